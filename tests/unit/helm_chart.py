#!/usr/bin/python3
"""deploy/helm/tandem is what scripts/gen-helm-chart makes; with its own values it renders what the
kustomization gives; and each value in values.yaml has an effect. Planted mistakes are caught first.

Rendered here by the few expressions of Helm that the chart uses (render()), and by `helm template`
or Helm's SDK (helm-python-sdk of PyPI) where there is one. Skips (77) without python3-yaml."""
import copy
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile

from tree import ROOT, read

try:
    import helm_python  # Helm's own SDK
except ImportError:
    helm_python = None
try:
    import yaml
except ImportError:
    print("helm_chart: skipped, python3-yaml is not installed")
    sys.exit(77)

CHART = os.path.join(ROOT, "deploy", "helm", "tandem")
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
SOURCE = os.path.join(ROOT, "deploy", "kubernetes")


def look_up(path, values, dot):
    if path == ".":
        return dot
    assert path.startswith(".Values."), path
    for name in path.split(".")[2:]:
        values = values[name]
    return values


def evaluate(expression, values, dot):
    """A value, int VALUE, toJson VALUE, and toYaml VALUE | nindent N, as Helm has them."""
    m = re.fullmatch(r"(?:(int|toJson|toYaml) )?(\.[\w.]*)(?: \| nindent (\d+))?", expression)
    assert m and (m[1] == "toYaml") == bool(m[3]), f"an expression that is not known: {expression}"
    value = look_up(m[2], values, dot)
    if m[1] == "toYaml":
        text = yaml.safe_dump(value, sort_keys=True)
        return "".join("\n" + " " * int(m[3]) + line for line in text.splitlines())
    if m[1] == "toJson":
        return json.dumps(value)
    assert isinstance(value, (str, int)), f"{expression} is {value!r}"
    return str(int(value)) if m[1] else str(value)


def render(template, values, dot=None):
    """{{- takes the space before it away."""
    text = re.sub(r"\s*\{\{- ", "{{ ", template)
    out, at = "", 0
    while m := re.compile(r"\{\{ (.*?) \}\}").search(text, at):
        out, at = out + text[at:m.start()], m.end()
        if not m[1].startswith("range "):
            out += evaluate(m[1], values, dot)
            continue
        end = text.index("{{ end }}", at)
        for item in look_up(m[1].removeprefix("range "), values, dot):
            out += render(text[at:end], values, item)
        at = end + len("{{ end }}")
    return out + text[at:]


def by_name(texts):
    documents = [d for t in texts for d in yaml.load_all(t, LOADER) if d]
    named = {(d["kind"], d["metadata"]["name"]): d for d in documents}
    assert len(named) == len(documents)
    return named


def kustomized():
    """What `kubectl kustomize` gives, if there is one; else the manifests that the kustomization
    lists: its image is the one that they have (gen-helm-chart sees to that)."""
    if shutil.which("kubectl"):
        return by_name([
            subprocess.run(["kubectl", "kustomize", SOURCE], capture_output=True, text=True,
                           check=True).stdout
        ])
    names = yaml.safe_load(read(SOURCE, "kustomization.yaml"))["resources"]
    return by_name(read(SOURCE, n) for n in names)


def rendered(values, edit):
    folder = os.path.join(CHART, "templates")
    return by_name(render(edit(read(folder, n)), values) for n in sorted(os.listdir(folder)))


def rendered_by_helm(values, _):
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as f:
        yaml.safe_dump(values, f)
        f.flush()
        return by_name([
            subprocess.run(["helm", "template", "-f", f.name, "tandem", CHART], capture_output=True,
                           text=True, check=True).stdout
        ])


def rendered_by_sdk(values, _):
    with helm_python.Chart.load(CHART) as chart:
        return by_name(chart.render(values, name="tandem").values())


def leaves(values, path=()):
    for name, value in values.items():
        if isinstance(value, dict) and name != "resources":
            yield from leaves(value, (*path, name))
        else:
            yield (*path, name)


def other(value, i):
    """A value of the same type that is nowhere else."""
    return {
        str: lambda: f"other-{i}", int: lambda: 1234567 + i,
        list: lambda: [f"--a=b c {i}", f'"{i}"'],
        dict: lambda: {"limits": {"cpu": "3", "memory": f"{i}Gi"}}
    }[type(value)]()


def problems(want, renderers, edit=lambda text: text):
    values = yaml.safe_load(read(CHART, "values.yaml"))
    for r in renderers:
        got = r(values, edit)
        for key in sorted(want.keys() | got.keys()):
            if want.get(key) != got.get(key):
                yield f"{'/'.join(key)} is not what the kustomization gives ({r.__name__})"
        changed, told = copy.deepcopy(values), {}
        for i, path in enumerate(leaves(values)):
            inner = changed
            for name in path[:-1]:
                inner = inner[name]
            told[".".join(path)] = inner[path[-1]] = other(inner[path[-1]], i)
        text = json.dumps([v for k, v in sorted(r(changed, edit).items())])
        for path, value in told.items():
            if isinstance(value, dict):  # Helm merges it with what values.yaml has
                value = value["limits"]["memory"]
            for v in value if isinstance(value, list) else [value]:
                if json.dumps(str(v))[1:-1] not in text:
                    yield f"{path}: {v!r} has no effect ({r.__name__})"


def check_missing():
    """A file that is not there is named; no traceback."""
    for missing in ("deploy/helm/tandem/Chart.yaml", "deploy/kubernetes/router.yaml"):
        with tempfile.TemporaryDirectory() as copy:
            for folder in ("scripts", "deploy"):
                shutil.copytree(os.path.join(ROOT, folder), os.path.join(copy, folder))
            os.remove(os.path.join(copy, missing))
            got = subprocess.run([os.path.join(copy, "scripts", "gen-helm-chart"), "--check"],
                                 capture_output=True, text=True, check=False)
            if got.returncode != 1 or os.path.basename(
                    missing) not in got.stderr or "Traceback" in got.stderr:
                sys.exit(f"helm_chart: without {missing}: {got.returncode}, {got.stderr}")


def main():
    want = kustomized()
    for mistake, there, instead in (("another port", "port: 7601", "port: 7602"),
                                    ("a value that is not used", "{{ .Values.decode.kvMemory }}",
                                     "24Gi")):
        if not list(problems(want, [rendered], lambda t, a=there, b=instead: t.replace(a, b))):
            sys.exit(f"helm_chart: a planted mistake passes: {mistake}")
    made = subprocess.run([os.path.join(ROOT, "scripts", "gen-helm-chart"), "--check"],
                          capture_output=True, text=True, check=False)
    check_missing()
    renderers = [rendered] + ([rendered_by_helm] if shutil.which("helm") else [])
    renderers += [rendered_by_sdk] if helm_python else []
    found = ([made.stderr] if made.returncode else []) + list(problems(want, renderers))
    if found:
        sys.exit("helm_chart:\n  " + "\n  ".join(found))
    print(f"helm_chart: as the kustomization: {', '.join(r.__name__ for r in renderers)}")


if __name__ == "__main__":
    main()
