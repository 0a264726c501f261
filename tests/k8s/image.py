"""Container images as archives that containerd imports, made without a registry.

tree(): the programs of a build with the libraries that they have on this machine, in a few
seconds. It stands for deploy/Containerfile's image in its user, paths and emptiness; what it does
not show is that the Containerfile builds, and that it installs what the programs need."""
import hashlib
import io
import json
import os
import shutil
import subprocess
import tarfile

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


def write_archive(path, name, layer, command):
    """An image of one layer, in the layout of `docker save`."""
    config = json.dumps({
        "architecture": "amd64", "os": "linux",
        "config": {"Cmd": command, "User": USER, "Env": ["PATH=/usr/local/bin:/usr/bin:/bin"]},
        "rootfs": {"type": "layers", "diff_ids": ["sha256:" + hashlib.sha256(layer).hexdigest()]}
    }).encode()
    config_name = hashlib.sha256(config).hexdigest() + ".json"
    manifest = [{"Config": config_name, "RepoTags": [name], "Layers": ["layer.tar"]}]
    with tarfile.open(path + ".new", "w") as tar:
        add_bytes(tar, config_name, config)
        add_bytes(tar, "layer.tar", layer)
        add_bytes(tar, "manifest.json", json.dumps(manifest).encode())
    os.rename(path + ".new", path)
    return path


def pause(path):
    """The container that holds a pod's namespaces: catatonit, which is static, and waits."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as tar:
        add_file(tar, os.path.realpath(shutil.which("catatonit")), "pause")
    return write_archive(path, "localhost/pause:1", data.getvalue(), ["/pause", "-P"])


def tree(path, name, bin_dir):
    data = io.BytesIO()
    tools = [os.path.realpath(shutil.which(n)) for n in ("sleep", "sh", "cat", "cp")]
    programs = [os.path.join(bin_dir, n) for n in PROGRAMS]
    with tarfile.open(fileobj=data, mode="w") as tar:
        for p in programs:
            add_file(tar, p, "/usr/local/bin/" + os.path.basename(p))
        for n in ("sleep", "sh", "cat", "cp"):
            add_file(tar, os.path.realpath(shutil.which(n)), "/bin/" + n)
        for p in libraries(programs + tools):
            add_file(tar, os.path.realpath(p), p)
        add_bytes(tar, "/etc/passwd", b"tandem:x:10001:10001::/:/usr/sbin/nologin\n")
        add_bytes(tar, "/etc/group", b"tandem:x:10001:\n")
        add_bytes(tar, "/etc/nsswitch.conf", b"hosts: files dns\n")
    return write_archive(path, name, data.getvalue(), ["tandem", "--help"])
