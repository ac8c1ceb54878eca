# SPDX-License-Identifier: Apache-2.0
"""Hints change nothing, neither on the CPU nor in the program; what they cannot mean is refused."""

import pytest
import torch

import torch_tile.language as T
from torch_tile.diagnostics.errors import TileError
from torch_tile.ir.node import alike
from torch_tile.simulator.tile.interpreter import evaluate


def doubled(hinted):
    @T.prim_func
    def kernel(X: T.Tensor((40,), "float32"), Y: T.Tensor((40,), "float32")):
        with T.Kernel(1, threads=128):
            if hinted:
                T.disable_warp_group_reg_alloc()
                T.annotate_producer_reg_dealloc(24)
                T.annotate_consumer_reg_alloc()
                T.annotate_l2_hit_ratio({X: 0.5})
                T.annotate_restrict_buffers(X, Y)
            for i in T.Parallel(40):
                Y[i] = X[i] * 2

    return kernel


def test_hints_change_nothing():
    assert alike(doubled(True).program, doubled(False).program)
    x, y = torch.randn(40), torch.full((40,), float("nan"))
    evaluate(doubled(True), x, y)
    assert torch.equal(y, x * 2)


@pytest.mark.parametrize(
    "hint",
    [
        lambda A, tile: T.annotate_producer_reg_dealloc(20),
        lambda A, tile: T.annotate_consumer_reg_alloc("many"),
        lambda A, tile: T.annotate_l2_hit_ratio({A: 1.5}),
        lambda A, tile: T.annotate_l2_hit_ratio({tile: 0.5}),
        lambda A, tile: T.annotate_restrict_buffers(A, 3),
    ],
)
def test_what_hints_cannot_mean(hint):
    with pytest.raises(TileError) as caught:

        @T.prim_func
        def kernel(A: T.Tensor((4,), "float32")):
            with T.Kernel(1):
                tile = T.alloc_shared((4,), "float32")
                hint(A, tile)

    assert caught.value.code == "bad_argument"


def test_hints_stand_in_kernels():
    with pytest.raises(TileError) as caught:
        T.disable_warp_group_reg_alloc()
    assert caught.value.code == "not_in_kernel"
