# SPDX-License-Identifier: Apache-2.0
"""Rounding and wrapping agree with torch."""

import numpy as np
import pytest
import torch

from torch_tile.ir import dtype as dt
from torch_tile.simulator.simt.values import (
    binary,
    cast,
    constant,
    decode,
    encode,
    mathematics,
    rounded,
    unary,
)

SMALL = ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"]
INTS = ["int8", "int16", "int32", "int64", "uint8", "uint32"]


@pytest.mark.parametrize("name", SMALL)
def test_small_floats_round_as_torch_does(name):
    dtype, to = dt.to_dtype(name), getattr(torch, name)
    bits = torch.randint(-(2**31), 2**31, (4000,)).int()
    x = torch.cat([bits.view(torch.float32), torch.randn(4000) * 30, torch.tensor([0.0, -0.0, 1e30, -1e30])])
    want = x.to(to)
    got = encode(x.numpy(), dtype)
    a, b = torch.from_numpy(decode(got, dtype)), want.float()
    assert torch.equal(a.isnan(), b.isnan())
    assert torch.equal(a[~a.isnan()], b[~b.isnan()]) and torch.equal(a.signbit()[~a.isnan()], b.signbit()[~b.isnan()])
    assert rounded(np.float32(1.0625), dtype) == float(torch.tensor(1.0625).to(to))


@pytest.mark.parametrize("name", INTS)
@pytest.mark.parametrize("op", ["+", "-", "*", "//", "%", "&", "|", "^", "min", "max", "<", "=="])
def test_integers_wrap_alike_shared_and_per_thread(name, op, seed):
    dtype, rng = dt.to_dtype(name), np.random.default_rng(seed)
    info = np.iinfo(name)
    a, b = (rng.integers(info.min, info.max, 64, dtype=name, endpoint=True) for _ in range(2))
    b[b == 0] = 1
    with np.errstate(all="ignore"):
        got = binary(op, dtype)(a, b)
        each = [binary(op, dtype)(int(x), int(y)) for x, y in zip(a, b, strict=True)]
        mixed = [binary(op, dtype)(a, int(y))[n] for n, y in enumerate(b)]
    assert got.tolist() == each == [type(v)(m) for v, m in zip(each, mixed, strict=True)]


def test_casts():
    x = np.array([1.9, -1.9, 300.0], np.float32)
    assert cast(dt.float32, dt.int32)(x).tolist() == [1, -1, 300]
    assert cast(dt.float32, dt.uint8)(np.float32(300)) == 255 and cast(dt.int32, dt.uint8)(300) == 44
    assert cast(dt.int32, dt.int8)(np.array([200], np.int32)).tolist() == [-56]
    assert cast(dt.int32, dt.bfloat16)(257) == 256 and cast(dt.float32, dt.bool_)(np.float32(0.5)) is True
    assert cast(dt.bool_, dt.float32)(np.array([True, False])).tolist() == [1.0, 0.0]


def test_operations_round_to_their_type(seed):
    rng = np.random.default_rng(seed)
    x, y = (torch.from_numpy(rng.standard_normal(50)).bfloat16() for _ in range(2))
    got = binary("*", dt.bfloat16)(x.float().numpy(), y.float().numpy())
    assert torch.equal(torch.from_numpy(got), (x * y).float())
    got = mathematics("exp", dt.bfloat16, dt.bfloat16)(x.float().numpy())
    assert torch.equal(torch.from_numpy(got), x.float().exp().bfloat16().float())
    assert mathematics("sqrt", dt.float32, dt.float32)(np.float32(2)) == np.sqrt(np.float32(2))
    assert constant(0.1, dt.float16) == np.float32(np.float16(0.1))
    assert unary("-", dt.uint8)(1) == 255 and unary("~", dt.int32)(0) == -1 and unary("not", dt.bool_)(True) is False
    assert binary("//", dt.int32)(7, 0) == 7  # undefined, but no exception
