# SPDX-License-Identifier: Apache-2.0
import torch

import torch_tile.language as T
from torch_tile.autotuner.inputs import made_by_seed, spare, written


def test_what_a_program_writes():
    @T.prim_func
    def main(x: T.Tensor((32,), "float32"), y: T.Tensor((32,), "float32"), z: T.Tensor((32,), "float32")):
        with T.Kernel(1, threads=32) as _:
            tile = T.alloc_shared((32,), "float32")
            T.copy(x, tile)
            T.copy(tile, y)
            T.atomic_add(z[0], 1.0)

    program = main.program
    assert [id(p) in written(program) for p in program.params] == [False, True, True]


def test_spare_tensors_have_the_same_strides_and_values():
    x = torch.arange(24.0).reshape(4, 6)
    for view in (x, x.T, x[:, ::2], x[1:3, 2:4], torch.tensor(3.0), x[:0]):
        made = spare(view)
        assert made.stride() == view.stride() and torch.equal(made, view)
        assert not view.numel() or made.data_ptr() != view.data_ptr()
    wide = torch.ones(1).expand(4)
    assert spare(wide) is wide and spare(3) == 3
    assert not spare(torch.ones(2, requires_grad=True)).requires_grad


def test_the_callers_random_numbers_go_on():
    torch.manual_seed(1)
    want = torch.rand(3)
    torch.manual_seed(1)
    with made_by_seed():
        first = torch.rand(2)
    assert torch.equal(torch.rand(3), want)
    with made_by_seed():
        assert torch.equal(torch.rand(2), first)
