# SPDX-License-Identifier: Apache-2.0

import torch_tile.language as T
from torch_tile.ir.node import find
from torch_tile.ir.stmt import For
from torch_tile.tileop.uses import count_uses, reads_of, touched_by, uses, writes_of


@T.prim_func
def kernel(A: T.Tensor((64, 8), "float32"), B: T.Tensor((64, 8), "float32"), I: T.Tensor((8,), "int32")):
    with T.Kernel(1, threads=32):
        s = T.alloc_shared((8, 8), "float32")
        for k in T.serial(8):
            T.copy(A[k * 8, 0], s)
            for i, j in T.Parallel(8, 8):
                B[I[i], j] = s[i, j] + 1.0
        T.atomic_add(B[0, 0], 1.0)


def names(buffers):
    return sorted(b.name for b in buffers)


def test_statements_tell_what_they_read_and_write():
    body = kernel.program.kernels[0].body
    reads, writes = uses(body)
    assert (names(reads), names(writes)) == (["A", "B", "I", "s"], ["B", "s"])
    assert names(touched_by(body)) == ["A", "B", "I", "s"]
    nest = [loop for loop in find(body, For) if len(loop.vars) == 2]
    assert [(names(reads_of(one)), names(writes_of(one))) for one in nest] == [(["I", "s"], ["B"])]


def test_places_are_counted_each():
    body = kernel.program.kernels[0].body
    count = {b.name: count_uses(b, body) for b in touched_by(body)}
    assert count == {"A": 1, "s": 2, "B": 2, "I": 1}
