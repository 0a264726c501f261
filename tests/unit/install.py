#!/usr/bin/python3
"""What `cmake --install` puts into an empty folder: the whole list of files; programs that start
there and carry no path of the build; man pages that the checker of man pages accepts and that
name every option; completion that bash loads and that answers; units that systemd accepts.

    tests/unit/install.py BUILD_DIR

Each check is first seen to catch a planted mistake. What this machine lacks (mandoc or man,
systemd-analyze, fish, zsh) is told and left out."""
import os
import re
import shutil
import subprocess
import sys
import tempfile

from tree import ROOT

BUILD = sys.argv[1]
PROGRAMS = ["tandem", "tandem-router", "tandem-prefill", "tandem-decode"]
COMMANDS = [
    "up", "generate", "chat", "status", "health", "doctor", "model", "tokenize", "logits",
    "compare", "quantize", "engine-bench", "sim", "plan", "bench"
]
BENCHES = ["serve", "replay", "sweep", "compare", "plot", "calibrate", "xfer"]
UNITS = ["tandem-router.service", "tandem-prefill@.service", "tandem-decode@.service"]
POCKET = ("config.json generation_config.json model.safetensors special_tokens_map.json "
          "tokenizer.json tokenizer_config.json README.md PROVENANCE").split()


def expected_files():
    files = {f"usr/bin/{p}" for p in PROGRAMS} | {f"usr/share/man/man8/{p}.8" for p in PROGRAMS[1:]}
    files |= {
        f"usr/share/man/man1/{name}.1" for name in
        ["tandem", *(f"tandem-{c}" for c in COMMANDS), *(f"tandem-bench-{b}" for b in BENCHES)]
    }
    files |= {f"usr/share/bash-completion/completions/{p}" for p in PROGRAMS
              } | {f"usr/share/fish/vendor_completions.d/{p}.fish" for p in PROGRAMS}
    files |= {"usr/share/zsh/vendor-completions/_tandem", "etc/tandem/tandem.env"
              } | {f"usr/lib/systemd/system/{u}" for u in UNITS}
    files |= {f"usr/share/tandem/models/pocket/{name}" for name in POCKET}
    for folder in ("tandem", "grpc"):
        for at, _, names in os.walk(os.path.join(ROOT, "proto", folder)):
            files |= {
                "usr/share/tandem/" + os.path.relpath(os.path.join(at, n), ROOT) for n in names
                if n.endswith(".proto")
            }
    files |= {
        f"usr/share/doc/tandem/{n}" for n in ("LICENSE", "README.md", "SECURITY.md", "copyright")
    }
    return files | {
        f"usr/share/doc/tandem/{os.path.relpath(os.path.join(at, n), ROOT)}"
        for at, _, names in os.walk(os.path.join(ROOT, "docs")) for n in names
    }


def installed_files(root):
    return {
        os.path.relpath(os.path.join(at, n), root) for at, _, names in os.walk(root) for n in names
    }


def list_problems(have, want):
    yield from (f"not installed: {name}" for name in sorted(want - have))
    # with -DTANDEM_CUDA=ON there are these more
    cuda = {
        "usr/lib/libtandem_cuda.so", "usr/share/doc/tandem-cuda/LICENSE",
        "usr/share/doc/tandem-cuda/copyright"
    }
    yield from (f"installed, and not in the list: {name}" for name in sorted(have - want - cuda))


def run(command, **more):
    env = {k: v for k, v in os.environ.items() if not k.startswith("TANDEM_")}
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, env=env,
                          **more)


def program_problems(path):
    done = run([path, "--version"])
    if done.returncode or "tandem" not in done.stdout:
        yield f"{path} --version: status {done.returncode} {done.stderr}"
    if "RUNPATH" in (dynamic := run(["readelf", "-d", path]).stdout) or "RPATH" in dynamic:
        yield f"{path} looks for libraries in {re.findall(r'R(?:UN)?PATH.*', dynamic)}"


def man_problems(path, flags):
    if shutil.which("mandoc"):
        yield from run(["mandoc", "-T", "lint", "-W", "warning", path]).stdout.splitlines()
    if shutil.which("man"):
        done = run(["man", "--warnings", "-E", "UTF-8", "-l", "-Tutf8", "-Z", path])
        yield from (f"man {path}: {line}" for line in done.stderr.splitlines())
    with open(path, encoding="utf-8") as f:
        text = f.read().replace("\\-", "-")
    yield from (f"{path} does not name --{flag}" for flag in flags if f"--{flag}\\fR" not in text)


def flags_of(bin_dir, words):
    return re.findall(r"^  --([a-z0-9-]+)",
                      run([os.path.join(bin_dir, words[0]), *words[1:], "--help"]).stdout,
                      re.MULTILINE)


def copyright_problems(path, licence_path):
    """The licence that copyright names is the one whose text is installed, with somebody to ask."""
    with open(path, encoding="utf-8") as f:
        fields = re.findall(r"^([A-Z][A-Za-z-]+): *(.*)", f.read(), re.MULTILINE)
    with open(licence_path, encoding="utf-8") as f:
        title = f.read(200)
    if ("License", "Apache-2.0") not in fields or not re.search(
            r"Apache License\s+Version 2\.0, January 2004", title):
        yield f"{path} and {licence_path} do not both name Apache-2.0"
    if not re.fullmatch(r".+ <\S+@\S+>", dict(fields).get("Upstream-Contact", "")):
        yield (f"{path}: Upstream-Contact is \"{dict(fields).get('Upstream-Contact')}\", must be "
               "name <address> (TANDEM_PACKAGE_CONTACT)")


def bash_answer(path, line):
    """What bash offers at the end of the line."""
    words = line.split(" ")
    script = (f'source "{path}"; COMP_WORDS=({" ".join(repr(w) for w in words)}); '
              f'COMP_CWORD={len(words) - 1}; _tandem; echo "${{COMPREPLY[*]}}"')
    done = run(["bash", "--norc", "-uc", script])
    return done.stdout.split() if done.returncode == 0 and not done.stderr else [
        f"bash: {done.stderr.strip()}"
    ]


def completion_problems(path, bin_dir):
    asked = {
        "tandem st": ["status"], "tandem bench pl": ["plot"], "tandem up --mode ": [
            "pd", "colocated", "hybrid"
        ], "tandem up --mode = h": ["hybrid"], "tandem-router --pol": ["--policy"],
        "/usr/bin/tandem-decode --import": ["--import-timeout-ms"], "tandem status --no-such": []
    }
    for program in PROGRAMS[1:]:
        asked[f"{program} --"] = sorted("--" + f for f in flags_of(bin_dir, [program]))
    for line, want in asked.items():
        answer = bash_answer(path, line)
        if not set(want) <= set(answer) or (not line.endswith("--") and len(answer) != len(want)):
            yield f"completion of {line!r}: {answer}, must be {want}"


def unit_problems(folder, root):
    if not shutil.which("systemd-analyze"):
        return
    for unit in UNITS:
        instance = unit.replace("@.", "@0.")
        with tempfile.TemporaryDirectory() as at:
            # The programs of the units are in the empty folder, and systemd-analyze looks for them.
            with open(os.path.join(folder, unit), encoding="utf-8") as f, open(
                    os.path.join(at, instance), "w", encoding="utf-8") as g:
                g.write(
                    re.sub(r"^ExecStart=", f"ExecStart={root}", f.read(),
                           flags=re.MULTILINE).replace("%i", "0"))
            done = run([
                "systemd-analyze", "verify", "--man=no", "--recursive-errors=no",
                os.path.join(at, instance)
            ])
            lines = [
                line for line in done.stderr.splitlines()
                if instance in line or "unit file" in line.lower()
            ]
            yield from lines if lines or not done.returncode else [
                f"systemd-analyze verify {unit}: status {done.returncode}: {done.stderr}"
            ]


def seen_to_catch(what, problems):
    if not list(problems):
        sys.exit(f"install: a planted mistake passes: {what}")


def main():
    problems = []
    with tempfile.TemporaryDirectory(prefix="tandem-install-") as root:
        done = subprocess.run(["cmake", "--install", BUILD, "--prefix", "/usr"], env=dict(
            os.environ, DESTDIR=root), capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"cmake --install: {done.stdout}{done.stderr}")
        have, want, bin_dir = installed_files(root), expected_files(), os.path.join(root, "usr/bin")
        problems += list_problems(have, want)
        seen_to_catch("a file that is not there", list_problems(have - {"usr/bin/tandem"}, want))

        for name in PROGRAMS:
            problems += program_problems(os.path.join(bin_dir, name))
        pages = [(f"man8/{p}.8", [p])
                 for p in PROGRAMS[1:]] + [(f"man1/tandem-{c}.1", ["tandem", c]) for c in COMMANDS]
        pages += [(f"man1/tandem-bench-{b}.1", ["tandem", "bench", b])
                  for b in BENCHES] + [("man1/tandem.1", ["tandem"])]
        for page, words in pages:
            problems += man_problems(os.path.join(root, "usr/share/man", page),
                                     flags_of(bin_dir, words))
        wrong = os.path.join(root, "wrong.1")
        with open(wrong, "w", encoding="utf-8") as f:
            f.write(".TH X 1\n.SH NAME\nx\n.ZZ\n")
        seen_to_catch("a man page without an option", man_problems(wrong, ["model"]))

        doc = os.path.join(root, "usr/share/doc/tandem")
        problems += copyright_problems(f"{doc}/copyright", f"{doc}/LICENSE")
        with open(wrong, "w", encoding="utf-8") as f:
            f.write("Upstream-Contact: \nLicense: Apache-2.0\n")
        seen_to_catch("nobody to ask", copyright_problems(wrong, f"{doc}/LICENSE"))
        seen_to_catch("another licence's text",
                      copyright_problems(f"{doc}/copyright", f"{doc}/README.md"))

        bash = os.path.join(root, "usr/share/bash-completion/completions/tandem")
        problems += completion_problems(bash, bin_dir)
        with open(bash, encoding="utf-8") as f, open(wrong, "w", encoding="utf-8") as g:
            g.write(f.read().replace("--policy", "--polity"))
        seen_to_catch("completion that lacks a flag", completion_problems(wrong, bin_dir))
        for shell, path in (("fish", "usr/share/fish/vendor_completions.d/tandem.fish"),
                            ("zsh", "usr/share/zsh/vendor-completions/_tandem")):
            if shutil.which(shell) and (done := run([shell, "-n",
                                                     os.path.join(root, path)])).returncode:
                problems.append(f"{path}: {done.stderr}")

        units = os.path.join(root, "usr/lib/systemd/system")
        problems += unit_problems(units, root)
        for unit in UNITS:
            with open(os.path.join(units, unit), encoding="utf-8") as f:
                text = f.read()
            if "@" in text.replace("@system-service", "") or "/etc/tandem/tandem.env" not in text:
                problems.append(f"{unit}: a path was not filled in")
        with open(os.path.join(units, UNITS[0]), "a", encoding="utf-8") as f:
            f.write("[Service]\nLimitNOFILES=1\n")
        if shutil.which("systemd-analyze"):
            seen_to_catch("a unit with an unknown setting", unit_problems(units, root))
    tools = ("mandoc", "man", "systemd-analyze", "fish", "zsh")
    print(f"{len(have)} files; not here: "
          f"{', '.join(t for t in tools if not shutil.which(t)) or 'nothing'}")
    if problems:
        sys.exit("install:\n  " + "\n  ".join(problems))


main()
