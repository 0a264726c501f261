#!/usr/bin/env python3
"""Makes tests/golden/checkpoints: a small random Llama as the libraries themselves quantise and
store it, and the logits that Hugging Face transformers computes from the directory.

    python tests/golden/make_checkpoints.py [NAME ...]

Run in a throw-away environment that has torch, transformers, accelerate, compressed-tensors,
bitsandbytes, gptqmodel and nvidia-modelopt; `make check` needs none of them. Files and formulas of
tests/cluster/quant_model.py are our own reading of the formats; these files are not.
checkpoints/PROVENANCE.md records versions. Where a library multiplies on a GPU alone, or in f16,
its own function widens the matrices, and transformers multiplies by them in f32."""
import importlib.metadata
import json
import os
import shutil
import struct
import sys
import zlib

import torch
import transformers
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

SEED = 20261128
PROMPT = 40
HERE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "checkpoints")
# rows of 64 and 128 values: whole blocks of NF4, and groups of 32
SHAPE = dict(vocab_size=96, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
             num_attention_heads=4, num_key_value_heads=2, head_dim=16,
             max_position_embeddings=128, rms_norm_eps=1e-5, bos_token_id=1, eos_token_id=2,
             tie_word_embeddings=False)

TOKEN = dict(symmetric=True, dynamic=True, strategy="token")
# name: what compressed-tensors does to weights and activations, and the format it stores
COMPRESSED = {
    "int4_group": (dict(num_bits=4, type="int", strategy="group", group_size=32), None,
                   "pack-quantized"),
    "int4_zeros": (dict(num_bits=4, type="int", strategy="group", group_size=32,
                        symmetric=False), None, "pack-quantized"),
    "int8_channel": (dict(num_bits=8, type="int", strategy="channel"), None, "pack-quantized"),
    "w8a8": (dict(num_bits=8, type="int", strategy="channel"),
             dict(num_bits=8, type="int", **TOKEN), "int-quantized"),
    "fp8": (dict(num_bits=8, type="float", strategy="channel"),
            dict(num_bits=8, type="float", **TOKEN), "float-quantized"),
}
BITSANDBYTES = {
    "nf4": dict(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
    "nf4_double": dict(load_in_4bit=True, bnb_4bit_quant_type="nf4",
                       bnb_4bit_use_double_quant=True),
    "fp4": dict(load_in_4bit=True, bnb_4bit_quant_type="fp4"),
    "llm_int8": dict(load_in_8bit=True),
}
# bits, columns of a group (-1: all), act order, symmetric, checkpoint_format
GPTQ = {
    "gptq4": (4, 32, False, False, "gptq"),
    "gptq4_v2": (4, 32, False, False, "gptq_v2"),
    "gptq4_order": (4, 32, True, True, "gptq"),
    "gptq8": (8, -1, False, True, "gptq"),
    "gptq8_order": (8, 32, True, False, "gptq_v2"),
}
# of transformers: rows and columns of a block
FLOATS = {"fp8_block": (128, 128), "fp8_tensor": None}
# transformers cuts whole blocks alone
SHAPES = {"fp8_block": dict(hidden_size=128, intermediate_size=256, num_hidden_layers=1,
                            num_key_value_heads=4, head_dim=32)}


def random_model(seed, **shape):
    gen = torch.Generator().manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**{**SHAPE, **shape})).float()
    for name, p in model.named_parameters():
        size = 1.0 if "embed" in name else (3.0 if "lm_head" in name else 1.4) / p.shape[-1]**0.5
        p.data = torch.randn(p.shape, generator=gen) * size
        if p.dim() == 1:
            p.data = 1 + 0.2 * torch.randn(p.shape, generator=gen)
        p.data = p.data.half().float()
    return model.eval(), torch.randint(3, SHAPE["vocab_size"], (1, PROMPT), generator=gen)


def linears(model):
    return [(name, m) for name, m in model.named_modules()
            if isinstance(m, torch.nn.Linear) and name != "lm_head"]


def set_scales(module, args):
    """Scale and zero of each group of a matrix from its least and greatest, by the library's
    function."""
    from compressed_tensors.quantization.utils import calculate_qparams
    w = module.weight.data
    size = args.group_size if args.group_size and args.group_size > 0 else w.shape[1]
    of = torch.arange(w.shape[1]) // size
    scales, zeros = zip(*(calculate_qparams(w[:, of == g].amin(1), w[:, of == g].amax(1), args)
                          for g in range(int(of.max()) + 1)))
    module.weight_scale.data = torch.stack(scales, 1).to(module.weight_scale.dtype)
    if not args.symmetric:
        module.weight_zero_point.data = torch.stack(zeros, 1).to(module.weight_zero_point.dtype)


def compress(name, model, out):
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (QuantizationConfig, apply_quantization_config)
    weights, inputs, kind = COMPRESSED[name]
    config = QuantizationConfig(config_groups={"group_0": dict(
        targets=["Linear"], weights=weights, input_activations=inputs, format=kind)},
        ignore=["lm_head"], format=kind)
    apply_quantization_config(model, config)
    for _, module in linears(model):
        set_scales(module, module.quantization_scheme.weights)
    compressor = ModelCompressor(quantization_config=config)
    compressor.compress_model(model)
    os.makedirs(out)
    save_file({k: v.contiguous().half() if v.dtype == torch.float32 and "scale" not in k else
               v.contiguous() for k, v in model.state_dict().items()},
              os.path.join(out, "model.safetensors"), {"format": "pt"})
    model.config.dtype = torch.float16
    model.config.save_pretrained(out)
    compressor.update_config(out)
    if weights.get("symmetric", True):
        return None
    # transformers 5.23 refuses packed zeros
    compressor.decompress_model(model)
    return model


def bitsandbytes(name, model, out):
    plain = out + ".plain"
    model.half().save_pretrained(plain)
    AutoModelForCausalLM.from_pretrained(
        plain, dtype=torch.float16, device_map="cpu",
        quantization_config=BitsAndBytesConfig(**BITSANDBYTES[name])).save_pretrained(out)
    shutil.rmtree(plain)


def ranges(w, bits, of, symmetric):
    """Scales (f16) and zeros [rows, groups] of a matrix from its least and greatest of each group,
    where `of` says the group of each column. The matrix is clipped to what codes can say."""
    most = 2**bits - 1
    scales, zeros = [], []
    for g in range(int(of.max()) + 1):
        part = w[:, of == g]
        low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
        if symmetric:
            high = torch.maximum(high, -low)
            low = -high
        scales.append(((high - low) / most).half().float())
        # version 1 of GPTQ's files cannot tell a zero of 0 from one of 2^bits
        zeros.append(torch.full_like(low, (most + 1) // 2) if symmetric else
                     torch.round(-low / scales[-1]).clamp(1, most))
    scales, zeros = torch.stack(scales, 1), torch.stack(zeros, 1)
    w.copy_(torch.clamp(w, -(zeros * scales)[:, of], ((most - zeros) * scales)[:, of]))
    return scales, zeros


def pack(model, quantize, config, method, out):
    """Writes what quantize(linear, values of its kind) returns for each matrix, and of all others
    f16; leaves the matrices' numbers, widened by the library, in the model."""
    tensors = {k: v.half() for k, v in model.state_dict().items()}
    for name, linear in linears(model):
        parts, values = quantize(linear)
        del tensors[name + ".weight"]
        tensors.update({f"{name}.{k}": v.contiguous() for k, v in parts.items()})
        linear.weight.data = values
    os.makedirs(out)
    save_file(tensors, os.path.join(out, "model.safetensors"), {"format": "pt"})
    model.config.dtype = torch.float16
    model.config.quantization_config = dict(config, quant_method=method)
    model.config.save_pretrained(out)
    del model.config.quantization_config
    return model


def gptq(name, model, out):
    """GPTQModel's packing, widening and files; codes are the nearest, in any order of columns."""
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.quantization import QuantizeConfig
    from gptqmodel.utils.model import convert_gptq_v2_to_v1_format_module
    bits, group, order, symmetric, version = GPTQ[name]
    config = QuantizeConfig(bits=bits, group_size=group, desc_act=order, sym=symmetric,
                            format=version, offload_to_disk=False)

    def quantize(linear):
        n_out, n_in = linear.weight.shape
        of = torch.arange(n_in) // (group if group > 0 else n_in)
        if order:
            of = of[torch.randperm(n_in, generator=torch.Generator().manual_seed(n_in))]
        scales, zeros = ranges(linear.weight.data, bits, of, symmetric)
        q = TorchLinear(bits=bits, group_size=group, sym=symmetric, desc_act=order,
                        in_features=n_in, out_features=n_out, bias=False)
        q.pack_original(linear, scales, zeros, of.int())
        q.eval()
        halves = q.scales
        q.scales = halves.float()  # the library's numbers in f32
        values = q.dequantize_weight().float().T.contiguous()
        q.scales = halves
        if version == "gptq":
            convert_gptq_v2_to_v1_format_module(q, config)
        return {k: getattr(q, k) for k in ("qweight", "qzeros", "scales", "g_idx")}, values

    model = pack(model, quantize, config.to_dict(), "gptq", out)
    config.save_pretrained(out)
    return model


def awq(_, model, out):
    """AWQ as GPTQModel packs, widens and stores it."""
    from gptqmodel.nn_modules.qlinear.torch_awq import AwqTorchLinear, dequantize_gemm
    from gptqmodel.quantization import QuantizeConfig
    config = QuantizeConfig(bits=4, group_size=32, method="awq", format="gemm", sym=False,
                            desc_act=False, offload_to_disk=False)

    def quantize(linear):
        n_out, n_in = linear.weight.shape
        scales, zeros = ranges(linear.weight.data, 4, torch.arange(n_in) // 32, False)
        q = AwqTorchLinear(bits=4, group_size=32, sym=False, desc_act=False, in_features=n_in,
                           out_features=n_out)
        q.pack(linear, scales, zeros)
        values = dequantize_gemm(qweight=q.qweight, qzeros=q.qzeros, scales=q.scales.float(),
                                 bits=4, group_size=32)
        return ({"qweight": q.qweight, "qzeros": q.qzeros, "scales": q.scales.half()},
                values.float().T.contiguous())

    return pack(model, quantize, config.to_dict(), "awq", out)


def floats(name, model, out):
    """The 8-bit floats of transformers, which widens the directory again where there is no GPU.
    Activations are rounded here as its kernels for a GPU do: by their largest in each row, or in
    each 128 columns of a row."""
    from transformers import FineGrainedFP8Config
    from transformers.integrations.finegrained_fp8 import Fp8Quantize
    from types import SimpleNamespace
    block = FLOATS[name]
    config = FineGrainedFP8Config(weight_block_size=block, modules_to_not_convert=["lm_head"])
    op = Fp8Quantize(SimpleNamespace(quantization_config=config))

    def quantize(linear):
        parts = op.convert({"weight": linear.weight.data})
        return {k.rsplit(".", 1)[-1]: v for k, v in parts.items()}, linear.weight.data

    pack(model, quantize, config.to_dict(), "fp8", out)
    loaded = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32,
                                                  attn_implementation="eager").eval()
    assert all(m.weight.dtype == torch.float32 for _, m in linears(loaded))
    torch.nn.Module.float(loaded)  # lm_head is loaded as it is stored
    step = block[1] if block else None

    def rounded(module, args):
        x = args[0].float()
        groups = x.unflatten(-1, (-1, step or x.shape[-1]))
        scale = groups.abs().amax(-1, keepdim=True) / 448
        return ((groups / scale).to(torch.float8_e4m3fn).float() * scale).flatten(-2)

    for _, linear in linears(loaded):
        linear.register_forward_pre_hook(rounded)
    return loaded


def modelopt(_, model, out, tokens):
    """modelopt's FP8, by its calibration, with its own arithmetic, and as it exports it."""
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint
    from modelopt.torch.export.unified_export_hf import requantize_resmooth_fused_llm_layers
    model.config.architectures = ["LlamaForCausalLM"]
    for _, linear in linears(model):  # in f16 some lie at ties, where calibration and export part
        linear.weight.data *= 1.003
    mtq.quantize(model, mtq.FP8_DEFAULT_CFG, lambda m: m(tokens))
    requantize_resmooth_fused_llm_layers(model)  # q, k and v get one scale, as the export gives
    with torch.no_grad():
        logits = model(tokens).logits[0]
    model.config.dtype = torch.float32
    export_hf_checkpoint(model, export_dir=out)
    return logits


def whole_numbers(model):
    """Matrices of 4 bits as the library widens them: its own products on a CPU round to bf16."""
    import bitsandbytes.functional as bnb
    found = [(name, m) for name, m in model.named_modules() if type(m).__name__ == "Linear4bit"]
    for name, module in found:
        linear = torch.nn.Linear(module.in_features, module.out_features, bias=False)
        module.weight.quant_state.dtype = torch.float32
        linear.weight.data = bnb.dequantize_4bit(module.weight.data,
                                                 module.weight.quant_state)
        parent, last = name.rsplit(".", 1)
        setattr(model.get_submodule(parent), last, linear)
    if found:
        torch.nn.Module.float(model)


def codes_of_127():
    """compressed-tensors takes 127.5 for the largest activation, and -128 to 127 for codes; others,
    and this project, 127. Everything else stays the library's."""
    from compressed_tensors.quantization import utils
    from compressed_tensors.quantization.lifecycle import forward
    range_of = utils.helpers.calculate_range

    def calculate_range(args, device):
        low, high = range_of(args, device)
        return (-high, high) if args.type == "int" and args.num_bits == 8 else (low, high)

    utils.helpers.calculate_range = forward.calculate_range = calculate_range


def logits_of(name, model, tokens):
    with torch.no_grad():
        if name != "llm_int8":
            return model(tokens).logits[0]
        # a row at a time: the columns that LLM.int8() leaves out are then those of the row
        rows, cache = [], None
        for i in range(PROMPT):
            out = model(tokens[:, i:i + 1], past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            rows.append(out.logits[0, 0])
        return torch.stack(rows)


def make(name):
    seed = SEED + zlib.crc32(name.encode()) % 1000000
    model, tokens = random_model(seed, **SHAPES.get(name, {}))
    out = os.path.join(HERE, name)
    shutil.rmtree(out, ignore_errors=True)
    if name == "modelopt":
        logits = modelopt(name, model, out, tokens)
    else:
        kinds = [(COMPRESSED, compress), (BITSANDBYTES, bitsandbytes), (GPTQ, gptq),
                 (("awq",), awq), (FLOATS, floats)]
        loaded = next(f for names, f in kinds if name in names)(name, model, out)
        if not loaded:
            loaded = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32,
                                                          attn_implementation="eager").eval()
        if name == "w8a8":
            codes_of_127()
        whole_numbers(loaded)
        logits = logits_of(name, loaded, tokens)
    logits = logits.float().flatten().tolist()
    with open(os.path.join(out, "logits.f32"), "wb") as f:
        f.write(struct.pack("<%df" % len(logits), *logits))
    with open(os.path.join(out, "tokens.json"), "w", encoding="utf-8") as f:
        json.dump({"seed": seed, "tokens": tokens[0].tolist(),
                   "largest_logit": max(map(abs, logits))}, f, indent=1)
    print("%-14s largest logit %.2f, %d bytes" % (name, max(map(abs, logits)), sum(
        os.path.getsize(os.path.join(out, f)) for f in os.listdir(out))), flush=True)


LIBRARIES = ("torch", "transformers", "compressed-tensors", "bitsandbytes", "gptqmodel",
             "nvidia-modelopt")


def provenance():
    with open(os.path.join(HERE, "PROVENANCE.md"), "w", encoding="utf-8") as f:
        f.write("""# Where these files come from

Each folder is a small random Llama, quantised and stored by the functions of compressed-tensors,
bitsandbytes, GPTQModel, transformers or modelopt, with the logits (`logits.f32`: little-endian f32
[tokens, vocab]) that Hugging Face transformers computes from it in f32 on a CPU for the prompt in
`tokens.json`. No trained weights, no third-party data.

* made by: `python tests/golden/make_checkpoints.py`
* python %s, %s
* %s
* base seed %d; each model's seed is in its tokens.json
* int4_zeros: from the library's own decompression, because transformers refuses its packed zeros
* w8a8: codes -127 to 127, and 127 for the largest activation, where compressed-tensors has -128 to
  127, and 127.5
* nf4, nf4_double, fp4: matrices widened by bitsandbytes, products in f32, because its own products
  on a CPU round to bf16
* llm_int8: a row at a time, so that the columns which LLM.int8() leaves out are those of the row
* gptq4, gptq4_v2, gptq4_order, gptq8, gptq8_order, awq: packed and widened by GPTQModel, with its
  scales made f32 first, because its own products on a CPU are in f16 or bf16; codes are the nearest
  ones, and the order of columns is random, because no calibration is in the format
* fp8_block, fp8_tensor: quantised by transformers, and widened by it as it loads the directory;
  activations rounded by torch's cast, by the largest of each 128 columns, or of each row
* modelopt: logits by the model as modelopt calibrated it, before its export; its matrices are not
  f16, of which some lie at ties, where its calibration and its export round to different sides
""" % (sys.version.split()[0],
       *(", ".join(f"{n} {importlib.metadata.version(n)}" for n in part)
         for part in (LIBRARIES[:4], LIBRARIES[4:])), SEED))


def main():
    torch.set_num_threads(1)
    for name in [*COMPRESSED, *BITSANDBYTES, *GPTQ, "awq", *FLOATS, "modelopt"]:
        if not sys.argv[1:] or name in sys.argv[1:]:
            make(name)
    provenance()


if __name__ == "__main__":
    main()
