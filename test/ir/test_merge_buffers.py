# SPDX-License-Identifier: Apache-2.0
"""Programs in which parameters share one buffer."""

import torch_tile.language as T
from torch_tile.ir.buffer import Buffer
from torch_tile.ir.idmap import IdMap
from torch_tile.ir.merge_buffers import may_merge, merge_buffers
from torch_tile.ir.node import find, walk


@T.prim_func
def by_views(x: T.Tensor((4, 8), "float32"), y: T.Tensor((4, 8), "float32"), out: T.Tensor((4, 8), "float32")):
    flat = T.reshape(x, (32,))
    other = T.reshape(y, (32,))
    with T.Kernel(4, threads=32) as bx:
        for i in T.Parallel(8):
            out[bx, i] = flat[bx * 8 + i] + other[bx * 8 + i] + x[bx, i]


def test_accesses_and_views_name_the_kept_buffer():
    program = by_views.program
    x, y, out = program.params
    merged = merge_buffers(program, IdMap([(x, out)]))
    assert merged.params == program.params and [v.base for v in merged.views] == [out, y]
    used = [b for node in walk(merged.kernels[0].body) for b in find(node, Buffer)]
    assert not any(b is x or b.base is x for b in used) and any(b.base is out for b in used)
    assert merge_buffers(program, IdMap()).kernels[0] is program.kernels[0]  # what does not change stays itself


def test_a_program_of_other_buffers_stays():
    program = by_views.program
    other = Buffer("other", program.params[0].shape, program.params[0].dtype, "global")
    assert merge_buffers(program, IdMap([(other, program.params[2])])).kernels == program.kernels


def test_what_may_merge():
    @T.prim_func
    def several(a: T.Tensor((4, 8), "float32"), b: T.Tensor((8, 4), "float32"), c: T.Tensor((32,), "float32"),
                d: T.Tensor((4, 8), "int32")):  # fmt: skip
        with T.Kernel(1, threads=32):
            for i in T.Parallel(4):
                a[i, 0] = b[i, 0] + c[i] + d[i, 0]

    a, b, c, d = several.program.params
    assert may_merge(a, a) and may_merge(a, b) and not may_merge(a, c) and not may_merge(a, d)
