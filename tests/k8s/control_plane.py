"""One node of a real Kubernetes, and a client of its API: what test_k8s.py stands on.

scripts/check-k8s has made the namespaces that this runs in, and says in TANDEM_K8S_PLANE where
things are. All files are in memory, on mounts that end with the namespaces; so do all processes.
In place of CoreDNS dnsmasq answers (names.py): names of Services, and for headless ones their pods'
addresses, as the API has them.

Addresses: the node is 10.99.0.1, Services are 10.96.0.0/16, pods 10.88.77.0/24. No packet leaves
the network namespace: it has no device that leads out."""
import base64
import functools
import http.client
import json
import os
import re
import shutil
import ssl
import subprocess
import time
import urllib.parse

from names import Names

PLANE = json.loads(os.environ["TANDEM_K8S_PLANE"])
DIR = "/run/tandem-k8s"  # of this mount namespace
NODE_IP, SERVICES, PODS = "10.99.0.1", "10.96.0.0/16", "10.88.77.0/24"
CONTAINERD = "/run/containerd/containerd.sock"
TOKEN = "tandem-k8s"
APISERVER_PORT = 6443
FOLLOWED = []  # the Names of the plane that runs: whoever waits is told when they are lost
START_S = 400  # of a step of the plane's start, on a machine that does much else

CONTAINERD_CONFIG = f"""
version = 2
root = "/var/lib/containerd"
state = "/run/containerd"
[grpc]
address = "{CONTAINERD}"
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "localhost/pause:1"
restrict_oom_score_adj = true
disable_apparmor = true
[plugins."io.containerd.grpc.v1.cri".containerd]
snapshotter = "overlayfs"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
SystemdCgroup = false
[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "{PLANE['cni']}"
conf_dir = "{DIR}/cni"
"""

# A route of its own to each pod: packets between pods pass this host's rules, which translate the
# addresses of Services, without a bridge.
CNI_CONFIG = {
    "cniVersion": "0.4.0", "name": "pods", "plugins": [{
        "type": "ptp", "ipam": {
            "type": "host-local", "ranges": [[{"subnet": PODS}]], "routes": [{"dst": "0.0.0.0/0"}],
            "dataDir": "/run/cni-ipam"
        }
    }]
}

KUBECONFIG = {
    "apiVersion": "v1", "kind": "Config", "current-context": "c", "clusters": [{
        "name": "c", "cluster": {
            "server": f"https://127.0.0.1:{APISERVER_PORT}", "insecure-skip-tls-verify": True
        }
    }], "users": [{"name": "u", "user": {"token": TOKEN}}],
    "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}]
}


def run(*command, text=None):
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False,
                          timeout=120)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stdout[-2000:]}{done.stderr[-3000:]}"
    return done.stdout


def write(path, text, mode=0o644):
    with open(path, "w", encoding="utf-8") as f:
        f.write(text)
    os.chmod(path, mode)
    return path


def wait_for(condition, what, timeout=START_S):
    """The condition's first true value. Looks again after a tenth of the wait so far."""
    begin = time.monotonic()
    while True:
        value = condition()
        if value:
            return value
        assert not (ended := [n.problem for n in FOLLOWED if n.problem]), ended
        waited = time.monotonic() - begin
        assert waited < timeout, f"no {what} within {timeout} s"
        time.sleep(min(max(waited / 10, 0.02), 0.3))


class ApiError(Exception):
    def __init__(self, status, text):
        super().__init__(f"{status}: {text[:600]}")
        self.status = status


def connect(timeout):
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return http.client.HTTPSConnection("127.0.0.1", APISERVER_PORT, timeout=timeout,
                                       context=context)


def end_of(pod, timeout=120):
    """Follows the pod's changes until it is deleted. How its container ended, or None: this
    kubelet deletes a pod whose container is gone also before it has told the API of the end."""
    c, end = connect(timeout), None
    try:
        c.request(
            "GET", "/api/v1/namespaces/default/pods?watch=1&fieldSelector=metadata.name%3D" +
            pod["metadata"]["name"], headers={"Authorization": f"Bearer {TOKEN}"})
        for line in c.getresponse():
            event = json.loads(line)
            for status in event["object"]["status"].get("containerStatuses", ()):
                end = status["state"].get("terminated", end)
            if event["type"] == "DELETED":
                return end
    finally:
        c.close()
    raise AssertionError(f"{pod['metadata']['name']}: the API ended its watch")


def api(method, path, body=None, content="application/json", timeout=30):
    """One call of the Kubernetes API; JSON, or text where it answers text."""
    c = connect(timeout)
    try:
        c.request(method, path, None if body is None else json.dumps(body), {
            "Authorization": f"Bearer {TOKEN}", "Content-Type": content,
            "Accept": "application/json"
        })
        r = c.getresponse()
        text = r.read().decode()
    finally:
        c.close()
    if r.status >= 300:
        raise ApiError(r.status, text)
    return json.loads(text) if text.startswith("{") else text


def selector(labels):
    return "?labelSelector=" + urllib.parse.quote(",".join(f"{k}={v}" for k, v in labels.items()))


class Plane:
    def __init__(self):
        self.processes = {}  # name -> Popen
        self.names = None

    # --- life

    def __enter__(self):
        try:
            self.mount()
            self.link()
            self.start_store()
            self.start_node()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_):
        self.stop()

    def stop(self):
        """Nothing here needs an orderly end: what is left ends with the PID namespace."""
        FOLLOWED.clear()
        if self.names:
            self.names.stop()
        for p in reversed(list(self.processes.values())):
            p.kill()
            p.wait()
        for name in os.listdir("/var/log/pods") if os.path.isdir("/var/log/pods") else ():
            shutil.copytree(os.path.join("/var/log/pods", name),
                            os.path.join(PLANE["log"], "pods", name), dirs_exist_ok=True)

    def mount(self):
        """What these programs write lies in memory; the sysctls that a kubelet wants are there."""
        run("mount", "--make-rshared", "/")
        for path in ("/run", "/var/lib", "/var/log"):
            run("mount", "-t", "tmpfs", "-o", "mode=755", "tandem-k8s", path)
        for path in ("cni", "pki", "sysctl", "names", "kubelet", "volumes"):
            os.makedirs(os.path.join(DIR, path))
        os.symlink("/run", "/var/run") if not os.path.exists("/var/run") else None
        for i, (name, value) in enumerate(PLANE["sysctls"].items()):
            if os.path.exists("/proc/sys/" + name):
                file = write(f"{DIR}/sysctl/{i}", value + "\n")
                run("mount", "--bind", file, "/proc/sys/" + name)

    @staticmethod
    def link():
        """Without a default route: what asks for the outside world is told at once that there is
        none."""
        run("ip", "link", "set", "lo", "up")
        run("ip", "link", "add", "d0", "type", "veth", "peer", "name", "d1")
        run("ip", "addr", "add", NODE_IP + "/24", "dev", "d0")
        run("ip", "link", "set", "d0", "up")
        run("ip", "link", "set", "d1", "up")
        run("ip", "route", "add", SERVICES, "dev", "d0")
        with open("/proc/sys/net/ipv4/ip_forward", "w", encoding="ascii") as f:
            f.write("1")  # of this network namespace

    def start(self, name, *command):
        with open(os.path.join(PLANE["log"], name + ".log"), "wb") as log:
            self.processes[name] = subprocess.Popen(
                ["nice", "-n", "5", *command], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                env=dict(os.environ, HOME=DIR))
        return self.processes[name]

    def wait_of(self, name, condition, what, timeout=START_S):
        """Waits for what a program does; its end is told with its last lines."""
        def look():
            if self.processes[name].poll() is not None:
                with open(os.path.join(PLANE["log"], name + ".log"), encoding="utf-8",
                          errors="replace") as f:
                    raise AssertionError(f"{name} ended with {self.processes[name].returncode}:\n"
                                         f"{f.read()[-4000:]}")
            try:
                return condition()
            except (OSError, ApiError, http.client.HTTPException):
                return None

        return wait_for(look, f"{what} ({name})", timeout)

    def start_store(self):
        binary = lambda name: os.path.join(PLANE["bin"], name)
        self.kubeconfig = write(f"{DIR}/kubeconfig", json.dumps(KUBECONFIG))
        self.start("etcd", "etcd", "--unsafe-no-fsync", "--data-dir", f"{DIR}/etcd",
                   "--listen-client-urls", "http://127.0.0.1:2379", "--advertise-client-urls",
                   "http://127.0.0.1:2379", "--listen-peer-urls", "http://127.0.0.1:2380")
        write(f"{DIR}/containerd.toml", CONTAINERD_CONFIG)
        write(f"{DIR}/cni/10-pods.conflist", json.dumps(CNI_CONFIG))
        self.start("containerd", "containerd", "--config", f"{DIR}/containerd.toml")
        run("openssl", "genrsa", "-out", f"{DIR}/pki/sa.key", "2048")
        run("openssl", "rsa", "-in", f"{DIR}/pki/sa.key", "-pubout", "-out", f"{DIR}/pki/sa.pub")
        write(f"{DIR}/tokens.csv", f"{TOKEN},admin,1,system:masters\n")
        self.start("kube-apiserver", binary("kube-apiserver"),
                   "--etcd-servers=http://127.0.0.1:2379", "--bind-address=127.0.0.1",
                   f"--advertise-address={NODE_IP}", f"--secure-port={APISERVER_PORT}",
                   f"--cert-dir={DIR}/pki", "--service-account-issuer=tandem-k8s",
                   f"--service-account-signing-key-file={DIR}/pki/sa.key",
                   f"--service-account-key-file={DIR}/pki/sa.pub",
                   f"--service-cluster-ip-range={SERVICES}", f"--token-auth-file={DIR}/tokens.csv",
                   "--authorization-mode=AlwaysAllow", "--endpoint-reconciler-type=none",
                   "--allow-privileged", "--kubelet-preferred-address-types=InternalIP",
                   "--profiling=false")
        self.wait_of("kube-apiserver", lambda: api("GET", "/readyz") == "ok", "ready API")
        self.start("kube-controller-manager", binary("kube-controller-manager"),
                   f"--kubeconfig={self.kubeconfig}", "--leader-elect=false",
                   f"--service-account-private-key-file={DIR}/pki/sa.key",
                   "--bind-address=127.0.0.1", "--port=0", "--profiling=false")
        self.start("kube-scheduler", binary("kube-scheduler"), f"--kubeconfig={self.kubeconfig}",
                   "--leader-elect=false", "--bind-address=127.0.0.1", "--port=0",
                   "--profiling=false")

    def start_node(self):
        binary = lambda name: os.path.join(PLANE["bin"], name)
        self.wait_of("containerd", lambda: os.path.exists(CONTAINERD), "socket")
        self.start("kubelet", binary("kubelet"), f"--kubeconfig={self.kubeconfig}",
                   "--container-runtime=remote",
                   f"--container-runtime-endpoint=unix://{CONTAINERD}", "--cgroup-driver=cgroupfs",
                   f"--cgroup-root=/{PLANE['cgroup']}", "--enforce-node-allocatable=",
                   "--fail-swap-on=false", f"--root-dir={DIR}/kubelet",
                   f"--volume-plugin-dir={DIR}/volumes", f"--cert-dir={DIR}/pki/kubelet",
                   "--hostname-override=node", f"--node-ip={NODE_IP}", f"--cluster-dns={NODE_IP}",
                   "--cluster-domain=cluster.local", "--oom-score-adj=0", "--resolv-conf=",
                   "--eviction-hard=", "--address=127.0.0.1", "--sync-frequency=10s",
                   "--node-status-update-frequency=10s", "--max-pods=60", "--registry-qps=0",
                   "--event-qps=0")
        self.start("kube-proxy", binary("kube-proxy"), f"--kubeconfig={self.kubeconfig}",
                   "--hostname-override=node", "--proxy-mode=iptables",
                   "--conntrack-max-per-core=0", "--conntrack-tcp-timeout-established=0",
                   "--conntrack-tcp-timeout-close-wait=0", f"--cluster-cidr={PODS}",
                   "--oom-score-adj=0", "--iptables-min-sync-period=100ms")
        self.names = Names(f"{DIR}/names", NODE_IP, functools.partial(self.start, "dnsmasq"),
                           self.host_lines, (OSError, ApiError, http.client.HTTPException))
        FOLLOWED.append(self.names)
        wait_for(self.names.ready.is_set, "name server")
        self.wait_of("kubelet", lambda: self.conditions("/api/v1/nodes/node")["Ready"] == "True",
                     "ready node")
        self.wait_of(
            "kube-controller-manager",
            lambda: api("GET", "/api/v1/namespaces/default/serviceaccounts/default").get("secrets"),
            "account")

    # --- names

    @staticmethod
    def host_lines():
        services = api("GET", "/api/v1/namespaces/default/services")["items"]
        lines = []
        for s in services:
            name = s["metadata"]["name"]
            full = f"{name}.default.svc.cluster.local"
            if s["spec"]["clusterIP"] != "None":
                lines.append(f"{s['spec']['clusterIP']} {full}")
                continue
            try:
                e = api("GET", f"/api/v1/namespaces/default/endpoints/{name}")
            except ApiError as failure:
                if failure.status != 404:
                    raise  # an API that is busy takes no name away
                continue
            for subset in e.get("subsets", ()):
                addresses = list(subset.get("addresses", ()))
                if s["spec"].get("publishNotReadyAddresses"):
                    addresses += subset.get("notReadyAddresses", ())
                for a in addresses:
                    own = f" {a['hostname']}.{full}" if a.get("hostname") else ""
                    lines.append(f"{a['ip']} {full}{own}")
        return "".join(line + "\n" for line in sorted(lines))

    # --- what the API has

    @staticmethod
    def conditions(path):
        return {c["type"]: c["status"] for c in api("GET", path)["status"].get("conditions", ())}

    def kubectl(self, *args, text=None):
        return run("kubectl", "--kubeconfig", self.kubeconfig, "--cache-dir", f"{DIR}/kubectl",
                   *args, text=text)

    @staticmethod
    def load_image(path):
        run("ctr", "-a", CONTAINERD, "-n", "k8s.io", "images", "import", path)

    @staticmethod
    def pods(**labels):
        """Pods of these labels that nobody has asked to end, oldest first."""
        items = api("GET", "/api/v1/namespaces/default/pods" + selector(labels))["items"]
        return sorted((p for p in items if "deletionTimestamp" not in p["metadata"]),
                      key=lambda p: p["metadata"]["creationTimestamp"])

    @staticmethod
    def pod(name):
        try:
            return api("GET", f"/api/v1/namespaces/default/pods/{name}")
        except ApiError as e:
            if e.status != 404:
                raise
            return None

    @staticmethod
    def log_files(pod):
        """Of the lives of the pod's containers, oldest first."""
        folder = "/var/log/pods/default_%s_%s" % (pod["metadata"]["name"], pod["metadata"]["uid"])
        return [
            os.path.join(path, name) for path, _, names in sorted(os.walk(folder))
            for name in sorted(names)
        ]

    def log(self, pod):
        """All that the pod's containers have said, of all their lives."""
        text = ""
        for path in self.log_files(pod):
            with open(path, encoding="utf-8", errors="replace") as f:
                text += re.sub(r"^\S+ std(out|err) [FP] ", "", f.read(), flags=re.MULTILINE)
        return text

    @staticmethod
    def processes_of(pod, program):
        """Process ids of a program in a pod, by the pod's cgroup."""
        uid, found = pod["metadata"]["uid"], []
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                with open(f"/proc/{pid}/cgroup", encoding="ascii") as f, open(
                        f"/proc/{pid}/comm", encoding="ascii") as g:
                    if f"pod{uid}" in f.read() and g.read().strip() == program[:15]:
                        found.append(int(pid))
            except OSError:
                pass  # it has ended
        return found


def secret(name, **data):
    return {
        "apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "type": "Opaque",
        "data": {
            k.replace("_", "."): base64.b64encode(v.encode()).decode() for k, v in data.items()
        }
    }
