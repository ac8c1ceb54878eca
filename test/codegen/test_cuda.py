# SPDX-License-Identifier: Apache-2.0
"""The CUDA C++ of whole kernels: signatures, indices, order; all of it compiles for every chip without spills.

EXPECTTEST_ACCEPT=1 writes the text of a test anew. Run one test at a time then.
"""

import math
from dataclasses import replace

import pytest
from expecttest import assert_expected_inline
from flat_kernels import (
    SERIAL,
    at,
    body,
    bx,
    by,
    compiles,
    emitted,
    kernel,
    load,
    loop,
    number,
    program,
    put,
    t,
    tensor,
)

from torch_tile.codegen.cuda import LARGEST_SIZE, most_blocks
from torch_tile.compiler.sources import MapArg
from torch_tile.diagnostics.errors import Span, TileError
from torch_tile.intrinsics import bulk, memory, wgmma
from torch_tile.ir import dtype as dt
from torch_tile.ir.bounds import Interval
from torch_tile.ir.buffer import TensorMap
from torch_tile.ir.expr import Call, Expr, Var, cast
from torch_tile.ir.node import equal
from torch_tile.ir.stmt import Alloc, Block, If, Let, Store

SPAN = Span("kernels/attention/forward.py", 41, 41, 1, 2)


def test_vectors_guard_and_signature():
    n = Var("n", dt.int32, "dim", 8)
    x, y = tensor("x", (n,), "float16"), tensor("y", (n,), "float16")
    r = tensor("r", (8,), "float16", "local")
    start = bx * 1024 + t * 8
    inside = If(start < n, Block((memory.vector_copy(at(r, 0), at(x, start), 16),)), Block(()))
    source = program(
        [x, y],
        kernel(
            Alloc(r),
            inside,
            memory.vector_copy(
                at(y, start),
                at(r, 0),
                16,
            ),
            grid=((n + 1023) // 1024,),
        ),
    )
    made = emitted(source)
    assert_expected_inline(made.text, """\
// demo for cuda:sm_90a
#include "cuda_types.h"
#include "cuda_math.h"
#include "memory.h"

extern "C" __global__ void __launch_bounds__(128, 1)
demo_kernel(const tile::f16* __restrict__ x, tile::f16* y, const int n) {
  const int t = threadIdx.x;
  const int bx = blockIdx.x;
  alignas(16) tile::f16 r[8];
  if (bx * 1024 + t * 8 < n) {
    tile::vector_copy<16>(r, x + bx * 1024 + t * 8);
  }
  tile::vector_copy<16>(y + bx * 1024 + t * 8, r);
}
""")  # fmt: skip
    (entry,) = made.entries
    assert (entry.name, entry.args, entry.kinds, entry.threads) == ("demo_kernel", (0, 1, n), "PPi", 128)
    assert made.alignment == (16, 16)
    compiles(source)


def test_small_floats_and_scalars():
    x, scale = tensor("x", (128,), "float16"), Var("scale", dt.float16, "param")
    flag, eps = Var("flag", dt.bool_, "param"), Var("eps", dt.float64, "param")
    v = tensor("v", (), "float16", "var")
    source = program([x, scale, flag, eps], kernel(
        Alloc(v, load(x, t) * scale),
        If(flag, Block((put(v, load(v) + number(0.1, dt.float16)),)), Block(())),
        put(x, t, load(v) * load(v) + load(x, t)),
        put(x, 0, cast(eps, "float16")),
    ))  # fmt: skip
    assert_expected_inline(body(source), """\
extern "C" __global__ void __launch_bounds__(128, 1)
demo_kernel(tile::f16* x, const tile::f16 scale_bits, const bool flag, const double eps) {
  const float scale = tile::widen(scale_bits);
  const int t = threadIdx.x;
  tile::f16 v = tile::narrow<tile::f16>(tile::widen(x[t]) * scale);
  if (flag) {
    v = tile::narrow<tile::f16>(tile::widen(v) + 0.0999755859375f);
  }
  x[t] = tile::narrow<tile::f16>(tile::rounded<tile::f16>(tile::widen(v) * tile::widen(v)) + tile::widen(x[t]));
  x[0] = tile::narrow<tile::f16>(eps);
}
""")  # fmt: skip
    assert emitted(source).entries[0].kinds == "PH?d"
    compiles(source)


def test_large_tensors_and_strides():
    m, n, s = (Var(name, dt.int32, "dim") for name in "mns")
    x = tensor("x", (m, n), "float32", strides=(s, number(1)))
    y, z = tensor("y", (m, n), "float32"), tensor("z", (70000, 40000), "float32")
    row = bx * 128 + t

    def add(k):
        return put(y, row, k, load(x, row, k) + load(z, row, k))

    source = program([x, y, z], kernel(
        If(row < m, Block((loop(n, add, SERIAL, "k"),)), Block(())),
        grid=((m + 127) // 128,),
    ))  # fmt: skip
    assert_expected_inline(body(source), """\
extern "C" __global__ void __launch_bounds__(128, 1)
demo_kernel(const float* __restrict__ x, float* y, const float* __restrict__ z, const int m, const int n, const int64_t s) {
  const int t = threadIdx.x;
  const int bx = blockIdx.x;
  if (bx * 128 + t < m) {
    for (int k = 0; k < n; ++k) {
      y[(int64_t)(bx * 128 + t) * n + k] = x[(bx * 128 + t) * s + k] + z[(int64_t)bx * 5120000 + t * 40000 + k];
    }
  }
}
""")  # fmt: skip  # noqa: E501
    (entry,) = emitted(source).entries
    assert entry.kinds == "PPPiiq"
    compiles(source)


def test_several_kernels():
    x, w, out = tensor("x", (128,), "float32"), tensor("w", (128,), "float32"), tensor("out", (128,), "float32")
    u = Var("t", dt.int32, "thread")
    first = kernel(put(w, t, load(x, t)), blocks=(by,))
    second = kernel(put(out, u, load(w, u) + load(x, u)), thread=u)
    source = program([x], first, second, workspaces=[w], outputs=[out])
    assert_expected_inline(body(source), """\
extern "C" __global__ void __launch_bounds__(128, 1)
demo_kernel_0(const float* __restrict__ x, float* w) {
  const int t = threadIdx.x;
  w[t] = x[t];
}

extern "C" __global__ void __launch_bounds__(128, 1)
demo_kernel_1(const float* __restrict__ x, float* out, const float* __restrict__ w) {
  const int t = threadIdx.x;
  out[t] = w[t] + x[t];
}
""")  # fmt: skip
    assert [e.args for e in emitted(source).entries] == [(0, 2), (0, 1, 2)]
    assert emitted(source).disjoint == ((0, 1), (0, 2), (2, 1))  # read by one of the kernels, and written by it
    compiles(source)


def test_swizzled_blocks():
    x, bz = tensor("x", (4, 8, 16), "int32"), Var("bz", dt.int32, "block")
    blocks = {"grid": (16, 8, 4), "blocks": (bx, by, bz)}
    rows = program([x], kernel(put(x, bz, by, bx, t), swizzle=(10, "row"), **blocks))
    assert_expected_inline(body(rows), """\
extern "C" __global__ void __launch_bounds__(128, 1)
demo_kernel(int32_t* x) {
  const int t = threadIdx.x;
  const tile::BlockIndex block_index = tile::swizzled_rows<10>();
  const int bx = block_index.x, by = block_index.y;
  const int bz = blockIdx.z;
  x[bz * 128 + by * 16 + bx] = t;
}
""")  # fmt: skip
    columns = program([x], kernel(put(x, bz, by, bx, t), swizzle=(3, "column"), **blocks))
    assert "tile::swizzled_columns<3>()" in body(columns)
    plane = tensor("x", (8, 16), "int32")
    flat = program([plane], kernel(put(plane, by, bx, t), swizzle=(10, "row"), grid=(16, 8), blocks=(bx, by)))
    assert "tile::swizzled_rows<10>();\n  const int bx = block_index.x, by = block_index.y;\n  x[" in body(flat)
    compiles(rows)
    compiles(columns)
    compiles(flat)


def test_math():
    x, y = tensor("x", (128,), "float32"), Var("y", dt.float32)
    source = program([x], kernel(
        Let(y, Call("exp2", (load(x, t),), dt.float32)),
        put(x, t, Call("maximum", (Call("tanh", (y,), dt.float32), number(-math.inf, dt.float32)), dt.float32)),
    ))  # fmt: skip
    assert_expected_inline(body(source), """\
extern "C" __global__ void __launch_bounds__(128, 1)
demo_kernel(float* x) {
  const int t = threadIdx.x;
  const float y = tile::exp2(x[t]);
  x[t] = tile::maximum(tile::tanh(y), -tile::infinity());
}
""")  # fmt: skip
    fast = emitted(source, fast_math=True).text
    assert "#define TILE_FAST_MATH\n#include" in fast and "TILE_FAST_MATH" not in emitted(source).text
    compiles(source)
    compiles(source, fast_math=True)


def test_lines_of_the_author():
    x = tensor("x", (128,), "float32")
    source = program([x], kernel(Store(x, (t,), number(1.0, dt.float32), span=SPAN), span=SPAN))
    assert "demo_kernel(float* x) {  // forward.py:41\n" in body(source)
    assert "  x[t] = 1.0f;  // forward.py:41\n" in body(source)


def box(m, of, rows=64, swizzle=128, strides=None):
    """What the tensor memory accelerator is told of an m x 64 tensor of 16-bit floats."""
    return TensorMap(of, (m, number(64)), strides or (number(64), number(1)), (rows, 64), swizzle)


def brought(*maps):
    """One thread brings a box by each map."""
    tile = tensor("tile", (64, 64), "float16", "shared", offset=0)
    ready = tensor("ready", (1,), "uint64", "barrier", offset=8192, arrivals=1)
    loads = [bulk.tma_load(at(tile, 0, 0), each, (t, number(0)), at(ready, 0)) for each in maps]
    return Alloc(tile), Alloc(ready), If(t == 0, Block(tuple(loads)), Block(()))


def test_tensor_maps():
    """Equal ones are one parameter, after the pointers; only what is also read otherwise has a pointer."""
    m, s, n = Var("m", dt.int32, "dim"), Var("s", dt.int32, "dim"), Var("n", dt.int32, "dim")
    x, y = tensor("x", (m, 64), "float16"), tensor("y", (n, 64), "float16", strides=(s, number(1)))
    out = tensor("out", (128,), "float16")
    across = box(n, y, 32, 128, (s, number(1)))
    source = program([x, out, y], kernel(
        *brought(box(m, x), across, box(m, x), box(m, x, swizzle=0)), put(out, t, load(y, t, 0)), shared_bytes=8200,
    ))  # fmt: skip
    text = body(source)
    assert (
        "demo_kernel(tile::f16* out, const tile::f16* __restrict__ y, "
        "const __grid_constant__ tile::TensorMap x_map, const __grid_constant__ tile::TensorMap y_map, "
        "const __grid_constant__ tile::TensorMap x_map_1, const int64_t s) {"
    ) in text
    assert [line.strip() for line in text.splitlines() if "tma_load" in line] == [
        f"tile::tma_load(tile_1, &{name}, ready, t, 0);" for name in ("x_map", "y_map", "x_map", "x_map_1")
    ]
    made = emitted(source)
    (entry,) = made.entries
    assert entry.kinds == "PPMMMq" and made.alignment == (16, 2, 16)
    first = MapArg(0, (m, number(64)), (number(64), number(1)), (64, 64), 128, "float16", 2)
    assert all(equal_or_same(a, b) for a, b in zip(entry.args[2], first, strict=True))
    assert entry.args[3].position == 2 and entry.args[3].sizes[0] is n and entry.args[3].strides[0] is s
    assert entry.args[:2] == (1, 2) and entry.args[4].swizzle == 0 and entry.args[5] is s
    compiles(source, ("sm_90a",))


def equal_or_same(a, b):
    return all(map(equal, a, b)) if isinstance(a, tuple) and isinstance(a[0], Expr) else a == b


def test_a_tensor_that_bulk_copies_write_is_not_constant():
    x, tile = tensor("x", (128, 64), "float16"), tensor("tile", (64, 64), "float16", "shared", offset=0)
    stores = bulk.tma_store(box(number(128), x), at(tile, 0, 0), (number(0), number(0))), bulk.bulk_commit()
    source = program([x], kernel(Alloc(tile), put(tile, t, 0, load(x, t, 0)), *stores, shared_bytes=8192))
    assert "demo_kernel(tile::f16* x, const __grid" in body(source)
    compiles(source, ("sm_90a",))


def test_memory_that_threads_write_is_not_restricted():
    """Accesses could move across a barrier or an arrival; results of bulk stores included."""
    x, y, z = (tensor(name, (128,), "float32") for name in "xyz")
    counter = tensor("counter", (4,), "int32")
    w, tile = tensor("w", (4, 64), "float16"), tensor("tile", (4, 64), "float16", "shared", offset=0)
    map_ = TensorMap(w, w.shape, (number(64), number(1)), (4, 64), 128)
    stored = bulk.tma_store(map_, at(tile, 0, 0), (number(0), number(0)))
    arrival = put(counter, 3, memory.arrive_last(at(counter, 0), 4))

    def signature(*stmts):
        made = kernel(Alloc(tile), put(y, t, load(x, t)), stored, *stmts, shared_bytes=512)
        lines = body(program([x, y, z, w, counter], made)).splitlines()
        return next(line for line in lines if line.startswith("demo_kernel"))

    reads = put(z, t, cast(load(w, 0, t), dt.float32))
    plain, joined = signature(reads), signature(reads, arrival)
    for name, kind in (("x", "const float"), ("y", "float"), ("z", "float"), ("w", "tile::f16")):
        for text in (plain, joined):
            assert f"{kind}* {'__restrict__ ' if name == 'x' else ''}{name}" in text


def test_early_starts():
    x = tensor("x", (128,), "float32")
    source = program([x], kernel(bulk.grid_launch(), bulk.grid_wait(), put(x, t, 1.0)))
    assert emitted(source).entries[0].early
    assert not emitted(program([x], kernel(bulk.grid_launch(), put(x, t, 1.0)))).entries[0].early


@pytest.mark.parametrize(
    ("statement", "chips", "fix"),
    [(wgmma.wgmma_fence(), (80, 89, 100, 120), "sm_90a"), (bulk.fence_proxy_async(), (80, 89), "sm_90 or later")],
)
def test_instructions_that_a_chip_does_not_have(statement, chips, fix):
    """Even a later one may have lost them."""
    node = replace(statement, call=replace(statement.call, span=SPAN))
    source = program([], kernel(node))
    emitted(source, 90)
    for chip in chips:
        with pytest.raises(TileError) as caught:
            emitted(source, chip)
        assert caught.value.code == "unsupported_on_target" and caught.value.span is SPAN
        assert f"`{statement.call.name}` is not supported on target cuda:sm_{chip}" in str(caught.value)
        assert f"compile for {fix}" in str(caught.value)


def test_largest_size_leaves_room_for_whole_tiles():
    assert Interval(0, LARGEST_SIZE + 2**16 - 1).within(Interval(0, 2**31 - 1))


def test_blocks_of_a_grid_that_may_be_folded():
    """They all lie in x, so that indices of blocks side by side, in numbers of a row, fit in 32 bits."""
    n, bz = Var("n", dt.int32, "dim"), Var("bz", dt.int32, "block")
    many = kernel(grid=(8, n, n * n), blocks=(bx, by, bz))
    assert [most_blocks(many, axis) for axis in range(3)] == [2**31 - 1, 2**28 - 1, 2**28 - 1]
    assert most_blocks(kernel(grid=(2**20, n), blocks=(bx, by)), 1) == 65535
    assert most_blocks(kernel(grid=(n, 7), blocks=(bx, by)), 1) == 65535
    x = tensor("x", (n,), "int32")
    source = program([x], kernel(put(x, (bz * 8 + bx) // n, 0), grid=(8, n, n * n), blocks=(bx, by, bz)))
    assert "x[(bz * 8 + bx) / n] = 0;" in body(source)
