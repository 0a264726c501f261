"""deploy/kubernetes on a real control plane, kubelet and containerd (scripts/check-k8s starts this
in namespaces of its own). The tests share one cluster, and follow one another in this order.

Every answer is compared with one process that runs the request alone (I1): an answer that
survived a killed pod is the one that nobody disturbed. Load is 5 requests per second, and not
one may fail."""
import os
import random
import re
import secrets
import shutil
import signal
import sys
import threading
import time

import grpc
import pytest
import yaml

import image
from control_plane import DIR, PLANE, Plane, api, end_of, run, secret, selector, wait_for

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(ROOT, "tests", "cluster"))

from harness import BIN, POCKET, Cluster, as_result, one_process  # noqa: E402

OVERLAY = os.path.join(ROOT, "tests", "k8s", "overlay")
IMAGE = "docker.io/library/tandem:0.1.0"
SECRET_FILE = f"{DIR}/cluster-secret"
READY_S = 180  # pods that start where processors are shared with other builds
DEPLOYMENTS = ("tandem-router", "tandem-prefill", "tandem-decode")
RATE = 5.0  # requests per second
short = pytest.mark.short
N = 24


def make_requests():
    """All sampling parameters are given: the router has the model's own defaults, the one process
    has none."""
    rng = random.Random(int(os.environ.get("SEED", "16")))
    return [{
        "ids": [rng.randrange(3, 1024)
                for _ in range(rng.choice([1, 15, 17, 60, 120]))], "max_tokens": rng.choice(
                    [1, 9, 30, 60]), "seed": rng.randrange(1 << 40), "logprobs": 0,
        "temperature": rng.choice([0.0, 0.7, 1.3]), "top_k": rng.choice([0, 40]), "top_p": 0.9,
        "min_p": 0.0, "repetition_penalty": 1.1, "presence_penalty": 0.0, "frequency_penalty": 0.0
    } for _ in range(N)]


REQUESTS = make_requests()


class KubeCluster(Cluster):
    """The harness's calls, to the router's Service instead of processes of its own."""
    def __init__(self, address, credentials=None):
        self.router_args = [] if credentials else ["--cluster-secret-file", SECRET_FILE]
        self.channel, self.address, self.credentials = None, address, credentials
        self.connect()

    def connect(self):
        if self.channel:
            self.channel.close()
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_reconnect_backoff_ms", 500)]
        if self.credentials:
            options.append(("grpc.ssl_target_name_override", "tandem-router"))
            self.channel = grpc.secure_channel(self.address, self.credentials, options)
        else:
            self.channel = grpc.insecure_channel(self.address, options)

    @staticmethod
    def routers():
        """One for each router pod: each knows all workers, and has requests of its own."""
        return [KubeCluster(f"{p['status']['podIP']}:7600") for p in Plane.pods(component="router")]

    def wait_workers(self, n):
        """Every router has so many, ready."""
        for r in self.routers():
            r.wait_for(lambda r=r: sum(w.state == "ready" for w in r.status().workers) == n,
                       f"{n} workers at {r.address}", READY_S)
            r.channel.close()

    def wait_idle(self, timeout=30):
        for r in self.routers():
            Cluster.wait_idle(r, timeout)
            r.channel.close()


class Load:
    """Requests at a steady rate while something happens to the cluster; at the end, every answer
    is what one process gives."""
    def __init__(self, cluster, oracle, rate=RATE):
        self.cluster, self.oracle, self.period_s = cluster, oracle, 1 / rate
        self.requests, self.results = cluster.requests(REQUESTS), {}
        self.over, self.threads = threading.Event(), []

    def one(self, i):
        self.results[i] = self.cluster.generate(self.requests[i % N])

    def send(self):
        begin, i = time.monotonic(), 0
        while not self.over.wait(max(begin + i * self.period_s - time.monotonic(), 0)):
            self.threads.append(threading.Thread(target=self.one, args=(i, )))
            self.threads[-1].start()
            i += 1

    def __enter__(self):
        self.sender = threading.Thread(target=self.send)
        self.sender.start()
        wait_for(lambda: len(self.results) >= 3, "answer before anything happens", 60)
        return self

    def __exit__(self, exc_type, *_):
        if not exc_type:  # what happens afterwards is part of it
            n = len(self.results)
            wait_for(lambda: len(self.results) >= n + 5, "answers afterwards", 60)
        self.over.set()
        self.sender.join()
        for t in self.threads:
            t.join()
        if exc_type:
            return
        failed = [(i, r.code, r.details) for i, r in sorted(self.results.items())
                  if r.code != grpc.StatusCode.OK]
        assert not failed, f"{len(failed)} of {len(self.threads)} failed: {failed[:5]}"
        assert len(self.results) == len(self.threads)
        for i, r in self.results.items():
            assert as_result(r) == self.oracle[i % N], f"request {i} differs"
        print(f"{len(self.results)} of {len(self.threads)} answered, equal to one process")


def deployment_is_there(name, n=None):
    """All replicas are of the newest template, and available, and there are no others."""
    d = api("GET", f"/apis/apps/v1/namespaces/default/deployments/{name}")
    s, want = d["status"], d["spec"]["replicas"]
    return s.get("observedGeneration") == d["metadata"]["generation"] and (
        n is None or n == want) and all(
            s.get(k, 0) == want
            for k in ("replicas", "updatedReplicas", "availableReplicas", "readyReplicas"))


def wait_deployments(*names):
    def gone():
        return all(deployment_is_there(n) for n in names)

    try:
        wait_for(gone, f"ready {', '.join(names)}", READY_S)
    except AssertionError as e:
        told = []
        for p in Plane.pods(app="tandem"):
            told.append(f"{p['metadata']['name']}: {p['status']}"[:1500])
        raise AssertionError(f"{e}\n" + "\n".join(told)) from None


def patch(name, change, kind="deployments", group="apis/apps/v1"):
    return api("PATCH", f"/{group}/namespaces/default/{kind}/{name}", change,
               "application/strategic-merge-patch+json")


def restart(*names):
    """As `kubectl rollout restart` does."""
    for name in names:
        patch(
            name, {
                "spec": {
                    "template": {
                        "metadata": {"annotations": {"restarted": str(time.monotonic_ns())}}
                    }
                }
            })


def restarts(pod):
    now = Plane.pod(pod["metadata"]["name"])
    return now["status"]["containerStatuses"][0]["restartCount"] if now else -1


def delete(pod, **options):
    api("DELETE", f"/api/v1/namespaces/default/pods/{pod['metadata']['name']}",
        {"kind": "DeleteOptions", "apiVersion": "v1", **options})


def manifests(folder):
    """What kustomize makes of a folder, for this Kubernetes: a budget's version is v1 since 1.21,
    and its fields are those of v1beta1."""
    text = run("kubectl", "kustomize", folder)
    return text.replace("apiVersion: policy/v1\n", "apiVersion: policy/v1beta1\n")


def all_pods(**labels):
    """Those that are ending, too."""
    return api("GET", "/api/v1/namespaces/default/pods" + selector(labels))["items"]


@pytest.fixture(scope="session", name="plane")
def running_plane():
    images = os.path.join(PLANE["work"], "images")
    os.makedirs(images, exist_ok=True)
    archives = [
        image.pause(os.path.join(images, "pause.tar")),
        image.containerfile(os.path.join(images, "tandem.tar"), IMAGE, PLANE["work"], BIN)
        if PLANE["containerfile"] else image.tree(os.path.join(images, "tandem.tar"), IMAGE, BIN)
    ]
    print("image:", PLANE["containerfile"] or "programs with this machine's libraries")
    begin = time.monotonic()
    with Plane() as plane:
        for a in archives:
            plane.load_image(a)
        print(f"control plane and node ready in {time.monotonic() - begin:.0f} s")
        yield plane


@pytest.fixture(scope="session", name="cluster")
def running_cluster(plane):
    shutil.copytree(POCKET, f"{DIR}/model")
    for path, folders, files in os.walk(f"{DIR}/model"):
        for name in (*folders, *files):
            os.chmod(os.path.join(path, name), 0o755 if name in folders else 0o644)
    os.chmod(f"{DIR}/model", 0o755)
    value = secrets.token_hex(32)
    with open(SECRET_FILE, "w", encoding="ascii") as f:
        f.write(value + "\n")
    os.chmod(SECRET_FILE, 0o600)
    api("POST", "/api/v1/namespaces/default/secrets", secret("tandem-cluster", cluster=value))
    plane.kubectl("apply", "-f", "-", text=manifests(OVERLAY))
    wait_deployments(*DEPLOYMENTS)
    service = api("GET", "/api/v1/namespaces/default/services/tandem-router")
    cluster = KubeCluster(f"{service['spec']['clusterIP']}:7600")
    yield cluster
    cluster.channel.close()


@pytest.fixture(scope="session", name="oracle")
def one_process_alone():
    results, _ = one_process(REQUESTS, dtype="bf16")
    assert any(len(set(t)) > 3 for t, _ in results)
    return results


@short
def test_all_become_ready(cluster):
    """As the manifests have them: non-root, no capabilities, a root that nobody writes to."""
    cluster.wait_workers(4)
    pods = Plane.pods(app="tandem")
    assert len(pods) == 6
    for p in pods:
        (c, ) = p["spec"]["containers"]
        assert c["securityContext"]["readOnlyRootFilesystem"]
        assert c["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        (pid, ) = Plane.processes_of(p, c["command"][0])
        with open(f"/proc/{pid}/status", encoding="ascii") as f:
            status = dict(line.rstrip("\n").split(":\t", 1) for line in f if ":\t" in line)
        assert status["Uid"].split() == ["10001"] * 4
        assert int(status["CapEff"], 16) == 0 and int(status["CapBnd"], 16) == 0
        assert status["Seccomp"] == "2" and status["NoNewPrivs"] == "1"


@short
def test_answers_are_those_of_one_process(cluster, oracle):
    results = cluster.generate_many(cluster.requests(REQUESTS))
    assert [as_result(r) for r in results] == oracle
    cluster.wait_idle()


@short
def test_container_is_killed(cluster, oracle, plane):
    """kill -9 of a container's process: the kubelet starts it again, and no request is lost."""
    (pod, *_) = plane.pods(component="decode")
    (pid, ) = plane.processes_of(pod, "tandem-decode")
    with Load(cluster, oracle):
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: restarts(pod) >= 1, "second life of the container", READY_S)
        cluster.wait_workers(4)
    cluster.wait_idle()


def test_workers_are_deleted_by_force(cluster, oracle, plane):
    """Without a moment to drain, one of each role: the others go on with their requests."""
    with Load(cluster, oracle):
        for role in ("decode", "prefill"):
            delete(plane.pods(component=role)[0], gracePeriodSeconds=0)
            wait_deployments(f"tandem-{role}")
            cluster.wait_workers(4)
    cluster.wait_idle()


def test_workers_are_scaled(cluster, oracle):
    with Load(cluster, oracle):
        for n in (1, 2):
            for role in ("decode", "prefill"):
                patch(f"tandem-{role}", {"spec": {"replicas": n}})
            wait_deployments("tandem-decode", "tandem-prefill")
            cluster.wait_workers(2 * n)
    cluster.wait_idle()


def test_workers_are_rolled_out(cluster, oracle, plane):
    old = {
        p["metadata"]["uid"] for p in plane.pods(app="tandem")
        if "router" not in str(p["metadata"]["labels"])
    }
    with Load(cluster, oracle):
        restart("tandem-decode", "tandem-prefill")
        wait_deployments("tandem-decode", "tandem-prefill")
        cluster.wait_workers(4)
    assert not old & {p["metadata"]["uid"] for p in plane.pods(app="tandem")} and len(old) == 4
    cluster.wait_idle()


def test_stopped_worker_is_ended_by_liveness(cluster, oracle, plane):
    """SIGSTOP: its requests move at once, and the kubelet replaces what does not answer."""
    (pod, *_) = plane.pods(component="decode")
    (pid, ) = plane.processes_of(pod, "tandem-decode")
    n = restarts(pod)
    with Load(cluster, oracle):
        os.kill(pid, signal.SIGSTOP)
        wait_for(lambda: restarts(pod) > n, "another life of the stopped container", READY_S)
        cluster.wait_workers(4)
    assert pid not in plane.processes_of(pod, "tandem-decode")
    cluster.wait_idle()


def test_drain_ends_within_the_grace_period(cluster, plane):
    """A deleted worker finishes or hands over what runs, and exits before it would be killed."""
    requests = [
        cluster.request(ids=[5 + i, 77, 300], max_tokens=1200, temperature=0.8, top_p=0.9, seed=i,
                        ignore_eos=True) for i in range(6)
    ]
    want = [r.tokens for r in cluster.generate_many(requests)]
    streams = [cluster.stream(r, timeout=120) for r in requests]
    firsts = [next(s) for s in streams]
    (pod, *_) = plane.pods(component="decode")
    grace_s, begin = pod["spec"]["terminationGracePeriodSeconds"], time.monotonic()
    with open(plane.log_files(pod)[-1], encoding="utf-8") as log:  # it goes with the pod
        delete(pod)
        end, took_s, said = end_of(pod), time.monotonic() - begin, log.read()
    assert took_s < grace_s and (end is None or end["exitCode"] == 0), (end, took_s, said[-2000:])
    assert "ev=drained" in said, said[-2000:]
    got = [[*f.token_ids, *(t for m in s for t in m.token_ids)] for f, s in zip(firsts, streams)]
    assert got == want
    wait_deployments("tandem-decode")
    cluster.wait_workers(4)
    cluster.wait_idle()


@pytest.mark.parametrize("round_", range(int(os.environ.get("TANDEM_K8S_ROLLOUTS", "1"))))
def test_routers_are_rolled_out(cluster, oracle, plane, round_):
    """One by one, each ready when workers have joined it; what comes in goes to one that serves."""
    old = {p["metadata"]["uid"] for p in plane.pods(component="router")}
    with Load(cluster, oracle) as load:
        restart("tandem-router")
        wait_deployments("tandem-router")
        wait_for(lambda: not old & {p["metadata"]["uid"] for p in all_pods(component="router")},
                 "end of the old routers")
    print(f"round {round_}: {len(load.results)} of {len(load.threads)} answered")
    cluster.wait_workers(4)
    cluster.wait_idle()


def lockstep_set(name):
    """deploy/lockstep.example/NAME with what the overlay does to Deployments, one of each."""
    def patch_of(deployments, file):
        with open(os.path.join(OVERLAY, file), encoding="utf-8") as f:
            return {"target": {"kind": "Deployment", "name": deployments}, "patch": f.read()}

    folder = os.path.join(DIR, "lockstep", name)
    os.makedirs(folder)
    with open(os.path.join(folder, "kustomization.yaml"), "w", encoding="utf-8") as f:
        yaml.safe_dump(
            {
                "resources": [
                    os.path.relpath(os.path.join(ROOT, "deploy/lockstep.example", name), folder)
                ], "patches": [
                    patch_of("tandem-router-.*", "router.yaml"),
                    patch_of("tandem-(prefill|decode)-.*", "worker.yaml")
                ], "replicas": [{"name": f"{d}-{name}", "count": 1} for d in DEPLOYMENTS]
            }, f)
    return manifests(folder)


def test_lockstep_example(oracle, plane, cluster):
    """All of a set is replaced by all of another behind the clients' Service, and nobody sees it:
    the commands of deploy/lockstep.example/service.yaml."""
    blue, green = lockstep_set("blue"), lockstep_set("green")
    plane.kubectl("apply", "-f", "-", text=blue)
    plane.kubectl("apply", "-f", os.path.join(ROOT, "deploy/lockstep.example/service.yaml"))
    wait_deployments(*(f"{d}-blue" for d in DEPLOYMENTS))
    service = api("GET", "/api/v1/namespaces/default/services/tandem")
    clients = KubeCluster(f"{service['spec']['clusterIP']}:7600")
    with Load(clients, oracle):
        plane.kubectl("apply", "-f", "-", text=green)
        wait_deployments(*(f"{d}-green" for d in DEPLOYMENTS))
        patch("tandem", {"spec": {"selector": {"set": "green"}}}, "services", "api/v1")
        remove("tandem-router-blue", component="router", set="blue")
        plane.kubectl("delete", "--ignore-not-found", "--wait=false", "-f", "-", text=blue)
        wait_for(lambda: not all_pods(set="blue"), "end of the old set", READY_S)
    clients.channel.close()
    plane.kubectl("delete", "--wait=false", "-f", "-", text=green)
    wait_for(lambda: not all_pods(set="green"), "end of the new set", READY_S)
    cluster.wait_workers(4)


# ---- limits
# -------------------------------------------------------------------------------------------------


def limited_decode(name, kv_memory):
    """A decode worker of its own, in 256 MiB and one CPU."""
    docs = {(d["kind"], d["metadata"]["name"]): d for d in yaml.safe_load_all(manifests(OVERLAY))}
    d = docs[("Deployment", "tandem-decode")]
    d["metadata"]["name"], d["spec"]["replicas"] = name, 1
    for labels in (d["spec"]["selector"]["matchLabels"],
                   d["spec"]["template"]["metadata"]["labels"]):
        labels["component"] = name
    (c, ) = d["spec"]["template"]["spec"]["containers"]
    c["args"] = [a for a in c["args"] if "kv-memory" not in a] + [f"--kv-memory={kv_memory}"]
    c["resources"] = {
        "requests": {"cpu": "50m", "memory": "256Mi"}, "limits": {"cpu": "1", "memory": "256Mi"}
    }
    api("POST", "/apis/apps/v1/namespaces/default/deployments", d)


def remove(name, **labels):
    """The Deployment, and waits for the end of the pods with these labels."""
    api("DELETE", f"/apis/apps/v1/namespaces/default/deployments/{name}",
        {"kind": "DeleteOptions", "apiVersion": "v1", "propagationPolicy": "Background"})
    wait_for(lambda: not all_pods(**labels), f"end of {name}")


def test_limits_are_honoured(cluster, plane):
    """A share of memory is of what the container's limit leaves, and threads are the quota's."""
    limited_decode("limited", "40%")
    wait_deployments("limited")
    (pod, ) = plane.pods(component="limited")
    (pid, ) = plane.processes_of(pod, "tandem-decode")
    told = re.search(r"kv_blocks=(\d+) .*kv_bytes_per_token=(\d+) .*block_size=(\d+)",
                     plane.log(pod))
    kv_bytes = int(told[1]) * int(told[2]) * int(told[3])
    assert 1 << 20 < kv_bytes <= 0.4 * (256 << 20), f"the pool has {kv_bytes} bytes"
    threads = []
    for task in os.listdir(f"/proc/{pid}/task"):
        with open(f"/proc/{pid}/task/{task}/comm", encoding="ascii") as f:
            threads.append(f.read().strip())
    assert "engine" in threads and not [t for t in threads if t.startswith("td-part")], threads
    remove("limited", component="limited")
    cluster.wait_workers(4)


def test_pool_beyond_the_limit_is_refused(cluster, plane):
    """By name, before a byte is taken: nothing is killed for memory."""
    limited_decode("too-large", "1Gi")

    def ended():
        pods = plane.pods(component="too-large")
        told = pods and pods[0]["status"].get("containerStatuses", [{}])[0]
        return pods and (told.get("state", {}).get("terminated")
                         or told.get("lastState", {}).get("terminated"))

    end = wait_for(ended, "end of the worker")
    (pod, ) = plane.pods(component="too-large")
    assert (end["exitCode"], end["reason"]) == (1, "Error"), (end, plane.log(pod))
    assert re.search(r"kv.*1073741824|kv.*1\.0 GiB|kv.*1024 MiB", plane.log(pod)), plane.log(pod)
    remove("too-large", component="too-large")
    cluster.wait_workers(4)


# ---- TLS
# -------------------------------------------------------------------------------------------------


def certificates(folder):
    """A CA, and certificates of the router, the workers and a client: PEM by name."""
    os.makedirs(folder)
    names = {
        "router": "tandem-router,tandem-router.default.svc,tandem-registry",
        "worker": "tandem-workers", "client": "client"
    }
    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2")
    run("openssl", "req", "-x509", *key, "-keyout", f"{folder}/ca.key", "-out", f"{folder}/ca.crt",
        "-subj", "/CN=ca", "-addext", "basicConstraints=critical,CA:TRUE")
    for name, alt in names.items():
        with open(f"{folder}/ext", "w", encoding="ascii") as f:
            f.write("subjectAltName=" + ",".join("DNS:" + a for a in alt.split(",")) + "\n")
        run("openssl", "req", *key[:-2], "-keyout", f"{folder}/{name}.key", "-out", f"{folder}/csr",
            "-subj", f"/CN={name}")
        run("openssl", "x509", "-req", "-in", f"{folder}/csr", "-CA", f"{folder}/ca.crt", "-CAkey",
            f"{folder}/ca.key", "-CAcreateserial", "-days", "2", "-extfile", f"{folder}/ext",
            "-out", f"{folder}/{name}.crt")
    pem = {}
    for name in os.listdir(folder):
        with open(f"{folder}/{name}", encoding="ascii") as f:
            pem[name] = f.read()
    return pem


def small(pod):
    """What the overlay does to workers, for those of the example."""
    (c, ) = pod["spec"]["containers"]
    c["args"] = [a for a in c["args"] if not a.startswith(("--threads", "--kv-memory"))]
    c["args"].append("--kv-memory=16Mi")
    c["resources"] = {"requests": {"cpu": "50m", "memory": "96Mi"}, "limits": {"memory": "384Mi"}}


def tls_workers():
    """The Service and the StatefulSet of tls.example.yaml, and the same for prefill."""
    with open(os.path.join(ROOT, "deploy/kubernetes/tls.example.yaml"), encoding="utf-8") as f:
        text = f.read()
    _, service, decode = yaml.safe_load_all(text)
    prefill = list(yaml.safe_load_all(text.replace("decode", "prefill")))[2]
    for d in (decode, prefill):
        small(d["spec"]["template"])
    return [service, decode, prefill]


def tls_router():
    """The router's Deployment as the head of tls.example.yaml says."""
    docs = {(d["kind"], d["metadata"]["name"]): d for d in yaml.safe_load_all(manifests(OVERLAY))}
    d = docs[("Deployment", "tandem-router")]
    spec = d["spec"]["template"]["spec"]
    (c, ) = spec["containers"]
    c["args"] = [a for a in c["args"] if not a.startswith(("--cluster-secret", "--http-listen"))]
    c["ports"] = [p for p in c["ports"] if p["name"] != "http"]
    c["env"] = [{"name": "TANDEM_TLS_" + k, "value": v} for k, v in {
        "CERT": "/tls/tls.crt", "KEY": "/tls/tls.key", "CA": "/tls/ca.crt",
        "WORKER_NAMES": "tandem-workers", "SERVER_NAME": "tandem-workers"
    }.items()]
    c["readinessProbe"] = {
        "exec": {
            "command": [
                "tandem", "health", "--need-workers", "--tls-server-name=tandem-router",
                "127.0.0.1:7600"
            ]
        }, "periodSeconds": 2, "timeoutSeconds": 10
    }
    c["volumeMounts"][1] = {"name": "tls", "mountPath": "/tls", "readOnly": True}
    spec["volumes"][1] = {
        "name": "tls", "secret": {"secretName": "tandem-tls-router", "defaultMode": 0o440}
    }
    return d


def test_tls_example(cluster, oracle, plane):
    """Certificates in place of the cluster secret: the example's workers have names that they hold,
    and probes are commands that speak TLS."""
    pem = certificates(f"{DIR}/tls")
    for secret_name, who in (("tandem-tls", "worker"), ("tandem-tls-router", "router")):
        api(
            "POST", "/api/v1/namespaces/default/secrets",
            secret(secret_name, tls_crt=pem[f"{who}.crt"], tls_key=pem[f"{who}.key"],
                   ca_crt=pem["ca.crt"]))
    for name in ("tandem-prefill", "tandem-decode"):
        api("DELETE", f"/apis/apps/v1/namespaces/default/deployments/{name}",
            {"kind": "DeleteOptions", "apiVersion": "v1", "propagationPolicy": "Background"})
    plane.kubectl("apply", "-f", "-", text=yaml.safe_dump_all([*tls_workers(), tls_router()]))
    wait_deployments("tandem-router")
    wait_for(lambda: len(all_pods(app="tandem")) == 6, "end of what spoke no TLS", READY_S)

    def client(*mine):
        return KubeCluster(
            cluster.address,
            grpc.ssl_channel_credentials(pem["ca.crt"].encode(), *(pem[n].encode() for n in mine)))

    with_identity, without = client("client.key", "client.crt"), client()
    results = with_identity.generate_many(with_identity.requests(REQUESTS))
    assert [as_result(r) for r in results] == oracle
    assert sum(w.state == "ready" for w in with_identity.status().workers) == 4
    for stranger in (without, KubeCluster(cluster.address)):
        r = stranger.generate(stranger.requests(REQUESTS)[0], timeout=10)
        assert r.code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED), r
        stranger.channel.close()
    with_identity.channel.close()
