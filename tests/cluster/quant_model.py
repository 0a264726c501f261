"""Small checkpoints in the quantised formats of Hugging Face, and what they should compute.

A scheme here is a function that takes a matrix of floats [rows, columns] and returns the tensors
that a checkpoint holds for it, and a function that multiplies by it, in double precision. Formulas
are those of the schemes' papers and of the libraries that write such files; none of tandem's code
is in here."""
import copy
import json
import os
import re
import shutil
import struct

import numpy as np

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
POCKET = os.environ.get("TANDEM_TEST_MODEL", os.path.join(ROOT, "models", "pocket"))
HEADS, KV_HEADS, VOCAB, LAYERS = 4, 2, 2048, 2
EPS, THETA = 1e-5, 10000.0
TYPES = {np.dtype("f4"): "F32", np.dtype("f2"): "F16", np.dtype("i4"): "I32", np.dtype("i1"): "I8",
         np.dtype("u1"): "U8", np.dtype("i8"): "I64"}


class Typed:
    """An array whose bytes are of a type that numpy does not have."""

    def __init__(self, array, dtype):
        self.array, self.dtype = array, dtype


def write_safetensors(path, tensors):
    header, body, at = {}, [], 0
    for name, t in tensors.items():
        array, dtype = (t.array, t.dtype) if isinstance(t, Typed) else (t, TYPES[t.dtype])
        data = np.ascontiguousarray(array).tobytes()
        header[name] = {"dtype": dtype, "shape": list(array.shape),
                        "data_offsets": [at, at + len(data)]}
        body.append(data)
        at += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text + b"".join(body))


def pack(codes, bits):
    """Codes [.., n] of `bits` to words [.., n * bits / 32], the first in the lowest bits."""
    per = 32 // bits
    c = codes.astype(np.uint32).reshape(*codes.shape[:-1], -1, per)
    words = np.zeros(c.shape[:-1], np.uint32)
    for i in range(per):
        words |= c[..., i] << np.uint32(bits * i)
    return words.view(np.int32)


def rounded_to_groups(w, bits, group, order=None, symmetric=False):
    """Codes [rows, columns], zeros and f16 scales [rows, groups], and the group of each column."""
    n, k = w.shape
    group = k if group == -1 else group
    of = np.arange(k) // group
    if order is not None:
        of = of[np.argsort(order, kind="stable")]
    groups, most = of.max() + 1, 2**bits - 1
    scales, zeros = np.zeros((n, groups), np.float16), np.zeros((n, groups), np.int64)
    for g in range(groups):
        part = w[:, of == g]
        lo, hi = np.minimum(part.min(axis=1), 0), np.maximum(part.max(axis=1), 0)
        if symmetric:
            hi = np.maximum(hi, -lo)
            lo = -hi
        scales[:, g] = ((hi - lo) / most).astype(np.float16)
        zeros[:, g] = (most + 1) // 2 if symmetric else np.rint(
            -lo / scales[:, g].astype(np.float64))
    # a zero of 0 cannot be told from one of 2^bits in version 1 of GPTQ's files
    zeros = np.clip(zeros, 1, most)
    codes = np.clip(np.rint(w / scales[:, of]) + zeros[:, of], 0, most).astype(np.int64)
    return codes, zeros, scales, of


def widened(codes, zeros, scales, of):
    """What the codes stand for, as f32 computes it."""
    return (scales.astype(np.float32)[:, of] *
            (codes - zeros[:, of]).astype(np.float32)).astype(np.float64)


def plain_product(w):
    return lambda x: x @ w.T


class Plain:
    """Matrices as they are, which --dtype rounds while they load. Ranks cut rows of 512 between
    blocks of 256."""
    sizes, config = (256, 128, 512), None

    def matrix(self, name, w, rng):
        half = w.astype(np.float16)
        return {f"{name}.weight": half}, plain_product(half.astype(np.float64))


class Gptq:
    """Frantar et al. 2022, as AutoGPTQ and GPTQModel write it."""

    def __init__(self, bits=4, group=32, act_order=False, v2=False, symmetric=False, **more):
        self.bits, self.group, self.act_order, self.v2 = bits, group, act_order, v2
        self.symmetric = symmetric
        self.config = {"quant_method": "gptq", "bits": bits, "group_size": group,
                       "desc_act": act_order, "sym": symmetric, "true_sequential": True,
                       "damp_percent": 0.01, **more}
        if v2:
            self.config["checkpoint_format"] = "gptq_v2"

    def matrix(self, name, w, rng):
        order = rng.permutation(w.shape[1]) if self.act_order else None
        codes, zeros, scales, of = rounded_to_groups(w, self.bits, self.group, order,
                                                     self.symmetric)
        stored = zeros if self.v2 else zeros - 1
        return {
            f"{name}.qweight": np.ascontiguousarray(pack(codes, self.bits).T),
            f"{name}.qzeros": pack(np.ascontiguousarray(stored.T), self.bits),
            f"{name}.scales": np.ascontiguousarray(scales.T),
            f"{name}.g_idx": of.astype(np.int32),
        }, plain_product(widened(codes, zeros, scales, of))


class Dynamic:
    """GPTQModel's "dynamic": the first pattern that fits a name says in what the matrix differs
    from the whole, or with "-:" that it is not quantised."""
    ARGUMENTS = {"bits": "bits", "group_size": "group", "sym": "symmetric", "desc_act": "act_order"}

    def __init__(self, dynamic, **whole):
        self.whole, self.parts = Gptq(**whole), []
        for pattern, change in dynamic.items():
            own = {self.ARGUMENTS[key]: value for key, value in change.items()}
            scheme = Plain() if pattern.startswith("-:") else Gptq(**{**whole, **own})
            self.parts.append((re.sub(r"^[+-]:", "", pattern), scheme))
        self.config = dict(self.whole.config, dynamic=dynamic)

    def matrix(self, name, w, rng):
        for pattern, scheme in self.parts:
            if re.match(pattern, name):
                return scheme.matrix(name, w, rng)
        return self.whole.matrix(name, w, rng)


class Awq:
    """Lin et al. 2023, as AutoAWQ's "gemm" writes it."""
    PLACE = [0, 4, 1, 5, 2, 6, 3, 7]  # column n lies in nibble PLACE[n % 8]

    def __init__(self, group=16, plain=None):
        self.group, self.plain = group, plain
        self.config = {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm",
                       "zero_point": True, "modules_to_not_convert": plain}

    def matrix(self, name, w, rng):
        if any(part in name for part in self.plain or []):
            return Plain().matrix(name, w, rng)
        codes, zeros, scales, of = rounded_to_groups(w, 4, self.group)

        def words(c):
            c = c.T.reshape(c.shape[1], -1, 8)
            out = np.zeros_like(c)
            out[..., self.PLACE] = c
            return pack(out.reshape(c.shape[0], -1), 4)

        return {f"{name}.qweight": words(codes), f"{name}.qzeros": words(zeros),
                f"{name}.scales": np.ascontiguousarray(scales.T)}, plain_product(
                    widened(codes, zeros, scales, of))


def compressed(fmt, weights, activations):
    return {"quant_method": "compressed-tensors", "format": fmt,
            "quantization_status": "compressed", "kv_cache_scheme": None, "ignore": ["lm_head"],
            "config_groups": {"group_0": {
                "targets": ["Linear"], "weights": {"dynamic": False, "observer": "minmax",
                                                   "symmetric": True, "actorder": None, **weights},
                "input_activations": activations, "output_activations": None}}}


class Packed:
    """compressed-tensors' pack-quantized."""

    def __init__(self, bits=4, group=32, symmetric=True, act_order=False):
        self.bits, self.group, self.symmetric = bits, group, symmetric
        self.act_order = act_order
        self.config = compressed("pack-quantized", {
            "num_bits": bits, "type": "int", "symmetric": symmetric,
            "strategy": "channel" if group == -1 else "group",
            "group_size": None if group == -1 else group,
            "actorder": "group" if act_order else None}, None)

    def matrix(self, name, w, rng):
        order = rng.permutation(w.shape[1]) if self.act_order else None
        codes, zeros, scales, of = rounded_to_groups(w, self.bits, self.group, order,
                                                     self.symmetric)
        per = 32 // self.bits
        tensors = {f"{name}.weight_packed": pack(np.pad(codes, ((0, 0), (0, -w.shape[1] % per))),
                                                 self.bits),
                   f"{name}.weight_scale": scales,
                   f"{name}.weight_shape": np.array(w.shape, np.int64)}
        if not self.symmetric:
            padded = np.pad(zeros, ((0, -w.shape[0] % per), (0, 0)))
            tensors[f"{name}.weight_zero_point"] = np.ascontiguousarray(
                pack(np.ascontiguousarray(padded.T), self.bits).T)
        if self.act_order:
            tensors[f"{name}.weight_g_idx"] = of.astype(np.int32)
        return tensors, plain_product(widened(codes, zeros, scales, of))


def int8_rows(x, limit=np.inf):
    """Codes of each row by its largest, and their scale; values from `limit` on have code 0."""
    kept = np.where(np.abs(x) < limit, x, 0)
    scale = np.abs(kept).max(axis=1, keepdims=True) / 127
    return np.rint(kept / np.maximum(scale, 1e-30)), scale


class Int8:
    """compressed-tensors' int-quantized: SmoothQuant's result, or with dynamic=False only weights
    of 8 bits."""

    def __init__(self, dynamic=True, per_tensor=False):
        self.dynamic, self.per_tensor = dynamic, per_tensor
        self.config = compressed("int-quantized", {
            "num_bits": 8, "type": "int", "strategy": "tensor" if per_tensor else "channel"}, {
                "num_bits": 8, "type": "int", "symmetric": True, "dynamic": True,
                "strategy": "token"} if dynamic else None)

    def matrix(self, name, w, rng):
        scale = np.abs(w).max(axis=None if self.per_tensor else 1, keepdims=True)
        scale = (scale / 127).astype(np.float32)
        codes = np.rint(w / scale)
        value = codes * scale.astype(np.float64)

        def product(x):
            if self.dynamic:
                x_codes, x_scale = int8_rows(x)
                x = x_codes * x_scale
            return x @ value.T

        return {f"{name}.weight": codes.astype(np.int8),
                f"{name}.weight_scale": scale.reshape(-1) if self.per_tensor else scale}, product


def e4m3_values():
    bits = np.arange(256)
    e, m = bits >> 3 & 15, bits & 7
    v = np.where(e > 0, (1 + m / 8) * 2.0**(e - 7), m / 8 * 2.0**-6) * np.where(bits & 128, -1, 1)
    v[[127, 255]] = np.nan
    return v


E4M3 = e4m3_values()


def to_e4m3(x):
    """The nearest bytes, half to even."""
    positive = E4M3[:127]
    a = np.minimum(np.abs(x), 448)
    hi = np.clip(np.searchsorted(positive, a), 1, 126)
    down, up = a - positive[hi - 1], positive[hi] - a
    code = np.where((down < up) | ((down == up) & (hi % 2 == 1)), hi - 1, hi)
    return (code + np.where(np.signbit(x), 128, 0)).astype(np.uint8)


class Fp8:
    """8-bit floats. way: "channel" and "tensor" (compressed-tensors; per row or per matrix),
    "static" and "block" (transformers' fp8, as DeepSeek writes blocks), "modelopt", "weights".
    powers: scales that are powers of two, also those of activations (DeepSeek-V3.1); weights have
    them stored as their exponents ("F8_E8M0"), or as numbers ("F32")."""

    def __init__(self, way, powers=None):
        self.way, self.powers = way, powers
        eight = {"num_bits": 8, "type": "float"}
        if way in ("channel", "tensor", "weights"):
            self.config = compressed(
                "float-quantized", {**eight, "strategy": "tensor" if way == "tensor" else
                                    "channel"}, None if way == "weights" else {
                                        **eight, "symmetric": True, "dynamic": True,
                                        "strategy": "token"})
        elif way == "modelopt":
            self.config = {"quant_method": "modelopt", "quant_algo": "FP8",
                           "kv_cache_quant_algo": "FP8", "producer": {"name": "modelopt"}}
        else:
            self.config = {"quant_method": "fp8", "fmt": "e4m3",
                           "activation_scheme": "static" if way == "static" else "dynamic",
                           "weight_block_size": [128, 128] if way == "block" else None}
            if powers:
                self.config["scale_fmt"] = "ue8m0"

    def matrix(self, name, w, rng):
        n, k = w.shape
        if self.way == "block":
            grid = np.pad(np.abs(w), ((0, -n % 128), (0, -k % 128))).reshape(
                -(-n // 128), 128, -(-k // 128), 128).max(axis=(1, 3))
            scale = (grid / 448).astype(np.float32)
            if self.powers:
                exponent = np.ceil(np.log2(scale)).astype(np.int64)
                scale = (2.0**exponent).astype(np.float32)
            wide = np.repeat(np.repeat(scale, 128, 0), 128, 1)[:n, :k].astype(np.float64)
        else:
            axis = 1 if self.way in ("channel", "weights") else None
            scale = (np.abs(w).max(axis=axis, keepdims=True) / 448).astype(np.float32)
            wide = scale.astype(np.float64)
        codes = to_e4m3(w / wide)
        value = E4M3[codes] * wide
        stored = scale if scale.size > 1 or self.way == "block" else scale.reshape(())
        if self.powers == "F8_E8M0":
            stored = Typed((exponent + 127).astype(np.uint8), "F8_E8M0")
        tensors = {f"{name}.weight": Typed(codes, "F8_E4M3"),
                   f"{name}.weight_scale{'_inv' if self.way == 'block' else ''}": stored}
        fixed = np.float32(0.02)
        if self.way in ("static", "modelopt"):
            tensors[f"{name}.input_scale"] = np.array(fixed)
        if self.way == "modelopt" and name.endswith("k_proj"):
            tensors[f"{name}.k_scale"] = np.array(np.float32(1))

        def product(x):
            if self.way == "weights":
                return x @ value.T
            step = 128 if self.way == "block" else k
            out = np.empty_like(x)
            for at in range(0, k, step):
                part = x[:, at:at + step]
                s = np.float64(fixed) if f"{name}.input_scale" in tensors else np.abs(part).max(
                    axis=1, keepdims=True) / 448
                if self.powers:
                    s = 2.0**np.ceil(np.log2(s))
                out[:, at:at + step] = E4M3[to_e4m3(part / s)] * s
            return out @ value.T

        return tensors, product


class Mixed:
    """compressed-tensors with three groups of layers: attention, gate and up, down."""

    def __init__(self, *schemes):
        self.parts = list(zip(["re:.*self_attn.*", "re:.*(gate|up)_proj$", "re:.*down_proj$"],
                              schemes))
        groups = {}
        for i, (target, scheme) in enumerate(self.parts):
            own = copy.deepcopy(scheme.config)
            groups[f"group_{i}"] = dict(own["config_groups"]["group_0"], targets=[target],
                                        format=own["format"])
        self.config = dict(compressed("mixed-precision", {}, None), config_groups=groups)

    def matrix(self, name, w, rng):
        for target, scheme in self.parts:
            if re.match(target[3:], name):
                return scheme.matrix(name, w, rng)
        raise AssertionError(name)


class LlmInt8:
    """bitsandbytes' LLM.int8(), with a row's own outliers: what the paper's columns are for a batch
    of one row."""
    config = {"quant_method": "bitsandbytes", "load_in_8bit": True, "load_in_4bit": False,
              "llm_int8_threshold": 6.0, "llm_int8_has_fp16_weight": False,
              "llm_int8_skip_modules": None, "bnb_4bit_quant_type": "fp4"}

    def matrix(self, name, w, rng):
        most = np.abs(w).max(axis=1).astype(np.float32)
        codes = np.rint(w * 127 / most[:, None])
        value = codes * (most.astype(np.float64) / 127)[:, None]

        def product(x):
            x_codes, scale = int8_rows(x, 6.0)
            return (x_codes * scale + np.where(np.abs(x) >= 6, x, 0)) @ value.T

        return {f"{name}.weight": codes.astype(np.int8), f"{name}.SCB": most,
                f"{name}.weight_format": np.array(0, np.uint8)}, product


class Nf4:
    """bitsandbytes' 4 bits: NF4's table, or FP4's; absmax of each 64, double quantised or not."""
    NF4 = [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
           -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
           0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
           0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0]
    FP4 = [0.0, 0.0052083333, 0.6666667, 1.0, 0.3333333, 0.5, 0.1666667, 0.25]

    def __init__(self, double=False, kind="nf4", block=64):
        self.double, self.kind, self.block = double, kind, block
        # rows are whole blocks; an odd block makes matrices of an odd count of codes
        self.sizes = (3 * block, 2 * block, 5 * block) if block % 2 else (128, 32, 192)
        self.config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False,
                       "bnb_4bit_quant_type": kind, "bnb_4bit_use_double_quant": double,
                       "bnb_4bit_compute_dtype": "bfloat16", "bnb_4bit_quant_storage": "uint8"}

    def matrix(self, name, w, rng):
        table = np.array(self.NF4 if self.kind == "nf4" else self.FP4 + [-v for v in self.FP4],
                         np.float32)
        blocks = w.reshape(-1, self.block)
        absmax = np.abs(blocks).max(axis=1).astype(np.float32)
        state = {"quant_type": self.kind, "blocksize": self.block, "dtype": "float16",
                 "shape": list(w.shape)}
        tensors = {f"{name}.weight.quant_map": table}
        if self.double:
            offset = float(absmax.mean())
            nested = np.abs(np.pad(absmax - offset, (0, -len(absmax) % 256)).reshape(
                -1, 256)).max(axis=1).astype(np.float32)
            nested_map = np.sort(rng.uniform(-1, 1, 256)).astype(np.float32)
            relative = (absmax - offset) / np.repeat(nested, 256)[:len(absmax)]
            codes = np.abs(relative[:, None] - nested_map).argmin(axis=1).astype(np.uint8)
            state.update(nested_blocksize=256, nested_offset=offset, nested_dtype="float32")
            tensors[f"{name}.weight.nested_absmax"] = nested
            tensors[f"{name}.weight.nested_quant_map"] = nested_map
            tensors[f"{name}.weight.absmax"] = codes
            absmax = nested_map[codes] * np.repeat(nested, 256)[:len(absmax)] + np.float32(offset)
        else:
            tensors[f"{name}.weight.absmax"] = absmax
        codes = np.abs((blocks / absmax[:, None])[..., None] - table).argmin(axis=2)
        value = (table[codes] * absmax[:, None]).astype(np.float64).reshape(w.shape)
        flat = codes.reshape(-1).astype(np.uint8)
        second = flat[1::2]
        tensors[f"{name}.weight"] = (flat[0::2][:len(second)] << 4 | second)[:, None]
        tensors[f"{name}.weight.quant_state.bitsandbytes__{self.kind}"] = np.frombuffer(
            json.dumps(state).encode(), np.uint8)
        return tensors, plain_product(value)


class Model:
    """A random llama whose matrices `scheme` stores; with `experts` a Mixtral, each of whose rows
    goes to all of them. tensors and config may be changed before write()."""

    def __init__(self, scheme, seed=1, experts=0):
        rng = np.random.default_rng(seed)
        hidden, head_dim, ff = self.sizes = getattr(scheme, "sizes", (112, 24, 176))
        self.config = {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden,
            "intermediate_size": ff, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
            "head_dim": head_dim, "num_hidden_layers": LAYERS, "vocab_size": VOCAB,
            "max_position_embeddings": 2048, "rms_norm_eps": EPS, "rope_theta": THETA,
            "tie_word_embeddings": False, "torch_dtype": "float16", "bos_token_id": 0,
            "eos_token_id": 0, "quantization_config": copy.deepcopy(scheme.config)}
        self.experts = experts
        if experts:
            self.config.update(architectures=["MixtralForCausalLM"], model_type="mixtral",
                               num_local_experts=experts, num_experts_per_tok=experts)
        self.tensors, self.products, self.plain = {}, {}, {}
        self.files = {}  # more, by their names
        q, kv = HEADS * head_dim, KV_HEADS * head_dim
        shapes = {"self_attn.q_proj": (q, hidden), "self_attn.k_proj": (kv, hidden),
                  "self_attn.v_proj": (kv, hidden), "self_attn.o_proj": (hidden, q)}
        for mlp in self._mlps():
            shapes.update(zip(mlp, ((ff, hidden), (ff, hidden), (hidden, ff))))
        for i in range(LAYERS):
            if experts:
                self._plain(f"model.layers.{i}.block_sparse_moe.gate",
                            rng.normal(size=(experts, hidden)))
            for part, shape in shapes.items():
                name = f"model.layers.{i}.{part}"
                w = rng.normal(size=shape) * (2.0 / shape[1])**0.5
                parts, self.products[name] = scheme.matrix(name, w, rng)
                self.tensors.update(parts)
            for part in ("input_layernorm", "post_attention_layernorm"):
                self._plain(f"model.layers.{i}.{part}", rng.uniform(0.5, 1.5, hidden))
        self._plain("model.norm", rng.uniform(0.5, 1.5, hidden))
        self._plain("model.embed_tokens", rng.normal(size=(VOCAB, hidden)))
        self._plain("lm_head", rng.normal(size=(VOCAB, hidden)) * 0.3)

    def _mlps(self):
        """Names of gate, up and down: of the MLP, or of each expert."""
        if not self.experts:
            return [[f"mlp.{p}_proj" for p in ("gate", "up", "down")]]
        return [[f"block_sparse_moe.experts.{e}.w{k}" for k in (1, 3, 2)]
                for e in range(self.experts)]

    def _plain(self, name, value):
        half = value.astype(np.float16)
        self.tensors[name + ".weight"] = half
        self.plain[name] = half.astype(np.float64)

    def take_images(self):
        """Becomes the text model of one that takes images, as transformers first named those."""
        self.tensors = {f"language_model.{name}": t for name, t in self.tensors.items()}
        outer = {"model_type": "mistral3", "vision_config": {},
                 "architectures": ["Mistral3ForConditionalGeneration"],
                 "quantization_config": self.config.pop("quantization_config")}
        text = dict(self.config, model_type="mistral", architectures=["MistralForCausalLM"])
        self.config = dict(outer, text_config=text)

    def write(self, folder):
        os.makedirs(folder)
        for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
            shutil.copy(os.path.join(POCKET, name), folder)
        with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as f:
            json.dump(self.config, f)
        for name, value in self.files.items():
            with open(os.path.join(folder, name), "w", encoding="utf-8") as f:
                json.dump(value, f)
        write_safetensors(os.path.join(folder, "model.safetensors"), self.tensors)
        return str(folder)

    def logits(self, tokens):
        """Of every position, in double precision."""
        x, n = self.plain["model.embed_tokens"][tokens], len(tokens)
        dim = self.sizes[1]
        angle = np.outer(np.arange(n), THETA**(-np.arange(0, dim, 2) / dim))
        cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
        mask = np.triu(np.full((n, n), -np.inf), 1)

        def norm(v, name):
            return v / np.sqrt((v * v).mean(axis=1, keepdims=True) + EPS) * self.plain[name]

        def rotated(v, heads):
            a, b = np.split(v.reshape(n, heads, dim), 2, axis=2)
            return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=2)

        for i in range(LAYERS):
            at = f"model.layers.{i}."
            h = norm(x, at + "input_layernorm")
            q, k, v = (self.products[f"{at}self_attn.{p}_proj"](h) for p in "qkv")
            q, k, v = rotated(q, HEADS), rotated(k, KV_HEADS), v.reshape(n, KV_HEADS, dim)
            k, v = (np.repeat(t, HEADS // KV_HEADS, axis=1) for t in (k, v))
            s = np.einsum("ihd,jhd->hij", q, k) / dim**0.5 + mask
            p = np.exp(s - s.max(axis=2, keepdims=True))
            p /= p.sum(axis=2, keepdims=True)
            out = np.einsum("hij,jhd->ihd", p, v).reshape(n, -1)
            x = x + self.products[at + "self_attn.o_proj"](out)
            h = norm(x, at + "post_attention_layernorm")
            share = np.ones((n, 1))
            if self.experts:
                share = np.exp(h @ self.plain[at + "block_sparse_moe.gate"].T)
                share /= share.sum(axis=1, keepdims=True)
            for e, names in enumerate(self._mlps()):
                gate, up = (self.products[at + name](h) for name in names[:2])
                down = self.products[at + names[2]](gate / (1 + np.exp(-gate)) * up)
                x = x + share[:, e:e + 1] * down
        return norm(x, "model.norm") @ self.plain["lm_head"].T
