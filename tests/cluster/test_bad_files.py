"""Daemons started on broken model directories and impossible options: each exits with a failure
within seconds of processor time and one line on stderr that names file, field, value and
limit; never by a signal, never with a sanitizer report."""
import json
import os
import resource
import shutil
import socket
import struct
import subprocess
import tempfile

import proofs
import pytest

from harness import BIN, POCKET, SANITIZER, SHORT, SLOW, TSAN_ENV

FILES = [
    "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
    "tokenizer_config.json", "special_tokens_map.json"
]


def cpu_s():
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def start(program, args, env=None, seconds=5):
    """Runs a program that must refuse to start, for at most so many seconds of processor time;
    returns (exit status, the error line)."""
    before = cpu_s()
    full = {**os.environ, **TSAN_ENV, **(env or {})}
    p = subprocess.run([os.path.join(BIN, program), *map(str, args)], stdin=subprocess.DEVNULL,
                       capture_output=True, timeout=60 * SLOW, env=full,
                       check=False)  # the deadline of one that hangs
    text = p.stderr.decode("utf-8", "replace")
    assert not SANITIZER.search(text), text[-5000:]
    assert p.returncode in (1, 2), (p.returncode, text[-3000:])
    assert cpu_s() - before < seconds * SLOW
    errors = [
        line for line in text.splitlines()
        if line.startswith(f"{program}: error: ") or "lvl=error" in line
    ]
    assert len(errors) == 1 and text.splitlines()[-1] == errors[0], text[-3000:]
    assert len(errors[0]) < 700
    return p.returncode, errors[0]


ROUTER = ["--listen", "127.0.0.1:0"]
WORKER = [
    "--listen", "127.0.0.1:0", "--router", "127.0.0.1:1", "--kv-memory", "1MiB", "--threads", 1,
    "--dtype", "f32"
]


@pytest.fixture
def model(tmp_path):
    d = tmp_path / "model"
    d.mkdir()
    for name in FILES:
        if os.path.exists(os.path.join(POCKET, name)):
            shutil.copy(os.path.join(POCKET, name), d / name)
    return d


# ---- ways to break a file ---------------------------------------------------------------------


def cut(name, keep):
    def do(d):
        data = (d / name).read_bytes()
        (d / name).write_bytes(data[:keep if isinstance(keep, int) else int(len(data) * keep)])

    return do


def remove(name):
    return lambda d: (d / name).unlink()


def write(name, data):
    return lambda d: (d / name).write_bytes(data)


def as_directory(name):
    def do(d):
        (d / name).unlink()
        (d / name).mkdir()

    return do


def fifo(name):
    """A pipe that nobody writes to: reading it must not wait for ever."""
    def do(d):
        (d / name).unlink()
        os.mkfifo(d / name)

    return do


def edit(name, change):
    def do(d):
        j = json.loads((d / name).read_text())
        j = change(j) or j
        (d / name).write_text(json.dumps(j))

    return do


def config(**fields):
    def change(j):
        for k, v in fields.items():
            if v is ...:
                j.pop(k, None)
            else:
                j[k] = v

    return edit("config.json", change)


def header(change):
    """Edits the header of model.safetensors; the data stay."""
    def do(d):
        data = (d / "model.safetensors").read_bytes()
        n = struct.unpack("<Q", data[:8])[0]
        j = json.loads(data[8:8 + n])
        h = change(j)
        h = json.dumps(j).encode() if h is None else h
        (d / "model.safetensors").write_bytes(struct.pack("<Q", len(h)) + h + data[8 + n:])

    return do


NORM = "model.norm.weight"
K0 = "model.layers.0.self_attn.k_proj.weight"


def tensor(name, **fields):
    return header(lambda j: j[name].update(fields))


def renamed(old, new):
    def change(j):
        j[new] = j.pop(old)

    return header(change)


def past_end(j):
    begin, end = j[NORM]["data_offsets"]
    j[NORM]["data_offsets"] = [begin + 10**9, end + 10**9]


def overlap(j):
    names = sorted((n for n in j if n != "__metadata__"), key=lambda n: j[n]["data_offsets"][0])
    same = [n for n in names if j[n]["shape"] == j[names[-1]]["shape"]]
    a, b = (same + names)[:2]
    j[b]["data_offsets"] = list(j[a]["data_offsets"])
    j[b]["shape"] = list(j[a]["shape"])


def tok(change):
    return edit("tokenizer.json", change)


def set_in(*path_and_value):
    *path, last, value = path_and_value

    def change(j):
        at = j
        for k in path:
            at = at[k]
        at[last] = value

    return change


ST = "model.safetensors"
WEIGHTS = [  # what a worker finds
    ("missing", remove(ST), [ST]), ("empty", cut(ST, 0), [ST, "0 bytes"]),
    ("seven_bytes", cut(ST, 7), [ST, "7 bytes"]),
    ("half_header", cut(ST, 100), [ST, "header length"]), ("half_data", cut(ST, 0.5), [ST,
                                                                                       "bytes"]),
    ("one_byte_less", cut(ST, -1), [ST, "bytes"]),
    ("header_length_huge", lambda d:
     (d / ST).write_bytes(b"\xff" * 8 + b"{}"), [ST, "header length", "18446744073709551615"]),
    ("header_length_0", lambda d: (d / ST).write_bytes(bytes(8) + b"{}"), [ST, "header"]),
    ("header_no_json", header(lambda j: b"hello"), [ST, "header"]),
    ("header_list", header(lambda j: b"[1]"), [ST, "header", "object"]),
    ("header_empty", header(lambda j: b"{}"), [ST, "no tensor"]),
    ("header_deep", header(lambda j: b'{"a":' + b"[" * 100000 + b"]" * 100000 + b"}"), [
        ST, "header"
    ]),
    ("header_duplicate",
     header(lambda j:
            b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"F32","shape":[1],'
            b'"data_offsets":[0,4]}}'), [ST, "header"]), ("past_end", header(past_end), [ST, NORM]),
    ("overlap", header(overlap), [ST]),
    ("begin_after_end", tensor(NORM, data_offsets=[10, 5]), [ST, NORM, "data_offsets"]),
    ("negative_offset", tensor(NORM, data_offsets=[-4, 5]), [ST, NORM, "data_offsets"]),
    ("float_offset", tensor(NORM, data_offsets=[0.5, 5]), [ST, NORM, "data_offsets"]),
    ("one_offset", tensor(NORM, data_offsets=[0]), [ST, NORM, "data_offsets"]),
    ("shape_disagrees", tensor(NORM, shape=[193]), [ST, NORM]),
    ("shape_negative", tensor(NORM, shape=[-1]), [ST, NORM, "shape"]),
    ("shape_absurd", tensor(NORM, shape=[2**40, 2**40]), [ST, NORM, "shape"]),
    ("shape_2_63", tensor(NORM, shape=[2**63 - 1]), [ST, NORM, "shape"]),
    ("many_dimensions", tensor(NORM, shape=[1] * 100), [ST, NORM, "100"]),
    ("dtype_unknown", tensor(NORM, dtype="F99"), [NORM, "F99", "BF16"]),
    ("dtype_integer", tensor(NORM, dtype="I16"), [NORM, "I16"]),
    ("extra_key", tensor(NORM, colour="red"), [ST, NORM]),
    ("name_long", renamed(NORM, "x" * 10000), [ST, "10000"]),
    ("tensor_missing", renamed(K0,
                               "model.layers.0.self_attn.z_proj.weight"), ["layers.0.self_attn"]),
    ("tensor_transposed", header(lambda j: j[K0].update(shape=j[K0]["shape"][::-1])), [K0, "64"]),
    ("metadata_no_object", header(lambda j: j.update(__metadata__=3)), [ST, "__metadata__"]),
    ("many_tensors",
     header(lambda j: json.dumps(
         {f"t{i}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
          for i in range(200001)}).encode()), [ST, "200001", "200000"]),
    ("directory", as_directory(ST), [ST]), ("fifo", fifo(ST), [ST]),
    ("index_of_nothing", lambda d:
     ((d / ST).unlink(), (d / f"{ST}.index.json").write_text("{}")), ["index.json", "weight_map"]),
    ("index_escapes", lambda d:
     ((d / ST).unlink(),
      (d / f"{ST}.index.json").write_text('{"weight_map":{"a":"../../etc/passwd"}}')), [
          "index.json", "passwd"
      ]),
    ("index_of_missing_shard", lambda d:
     ((d / ST).unlink(),
      (d / f"{ST}.index.json").write_text('{"weight_map":{"a":"model-1.safetensors"}}')), [
          "model-1.safetensors"
      ]),
    ("index_names_no_tensor", lambda d:
     (os.rename(d / ST, d / "s1.safetensors"),
      (d / f"{ST}.index.json").write_text('{"weight_map":{"nope":"s1.safetensors"}}')), [
          "index.json"
      ]),
]
CONFIG = [  # both daemons read it
    ("missing", remove("config.json"), ["config.json"]),
    ("empty", cut("config.json", 0), ["config.json"]),
    ("half", cut("config.json", 0.5), ["config.json", "line"]),
    ("not_utf8", write("config.json", b'{"model_type": "\xff"}'), ["config.json"]),
    ("list", write("config.json", b"[]"), ["config.json", "object"]),
    ("large", write("config.json", b" " * 50_000_000), ["config.json", "50000000"]),
    ("deep", write("config.json", b"[" * 1_000_000), ["config.json"]),
    ("directory", as_directory("config.json"), ["config.json"]),
    ("fifo", fifo("config.json"), ["config.json"]),
    ("type_missing", config(model_type=...), ["config.json", "model_type"]),
    ("type_unknown", config(model_type="mamba"), ["config.json", "model_type", "mamba"]),
    ("field_unknown", config(secret_scale=3), ["config.json", "secret_scale", "3"]),
    ("activation", config(hidden_act="relu"), ["config.json", "hidden_act", "relu", "silu"]),
    ("hidden_0", config(hidden_size=0), ["config.json", "hidden_size", "0"]),
    ("hidden_text", config(hidden_size="many"), ["config.json", "hidden_size"]),
    ("hidden_float", config(hidden_size=192.5), ["config.json", "hidden_size"]),
    ("hidden_absurd", config(hidden_size=2**40), ["config.json", "hidden_size",
                                                  str(2**40)]),
    ("layers_negative", config(num_hidden_layers=-1), ["config.json", "num_hidden_layers", "-1"]),
    ("layers_absurd", config(num_hidden_layers=10**9), [
        "config.json", "num_hidden_layers", str(10**9)
    ]), ("heads_0", config(num_attention_heads=0), ["config.json", "num_attention_heads", "0"]),
    ("kv_heads_do_not_divide", config(num_key_value_heads=4), [
        "config.json", "num_key_value_heads", "4", "6"
    ]), ("head_dim_odd", config(head_dim=33), ["config.json", "head_dim", "33"]),
    ("vocab_0", config(vocab_size=0), ["config.json", "vocab_size", "0"]),
    ("positions_0", config(max_position_embeddings=0), [
        "config.json", "max_position_embeddings", "0"
    ]), ("eps_negative", config(rms_norm_eps=-1e-5), ["config.json", "rms_norm_eps"]),
    ("theta_0", config(rope_theta=0), ["config.json", "rope_theta", "0"]),
    ("rope_unknown", config(rope_scaling={"rope_type": "spiral", "factor": 2}), [
        "config.json", "rope_type", "spiral"
    ]),
    ("rope_factor_0", config(rope_scaling={"rope_type": "linear", "factor": 0}), [
        "config.json", "factor", "0"
    ]),
    ("rope_contradiction",
     config(rope_scaling={"rope_type": "linear", "type": "llama3", "factor": 2}), [
         "config.json", "rope_type", "linear", "llama3"
     ]), ("dtype_unknown", config(torch_dtype="float8"), ["config.json", "float8"]),
    ("eos_range", config(eos_token_id=99999), ["eos_token_id", "99999", "2047"]),
    ("quantized", config(quantization_config={"bits": 4}), ["config.json", "quantization_config"]),
    ("bias_text", config(attention_bias="yes"), ["config.json", "attention_bias"]),
    ("generation_no_json", write("generation_config.json", b"{"), ["generation_config.json"]),
    ("generation_temperature", edit("generation_config.json", lambda j: j.update(temperature=-3)), [
        "generation_config.json", "temperature", "-3"
    ]),
    ("generation_top_p", edit("generation_config.json", lambda j: j.update(top_p=7)), [
        "generation_config.json", "top_p", "7"
    ]),
]
DISAGREE = [  # config and weights: the worker sees it
    ("hidden", config(hidden_size=384, head_dim=64), ["embed_tokens", "384", "192"]),
    ("intermediate", config(intermediate_size=500), ["layers.0.mlp", "500", "512"]),
    ("vocab", config(vocab_size=4096), ["embed_tokens", "4096", "2048"]),
    ("kv_heads", config(num_key_value_heads=3), ["self_attn.k_proj", "96", "64"]),
    ("layer_more", config(num_hidden_layers=6), ["layers.5"]),
    ("layer_less", config(num_hidden_layers=4), ["layers.4"]),
    ("qk_norm_missing", config(model_type="qwen3", architectures=["Qwen3ForCausalLM"]), ["q_norm"]),
    ("bias_missing", config(attention_bias=True), ["bias"]),
]
TOKENIZER = [  # the router reads it
    ("missing", remove("tokenizer.json"), ["tokenizer.json"]),
    ("empty", cut("tokenizer.json", 0), ["tokenizer.json"]),
    ("half", cut("tokenizer.json", 0.5), ["tokenizer.json"]),
    ("one_byte_less", cut("tokenizer.json", -3), ["tokenizer.json"]),
    ("not_utf8", write("tokenizer.json", b'{"version":"\xff"}'), ["tokenizer.json"]),
    ("list", write("tokenizer.json", b"[]"), ["tokenizer.json", "object"]),
    ("directory", as_directory("tokenizer.json"), ["tokenizer.json"]),
    ("fifo", fifo("tokenizer.json"), ["tokenizer.json"]),
    ("no_model", tok(lambda j: j.pop("model") and None), ["tokenizer.json", "model"]),
    ("model_type", tok(set_in("model", "type", "Unigram")), ["tokenizer.json", "model", "Unigram"]),
    ("vocab_list", tok(set_in("model", "vocab", [])), ["tokenizer.json", "vocab"]),
    ("vocab_empty", tok(set_in("model", "vocab", {})), ["tokenizer.json", "vocab"]),
    ("id_negative", tok(set_in("model", "vocab", "zz", -5)), ["tokenizer.json", "zz", "-5"]),
    ("id_huge", tok(set_in("model", "vocab", "zz", 2**40)), ["tokenizer.json", "zz",
                                                             str(2**40)]),
    ("id_text", tok(set_in("model", "vocab", "zz", "five")), ["tokenizer.json", "zz"]),
    ("id_twice", tok(set_in("model", "vocab", "zz", 100)), ["tokenizer.json", "100"]),
    ("merges_unknown", tok(lambda j: j["model"]["merges"].insert(3, "zzz yyy")), [
        "tokenizer.json", "merges[3]", "zzz"
    ]),
    ("merges_number", tok(lambda j: j["model"]["merges"].insert(3, 7)), [
        "tokenizer.json", "merges[3]"
    ]),
    ("merges_one_word", tok(lambda j: j["model"]["merges"].insert(3, "a")), [
        "tokenizer.json", "merges[3]"
    ]),
    ("pre_tokenizer_unknown", tok(lambda j: j.update(pre_tokenizer={"type": "Magic"})), [
        "tokenizer.json", "pre_tokenizer", "Magic"
    ]),
    ("regex_broken",
     tok(lambda j: j.update(pre_tokenizer={
         "type": "Split", "pattern": {"Regex": "(["}, "behavior": "Isolated", "invert": False
     })), ["tokenizer.json", "pre_tokenizer"]),
    ("normalizer_unknown", tok(lambda j: j.update(normalizer={"type": "Magic"})), [
        "tokenizer.json", "normalizer", "Magic"
    ]),
    ("decoder_unknown", tok(lambda j: j.update(decoder={"type": "Magic"})), [
        "tokenizer.json", "decoder", "Magic"
    ]),
    ("added_no_list", tok(lambda j: j.update(added_tokens=5)), ["tokenizer.json", "added_tokens"]),
    ("added_empty", tok(lambda j: j["added_tokens"][0].update(content="")), [
        "tokenizer.json", "added_tokens[0]"
    ]), ("template_file_no_json", write("tokenizer_config.json", b"{"), ["tokenizer_config.json"]),
    ("template_number", edit("tokenizer_config.json", lambda j: j.update(chat_template=5)), [
        "tokenizer_config.json", "chat_template"
    ]),
]


def check(program, model, parts, seconds=5):
    args = ROUTER if program == "tandem-router" else WORKER
    _, line = start(program, ["--model", model, *args], seconds=seconds)
    for part in parts:
        assert part in line, f"{part!r} is not in {line!r}"


def cases(table):
    table = table[::
                  # sanitizer builds: the fuzzers and unit tests have the rest
                  3] if SHORT else table
    return pytest.mark.parametrize("case", table, ids=[c[0] for c in table])


@cases(WEIGHTS)
def test_weights(model, case):
    case[1](model)
    check("tandem-decode", model, case[2])


@cases(CONFIG)
def test_config(model, case):
    case[1](model)
    check("tandem-router", model, case[2])
    check("tandem-prefill", model, case[2])


@cases(DISAGREE)
def test_config_against_weights(model, case):
    case[1](model)
    check("tandem-decode", model, case[2])


@cases(TOKENIZER)
def test_tokenizer(model, case):
    case[1](model)
    check("tandem-router", model, case[2])


@pytest.mark.parametrize("program", ["tandem-router", "tandem-prefill", "tandem-decode"])
def test_no_such_place(program, tmp_path):
    check(program, tmp_path / "nowhere", ["nowhere"])
    check(program, tmp_path, ["config.json"])
    (tmp_path / "file").write_text("x")
    check(program, tmp_path / "file", ["file"])
    check(program, "/" + "x" * 5000, ["path"])
    locked = tmp_path / "locked"
    locked.mkdir()
    for name in FILES:
        if os.path.exists(os.path.join(POCKET, name)):
            shutil.copy(os.path.join(POCKET, name), locked / name)
    (locked / "config.json").chmod(0)
    if os.geteuid() != 0:  # root reads everything
        check(program, locked, ["config.json", "ermission"])


def gguf_alone(d):
    for name in FILES:
        if (d / name).exists():
            (d / name).unlink()
    (d / "model-Q8_0.gguf").write_bytes(b"GGUF" + bytes(60))
    return d


def gguf_for_weights(d):
    (d / "model.safetensors").unlink()
    (d / "model-Q8_0.gguf").write_bytes(b"GGUF" + bytes(60))
    return d


def gguf_file(d):
    (d / "model-Q8_0.gguf").write_bytes(b"GGUF" + bytes(60))
    return d / "model-Q8_0.gguf"


def gguf_by_magic(d):
    (d / "blob").write_bytes(b"GGUF" + bytes(60))
    return d / "blob"


def adapter_beside(d):
    (d / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 8}')
    return d


def adapter_instead(d):
    return adapter_beside(gguf_alone(d))


NOT_OURS = [(gguf_alone, ["model-Q8_0.gguf and no ", "a GGUF model is named by its file"]),
            (gguf_for_weights, ["model-Q8_0.gguf and no .safetensors", "is named by its file"]),
            (gguf_file, ["model-Q8_0.gguf: GGUF version 0, must be 2 or 3"]),
            (gguf_by_magic, ["blob: GGUF version 0, must be 2 or 3"]),
            (adapter_beside, [
                "adapter_config.json", "LoRA adapters are not supported by this version"
            ]), (adapter_instead, ["adapter_config.json: LoRA"])]


@pytest.mark.parametrize("case", NOT_OURS, ids=[c[0].__name__ for c in NOT_OURS])
@pytest.mark.parametrize("program",
                         ["tandem-router", "tandem-prefill", "tandem-decode", "tokenize", "logits"])
def test_a_bad_gguf_or_an_adapter_is_told_by_name(program, case, model, tmp_path):
    what, parts = case
    path = what(model)
    if program.startswith("tandem-"):
        check(program, path, parts)
        return
    more = ["--tokens", "1", "--out", tmp_path / "x"] if program == "logits" else []
    p = subprocess.run([os.path.join(BIN, "tandem"), program, "--model", path, *more], input=b"",
                       capture_output=True, timeout=60 * SLOW, check=False)
    # the tokenizer is there, and it needs no weights
    if program == "tokenize" and what is gguf_for_weights:
        assert p.returncode == 0, p.stderr
        return
    assert p.returncode == 1, (p.returncode, p.stderr)
    for part in parts:
        assert part in p.stderr.decode(), (part, p.stderr)


SECRET_DIR = tempfile.TemporaryDirectory(
    prefix="tandem-test-")  # for ports beyond loopback, which are refused without an identity
SECRET = [
    "--cluster-secret-file",
    proofs.write_secret(os.path.join(SECRET_DIR.name, "secret"),
                        "bad-files-0123456789abcdefghijklmn")
]
BAD_OPTIONS = [
    ("tandem-decode", ["--kv-memory", "lots"], 2, ["kv_memory", "lots"]),
    ("tandem-decode", ["--kv-memory", "1"], 2, ["kv_memory", "block"]),
    ("tandem-decode", ["--kv-memory", "900TiB"], 1, ["kv_memory", "available"]),
    ("tandem-decode", ["--kv-memory", "0%"], 2, ["kv_memory", "0%"]),
    ("tandem-decode", ["--kv-memory", "nan%"], 2, ["kv_memory", "nan%"]),
    ("tandem-decode", ["--kv-memory", "101%"], 2, ["kv_memory", "101%"]),
    ("tandem-decode", ["--kv-memory", "-5%"], 2, ["kv_memory", "-5%"]),
    ("tandem-decode", ["--block-size", "17"], 2, ["block_size", "17"]),
    ("tandem-decode", ["--block-size", "4"], 2, ["block-size", "4", "8..256"]),
    ("tandem-decode", ["--dtype", "int3"], 2, ["dtype", "int3", "bf16"]),
    ("tandem-decode", ["--ops", "magic"], None, ["ops", "magic"]),
    ("tandem-decode", ["--cpus", "0-"], 2, ["cpus"]),
    ("tandem-decode", ["--cpus", "0,1023"], 2, ["cpus", "1023", "0.."]),
    ("tandem-decode", ["--cpus", "0", "--threads", "4"], 2, ["cpus", "threads", "4"]),
    ("tandem-decode", ["--threads", "-1"], 2, ["threads", "-1"]),
    ("tandem-decode", ["--max-seqs", "0"], 2, ["max-seqs", "0"]),
    ("tandem-decode", [*SECRET, "--listen", "nowhere"], None, ["listen", "nowhere"]),
    ("tandem-decode", [*SECRET, "--listen", "203.0.113.7:0"], 1, ["listen", "203.0.113.7"]),
    ("tandem-decode", [*SECRET, "--listen", "0.0.0.0:0"], 2, ["advertise", "0.0.0.0"]),
    ("tandem-decode", [*SECRET, "--transfer-host", "203.0.113.7"], 1, ["203.0.113.7"]),
    ("tandem-decode", ["--metrics-listen", "7"], 2, ["metrics_listen", "7"]),
    ("tandem-decode", ["--metrics-listen",
                       "127.0.0.1:99999999"], None, ["metrics_listen", "99999999", "65535"]),
    ("tandem-decode", ["--listen", "127.0.0.1:99999999"], None, ["listen", "99999999"]),
    ("tandem-decode", ["--tls-cert", "x.pem"], 2, ["tls_cert", "tls_key"]),
    ("tandem-decode", ["--tls-cert", "no-cert.pem", "--tls-key",
                       "no-key.pem"], None, ["no-cert.pem"]),
    ("tandem-decode", ["--drain-timeout-ms", "soon"], 2, ["drain-timeout-ms", "soon"]),
    ("tandem-router", ["--decision-log", "/nowhere/log"], 1, ["decision_log", "/nowhere/log"]),
    ("tandem-router",
     ["--http-listen", "127.0.0.1:0", "--http-cors-origins", "https://a.example/"], 2,
     ["http_cors_origins", "https://a.example/"]),
    ("tandem-router", ["--policy", "magic"], 2, ["policy", "magic", "round_robin"]),
    ("tandem-router", ["--policy", "conductor"], 2, [
        "policy", "conductor", "goodput|round_robin|least_token|cache_aware", "tandem sim"
    ]), ("tandem-router", ["--mode", "pd-ish"], 2, ["mode", "pd-ish"]),
    ("tandem-router", ["--max-requests", "0"], 2, ["max-requests", "0"]),
    ("tandem-router", ["--max-message-bytes", "5"], 2, ["max-message-bytes", "5"]),
    ("tandem-router", [*SECRET, "--listen", "300.1.1.1:70"], 1, ["listen", "300.1.1.1"]),
    ("tandem-router", ["--tls-key", "x.pem"], 2, ["tls_cert", "tls_key"]),
    ("tandem-router", ["extra"], 2, ["extra"]),
]


@pytest.mark.parametrize("case", BAD_OPTIONS, ids=[
    " ".join(a for a in c[1] if a not in SECRET)[:40] for c in BAD_OPTIONS
])
def test_option(case):
    program, args, status, parts = case
    base = ROUTER if program == "tandem-router" else WORKER
    got, line = start(program, ["--model", POCKET, *base, *args])
    assert status in (None, got), (got, line)
    for part in parts:
        assert part in line or part.replace("-", "_") in line, f"{part!r} is not in {line!r}"


def test_port_in_use():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        at = f"127.0.0.1:{s.getsockname()[1]}"
        for program, args in (("tandem-router", [*ROUTER, "--listen", at]), ("tandem-prefill", [
                *WORKER, "--listen", at
        ]), ("tandem-router", [*ROUTER, "--metrics-listen", at])):
            _, line = start(program, ["--model", POCKET, *args])
            assert at in line


def test_environment():
    """A bad value is named by where it came from."""
    _, line = start("tandem-router", ["--model", POCKET, *ROUTER],
                    env={"TANDEM_MAX_REQUESTS": "many"})
    assert "TANDEM_MAX_REQUESTS" in line and "many" in line
    _, line = start("tandem-decode", ["--model", POCKET, *WORKER], env={"TANDEM_FAULT": "nonsense"})
    assert "TANDEM_FAULT" in line and "nonsense" in line
