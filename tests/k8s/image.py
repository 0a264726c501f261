"""Container images as archives that containerd imports, made without a registry.

containerfile(): the last stage of deploy/Containerfile, each instruction as it stands there: RUN
in a bare root of Debian 12 (scripts/bare-root), COPY --from=build out of the build tree, USER, CMD.
Not run: its first stage, which builds the programs. root() makes what RUN leaves, once, and needs a
network; so it runs before the plane's namespaces are entered.

tree(): the programs of a build with the libraries that they have on this machine, in a few
seconds. It has the user and the paths of the Containerfile's image, and nothing else of it."""
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import tarfile
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
PROGRAMS = ("tandem", "tandem-router", "tandem-prefill", "tandem-decode")
USER = "10001:10001"


def add_bytes(tar, name, data, mode=0o644):
    info = tarfile.TarInfo(name.lstrip("/"))
    info.size, info.mode = len(data), mode
    tar.addfile(info, io.BytesIO(data))


def add_file(tar, path, name, mode=0o755):
    with open(path, "rb") as f:
        add_bytes(tar, name, f.read(), mode)


def libraries(paths):
    """Every shared library of these programs, and the loader, by the path that they look at."""
    found = set()
    for path in paths:
        for line in subprocess.run(["ldd", path], capture_output=True, text=True,
                                   check=False).stdout.splitlines():
            words = line.replace("=>", " ").split()
            found.update(w for w in words if w.startswith("/"))
    return sorted(found)


def write_archive(path, name, layers, **config):
    """An image in the layout of `docker save`. layers: paths of tar files."""
    ids = []
    for layer in layers:
        with open(layer, "rb") as f:
            ids.append("sha256:" + hashlib.file_digest(f, "sha256").hexdigest())
    config = {
        "Env": ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"], **config
    }
    config = json.dumps({
        "architecture": "amd64", "os": "linux", "config": config,
        "rootfs": {"type": "layers", "diff_ids": ids}
    }).encode()
    config_name = hashlib.sha256(config).hexdigest() + ".json"
    names = [f"layer-{i}.tar" for i in range(len(layers))]
    manifest = [{"Config": config_name, "RepoTags": [name], "Layers": names}]
    with tarfile.open(path + ".new", "w") as tar:
        add_bytes(tar, config_name, config)
        for layer, entry in zip(layers, names):
            tar.add(layer, entry)
        add_bytes(tar, "manifest.json", json.dumps(manifest).encode())
    os.rename(path + ".new", path)
    return path


def pause(path):
    """The container that holds a pod's namespaces: catatonit, which is static, and waits."""
    with tarfile.open(path + ".layer", "w") as tar:
        add_file(tar, os.path.realpath(shutil.which("catatonit")), "pause")
    return write_archive(path, "localhost/pause:1", [path + ".layer"], User=USER,
                         Cmd=["/pause", "-P"])


def tree(path, name, bin_dir):
    tools = [os.path.realpath(shutil.which(n)) for n in ("sleep", "sh", "cat", "cp")]
    programs = [os.path.join(bin_dir, n) for n in PROGRAMS]
    with tarfile.open(path + ".layer", "w") as tar:
        for p in programs:
            add_file(tar, p, "/usr/local/bin/" + os.path.basename(p))
        for n in ("sleep", "sh", "cat", "cp"):
            add_file(tar, os.path.realpath(shutil.which(n)), "/bin/" + n)
        for p in libraries(programs + tools):
            add_file(tar, os.path.realpath(p), p)
        add_bytes(tar, "/etc/passwd", b"tandem:x:10001:10001::/:/usr/sbin/nologin\n")
        add_bytes(tar, "/etc/group", b"tandem:x:10001:\n")
        add_bytes(tar, "/etc/nsswitch.conf", b"hosts: files dns\n")
    return write_archive(path, name, [path + ".layer"], User=USER, Cmd=["tandem", "--help"])


# ---- the Containerfile's
# -------------------------------------------------------------------------------------------------


def last_stage():
    """[(instruction, argument)] behind the last FROM, lines that go on joined."""
    with open(os.path.join(ROOT, "deploy", "Containerfile"), encoding="utf-8") as f:
        lines = [line for line in f.read().splitlines() if not line.lstrip().startswith("#")]
    text = "\n".join(lines).replace("\\\n", " ")
    out = []
    for line in filter(str.strip, text.splitlines()):
        word, argument = line.split(None, 1)
        out = [(word, argument)] if word == "FROM" else [*out, (word, argument.strip())]
    assert out[0] == ("FROM", "debian:12-slim"), f"the last stage is {out[0]}"
    unknown = {w for w, _ in out[1:]} - {"RUN", "COPY", "USER", "CMD"}
    assert not unknown, f"instructions of the last stage that nobody follows here: {unknown}"
    return out


def runs():
    return [a for w, a in last_stage() if w == "RUN"]


def root_path(work):
    """Of the layer that RUN leaves: another one when a command changes."""
    key = hashlib.sha256("\n".join(runs()).encode()).hexdigest()[:16]
    return os.path.join(work, "images", f"root-{key}.tar")


def root(work):
    """Makes root_path(), if it is not there: mmdebstrap, and the commands. None and why not."""
    path, tool = root_path(work), os.path.join(ROOT, "scripts", "bare-root")
    if os.path.exists(path):
        return None
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with tempfile.TemporaryDirectory(dir=os.path.dirname(path)) as folder:
        bare = os.path.join(folder, "root")
        for command in ([tool, "make", "debian12",
                         bare], *([tool, "run", "--net", bare, "sh", "-c", r] for r in runs())):
            try:
                done = subprocess.run(command, capture_output=True, text=True, check=False,
                                      timeout=900)
            except subprocess.TimeoutExpired:
                return f"{' '.join(command)[:200]}: not done within 900 s"
            if done.returncode:
                return f"{' '.join(command)[:200]}: {(done.stdout + done.stderr)[-600:]}"
        with tarfile.open(path + ".new", "w") as tar:
            for name in sorted(os.listdir(bare)):
                if name not in ("dev", "proc", "sys"):
                    tar.add(os.path.join(bare, name), name, filter=without_packages)
        os.rename(path + ".new", path)
    return None


def without_packages(entry):
    """What Debian's own image makes apt remove."""
    return None if re.match(r"var/(cache/apt|lib/apt/lists)/", entry.name) else entry


def containerfile(path, name, work, bin_dir):
    config = {}
    with tarfile.open(path + ".layer", "w") as tar:
        for word, argument in last_stage()[1:]:
            if word == "COPY":
                *sources, target = argument.split()
                built = sources[0] == "--from=build"
                assert target.endswith("/")
                for s in sources[built:]:
                    add_file(
                        tar,
                        os.path.join(bin_dir if built else ROOT,
                                     os.path.basename(s) if built else s),
                        target + os.path.basename(s), 0o755 if built else 0o644)
            elif word == "USER":
                config["User"] = argument
            elif word == "CMD":
                config["Cmd"] = json.loads(argument)
    assert config["User"] == USER, config
    return write_archive(path, name, [root_path(work), path + ".layer"], **config)
