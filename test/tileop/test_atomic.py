# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

import torch_tile.language as T
from torch_tile.diagnostics import TileError

FOLD = {"add": torch.add, "max": torch.maximum, "min": torch.minimum}


@pytest.mark.parametrize("dtype", ["float32", "int32", "float64", "int64"])
@pytest.mark.parametrize("kind", FOLD)
def test_many_blocks_update_one_place(kind, dtype, launch):
    """Elements, scalars and whole regions; the numbers are small integers, so that no order of additions is special."""

    @T.prim_func
    def kernel(A: T.Tensor((12, 5), dtype), out: T.Tensor((3, 8), dtype)):
        with T.Kernel(12) as b:
            row = T.alloc_fragment((5,), dtype)
            T.copy(A[b, 0], row)
            getattr(T, f"atomic_{kind}")(out[0, 1:6], row)
            for i in T.Parallel(5):
                getattr(T, f"atomic_{kind}")(out[1, b % 4 + i], A[b, i])
            getattr(T, f"atomic_{kind}")(out[2, 3], A[b, 2], memory_order="relaxed")
            getattr(T, f"atomic_{kind}")(out[2, 6], row)  # sticks out: dropped

    a, out = (torch.randint(-9, 9, s).to(getattr(torch, dtype)) for s in ((12, 5), (3, 8)))
    expected = out.clone()
    for b in range(12):
        expected[0, 1:6] = FOLD[kind](expected[0, 1:6], a[b])
        for i in range(5):
            expected[1, b % 4 + i] = FOLD[kind](expected[1, b % 4 + i], a[b, i])
        expected[2, 3] = FOLD[kind](expected[2, 3], a[b, 2])
        expected[2, 6:8] = FOLD[kind](expected[2, 6:8], a[b, :2])
    launch(kernel, a, out)
    assert torch.equal(out, expected)


def test_a_scalar_for_a_region(launch):
    @T.prim_func
    def kernel(out: T.Tensor((4, 4), "float32")):
        with T.Kernel(6) as b:
            T.atomic_add(out[1:3, :], 2)
            T.atomic_max(out[0, 0], b)

    out = torch.zeros(4, 4)
    launch(kernel, out)
    assert out[1:3].eq(12).all() and out[3].eq(0).all() and out[0, 0] == 5


def test_extents_must_agree(complaint):
    @T.prim_func
    def kernel(out: T.Tensor((8,), "float32")):
        with T.Kernel(1) as _:
            row = T.alloc_fragment((4,), "float32")
            T.atomic_add(out[0:5], row)  # here

    assert "(4) and destination extents (5)" in complaint(kernel, "copy_shape")


def test_the_target_is_memory():
    with pytest.raises(TileError) as caught:

        @T.prim_func
        def kernel(out: T.Tensor((8,), "float32")):
            with T.Kernel(1) as _:
                T.atomic_min(3, out[0])

    assert caught.value.code == "atomic_target"
