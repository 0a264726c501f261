#!/usr/bin/python3
"""deploy/ speaks of what exists: the manifests parse; each daemon takes its flags and TANDEM_*
variables as they stand there; ports, probes, names and times agree with one another; no
workload selects another's pods; the dashboard asks for metrics that exist, and its panels do not
overlap; the build of each Containerfile can be configured from the folders that it copies, and
nothing else. Each check is first seen to catch a planted mistake. Skips (77) without
python3-yaml."""
import copy
import functools
import glob
import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile

from tree import METRIC, ROOT, read, source_files

try:
    import yaml
except ImportError:
    print("deploy_flags: skipped, python3-yaml is not installed")
    sys.exit(77)

BIN = os.environ["TANDEM_BIN"]
DAEMONS = ("tandem-router", "tandem-prefill", "tandem-decode")
# what a worker may take after drain_timeout_ms (STOP_BOUND_MS in common/worker/worker.c)
HAND_OVER_MS = 5000
DOWNWARD = "10.0.0.1"  # stands for any field of the downward API
# what the LeaderWorkerSet controller puts into the containers of a group, of its leader here
LWS = {"LWS_LEADER_ADDRESS": "tandem-decode-0.tandem-decode.default", "LWS_WORKER_INDEX": "0"}


@functools.cache
def variables_of(command):
    """The TANDEM_* variables that a daemon reads."""
    text = subprocess.run([os.path.join(BIN, command), "--help"], capture_output=True, text=True,
                          check=True).stdout
    return frozenset(re.findall(r"\[(TANDEM_[A-Z0-9_]+)", text))


@functools.cache
def effective_config(command, args, variables):
    """(NAME=VALUE pairs, None) as the daemon would run, or (None, its complaint). Arguments and
    (name, value) pairs are tuples: a planted mistake changes one container, and each of the
    others is asked once."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("TANDEM_")}
    env.update(variables)
    done = subprocess.run([os.path.join(BIN, command), *args, "--print-config"],
                          capture_output=True, text=True, env=env, check=False)
    if done.returncode:
        return None, done.stderr.strip()
    return dict(line.split("=", 1) for line in done.stdout.splitlines()), None


def port_of(address):
    return int(address.rsplit(":", 1)[1])


def probe_problems(container, config):
    named = {p["name"]: p["containerPort"] for p in container.get("ports", [])}
    for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
        probe = container.get(kind, {})
        if "grpc" in probe:
            if probe["grpc"]["port"] != port_of(config["listen"]):
                yield f"{kind} asks port {probe['grpc']['port']}, listen is {config['listen']}"
            if config["tls_cert"]:
                yield f"{kind} is a gRPC probe and TLS is on: Kubernetes' gRPC probes speak no TLS"
        if "httpGet" in probe:
            port = named.get(probe["httpGet"]["port"], probe["httpGet"]["port"])
            option = "metrics_listen" if probe["httpGet"]["path"] == "/healthz" else "http_listen"
            if not config.get(option) or port != port_of(config[option]):
                yield (f"{kind} asks HTTP port {port} for {probe['httpGet']['path']}, {option} is "
                       f"\"{config.get(option)}\"")
    for name, option in (("grpc", "listen"), ("metrics", "metrics_listen"),
                         ("registry", "worker_listen"), ("http", "http_listen")):
        if name in named and (not config.get(option) or named[name] != port_of(config[option])):
            yield f"port {name} is {named[name]}, {option} is \"{config.get(option)}\""


def identity_problems(spec, container, config):
    """A port that serves members of the cluster has an identity, or the daemon refuses to start;
    the secret's file is there, and others cannot read it."""
    names = "tls_worker_names" if container["command"][0] == "tandem-router" else "tls_router_names"
    path = config["cluster_secret_file"]
    if not path and not config[names]:
        yield (f"no cluster_secret_file and no {names}: it would refuse to listen at "
               f"{config.get('worker_listen') or config['listen']}")
    if not path:
        return
    mounts = [
        m["name"] for m in container.get("volumeMounts", [])
        if path.startswith(m["mountPath"] + "/")
    ]
    volumes = [
        v["secret"] for v in spec.get("volumes", []) if v["name"] in mounts and "secret" in v
    ]
    if not volumes:
        yield f"cluster_secret_file {path} lies in no Secret's volume"
    elif volumes[0]["secretName"] != "tandem-cluster":
        yield (f"cluster_secret_file is of Secret {volumes[0]['secretName']}, others have "
               "tandem-cluster")
    elif volumes[0].get("defaultMode", 0o644) & 0o027 or "fsGroup" not in spec.get(
            "securityContext", {}):
        yield (f"{path}: others could read it, or the daemon could not: defaultMode 0440 with "
               "fsGroup")


def container_problems(spec, container, services, given=()):
    """given: variables that a controller adds."""
    command = container["command"][0]
    if command not in DAEMONS:
        yield f"command {command} is none of {', '.join(DAEMONS)}"
        return
    variables = dict(given)
    for e in container.get("env", []):
        value = DOWNWARD if "valueFrom" in e else re.sub(r"\$\((\w+)\)", lambda m: variables[m[1]],
                                                         e["value"])
        variables[e["name"]] = value
    known = variables_of(command)
    own = command.replace("-", "_").upper() + "_"  # TANDEM_DECODE_: the daemon's own variables
    for name in variables:
        if name.startswith("TANDEM_") and name not in known and name.replace(own, "TANDEM_",
                                                                             1) not in known:
            yield f"{command} reads no variable {name}"
    args = [
        re.sub(r"\$\((\w+)\)", lambda m: variables.get(m[1], m[0]), a)
        for a in container.get("args", [])
    ]
    config, complaint = effective_config(command, tuple(args), tuple(variables.items()))
    if complaint:
        yield complaint
        return
    yield from probe_problems(container, config)
    yield from identity_problems(spec, container, config)
    sleep = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get(
        "command", ["sleep", "0"])
    need_ms = int(config["drain_timeout_ms"]) + HAND_OVER_MS + 1000 * int(sleep[1])
    if spec["terminationGracePeriodSeconds"] * 1000 <= need_ms:
        yield (f"terminationGracePeriodSeconds {spec['terminationGracePeriodSeconds']} must "
               f"exceed {need_ms} ms: preStop + drain + hand-over")
    if command != "tandem-router":
        if (host := config["router"].rsplit(":", 1)[0]) not in services or port_of(
                config["router"]) not in services[host]:
            yield f"router is {config['router']}, the Services are {services}"
        elif not host.startswith("tandem-registry"):
            yield f"router is {config['router']}: workers join at tandem-registry"
        if config["listen"].startswith("0.0.0.0") and not config["advertise"]:
            yield "listens on the wildcard address and advertises nothing"
        if config["advertise"] and config["transfer_host"] == "127.0.0.1":
            yield "transfer_host is 127.0.0.1: no other pod could push KV"


def group_problems(d, services):
    """A LeaderWorkerSet: the leader as any worker; all ranks with the same options, one on each
    pod; the others with neither probe nor port."""
    group = d["spec"]["leaderWorkerTemplate"]
    lead, rank = (group[t]["spec"]["containers"][0] for t in ("leaderTemplate", "workerTemplate"))
    given = dict(LWS, LWS_GROUP_SIZE=str(group["size"]))
    yield from container_problems(group["leaderTemplate"]["spec"], lead, services, given)
    if d["spec"].get("startupPolicy") == "LeaderReady":
        yield "startupPolicy is LeaderReady: the leader is ready when its ranks have joined"
    if (lead["command"], lead["args"]) != (rank["command"], rank["args"]):
        yield "the ranks' command or args are not the leader's"
    if extra := {"startupProbe", "readinessProbe", "livenessProbe", "ports"} & set(rank):
        yield f"a rank listens nowhere and has {', '.join(sorted(extra))}"
    options = dict(a.lstrip("-").split("=", 1) for a in lead["args"] if "=" in a)
    if options.get("tp") != str(group["size"]):
        yield f"tp is {options.get('tp')}, the group's size is {group['size']}"
    for option, variable in (("nnodes", "$(LWS_GROUP_SIZE)"), ("node-rank", "$(LWS_WORKER_INDEX)")):
        if options.get(option) != variable:
            yield f"{option} is {options.get(option)}, must be {variable}"
    host, _, port = options.get("master-addr", "").rpartition(":")
    ports = [p["containerPort"] for p in lead["ports"] if p["name"] == "ranks"]
    if host != "$(LWS_LEADER_ADDRESS)" or [int(port)] != ports:
        yield f"master-addr is {host}:{port}, must be the leader's address and port {ports}"
    if group["workerTemplate"]["spec"]["terminationGracePeriodSeconds"] < group["leaderTemplate"][
            "spec"]["terminationGracePeriodSeconds"]:
        yield "a rank's grace period is shorter than its leader's, whose drain it must outlive"


def selector_problems(documents):
    workloads = [d for d in documents if d["kind"] in ("Deployment", "StatefulSet")]
    for d in workloads:
        chosen = d["spec"]["selector"]["matchLabels"].items()
        for other in workloads:  # of one name: one takes the other's place
            name = other["metadata"]["name"]
            if name != d["metadata"]["name"] and chosen <= other["spec"]["template"]["metadata"][
                    "labels"].items():
                yield (f"{d['kind']} {d['metadata']['name']}: its selector takes the pods of "
                       f"{name}, too")


def manifest_problems(documents):
    yield from selector_problems(documents)
    services = {
        d["metadata"]["name"]: [p["port"] for p in d["spec"]["ports"]] for d in documents
        if d["kind"] == "Service"
    }
    n_containers = 0
    workloads = [d for d in documents if d["kind"] in ("Deployment", "StatefulSet")]
    for d in workloads:
        pod = d["spec"]["template"]
        where = f"{d['kind']} {d['metadata']['name']}"
        if not d["spec"]["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items():
            yield f"{where}: the selector does not match the template's labels"
        volumes = {v["name"] for v in pod["spec"].get("volumes", [])}
        for c in pod["spec"]["containers"]:
            n_containers += 1
            for m in c.get("volumeMounts", []):
                if m["name"] not in volumes:
                    yield f"{where}: no volume {m['name']}"
            for problem in container_problems(pod["spec"], c, services):
                yield f"{where}: {problem}"
    for d in documents:
        if d["kind"] == "LeaderWorkerSet":
            where = f"{d['kind']} {d['metadata']['name']}"
            yield from (f"{where}: {problem}" for problem in group_problems(d, services))
    if n_containers < 3:
        yield f"{n_containers} containers found, expected at least 3"


def lockstep_problems(edit=lambda text: text):
    """The sets of deploy/lockstep.example share no object and no pod, and the Service that clients
    dial takes the routers of one of them. Nothing without kubectl."""
    folder = os.path.join(ROOT, "deploy", "lockstep.example")
    sets = {}
    for name in ("blue", "green") if shutil.which("kubectl") else ():
        text = subprocess.run(
            ["kubectl", "kustomize", os.path.join(folder, name)], capture_output=True, text=True,
            check=True).stdout
        sets[name] = [d for d in yaml.safe_load_all(edit(text)) if d]
        yield from (f"set {name}: {p}" for p in manifest_problems(sets[name]))
    both = [d for documents in sets.values() for d in documents]
    if len({(d["kind"], d["metadata"]["name"]) for d in both}) != len(both):
        yield "lockstep.example: both sets have an object of one name"
    yield from (f"lockstep.example: {p}" for p in selector_problems(both))
    selector = yaml.safe_load(read(folder, "service.yaml"))["spec"]["selector"]
    for name in sets:
        taken = [
            d["metadata"]["name"] for d in both
            if d["kind"] == "Deployment" and {**selector, "set": name}.items() <= d["spec"]
            ["template"]["metadata"]["labels"].items()
        ]
        if taken != [f"tandem-router-{name}"]:
            yield f"lockstep.example: the Service with set {name} takes the pods of {taken}"


# What an InferencePool (v1) may have; the schema is not here.
POOL_FIELDS = {"selector", "targetPorts", "endpointPickerRef", "appProtocol"}
PICKER_METRICS = {
    "vllm:num_requests_waiting", "vllm:num_requests_running", "vllm:kv_cache_usage_perc"
}


def pool_problems(documents):
    """The pool's members are the routers, at their HTTP port and with what pickers read; the route
    leads to the pool."""
    named = {(d["kind"], d["metadata"]["name"]): d for d in documents if "metadata" in d}
    pool = named[("InferencePool", "tandem")]
    spec, router = pool["spec"], named[("Deployment", "tandem-router")]["spec"]["template"]
    if spec.keys() - POOL_FIELDS or not POOL_FIELDS - {"appProtocol"} <= spec.keys():
        yield f"InferencePool has {sorted(spec)}"
    chosen = spec["selector"]["matchLabels"].items()
    taken = [
        name for (kind, name), d in named.items() if kind in ("Deployment", "StatefulSet")
        and chosen <= d["spec"]["template"]["metadata"]["labels"].items()
    ]
    if taken != ["tandem-router"]:
        yield f"InferencePool takes the pods of {taken}"
    ports = {p["name"]: p["containerPort"] for p in router["spec"]["containers"][0]["ports"]}
    if spec["targetPorts"] != [{"number": ports["http"]}]:
        yield f"InferencePool has ports {spec['targetPorts']}, routers have HTTP at {ports['http']}"
    (rule, ) = named[("HTTPRoute", "tandem")]["spec"]["rules"]
    group = pool["apiVersion"].split("/")[0]
    if rule["backendRefs"] != [{"group": group, "kind": "InferencePool", "name": "tandem"}]:
        yield f"HTTPRoute leads to {rule['backendRefs']}"
    if missing := PICKER_METRICS - metrics_of("router/"):
        yield f"routers have no {sorted(missing)}"


def metrics_of(*folders):
    return set(
        re.findall(
            METRIC, "".join(
                read(ROOT, p) for p in source_files(ROOT, (".c", )) if p.startswith(folders))))


ROUTERS_ALONE = ("and on (instance) td_request_arrival_rate", 'component="router"')


def twice_problems(expressions, what):
    """Routers and workers count requests and tokens by the same names: a sum is of one of them."""
    both = metrics_of("router/") & metrics_of("common/worker/", "prefill/", "decode/")
    if "td_num_requests_running" not in both or "td_request_arrival_rate" in both:
        yield f"metrics of routers and of workers: {sorted(both)}"
    for e in expressions:
        for m in both & set(re.findall(r"\btd_\w+", e)):
            n = sum(e.count(x) for x in ROUTERS_ALONE)
            if n < len(re.findall(rf"\b{m}\b", e)):
                yield f"{what} sums {m} of routers and of workers: {e}"


def metrics_problems(text, what="the dashboard"):
    metrics = metrics_of("router/", "common/worker/", "common/engine/", "common/rpc/", "prefill/",
                         "decode/", "common/base/process_metrics.c")
    asked = {re.sub(r"_(bucket|sum|count)$", "", m) for m in re.findall(r"\btd_\w+", text)}
    if not asked:
        yield f"{what} asks for nothing"
    for m in sorted(asked - metrics):
        yield f"{what} asks for {m}, which no daemon has"


def grid_problems(panels):
    """Grafana moves panels that overlap, and takes two of one id for one."""
    taken = {}
    for p in panels:
        at = p["gridPos"]
        for cell in itertools.product(range(at["x"], at["x"] + at["w"]),
                                      range(at["y"], at["y"] + at["h"])):
            if cell[0] >= 24 or taken.setdefault(cell, p["title"]) != p["title"]:
                yield f"panel {p['title']} overlaps {taken.get(cell, 'the right edge')}"
                break
    for what in ("id", "title"):
        told = [p[what] for p in panels]
        if len(set(told)) != len(told):
            yield f"panels share one {what}: {sorted(told)}"


def dashboard_problems(text):
    panels = json.loads(text)["panels"]
    yield from grid_problems(panels)
    yield from twice_problems([t["expr"] for p in panels for t in p.get("targets", ())],
                              "the dashboard")
    yield from metrics_problems(text)


# One router, and one worker with series of the same names: what a panel makes of them.
SERIES = {
    'td_num_requests_running{instance="r", component="router"}': "3+0x30",
    'td_num_requests_running{instance="w", component="decode"}': "2+0x30",
    'td_request_arrival_rate{instance="r"}': "1+0x30",
}
WAITS = 'td_num_requests_waiting{instance="r", component="router"}'
RUNS = 'td_num_requests_running{instance="r", component="router"}'
GOOD, FAILED = 'td_request_success_total{instance="r"}', 'td_request_failure_total{instance="r"}'
SLO = 'td_slo_class_requests_total{{instance="r", class="{}", outcome="{}"}}'
MET, MISSED, BULK_MET = (SLO.format(*x)
                         for x in (("chat", "good"), ("chat", "missed"), ("bulk", "good")))
USED = 'td_kv_cache_usage_ratio{instance="w", component="decode"}'
DAYS = 'td_tls_certificate_expiry_days{instance="r", pod="p", file="f"}'

# Of each alert: series (one value a minute) by which it fires after 25 minutes, the labels that it
# then has beside its own, and series by which it does not.
ALERTS = {
    "TandemTokensContradict":
        ({'td_token_mismatch_total{instance="r"}': "0+0x20 1+0x10"}, {"instance": "r"},
         {'td_token_mismatch_total{instance="r"}': "1+0x30"}),
    "TandemKvDamaged":
        ({'td_kv_digest_mismatches_total{instance="w"}': "0+0x20 1+0x10"}, {"instance": "w"},
         {'td_kv_digest_mismatches_total{instance="w"}': "1+0x30"}),
    "TandemRequestsFail":
        ({GOOD: "0+90x30", FAILED: "0+10x30"}, {}, {GOOD: "0+96x30", FAILED: "0+4x30"}),
    "TandemObjectivesMissed":
        ({MET: "0+50x30", BULK_MET: "0+30x30", MISSED: "0+20x30"}, {},
         {MET: "0+52x30", BULK_MET: "0+40x30", MISSED: "0+8x30"}),
    "TandemRequestsWait": ({WAITS: "4+0x30", RUNS: "0+0x30"}, {}, {WAITS: "4+0x30",
                                                                    RUNS: "3+0x30"}),
    "TandemKvFull": ({USED: "0.96+0x30"}, {"instance": "w", "component": "decode"},
                     {USED: "0.94+0x30"}),
    "TandemPathFellBack":
        ({'td_kv_transfer_fallbacks_total{instance="w"}': "0+0x20 1+0x10"}, {"instance": "w"},
         {'td_kv_transfer_fallbacks_total{instance="w"}': "1+0x30"}),
    "TandemWorkersMoveRequests":
        ({'td_request_failovers_total{instance="r"}': "0+3x30"}, {"instance": "r"},
         {'td_request_failovers_total{instance="r"}': "0+1x30"}),
    "TandemCertificateEnds":
        ({DAYS: "6+0x30"}, {"pod": "p", "file": "f"}, {DAYS: "8+0x30"}),
}


def alert_tests(told):
    """Two of promtool's tests for each rule: it fires, and it does not."""
    for name, (firing, labels, quiet) in ALERTS.items():
        rule = told[name]
        fired = {"exp_labels": {**rule["labels"], **labels}, "exp_annotations": rule["annotations"]}
        for series, expected in ((firing, [fired]), (quiet, [])):
            yield {
                "interval": "1m", "input_series": [{"series": k, "values": v}
                                                   for k, v in series.items()], "alert_rule_test":
                    [{"alertname": name, "eval_time": "25m", "exp_alerts": expected}]
            }


# What scaling asks for, after half an hour of the series: to zero when idle, and back.
RECOMMENDED, WAITING, RUNNING, DONE = ('td_recommended_workers{role="%s",instance="r"}',
                                       'td_num_requests_waiting{component="router",instance="r"}',
                                       'td_num_requests_running{component="router",instance="r"}',
                                       'td_request_success_total{instance="r"}')
SCALING = {
    "before the first request": ("0", "0", "0", "0", 0),
    "the first request is held": ("0", "1", "0", "0", 1),
    "many are held": ("0", "40", "0", "0", 1),
    "under load": ("3", "2", "5", "0+60", 3),
    "one long answer": ("2", "0", "1", "9", 2),
    "idle for half an hour": ("2", "0", "0", "9", 0),
    "and woken again": ("2", "1", "0", "9", 1),
}


def scaled_queries(documents):
    return {
        d["spec"]["scaleTargetRef"]["name"].removeprefix("tandem-"): t["metadata"]["query"]
        for d in documents if d["kind"] == "ScaledObject" for t in d["spec"]["triggers"]
    }


def scaling_tests(queries):
    for role, query in queries.items():
        for wanted, waits, runs, done, replicas in SCALING.values():
            values = {RECOMMENDED % role: wanted, WAITING: waits, RUNNING: runs, DONE: done}
            yield {
                "interval": "1m", "input_series":
                    [{"series": k, "values": f"{v if '+' in v else v + '+0'}x40"}
                     for k, v in values.items()], "promql_expr_test": [{
                         "expr": query, "eval_time": "30m", "exp_samples":
                             [{"labels": "{}", "value": replicas}]
                     }]
            }


def scaling_problems(documents):
    """KEDA and HPA ask for metrics that exist, each for its own role's."""
    queries = scaled_queries(documents)
    if queries.keys() != {"prefill", "decode"}:
        yield f"KEDA scales {sorted(queries)}"
    yield from metrics_problems("\n".join(queries.values()), "KEDA's query")
    for d in documents:
        if d["kind"] != "HorizontalPodAutoscaler":
            continue
        role = d["spec"]["scaleTargetRef"]["name"].removeprefix("tandem-")
        for m in (m["external"]["metric"] for m in d["spec"]["metrics"]):
            yield from metrics_problems(m["name"], "the HPA")
            if m["selector"]["matchLabels"] != {"role": role}:
                yield f"the HPA of {role} asks for {m['selector']}"
    for role, query in queries.items():
        if f'td_recommended_workers{{role="{role}"}}' not in query:
            yield f"KEDA's query of {role} does not ask for its workers"


def promtool_problems(rules, expressions, queries):
    """promtool, where there is one: reads rules and expressions, and evaluates some of them."""
    if not shutil.which("promtool"):
        print("deploy_flags: alerts and dashboard not evaluated: no promtool (package prometheus)")
        return
    with tempfile.TemporaryDirectory() as folder:

        def promtool(*args, **files):
            for name, what in files.items():
                with open(os.path.join(folder, f"{name}.yaml"), "w", encoding="utf-8") as f:
                    yaml.safe_dump(what, f)
            done = subprocess.run(["promtool", *args], cwd=folder, capture_output=True, text=True,
                                  check=False)
            return [f"promtool: {done.stdout[-900:]}{done.stderr[-900:]}"
                    ] if done.returncode else []

        asked = [{"record": f"x{i}", "expr": e.replace("$__rate_interval", "1m")}
                 for i, e in enumerate(expressions)]
        yield from promtool("check", "rules", "rules.yaml", "asked.yaml", rules=rules,
                            asked={"groups": [{"name": "asked", "rules": asked}]})
        (running, ) = [e for e in expressions if e.startswith("sum(td_num_requests_running")]
        told = {r["alert"]: r for g in rules["groups"] for r in g["rules"]}
        if told.keys() != ALERTS.keys():
            yield f"alerts without a test, or tests without an alert: {told.keys() ^ ALERTS.keys()}"
            return
        series = [{"series": k, "values": v} for k, v in SERIES.items()]
        sample = {"expr": running, "eval_time": "5m", "exp_samples": [{"labels": "{}", "value": 3}]}
        panel = {"interval": "1m", "input_series": series, "promql_expr_test": [sample]}
        yield from promtool(
            "test", "rules", "test.yaml",
            test={"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": [
                panel, *alert_tests(told), *scaling_tests(queries)
            ]})


def rules_problems(documents):
    """Alerts ask for metrics that exist."""
    (rule, ) = [d for d in documents if d["kind"] == "PrometheusRule"]
    rules = [r for g in rule["spec"]["groups"] for r in g["rules"]]
    yield from metrics_problems("\n".join(r["expr"] for r in rules), "an alert")
    yield from twice_problems([r["expr"] for r in rules], "an alert")
    for r in rules:
        if not r["annotations"].get("summary") or r["labels"].get("severity") not in ("warning",
                                                                                      "critical"):
            yield f"alert {r['alert']} lacks a summary or a severity"


def containerfile_problems(text):
    """Configures as the build stage does, in a folder that holds what it copies, and looks for
    the targets that it builds."""
    names = [
        n for line in re.findall(r"^COPY (?!--from)(.*) \S+$", text, re.MULTILINE)
        for n in line.split()
    ]
    missing = [n for n in names if not os.path.exists(os.path.join(ROOT, n))]
    if missing:
        yield f"copies {', '.join(missing)}, which does not exist"
        return
    run = re.search(r"^RUN cmake (.*?) \\\n && cmake --build (\S+) --target ([\w -]+)", text,
                    re.MULTILINE)
    if not run:
        yield ("has no RUN cmake ... && cmake --build DIR --target ... of the form that is "
               "looked for")
        return
    configure, build_dir, targets = shlex.split(run[1]), run[2], run[3].split()
    if not shutil.which("nvcc"):  # the same folders and targets but for that one
        configure, targets = [a for a in configure if a != "-DTANDEM_CUDA=ON"], [
            n for n in targets if n != "tandem_cuda"
        ]
    with tempfile.TemporaryDirectory() as root:
        for n in names:
            os.makedirs(os.path.dirname(os.path.join(root, n)), exist_ok=True)
            os.symlink(os.path.join(ROOT, n), os.path.join(root, n))
        for command in (["cmake", *configure], ["cmake", "--build", build_dir, "--target", "help"]):
            done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
            if done.returncode:
                yield (f"from its folders alone {shlex.join(command)} "
                       f"fails:\n{done.stdout[-300:]}{done.stderr[-800:]}")
                return
        for n in targets:
            if not re.search(rf"(^|[ /]){n}(:| |$)", done.stdout, re.MULTILINE):
                yield f"builds target {n}, which its folders do not have"


def planted(documents, change_pod, change=lambda d: None):
    broken = copy.deepcopy(documents)
    decode = {(d["kind"], d["metadata"]["name"]): d for d in broken
              if "metadata" in d}[("Deployment", "tandem-decode")]
    change_pod(decode["spec"]["template"]["spec"])
    change(decode)
    return list(manifest_problems(broken))


def other_pool(documents):
    broken = copy.deepcopy(documents)
    (pool, ) = [d for d in broken if d["kind"] == "InferencePool"]
    pool["spec"]["selector"]["matchLabels"]["component"] = "decode"
    return broken


def planted_group(documents, change):
    broken = copy.deepcopy(documents)
    (group, ) = [d for d in broken if d["kind"] == "LeaderWorkerSet"]
    change(group["spec"])
    return list(manifest_problems(broken))


def wrong_rule(documents):
    broken = copy.deepcopy(documents)
    (rule, ) = [d for d in broken if d["kind"] == "PrometheusRule"]
    rule["spec"]["groups"][0]["rules"][0]["expr"] = "td_no_such_metric > 0"
    return broken


SCALING_MISTAKES = [
    ("a missing metric in KEDA's query", "ScaledObject", "td_num_requests_waiting", "td_none"),
    ("KEDA's query of the other role", "ScaledObject", 'role="decode"', 'role="prefill"'),
    ("a missing metric of the HPA", "HorizontalPodAutoscaler", "td_recommended_workers", "td_none"),
    ("the HPA of the other role", "HorizontalPodAutoscaler", "role: decode", "role: prefill"),
]


def wrong_scaler(documents, kind, old, new):
    text = yaml.safe_dump([d for d in documents if d["kind"] == kind])
    assert old in text
    others = [d for d in documents if d["kind"] != kind]
    return scaling_problems(others + yaml.safe_load(text.replace(old, new)))


def main():
    documents = []
    for path in sorted(glob.glob(os.path.join(ROOT, "deploy/kubernetes/*.yaml"))):
        documents += [d for d in yaml.safe_load_all(read(ROOT, path)) if d]
    dashboard = read(ROOT, "deploy/grafana-dashboard.json")
    containerfiles = {
        name: read(ROOT, name) for name in ("deploy/Containerfile", "deploy/Containerfile.cuda")
    }
    mistakes = {
        "an unknown flag": planted(documents,
                                   lambda s: s["containers"][0]["args"].append("--kv-memroy=1GiB")),
        "a value out of bounds": planted(
            documents, lambda s: s["containers"][0]["args"].append("--block-size=7")),
        "an unknown variable": planted(
            documents, lambda s: s["containers"][0]["env"].
            append({"name": "TANDEM_ADVERTISED", "value": "x"})), "a wrong port": planted(
                documents, lambda s: s["containers"][0]["readinessProbe"]["grpc"].update(port=1)),
        "a short grace period": planted(
            documents,
            lambda s: s.update(terminationGracePeriodSeconds=60)), "no identity": planted(
                documents, lambda s: s["containers"][0]["args"].remove(
                    next(a for a in s["containers"][0]["args"]
                         if "secret" in a))), "a secret that others can read": planted(
                             documents,
                             lambda s: s["volumes"][1]["secret"].update(defaultMode=0o444)),
        "a secret that is not mounted": planted(
            documents, lambda s: s["containers"][0]["volumeMounts"].pop(1)),
        "a worker that dials the clients' port": planted(
            documents, lambda s: s["containers"][0]["args"].append("--router=tandem-router:7600")),
        "ranks of other options": planted_group(
            documents, lambda s: s["leaderWorkerTemplate"]["workerTemplate"]["spec"]["containers"][
                0]["args"].append("--block-size=32")), "a group of another size": planted_group(
                    documents,
                    lambda s: s["leaderWorkerTemplate"].update(size=4)), "a missing metric": list(
                        dashboard_problems(
                            dashboard.replace(
                                "td_prompt_tokens_total",
                                "td_promt_tokens_total"))), "a sum of routers and workers": list(
                                    dashboard_problems(
                                        dashboard.replace(f" {ROUTERS_ALONE[0]}", "", 1))),
        "two panels of one id": list(
            dashboard_problems(dashboard.replace('"id": 2,', '"id": 1,'))), "panels that overlap":
                list(dashboard_problems(dashboard.replace('"x": 12,', '"x": 11,', 1))),
        "a selector of others": planted(
            documents, lambda s: None,
            lambda d: d["spec"]["selector"]["matchLabels"].pop("component")),
        "a set whose workers join another's routers": not shutil.which("kubectl") or list(
            lockstep_problems(lambda t: t.replace("=tandem-registry-green", "=tandem-registry"))),
        "a pool of workers": list(pool_problems(
            other_pool(documents))), "a missing metric in an alert": list(
                rules_problems(wrong_rule(documents))), "a missing folder": list(
                    containerfile_problems(containerfiles["deploy/Containerfile"].replace(
                        "COPY kernels kernels/\n", ""))),
    }
    for what, kind, old, new in SCALING_MISTAKES:
        mistakes[what] = list(wrong_scaler(documents, kind, old, new))
    missed = [name for name, problems in mistakes.items() if not problems]
    if missed:
        sys.exit(f"deploy_flags: these planted mistakes pass: {', '.join(missed)}")
    (rules, ) = [d["spec"] for d in documents if d["kind"] == "PrometheusRule"]
    queries = scaled_queries(documents)
    expressions = [t["expr"] for p in json.loads(dashboard)["panels"] for t in p.get("targets", ())]
    expressions += queries.values()
    problems = [
        *manifest_problems(documents), *lockstep_problems(), *pool_problems(documents),
        *dashboard_problems(dashboard), *rules_problems(documents), *scaling_problems(documents),
        *promtool_problems(rules, expressions, queries)
    ]
    for name, text in containerfiles.items():
        problems += [f"{name}: {problem}" for problem in containerfile_problems(text)]
    if problems:
        sys.exit("deploy_flags:\n  " + "\n  ".join(problems))
    print(f"deploy_flags: {len(documents)} documents, all as the daemons say")


if __name__ == "__main__":
    main()
