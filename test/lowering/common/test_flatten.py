# SPDX-License-Identifier: Apache-2.0
import torch_tile.language as T
from torch_tile.ir import dtype as dt
from torch_tile.ir.arith_util import evaluate
from torch_tile.ir.buffer import Buffer
from torch_tile.ir.expr import Var, const
from torch_tile.ir.layout import shared_tile
from torch_tile.ir.stmt import Alloc, Block, Kernel, Program, Store
from torch_tile.lowering.common.flatten import flatten


def test_rows_strides_and_scalars(becomes):
    m, n, s = T.dynamic("m, n, s")

    @T.prim_func
    def before(x: T.Tensor((m, n, 4), "float32"), y: T.StridedTensor((m, n), (s, 2), "float32"),
               z: T.Tensor((), "float32")):  # fmt: skip
        with T.Kernel(m, n) as (i, j):
            tile = T.alloc_shared((3, 5), "float32")
            v = T.alloc_var("int32", 1)
            tile[2, 1] = x[i, j, 3] + z[()]
            x[i, 0, v] = y[i, j] + tile[v, 4]

    got = repr(flatten(before.program))
    assert "x: T.Tensor((m * n * 4,), T.float32)" in got
    assert "z: T.Tensor((1,), T.float32)" in got and "+ z[0]" in got
    assert "tile = T.alloc_shared((15,), T.float32)" in got
    assert "tile[11] = x[i * (n * 4) + j * 4 + 3]" in got
    assert "y[i * s + j * 2] + tile[v * 5 + 4]" in got
    assert "v = T.alloc_var" in got


def test_what_was_taken_apart_is_one_index_again():
    """`row // n` and `row % n` of neighbouring dimensions, where no gap lies between them."""
    n, s = T.dynamic("n, s")

    @T.prim_func
    def before(x: T.Tensor((4, n, 8), "float32"), y: T.StridedTensor((4, n, 8), (s, 8, 1), "float32")):
        with T.Kernel(n, 4) as (i, j):
            row = i * 4 + j
            x[row // n, row % n, 5] = 1.0
            x[row // n, i % n, 5] = 2.0
            x[row % n, row // n, 5] = 3.0
            y[row // n, row % n, 5] = 4.0

    got = [line.strip() for line in repr(flatten(before.program)).splitlines() if "] = " in line]
    assert got == [
        "x[row * 8 + 5] = 1.0",
        "x[row // n * (n * 8) + i % n * 8 + 5] = 2.0",
        "x[row % n * (n * 8) + row // n * 8 + 5] = 3.0",
        "y[row // n * s + row % n * 8 + 5] = 4.0",
    ]


def test_tensor_maps_keep_what_a_flat_buffer_does_not_show(becomes):
    m, s = T.dynamic("m, s")

    @T.prim_func
    def before(x: T.StridedTensor((m, 64), (s, 1), "float16")):
        with T.Kernel(1, threads=32) as _:
            thread = T.thread_index()
            ready = T.alloc_barrier(1, (2, 2))
            tile = T.alloc_shared((8, 64), "float16")
            if thread == 0:
                T.evaluate(T.call(
                    "tma_load", T.address_of(tile[0, 0]), T.tensor_map(x, (m, 64), (s, 1), box=(8, 64), swizzle=128),
                    T.address_of(ready[1, 1]), thread, 0, options=("",),
                ))  # fmt: skip

    got = repr(flatten(before.program))
    assert "x: T.Tensor((m * 64,), T.float16)" in got and "T.alloc_barrier(1, (4,))" in got
    assert "T.tensor_map(x, (m, 64), (s, 1), box=(8, 64), swizzle=128), T.address_of(ready[3])" in got


def test_addresses(becomes):
    @T.prim_func
    def before(x: T.Tensor((4, 8), "float32")):
        with T.Kernel(1) as _:
            T.evaluate(T.call("atomic", T.address_of(x[2, 3]), x[1, 0], options=("add",)))

    assert "T.address_of(x[19]), x[8]" in repr(flatten(before.program))


def test_outputs_and_workspaces():
    @T.prim_func
    def kernel(x: T.Tensor((4,), "float32")):
        out = T.empty((2, 3), "float32")
        scratch = T.alloc_global((3, 2), "float32")
        with T.Kernel(1) as _:
            scratch[1, 1] = x[0]
            out[1, 2] = scratch[1, 1]
        return out

    flat = flatten(kernel.program)
    assert [b.static_shape for b in (*flat.outputs, *flat.workspaces)] == [(6,), (6,)]
    assert flat.params[0] is kernel.program.params[0]
    assert flat.outputs[0] is flat.kernels[0].body.stmts[1].buffer


def test_nothing_to_do(keeps):
    n = T.dynamic("n")

    @T.prim_func
    def kernel(x: T.Tensor((n,), "float32"), k: T.int32):
        with T.Kernel(n) as b:
            tile = T.alloc_shared((4,), "float32")
            v = T.alloc_var("int32", k)
            tile[v] = x[b + 0 * k]
            x[b] = tile[k]

    keeps(flatten, kernel)


def test_layouts_of_shared_memory():
    """A swizzled tile becomes one dimension, holes included, at its place; its elements lie where the layout says."""
    layout = shared_tile((2, 8, 64), 16)
    tile = Buffer(
        "tile", tuple(const(n, dt.int32) for n in (2, 8, 64)), dt.float16, "shared", layout=layout, offset=512
    )
    t = Var("t", dt.int32, "thread")
    body = Block((Alloc(tile), Store(tile, (const(1, dt.int32), t // 8, t % 8 * 8), const(0, dt.float16))))
    kernel = Kernel((const(1, dt.int32),), (Var("b", dt.int32, "block"),), (64,), body, thread=t)
    alloc, store = flatten(Program("demo", (), (kernel,), (), ())).kernels[0].body.stmts
    assert alloc.buffer is store.buffer and store.buffer.static_shape == (layout.extent("m"),)
    assert (store.buffer.offset, store.buffer.layout, store.buffer.strides) == (512, None, None)
    for thread in range(64):
        assert evaluate(store.indices[0], {t: thread}) == layout.apply((1, thread // 8, thread % 8 * 8))["m"]
