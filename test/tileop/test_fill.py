# SPDX-License-Identifier: Apache-2.0
import math

import pytest
import torch

import torch_tile.language as T
from torch_tile.diagnostics.errors import TileError
from torch_tile.ir.dtype import SATURATED

VALUES = {
    "float32": -2.5, "float16": math.inf, "bfloat16": 3.0, "float64": 0.1, "float8_e5m2": -57344.0, "int32": -7,
    "int8": -128, "uint8": 255, "int64": 2**40, "bool": True,
}  # fmt: skip


@pytest.mark.parametrize("dtype", VALUES)
def test_values_of_each_type(dtype, launch):
    value, torch_type = VALUES[dtype], getattr(torch, dtype)

    @T.prim_func
    def kernel(out: T.Tensor((2, 5, 3), dtype)):
        with T.Kernel(1) as _:
            tile = T.alloc_fragment((5, 3), dtype)
            T.fill(tile, value)
            T.copy(tile, out[0, :, :])
            T.clear(out[1, 1:4, :])

    before = torch.ones(2, 5, 3).to(torch_type)
    out = before.clone()
    launch(kernel, out)
    filled = torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else torch.int64).to(torch_type)
    assert torch.equal(out[0].double(), filled.double().expand(5, 3))
    assert not out[1, 1:4].double().any()
    assert torch.equal(out[1, [0, 4]].double(), before[1, [0, 4]].double())


@pytest.mark.parametrize("value", [1e9, -math.inf, math.nan])
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_literals_saturate_wherever_they_are_stored(dtype, value, launch):
    @T.prim_func
    def kernel(out: T.Tensor((3,), dtype)):
        with T.Kernel(1, threads=32) as _:
            tile = T.alloc_fragment((1,), dtype)
            T.fill(tile, value)
            T.copy(tile, out[0:1])
            out[1] = value
            out[2] = T.cast(value, dtype)

    out = torch.ones(3).to(getattr(torch, dtype))
    launch(kernel, out)
    most = SATURATED[dtype]
    wanted = torch.full((3,), value).clamp(-most, most)
    assert torch.equal(out.float().nan_to_num(7), wanted.nan_to_num(7))


def test_scalar_expressions_and_edges(launch):
    @T.prim_func
    def kernel(n: T.int32, x: T.Tensor((4,), "float32"), out: T.Tensor((4, 4), "float32")):
        with T.Kernel(4) as b:
            T.fill(out[b : b + n, 3], x[b] * 2.0 + b)
            if b == 2:
                out[0, 0:2] = x[1]

    x, out = torch.randn(4), torch.zeros(4, 4)
    launch(kernel, 1, x, out)
    wanted = torch.zeros(4, 4)
    wanted[:, 3] = x * 2 + torch.arange(4)
    assert torch.equal(out[:, 3], wanted[:, 3])
    launch(kernel, 9, x, out)  # sticks out below: dropped, and the last block wins nothing it does not reach
    assert out[3, 3] in (x * 2 + torch.arange(4))


def test_only_scalars():
    with pytest.raises(TileError) as caught:

        @T.prim_func
        def kernel(out: T.Tensor((4,), "float32")):
            with T.Kernel(1) as _:
                T.fill(out, out)

    assert caught.value.code == "fill_value"
    assert caught.value.span.source().strip() == "T.fill(out, out)"
