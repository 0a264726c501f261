#!/usr/bin/env python3
"""Makes tests/golden/formats/NAME.bin: blocks of one format of GGUF and the values that gguf-py
gives them, for tests/unit/kernels_blocks_test.c.

A file is blocks, then their values as little-endian f32. Codes are random bytes from a fixed seed;
f16 factors are drawn apart, so that they are numbers, and the first blocks have every field at its
extremes. Run in a throw-away environment that has gguf: python tests/golden/make_formats.py"""
import os
import random
import struct

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType as T
from gguf.quants import dequantize

HERE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "formats")
# where a block has f16 factors
FACTORS = {
    T.Q4_0: [0], T.Q4_1: [0, 2], T.Q5_0: [0], T.Q5_1: [0, 2], T.Q8_0: [0], T.Q2_K: [80, 82],
    T.Q3_K: [108], T.Q4_K: [0, 2], T.Q5_K: [0, 2], T.Q6_K: [208], T.IQ4_NL: [0], T.IQ4_XS: [0],
    T.MXFP4: []
}


def block(rng, kind, n_bytes, i):
    fill = {0: 0, 1: 255, 2: 0x80, 3: 0x7f}.get(i)
    b = bytearray(rng.randbytes(n_bytes) if fill is None else bytes([fill]) * n_bytes)
    for at in FACTORS[kind]:
        f = {0: 6e-8, 1: 65504.0, 2: -65504.0, 3: -6e-8}.get(i, rng.uniform(-0.1, 0.1))
        b[at:at + 2] = struct.pack("<e", f)
    if kind == T.MXFP4:
        b[0] = i if i < 4 else 254 if i == 4 else rng.randrange(100, 140)
    return bytes(b)


def main():
    os.makedirs(HERE, exist_ok=True)
    for kind in FACTORS:
        n_values, n_bytes = GGML_QUANT_SIZES[kind]
        rng = random.Random(f"tandem {kind.name}")
        blocks = b"".join(
            block(rng, kind, n_bytes, i) for i in range(16 if n_values == 32 else 6))
        values = dequantize(np.frombuffer(blocks, dtype=np.uint8), kind)
        with open(os.path.join(HERE, kind.name + ".bin"), "wb") as f:
            f.write(blocks + values.astype("<f4").tobytes())


if __name__ == "__main__":
    main()
