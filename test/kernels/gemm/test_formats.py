# SPDX-License-Identifier: Apache-2.0
import torch

import torch_tile.language as T
from torch_tile.jit import jit
from torch_tile.kernels.gemm.formats import E8M0, FORMATS, LANES, TABLE, pairs_of, power_of


def test_powers_of_all_codes():
    """Each byte of float8_e8m0fnu as torch reads it: 2^-127 for 0, NaN for 255."""

    @jit
    def powers():
        @T.prim_func
        def kernel(x: T.Tensor((256,), "uint8"), out: T.Tensor((256,), "float32")):
            with T.Kernel(1, threads=128) as _:
                for i in T.Parallel(256):
                    out[i] = power_of(x[i])

        return kernel

    codes, out = torch.arange(256, dtype=torch.uint8), torch.empty(256)
    powers()(codes, out)
    torch.testing.assert_close(out, codes.view(E8M0).float(), rtol=0, atol=0, equal_nan=True)


def test_powers_of_all_codes_in_words():
    """Four bytes of an int32, each as if it were alone."""

    @jit
    def powers():
        @T.prim_func
        def kernel(x: T.Tensor((64,), "int32"), out: T.Tensor((64, 4), "float32")):
            with T.Kernel(1, threads=64) as _:
                for byte in range(4):
                    for i in T.Parallel(64):
                        out[i, byte] = power_of(x[i], byte)

        return kernel

    codes, out = torch.randperm(256).to(torch.uint8), torch.empty(64, 4)
    powers()(codes.view(torch.int32), out)
    torch.testing.assert_close(out.flatten(), codes.view(E8M0).float(), rtol=0, atol=0, equal_nan=True)


def test_tables_hold_both_numbers_of_a_byte():
    """All pairs of each format, in both orders, in each lane's copy."""

    @jit
    def pairs(name, high_first):
        @T.prim_func
        def kernel(out: T.Tensor((TABLE,), "float16")):
            with T.Kernel(1, threads=128) as _:
                T.copy(pairs_of(name, high_first, torch.float16), out)

        return kernel

    codes = torch.arange(256)
    for name, form in FORMATS.items():
        for high_first in (False, True):
            out = torch.empty(TABLE, dtype=torch.float16)
            pairs(name, high_first)(out)
            fields = torch.stack([codes & 15, codes >> 4][:: -1 if high_first else 1], -1)
            want = form.table(torch.float16, out.device)[fields]
            assert torch.equal(out.view(256, LANES, 2), want[:, None].expand(-1, LANES, -1)), name
