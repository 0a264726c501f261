#!/usr/bin/env python3
"""Makes tests/golden/quantised/NAME.bin: values and the blocks to which gguf-py rounds them, for
tests/unit/kernels_quantize_test.c.

A file is N values as little-endian f32, then their blocks. The values are Gaussian of several
sizes, whole and half steps (ties), zeros, one value alone, and values of one sign; from a fixed
seed. Run in a throw-away environment that has gguf: python tests/golden/make_quantised.py"""
import os

import numpy as np
from gguf import GGMLQuantizationType as T
from gguf.quants import quantize

HERE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "quantised")


def values():
    rng = np.random.default_rng(20261123)
    blocks = [rng.standard_normal(32) * s for s in (1, 1, 1e-2, 0.02, 3e-4, 70, 1e-7, 3e3)]
    blocks += [np.zeros(32), rng.integers(-254, 255, 32) / 2, rng.integers(-16, 17, 32) / 2.0]
    alone = np.zeros(32)
    alone[17] = -0.75
    blocks += [alone, np.abs(rng.standard_normal(32)), -np.abs(rng.standard_normal(32)),
               np.full(32, 0.3), np.linspace(-8, 8, 32)]
    return np.concatenate(blocks).astype(np.float32)


def main():
    os.makedirs(HERE, exist_ok=True)
    x = values()
    for kind in (T.Q8_0, T.Q4_0, T.Q4_1, T.Q5_0, T.Q5_1, T.MXFP4):
        with open(os.path.join(HERE, kind.name + ".bin"), "wb") as f:
            f.write(x.astype("<f4").tobytes() + quantize(x, kind).tobytes())


if __name__ == "__main__":
    main()
