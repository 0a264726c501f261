"""`tandem` at a terminal: commands on a pseudo-terminal, in front of a router that says what the
test tells it to. What the user types reaches the model as the bytes that the line shows."""
import concurrent.futures
import fcntl
import http.server
import json
import os
import queue
import re
import select
import signal
import stat
import struct
import subprocess
import termios
import threading
import time

import grpc
import pytest
from harness import BIN, POCKET, SHORT, SLOW, free_port, nap, pb

PATIENCE_S = 20 * SLOW


class Router:
    """Answers Generate with what `say` yields, and keeps the requests."""
    def __init__(self):
        self.requests, self.cancelled = queue.Queue(), threading.Event()
        self.say = lambda request, context: iter(["A fox."])
        self.status = pb.StatusResponse(model="m", mode="pd", policy="goodput", attainment=-1)
        self.server = grpc.server(concurrent.futures.ThreadPoolExecutor(4))
        self.server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(
                "tandem.v1.Inference", {
                    "Generate": grpc.unary_stream_rpc_method_handler(
                        self.generate, pb.GenerateRequest.FromString,
                        pb.GenerateResponse.SerializeToString),
                    "Status": grpc.unary_unary_rpc_method_handler(
                        lambda m, c: self.status, pb.StatusRequest.FromString,
                        pb.StatusResponse.SerializeToString)
                }), ))
        self.at = f"127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"
        self.server.start()

    def generate(self, request, context):
        self.requests.put(request)
        context.add_callback(lambda: None if context.code() else self.cancelled.set())
        for i, text in enumerate(self.say(request, context)):
            yield pb.GenerateResponse(text=text, token_ids=[i])
        yield pb.GenerateResponse(finish_reason=pb.FINISH_STOP, usage=pb.Usage(
            prompt_tokens=7, output_tokens=3), ledger=pb.Ledger(ttft_us=2500, e2e_us=12500))

    def talk(self):
        """The messages of the next request, (role, text) each."""
        m = self.requests.get(timeout=PATIENCE_S)
        return [(x.role, x.content) for x in m.chat.messages]


class Terminal:
    """A program on a terminal of so many columns."""
    def __init__(self, *args, columns=80, env=None, file_bytes=None):
        self.fd, its_end = os.openpty()
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        env = {**os.environ, "TERM": "xterm", "LANG": "C.UTF-8", **(env or {})}
        env.pop("LC_ALL", None)
        # Not pty.fork: beside threads of grpc Python may stand in its fork for ever (Debian 13).
        command = ["setsid", "--ctty", os.path.join(BIN, "tandem"), *args]
        if file_bytes is not None:  # no file may grow beyond, which is an error: a full disk
            command = ["prlimit", f"--fsize={file_bytes}", *command]
        self.process = subprocess.Popen(command, stdin=its_end, stdout=its_end, stderr=its_end,
                                        env=env, restore_signals=False)  # SIGXFSZ is ignored
        os.close(its_end)
        self.pid = self.process.pid
        self.said, self.at = b"", 0

    def read(self):
        """False at the end."""
        if not select.select([self.fd], [], [], PATIENCE_S)[0]:
            pytest.fail(f"nothing comes; so far: {self.said!r}")
        try:
            got = os.read(self.fd, 4096)
        except OSError:
            got = b""
        self.said += got
        return got != b""

    def expect(self, text):
        """Reads until `text` comes behind what was expected before; returns what is in between."""
        while (found := self.said.find(text, self.at)) < 0:
            assert self.read(), f"{text!r} does not come: {self.said!r}"
        between, self.at = self.said[self.at:found], found + len(text)
        return between

    def type(self, text):
        os.write(self.fd, text if isinstance(text, bytes) else text.encode())

    def end(self):
        """The exit status, when the program has ended by itself."""
        while self.read():
            pass
        os.close(self.fd)
        status = self.process.wait(PATIENCE_S)
        if status:  # pytest shows it where the test does not want this status
            print(f"ended with {status}: {self.said.decode(errors='replace')}")
        return status


@pytest.fixture(name="router")
def a_router():
    router = Router()
    yield router
    router.server.stop(None)


@pytest.fixture(name="chat")
def a_chat(router, tmp_path):
    """chat(...) starts one; all have one folder of state."""
    begun = []

    def start(*args, **kwargs):
        t = Terminal("chat", "--server", router.at, *args, env={"XDG_STATE_HOME": str(tmp_path)},
                     **kwargs)
        begun.append(t)
        t.expect(b"you> ")
        return t

    yield start
    for t in begun:
        t.process.kill()
        t.process.wait(PATIENCE_S)


def until(condition):
    begin = time.monotonic()
    while not (got := condition()):
        assert time.monotonic() < begin + PATIENCE_S
        nap(begin)
    return got


def open_files(pid):
    found, folder = set(), f"/proc/{pid}/fd"
    for fd in os.listdir(folder):
        try:
            found.add(os.readlink(os.path.join(folder, fd)))
        except FileNotFoundError:
            pass
    return found


def shown(said):
    """The lines that a terminal shows of these bytes, as far as the wrapping uses it."""
    lines = [""]
    for part in re.findall(r"\x1b\[\d+D\x1b\[K|[^\x1b]|\x1b\[[^a-zA-Z]*[a-zA-Z]", said.decode()):
        back = re.match(r"\x1b\[(\d+)D\x1b\[K", part)
        if back:
            lines[-1] = lines[-1][:-int(back[1])]
        elif part == "\n":
            lines.append("")
        elif part != "\r" and part[0] != "\x1b":
            lines[-1] += part
    return lines


def test_keys_edit_the_line(router, chat):
    c = chat()
    # left, a word left, Home, End, Delete, F5, a lone modified arrow; é and 你 are one character
    c.type(b"tll\x1b[D\x1b[De\x1b[F m\xc3\xa9\xe4\xbd\xa0!\x1b[D\x1b[3~\x1b[15~\x1b[1;2A\x1bOH")
    c.type(b"\x1b[3~T\x1b[1;5C,\x05\n")
    c.expect(b"model> ")
    assert router.talk() == [("user", "Tell, mé你")]
    c.expect(b"A fox.")
    c.expect(b"you> ")
    c.type(b"\x1b[200~two\nlines\tof \x1b[31mtext\x1b[201~\n")  # pasted: one message
    c.expect(b"model> ")
    assert router.talk()[2:] == [("user", "two\nlines\tof text")]
    c.expect(b"you> ")
    c.type(b"\x04")
    assert c.end() == 0


def test_history(router, chat, tmp_path):
    for before in (False, True):
        c = chat()
        c.type(("\x1b[A\x1b[A" if before else "the first") + "\n")  # "/quit" was the last
        c.expect(b"you> ")
        assert router.talk() == [("user", "the first")]
        c.type("/quit\n")
        assert c.end() == 0
    path = tmp_path / "tandem" / "chat_history"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and b"the" in path.read_bytes()


def test_histories_of_two_talks(chat, tmp_path):
    """Two at once keep the lines of both; a file that has grown is shortened to its last 1,000."""
    path = tmp_path / "tandem" / "chat_history"
    talks = [chat(), chat()]
    for i in range(2):
        for name, c in zip("ab", talks):
            for _ in range(2):  # the same line again is no second one
                c.type(f"{name}{i}\n")
                c.expect(b"you> ")
    lines = path.read_text().splitlines()
    assert lines[1:] == ["a0", "b0", "a1", "b1"]
    path.write_text("\n".join([lines[0]] + [f"old{i}" for i in range(2500)]) + "\n")
    talks.append(chat())
    kept = path.read_text().splitlines()
    assert kept == [lines[0]] + [f"old{i}" for i in range(1500, 2500)]
    for c in talks:
        c.type("/quit\n")
        assert c.end() == 0
    assert path.read_text().splitlines() == kept + 3 * ["/quit"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_history_outlives_a_full_disk(chat, tmp_path):
    """What cannot be shortened stays whole, and nothing is left beside it."""
    path = tmp_path / "tandem" / "chat_history"
    path.parent.mkdir(mode=0o700)
    chat().type("/quit\n")
    header = until(lambda: path.exists() and path.read_text()).splitlines()[0]
    lines = [header] + [f"old{i}" for i in range(2500)]
    path.write_text("\n".join(lines) + "\n")
    c = chat(file_bytes=1024)
    assert path.read_text().splitlines() == lines
    c.type("one more\n")
    c.expect(b"history is not kept")
    assert path.read_text().splitlines() == lines
    assert os.listdir(path.parent) == ["chat_history"]


def test_history_is_written_under_the_lock(chat, tmp_path):
    path = tmp_path / "tandem" / "chat_history"
    c = chat()
    c.type("first\n")
    c.expect(b"you> ")
    before = path.read_text()
    # a lock that nobody gives back
    with path.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        c.type("second\n")
        c.expect(b"history is not kept")
        c.expect(b"you> ")
    assert path.read_text() == before
    # a talk that shortens the file has the lock of the old one, and gives its name to a new one
    c = chat()
    with path.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        c.type("third\n")
        until(lambda: str(path) in open_files(c.pid))
        new = path.with_name("new")
        new.write_text(before)
        new.rename(path)
    c.expect(b"you> ")
    assert path.read_text() == before + "third\n"


def test_ctrl_c_ends_the_answer(router, chat):
    go = threading.Event()

    def slowly(request, context):
        yield "It was a "
        while context.is_active() and not go.wait(0.01):
            pass

    c = chat()
    router.say = slowly
    c.type("Tell me\n")
    c.expect(b"It was a ")
    c.type(b"\x03")
    c.expect(b"[stopped]")
    c.expect(b"you> ")
    assert router.cancelled.wait(PATIENCE_S)
    router.say = lambda request, context: iter(["fox."])
    c.type("half a line\x03")  # a line that is given up
    c.expect(b"you> ")
    c.type("Go on\n")
    c.expect(b"fox.")
    router.talk()
    assert router.talk() == [("user", "Tell me"), ("assistant", "It was a "), ("user", "Go on")]
    c.type("/quit\n")
    assert c.end() == 0


def test_commands(router, chat, tmp_path):
    c = chat("--system", "Be kind.")
    steps = [("/system\n", b"Be kind."), ("/system Be brief.\n/system\n", b"lBe brief."),
             ("/set temperature 9e9\n", b"must be in -1..100"),
             ("/set tempreture 1\n", b"did you mean --temperature"),
             ("/set seed 7\n/set\n", b"seed=7\r\n"), ("/nosuch\n", b"there is no /nosuch"),
             ("/ledger\n", b"no answer yet"), ("/help\n", b"Ctrl-C ends an answer")]
    for typed, want in steps:
        c.type(typed)
        c.expect(want)
    c.type("/set stats true\n//etc/passwd\n")
    c.expect(b"[7 + 3 tokens, TTFT 2.5 ms, TPOT 5.00 ms, 200.0 tokens/s]")
    m = router.requests.get(timeout=PATIENCE_S)
    assert [x.content for x in m.chat.messages] == ["Be brief.", "/etc/passwd"]
    assert m.sampling.seed == 7
    file = tmp_path / "talk.json"
    c.type(f"/save {file}\n")
    c.expect(b"3 messages are in ")
    assert [x["content"] for x in json.loads(file.read_text())["messages"]] == [
        "Be brief.", "/etc/passwd", "A fox."
    ]
    c.type(f"/save {file}\n/ledger\n")
    c.expect(b"exists")
    c.expect(b"stage ledger of TTFT")
    c.type("/reset\nAgain\n")
    c.expect(b"A fox.")
    assert router.talk() == [("system", "Be brief."), ("user", "Again")]
    c.type("/quit\n")
    assert c.end() == 0


def test_words_are_wrapped(router, chat):
    words = "Once upon a time there was a little fox who lived in a wood of very tall trees".split()
    # in pieces that end inside words, and commands for the terminal that the model made up
    text = " ".join(words) + "\n" + 45 * "x" + " \x1b]0;title\x07 end"
    router.say = lambda request, context: (text[i:i + 3] for i in range(0, len(text), 3))
    c = chat(columns=40)
    c.type("Tell\n")
    c.expect(b"model> ")
    lines = shown(c.expect(b"you> "))
    assert max(len("model> " + lines[0]), *map(len, lines)) < 40
    assert " ".join(lines[:3]).split() == words
    assert lines[3:5] == [39 * "x", 6 * "x" + " \ufffd]0;title\ufffd end"]
    c.type("/quit\n")
    assert c.end() == 0


def test_lines_that_are_piped(router):
    done = subprocess.run([os.path.join(BIN, "tandem"), "chat", "--server", router.at],
                          input=b"/unknown words\n/reset\nsecond\n", capture_output=True,
                          timeout=PATIENCE_S, check=False)
    assert (done.returncode, done.stdout) == (0, b"A fox.\nA fox.\n")
    assert router.talk() == [("user", "/unknown words")] and router.talk() == [("user", "second")]


# ---- status
# -------------------------------------------------------------------------------------------------


def a_status():
    """Long names everywhere, and numbers that are as long as they get."""
    long, v6 = "a-worker-on-a-node-with-a-very-long-name.cluster.example-", "[2001:db8:1234:5678:"
    workers = [
        pb.WorkerStatus(name=f"{long}{i}", role=role, state="draining", tp=16,
                        address=f"{v6}9abc:def0:1234:567{i}]:65535", kv_blocks=9999999,
                        kv_blocks_held=123456, kv_blocks_cached=123456, running=4096, waiting=4096,
                        prefill_tokens_per_s=1234567.8, decode_tokens_per_s=123456.7,
                        kv_dtype="bf16", kv_bytes_per_token=12345678, model="a-model" * 9,
                        kernels="avx512bf16 (measured, GFLOP/s a thread: avx512 96, bf16 185)")
        for i, role in enumerate(("prefill", "decode"))
    ]
    models = [
        pb.ModelStatus(name="an-organisation/a-model-of-a-long-name-" + x, aliases=["a" * 99],
                       bound="transfer", finished=12345678, failed=123456, ttft_p50_ms=12.3,
                       ttft_p99_ms=60000, tpot_p50_ms=1.5, tpot_p99_ms=2.5, judged=1000, good=987)
        for x in ("x", "y")
    ]
    refused = pb.RefusedWorker(name="w9", pid=17, times=3, age_ms=2500,
                               reason='the model "other" is not served here: ' + "x " * 40)
    return pb.StatusResponse(model="m" * 90, mode="colocated", policy="goodput", bound="prefill",
                             uptime_ms=10**10, attainment=0.987, want_prefill=12, want_decode=13,
                             arrival_rate=12.34, workers=workers, models=models, refused_workers=[
                                 refused
                             ])


def test_status_fits_the_terminal(router):
    router.status = a_status()
    for columns, name in ((80, "..."), (400, router.status.workers[0].name)):
        t = Terminal("status", "--server", router.at, columns=columns)
        assert t.end() == 0
        lines = shown(t.said)
        assert max(map(len, lines)) <= columns, lines
        text = "\n".join(lines)
        assert name in text and "98.7 %" in text and "60000.0 ms" in text
        assert "w9 (pid 17) is refused, 3 times, last 2 s ago:" in text
        assert "(not proved to be a worker of this cluster)" in text
    router.status.models.pop()
    wide = subprocess.run([os.path.join(BIN, "tandem"), "status", "--server", router.at],
                          capture_output=True, check=True, timeout=PATIENCE_S).stdout.decode()
    assert router.status.workers[0].name in wide and "%" in wide.splitlines()[1]


def test_status_obeys_no_name(router):
    """Whoever reaches the workers' port may say a hello, and its name is told."""
    router.status = a_status()
    router.status.workers[0].name = "w\x1b]0;x\x07\u00e9\u009b"
    router.status.refused_workers[0].reason = "\x1b[2J\n\x7f"
    t = Terminal("status", "--server", router.at, columns=400)
    assert t.end() == 0
    lines = shown(t.said)
    assert "w?]0;x?\u00e9??" in "\n".join(lines) and any("?[2J??" in x for x in lines), lines
    assert all(x.isprintable() for x in lines)


def test_status_is_watched_in_place(router):
    t = Terminal("status", "--server", router.at, "--watch", "--interval-ms", "100")
    t.expect(b"no workers have joined\x1b[K\r\n\x1b[J")
    n_lines = t.said.count(b"\n")
    assert t.expect(b"model m").endswith(b"\x1b[%dA" % n_lines)
    router.status.workers.add(name="w0", role="decode", state="ready")
    t.expect(b"w0 ")
    t.expect(b"\x1b[J")
    t.expect(b"\x1b[%dA" % (n_lines + 5))
    t.type(b"\x03")
    assert t.end() == -signal.SIGINT


# ---- no line is longer than the terminal is wide
# -------------------------------------------------------------------------------------------------

KINDS = ["serve", "replay", "sweep", "compare", "plot", "calibrate", "xfer"]
COMMANDS = ("up generate chat status health doctor model tokenize logits compare quantize "
            "engine-bench sim plan").split()
USES = [["help"], ["stauts"], ["rumpelstiltskin"], ["bench", "help"], ["bench", "srve"],
        ["help", "up"], ["tokenize"], ["compare"],
        ["up", "--model", "/no/such/folder/of/a/model/that/is/far/away"],
        ["up", "--model", POCKET, "--tls-ca", "ca.pem"], ["health", "--need-workers=1,x"],
        ["generate", "--server", "127.0.0.1:1,127.0.0.1:2", "Once"],
        ["status", "--server", "127.0.0.1:1"], ["model", POCKET]]
USES += [[c, flag] for c in COMMANDS for flag in ("--help", "--nosuch")]
USES += [["bench", k, flag] for k in KINDS for flag in ("--help", "--nosuch")]


def too_long(said, columns):
    """Lines over the width. A word that is longer than a line, such as a path, may stand whole
    where a line begins."""
    lines = re.split("\r\n|\r|\n", re.sub(r"\x1b\[[^a-zA-Z]*[a-zA-Z]", "", said.decode()))
    lines = [x.rstrip(" \\") for x in lines]
    return [x for x in lines if len(x) > columns and x.rfind(" ") > 8]


@pytest.mark.parametrize("columns", [80, 40])
def test_no_line_is_too_long(columns):
    for args in USES[::4] if SHORT else USES:
        t = Terminal(*args, columns=columns)
        t.end()
        assert len(t.said.split()) > 4 and not too_long(t.said, columns), (args, t.said.decode())


@pytest.mark.parametrize("columns", [80, 40])
def test_no_line_of_a_live_cluster_is_too_long(columns, tmp_path):
    """`up` on a terminal, and what asks it."""
    at = f"127.0.0.1:{free_port()}"
    up = Terminal("up", "--model", POCKET, "--listen", at, "--http-listen",
                  f"127.0.0.1:{free_port()}", "--kv-memory", "16MiB", columns=columns)
    up.expect(b"tandem is up at ")
    up.expect(b"curl ")
    # A busy machine may send the requests late: this test looks at lines, and not at figures.
    load = ["--num-prompts", "4", "--isl", "20", "--osl", "4", "--ignore-eos",
            "--max-sched-lag-ms", "60000"]
    slo = ["--goodput", "ttft:60000", "tpot:60000"]
    sweep = str(tmp_path / "sweep")
    uses = [["generate", "--server", at, "--stats", "--max-tokens", "12", "Once upon a time"],
            [
                "bench", "serve", "--server", at, "--request-rate", "20", *load, *slo,
                "--save-result", "--result-dir",
                str(tmp_path)
            ],
            [
                "bench", "sweep", "--server", at, "--rates", "10,20", *load, *slo, "--result-dir",
                sweep
            ], ["bench", "compare", f"{sweep}/sweep.json", f"{sweep}/sweep.json"],
            ["bench", "plot", f"{sweep}/sweep.json", "--out",
             str(tmp_path / "plots")]]
    if columns >= 80:
        uses.append(["status", "--server", at])
    for args in uses:
        t = Terminal(*args, columns=columns)
        assert t.end() == 0, args
        assert not too_long(t.said, columns), (args, too_long(t.said, columns))
    up.type(b"\x03")
    assert up.end() == 0
    assert not too_long(up.said, columns), too_long(up.said, columns)


# ---- names, addresses, variables
# -------------------------------------------------------------------------------------------------


def tandem(*args, stdin=b"", env=None):
    done = subprocess.run([os.path.join(BIN, "tandem"), *args], input=stdin, capture_output=True,
                          timeout=PATIENCE_S, check=False, env={**os.environ, **(env or {})})
    return done.returncode, done.stdout.decode(), done.stderr.decode()


def test_names_of_commands():
    rc, out, err = tandem("stauts")
    assert (rc, out, err) == (2, "", 'tandem: there is no COMMAND "stauts", did you mean status? '
                              "(`tandem help` lists all)\n")
    rc, out, err = tandem("help", "chta")
    assert rc == 2 and "did you mean chat?" in err
    rc, out, err = tandem("rumpelstiltskin")
    assert rc == 2 and 'no COMMAND "rumpelstiltskin"\n\n' in err and "usage: tandem COMMAND" in err
    for command in ("status", "bench"):
        assert tandem("help", command) == tandem(command, "--help")
    assert tandem("version") == tandem("--version")
    rc, out, err = tandem("status", "--jsno")
    assert rc == 2 and "did you mean --json?" in err


def test_tokenize_takes_a_text():
    text, model = "Once upon a time", ("--model", POCKET)
    ids = tandem("tokenize", *model, stdin=text.encode())
    assert ids[0] == 0 and tandem("tokenize", *model, text) == ids
    assert tandem("tokenize", *model, "--decode", ids[1].strip()) == (0, text + "\n", "")


def test_one_variable_has_one_meaning(router):
    """TANDEM_DECODE is a number of workers, TANDEM_MODEL a place of files. What is set for other
    commands and can only mean them still does, and is told."""
    text, model = "Once upon a time", ("--model", POCKET)
    ids = tandem("tokenize", *model, text)
    for env, says in (({"TANDEM_DECODE": "true"}, "use TANDEM_TOKENIZE_DECODE for this one"), ({
            "TANDEM_TOKENIZE_DECODE": "1"
    }, "")):
        rc, out, err = tandem("tokenize", *model, ids[1].strip(), env=env)
        assert (rc, out) == (0, text + "\n") and says in err and bool(says) == bool(err), env
    rc, out, err = tandem("tokenize", *model, text, env={"TANDEM_DECODE": "2"})
    assert (rc, out) == ids[:2] and "TANDEM_TOKENIZE_DECODE" in err and "left out" in err
    for env, name, says in (({"TANDEM_MODEL": POCKET}, "", ""), ({
            "TANDEM_MODEL": "org/name"
    }, "org/name", "use TANDEM_MODEL_NAME"), ({"TANDEM_MODEL": POCKET,
                                               "TANDEM_MODEL_NAME": "a"}, "a", "")):
        rc, _, err = tandem("generate", "--server", router.at, "Once", env=env)
        assert rc == 0 and says in err and bool(says) == bool(err), err
        assert router.requests.get(timeout=PATIENCE_S).model == name


def test_addresses_that_look_like_urls(router):
    for at in (f"http://{router.at}", f"HTTP://{router.at}/", f"grpc://{router.at}"):
        assert tandem("status", "--server", at)[0] == 0, at
    rc, _, err = tandem("status", "--server", f"https://{router.at}")
    assert rc == 2 and "asks for TLS: give --tls-ca" in err
    rc, _, err = tandem("status", "--server", f"http://{router.at}/v1")
    assert rc == 2 and "has a path" in err


@pytest.fixture(name="certificate", scope="module")
def a_certificate(tmp_path_factory):
    d = tmp_path_factory.mktemp("tls")
    subprocess.run([
        "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes",
        "-keyout", "key.pem", "-out", "cert.pem", "-days", "30", "-subj", "/CN=localhost",
        "-addext", "subjectAltName=IP:127.0.0.1"
    ], check=True, capture_output=True, cwd=d)
    return d


def test_ports_of_another_kind_are_told(router, certificate):
    key, cert = ((certificate / f).read_bytes() for f in ("key.pem", "cert.pem"))
    servers = [grpc.server(concurrent.futures.ThreadPoolExecutor(1)) for _ in range(2)]
    tls, mutual = (f"127.0.0.1:{s.add_secure_port('127.0.0.1:0', credentials)}"
                   for s, credentials in zip(servers, (grpc.ssl_server_credentials([(
                       key, cert)]), grpc.ssl_server_credentials([(key, cert)], cert, True))))
    for s in servers:
        s.start()
    web = http.server.HTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler)
    thread = threading.Thread(target=web.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        own = f"127.0.0.1:{web.server_port}"
        ca = ("--tls-ca", str(certificate / "cert.pem"))
        for at, args, says in ((tls, (), "speaks TLS: give --tls-ca"),
                               (router.at, ca, "speaks no TLS: leave out --tls-ca"),
                               (mutual, ca,
                                "speaks TLS and may ask for a certificate: give --tls-cert"),
                               (own, (), "speaks HTTP")):
            rc, _, err = tandem("status", "--server", at, *args)
            assert rc == 1 and f"  {at}: that port {says}" in err, err
            assert "is a cluster running" not in err
        rc, _, err = tandem("health", "--timeout-ms", "500", tls)
        assert rc == 1 and "give --tls-ca" in err and len(err.splitlines()) == 1
    finally:
        web.shutdown()
        thread.join()
        web.server_close()
        for s in servers:
            s.stop(None)
