#!/usr/bin/env python3
"""Makes tests/golden/checkpoints: a small random Llama as the libraries themselves quantise and
store it, and the logits that Hugging Face transformers computes from the directory.

    python tests/golden/make_checkpoints.py [NAME ...]

Run in a throw-away environment that has torch, transformers, accelerate, compressed-tensors and
bitsandbytes; `make check` needs none of them. Files and formulas of tests/cluster/quant_model.py
are our own reading of the formats; these files are not. checkpoints/PROVENANCE.md records
versions. What the libraries do without a GPU decides what is here: GPTQ, AWQ and 8-bit floats in
blocks are not."""
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


def random_model(seed):
    gen = torch.Generator().manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE)).float()
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
    model, tokens = random_model(seed)
    out = os.path.join(HERE, name)
    shutil.rmtree(out, ignore_errors=True)
    if name in COMPRESSED:
        loaded = compress(name, model, out)
    else:
        loaded = bitsandbytes(name, model, out)
    if not loaded:
        loaded = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32,
                                                      attn_implementation="eager").eval()
    if name == "w8a8":
        codes_of_127()
    whole_numbers(loaded)
    logits = logits_of(name, loaded, tokens).float().flatten().tolist()
    with open(os.path.join(out, "logits.f32"), "wb") as f:
        f.write(struct.pack("<%df" % len(logits), *logits))
    with open(os.path.join(out, "tokens.json"), "w", encoding="utf-8") as f:
        json.dump({"seed": seed, "tokens": tokens[0].tolist(),
                   "largest_logit": max(map(abs, logits))}, f, indent=1)
    print("%-14s largest logit %.2f, %d bytes" % (name, max(map(abs, logits)), sum(
        os.path.getsize(os.path.join(out, f)) for f in os.listdir(out))), flush=True)


def provenance():
    import bitsandbytes
    import compressed_tensors
    with open(os.path.join(HERE, "PROVENANCE.md"), "w", encoding="utf-8") as f:
        f.write("""# Where these files come from

Each folder is a small random Llama, quantised and stored by compressed-tensors or bitsandbytes,
with the logits (`logits.f32`: little-endian f32 [tokens, vocab]) that Hugging Face transformers
computes from it in f32 on a CPU for the prompt in `tokens.json`. No trained weights, no third-party
data.

* made by: `python tests/golden/make_checkpoints.py`
* python %s, torch %s, transformers %s, compressed-tensors %s, bitsandbytes %s
* base seed %d; each model's seed is in its tokens.json
* int4_zeros: from the library's own decompression, because transformers refuses its packed zeros
* w8a8: codes -127 to 127, and 127 for the largest activation, where compressed-tensors has -128 to
  127, and 127.5
* nf4, nf4_double, fp4: matrices widened by bitsandbytes, products in f32, because its own products
  on a CPU round to bf16
* llm_int8: a row at a time, so that the columns which LLM.int8() leaves out are those of the row
""" % (sys.version.split()[0], torch.__version__, transformers.__version__,
         compressed_tensors.__version__, bitsandbytes.__version__, SEED))


def main():
    torch.set_num_threads(1)
    for name in [*COMPRESSED, *BITSANDBYTES]:
        if not sys.argv[1:] or name in sys.argv[1:]:
            make(name)
    provenance()


if __name__ == "__main__":
    main()
