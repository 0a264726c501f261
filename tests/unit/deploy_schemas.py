#!/usr/bin/python3
"""The manifests of deploy/kubernetes, what kustomize makes of them, and its components, against the
strict schemas of Kubernetes 1.32 and the newest that kubernetes-validate (PyPI) has: they come with
it, so nothing is asked of a network. It first sees a planted mistake refused. Skips (77) without
kubernetes-validate or kubectl.

    deploy_schemas.py [PROGRAM]          PROGRAM: kubernetes-validate, if it is not on PATH"""
import glob
import os
import shutil
import subprocess
import sys
import tempfile

from tree import ROOT, read

try:
    import yaml
except ImportError:
    print("deploy_schemas: skipped, python3-yaml is not installed")
    sys.exit(77)

PROGRAM = sys.argv[1] if len(sys.argv) > 1 else shutil.which("kubernetes-validate")
FOLDER = os.path.join(ROOT, "deploy", "kubernetes")
# Kinds of others, whose schemas are not Kubernetes' own.
OTHERS = ("kustomize.config.k8s.io/", "monitoring.coreos.com/", "keda.sh/",
          "inference.networking.k8s.io/", "gateway.networking.k8s.io/", "leaderworkerset.x-k8s.io/")
VERSIONS = ("1.32", None)  # None: the newest that it has


def rendered(folder, components=()):
    """What kubectl makes of the kustomization, with components."""
    with tempfile.TemporaryDirectory() as scratch:
        # kustomize takes no absolute paths
        below = os.path.relpath(folder, os.path.realpath(scratch))
        with open(os.path.join(scratch, "kustomization.yaml"), "w", encoding="utf-8") as f:
            yaml.safe_dump(
                {
                    "resources": [below],
                    "components": [os.path.join(below, "components", c) for c in components]
                }, f)
        return list(
            yaml.safe_load_all(
                subprocess.run(["kubectl", "kustomize", scratch], capture_output=True, text=True,
                               check=True).stdout))


def pods_of(documents):
    """The pods of a LeaderWorkerSet, whose own schema is not Kubernetes'."""
    return [{
        "apiVersion": "v1", "kind": "Pod", "metadata": dict(
            template["metadata"], name=role.lower()), "spec": template["spec"]
    } for d in documents if d["kind"] == "LeaderWorkerSet"
            for role, template in d["spec"]["leaderWorkerTemplate"].items()
            if role.endswith("Template")]


def complaint(documents, version):
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as f:
        yaml.safe_dump_all(documents, f)
        f.flush()
        done = subprocess.run([PROGRAM, "--strict", *(["-k", version] if version else []), f.name],
                              capture_output=True, text=True, check=False)
    return done.stdout + done.stderr if done.returncode else None


def main():
    if not PROGRAM or not shutil.which("kubectl"):
        print("deploy_schemas: skipped, no "
              f"{'kubectl' if PROGRAM else 'kubernetes-validate (pip install it)'} on PATH")
        sys.exit(77)
    sets = {"kustomization": rendered(FOLDER)}
    for c in sorted(os.listdir(os.path.join(FOLDER, "components"))):
        sets[c] = rendered(FOLDER, [c])
    lockstep = os.path.join(ROOT, "deploy", "lockstep.example")
    for name in ("blue", "green"):
        sets[name] = rendered(os.path.join(lockstep, name))
    sets["lockstep"] = [yaml.safe_load(read(lockstep, "service.yaml"))]
    for path in sorted(glob.glob(os.path.join(FOLDER, "*.example.yaml"))):
        sets[os.path.basename(path)] = list(yaml.safe_load_all(read(ROOT, path)))
    n, problems = 0, []
    for name, documents in sets.items():
        own = [d for d in documents if not d["apiVersion"].startswith(OTHERS)]
        own += pods_of(documents)
        n += len(own)
        for version in VERSIONS if own else ():
            # the field is newer than that version's schema
            if name == "model-image" and version:
                continue
            if text := complaint(own, version):
                problems.append(f"{name}, version {version or 'newest'}: {text[-1500:]}")
    wrong = rendered(FOLDER)
    wrong[0]["spec"] = {"replicsa": 1}
    if not complaint(wrong, None):
        problems.append("a planted mistake passes")
    if problems:
        sys.exit("deploy_schemas:\n  " + "\n  ".join(problems))
    print(f"deploy_schemas: {n} documents of {len(sets)} sets")


if __name__ == "__main__":
    main()
