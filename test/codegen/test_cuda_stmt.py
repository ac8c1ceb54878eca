# SPDX-License-Identifier: Apache-2.0
"""Statements of small kernels as CUDA C++, one feature each; all of it compiles for every chip without spills.

EXPECTTEST_ACCEPT=1 writes the text of a test anew. Run one test at a time then.
"""

from dataclasses import replace

import pytest
from expecttest import assert_expected_inline
from flat_kernels import SERIAL, at, body, bx, compiles, emitted, kernel, load, loop, number, program, put, t, tensor

from torch_tile.codegen.cuda_stmt import condition, registers_call
from torch_tile.diagnostics.errors import Span
from torch_tile.hardware import registers_at_start
from torch_tile.intrinsics import bulk, matrix, memory, wgmma
from torch_tile.intrinsics.base import call
from torch_tile.ir import dtype as dt
from torch_tile.ir.bits import reinterpret
from torch_tile.ir.buffer import Buffer, TensorMap
from torch_tile.ir.expr import Var, binary, cast, const, select
from torch_tile.ir.layout import shared_tile
from torch_tile.ir.stmt import Alloc, Assert, Block, Break, Continue, Do, If, Let, Print, Role, While
from torch_tile.lowering.hopper.init_mbarriers import init_mbarriers

SPAN = Span("kernels/attention/forward.py", 41, 41, 1, 2)


def test_control_flow():
    x, k = tensor("x", (64,), "int32"), Var("k", dt.int32, "param")
    v, name = tensor("v", (), "int32", "var"), Var("name", dt.int32)
    source = program([x, k], kernel(
        Alloc(v, number(3)),
        While(load(v) < k, Block((
            put(v, load(v) + 1),
            If(load(x, t % 64) == 0, Block((Continue(),)), Block((If(load(v) > 9, Block((Break(),)), Block(())),))),
        ))),
        loop(k, lambda i: (Let(name, i * 2 + t), put(x, t % 64, name)), SERIAL, start=4, step=3),
    ))  # fmt: skip
    assert_expected_inline(body(source), """\
extern "C" __global__ void __launch_bounds__(128, 1)
demo_kernel(int32_t* x, const int32_t k) {
  const int t = threadIdx.x;
  int32_t v = 3;
  while (v < k) {
    v = tile::wrapping_add<int>(v, 1);
    if (x[t % 64] == 0) {
      continue;
    } else {
      if (v > 9) {
        break;
      }
    }
  }
  for (int i = 4; i < k; i = (uint32_t)(k) - (uint32_t)i > 3u ? i + 3 : k) {
    const int64_t name = (int64_t)i * 2 + t;
    x[t % 64] = (int)name;
  }
}
""")  # fmt: skip
    compiles(source)


def test_shared_memory_swizzled():
    tile = tensor("tile", (16, 64), "float16", "shared", layout=shared_tile((16, 64), 16), offset=2048)
    x, r = tensor("x", (16, 64), "float16"), tensor("r", (8,), "float16", "local")
    source = program([x], kernel(
        Alloc(tile), Alloc(r),
        memory.vector_copy(at(r, 0), at(x, t // 8, t % 8 * 8), 16),
        memory.vector_copy(at(tile, t // 8, t % 8 * 8), at(r, 0), 16),
        memory.barrier(),
        put(x, t // 8, t % 8, load(tile, t % 8, t // 8)),
        shared_bytes=4096,
    ))  # fmt: skip
    assert_expected_inline(body(source), """\
extern "C" __global__ void __launch_bounds__(128, 1)
demo_kernel(tile::f16* x) {
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  const int t = threadIdx.x;
  tile::f16* const tile_1 = reinterpret_cast<tile::f16*>(shared_memory + 2048);
  alignas(16) tile::f16 r[8];
  tile::vector_copy<16>(r, x + t / 8 * 64 + t % 8 * 8);
  tile::vector_copy<16>(tile_1 + (t % 8 ^ t / 8 % 8) * 8 + t / 8 * 64, r);
  tile::barrier();
  x[t / 8 * 64 + t % 8] = tile_1[(t / 64 ^ t % 8) * 8 + t / 8 % 8 + t % 8 * 64];
}
""")  # fmt: skip
    assert emitted(source).entries[0].shared_bytes == 4096
    compiles(source)


def test_asynchronous_copies():
    m = Var("m", dt.int32, "dim")
    tile, x = tensor("tile", (2, 16, 64), "float16", "shared", offset=0), tensor("x", (m, 64), "float16")
    y = tensor("y", (16, 64), "float16")

    def step(k):
        valid = select(k * 16 + t // 8 < m, 16, 0)
        return (
            memory.cp_async(at(tile, k % 2, t // 8, t % 8 * 8), at(x, k * 16 + t // 8, t % 8 * 8), valid, 16),
            memory.cp_async_commit(), memory.cp_async_wait(1), memory.barrier(),
            put(y, t // 8, t % 8, load(tile, (k + 1) % 2, t // 8, t % 8)),
        )  # fmt: skip

    source = program([x, y], kernel(Alloc(tile), loop((m + 15) // 16, step, SERIAL, "k"), shared_bytes=4096))
    assert_expected_inline(body(source), """\
extern "C" __global__ void __launch_bounds__(128, 1)
demo_kernel(const tile::f16* __restrict__ x, tile::f16* y, const int m) {
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  const int t = threadIdx.x;
  tile::f16* const tile_1 = reinterpret_cast<tile::f16*>(shared_memory + 0);
  for (int k = 0; k < (m + 15) / 16; ++k) {
    tile::cp_async<16>(tile_1 + k % 2 * 1024 + t / 8 * 64 + t % 8 * 8, x + (int64_t)k * 1024 + t / 8 * 64 + t % 8 * 8, k * 16 + t / 8 < m ? 16 : 0);
    tile::cp_async_commit();
    tile::cp_async_wait<1>();
    tile::barrier();
    y[t / 8 * 64 + t % 8] = tile_1[(k + 1) % 2 * 1024 + t / 8 * 64 + t % 8];
  }
}
""")  # fmt: skip  # noqa: E501
    compiles(source)


def test_tensor_cores():
    shared, out = tensor("shared", (16, 16), "bfloat16", "shared", offset=0), tensor("out", (16, 8), "float32")
    a, b = tensor("a", (8,), "bfloat16", "local"), tensor("b", (4,), "bfloat16", "local")
    d = tensor("d", (4,), "float32", "local")
    source = program([out], kernel(
        Alloc(shared), Alloc(a), Alloc(b), Alloc(d),
        loop(4, lambda i: put(d, i, 0.0)),
        matrix.ldmatrix(at(a, 0), at(shared, t % 16, t // 16 * 8), 4),
        matrix.ldmatrix(at(b, 0), at(shared, t % 16, 0), 2, True),
        matrix.mma(at(d, 0), at(a, 0), at(b, 0), "m16n8k16", ("bfloat16", "bfloat16", "float32")),
        loop(4, lambda i: put(out, t // 4 + i // 2 * 8, t % 4 * 2 + i % 2, load(d, i))),
        threads=32, shared_bytes=512,
    ))  # fmt: skip
    assert_expected_inline(body(source), """\
extern "C" __global__ void __launch_bounds__(32, 1)
demo_kernel(float* out) {
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  const int t = threadIdx.x;
  tile::bf16* const shared = reinterpret_cast<tile::bf16*>(shared_memory + 0);
  alignas(16) tile::bf16 a[8];
  alignas(16) tile::bf16 b[4];
  alignas(16) float d[4];
  #pragma unroll
  for (int i = 0; i < 4; ++i) {
    d[i] = 0.0f;
  }
  tile::ldmatrix_x4(a, shared + t % 16 * 16 + t / 16 * 8);
  tile::ldmatrix_x2_trans(b, shared + t % 16 * 16);
  tile::mma_m16n8k16(d, a, b);
  #pragma unroll
  for (int i = 0; i < 4; ++i) {
    out[t / 4 * 8 + i / 2 * 64 + (t % 4 * 2 + i % 2)] = d[i];
  }
}
""")  # fmt: skip
    compiles(source)


def test_neighbours_are_narrowed_together():
    x, y = tensor("x", (128, 8), "float32"), tensor("y", (128, 8), "float8_e4m3fn")
    r, h, e = (
        tensor("r", (8,), "float32", "local"),
        tensor("h", (8,), "bfloat16", "local"),
        tensor("e", (8,), "float8_e4m3fn", "local"),
    )
    source = program([x, y], kernel(
        Alloc(r), Alloc(h), Alloc(e),
        loop(2, lambda i: memory.vector_copy(at(r, i * 4), at(x, t, i * 4), 16)),
        loop(8, lambda i: put(h, i, cast(load(r, i) * 2, "bfloat16"))),
        loop(2, lambda j: loop(4, lambda i: put(e, j * 4 + i, cast(load(h, j * 4 + i), "float8_e4m3fn"))), name="j"),
        loop(7, lambda i: put(h, i, cast(load(r, i), "bfloat16"))),  # an odd number
        loop(4, lambda i: put(h, i * 2, cast(load(r, i), "bfloat16"))),  # not neighbours
        memory.vector_copy(at(y, t, 0), at(e, 0), 8),
        put(y, t, 1, cast(load(h, 3), "float8_e4m3fn")),
    ))  # fmt: skip
    assert_expected_inline(body(source), """\
extern "C" __global__ void __launch_bounds__(128, 1)
demo_kernel(const float* __restrict__ x, tile::e4m3* y) {
  const int t = threadIdx.x;
  alignas(16) float r[8];
  alignas(16) tile::bf16 h[8];
  alignas(16) tile::e4m3 e[8];
  #pragma unroll
  for (int i = 0; i < 2; ++i) {
    tile::vector_copy<16>(r + i * 4, x + t * 8 + i * 4);
  }
  #pragma unroll
  for (int i = 0; i < 8; i += 2) {
    tile::narrow_pair(&h[i], r[i] * 2.0f, r[i + 1] * 2.0f);
  }
  #pragma unroll
  for (int j = 0; j < 2; ++j) {
    #pragma unroll
    for (int i = 0; i < 4; i += 2) {
      tile::narrow_pair(&e[j * 4 + i], tile::widen(h, j * 4 + i), tile::widen(h, j * 4 + (i + 1)));
    }
  }
  #pragma unroll
  for (int i = 0; i < 7; ++i) {
    h[i] = tile::narrow<tile::bf16>(r[i]);
  }
  #pragma unroll
  for (int i = 0; i < 4; ++i) {
    h[i * 2] = tile::narrow<tile::bf16>(r[i]);
  }
  tile::vector_copy<8>(y + t * 8, e);
  y[t * 8 + 1] = tile::narrow<tile::e4m3>(tile::widen(h, 3));
}
""")  # fmt: skip
    compiles(source)


def test_float8_numbers_are_stored_by_four_codes():
    x, y, e, r, h = (
        tensor("x", (128, 8), "float32"), tensor("y", (128, 8), "float8_e4m3fn"),
        tensor("e", (8,), "float8_e4m3fn", "local"), tensor("r", (8,), "float32", "local"),
        tensor("h", (8,), "float16", "local"),
    )  # fmt: skip

    def code(i):
        return cast(call("float8_of_code", cast(load(h, i), "float32")), "float8_e4m3fn")

    def half(value):
        return cast(call("positive_half", value), "float16")

    source = program([x, y], kernel(
        Alloc(r), Alloc(h), Alloc(e),
        memory.vector_copy(at(r, 0), at(x, t, 0), 16), memory.vector_copy(at(r, 4), at(x, t, 4), 16),
        loop(8, lambda i: put(h, i, half(load(r, i)))),
        loop(8, lambda i: put(e, i, code(i // 2 % 2 * 4 + i % 2))),
        loop(2, lambda j: loop(4, lambda i: put(e, j * 4 + i, code(6 - j * 2 + i % 2)))),
        loop(4, lambda i: put(e, i, code(7 - i))),  # no pairs
        loop(4, lambda i: put(e, i, code(i + 1))),  # pairs at odd places
        loop(6, lambda i: put(e, i, code(i))),  # not by four
        loop(4, lambda i: put(e, i + 2, code(i))),  # not a whole word
        loop(4, lambda i: put(e, i * 2, code(i))),  # no neighbours
        memory.vector_copy(at(y, t, 0), at(e, 0), 8),
    ))  # fmt: skip
    lines = [line.strip() for line in body(source).splitlines() if "float8_of_code" in line or "store_codes" in line]
    assert [line.startswith("tile::store_codes(&e[") for line in lines] == [True, True, *[False] * 5]
    assert lines[1].split(", ", 1)[1].count("&h[") == 2
    assert body(source).count("tile::narrow_positive_pair(&h[i], r[i], r[i + 1]);") == 1
    compiles(source)


def test_pairs_of_float8_become_float16_at_once():
    e, h, b, odd = (
        tensor(name, (size,), kind, "local")
        for name, size, kind in (
            ("e", 8, "float8_e4m3fn"),
            ("h", 8, "float16"),
            ("b", 8, "bfloat16"),
            ("odd", 6, "float8_e4m3fn"),
        )
    )
    y = tensor("y", (128, 8), "float16")
    source = program([y], kernel(
        Alloc(e), Alloc(h), Alloc(b), Alloc(odd),
        loop(8, lambda i: put(h, i, cast(load(e, i), "float16"))),
        loop(4, lambda i: put(h, i, cast(load(e, i // 2 % 2 + i % 2 * 2), "float16"))),
        loop(8, lambda i: put(b, i, cast(load(e, i), "bfloat16"))),
        loop(6, lambda i: put(h, i, cast(load(odd, i), "float16"))),  # no whole words
        memory.vector_copy(at(y, t, 0), at(h, 0), 16),
    ))  # fmt: skip
    lines = [line.strip() for line in body(source).splitlines() if "pair" in line]
    assert lines == [
        "tile::widen_pair(&h[i], e, i, i + 1);",
        "tile::widen_pair(&h[i], e, i / 2 % 2 + i % 2 * 2, (i + 1) / 2 % 2 + (i + 1) % 2 * 2);",
        "tile::narrow_pair(&b[i], tile::widen(e, i), tile::widen(e, i + 1));",
        "tile::narrow_pair(&h[i], tile::widen(odd, i), tile::widen(odd, i + 1));",
    ]


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_operations_on_neighbours_are_one_instruction(kind):
    a, b, c = (tensor(name, (8,), kind, "local") for name in "abc")
    wide, y = tensor("wide", (8,), "float32", "local"), tensor("y", (128, 8), kind)
    values = [
        lambda i: load(a, i) * load(b, i),
        lambda i: load(a, i) * load(b, 7 - i) + load(c, i),  # the other way round; in place
        lambda i: load(b, i // 2) - load(a, i),  # one for both
        lambda i: cast(load(wide, i), kind) * const(2.0, c.dtype),
        lambda i: load(a, i) * load(wide, i),  # a product of floats
        lambda i: load(a, i) / load(b, i),
        lambda i: load(c, i ^ 1) + load(a, i),  # overwrites what the next value reads
        lambda i: cast(load(a, i), "float32") + cast(load(b, i), "float32"),  # a sum of floats
    ]
    source = program([y], kernel(
        Alloc(a), Alloc(b), Alloc(c), Alloc(wide),
        *(loop(8, lambda i, value=value: put(c, i, cast(value(i), kind))) for value in values),
        memory.vector_copy(at(y, t, 0), at(c, 0), 16),
    ))  # fmt: skip
    lines = [line.strip().replace("tile::", "") for line in body(source).splitlines() if "c[i]" in line]
    short = {"float16": "f16", "bfloat16": "bf16"}[kind]
    assert_expected_inline("\n".join(lines[:4]).replace(f"<{short}>", "") + "\n", """\
store_pair(&c[i], pair_product(pair_at(&a[i]), pair_at(&b[i])));
store_pair(&c[i], pair_sum(pair_product(pair_at(&a[i]), pair_of(b[7 - i], b[7 - (i + 1)])), pair_at(&c[i])));
store_pair(&c[i], pair_difference(pair_of(b[i / 2], b[(i + 1) / 2]), pair_at(&a[i])));
store_pair(&c[i], pair_product(pair_narrowed(wide[i], wide[i + 1]), 0x40004000u));
""")  # fmt: skip
    starts = ("narrow_pair", "narrow_pair", "c[i] = narrow", "narrow_pair")
    assert len(lines) == 8 and all(line.startswith(start) for line, start in zip(lines[4:], starts, strict=True))
    compiles(source)


def test_neighbouring_fields_are_widened_together():
    x, y = tensor("x", (128, 4), "int32"), tensor("y", (128, 8), "float16")
    words, factor, out = (
        tensor(name, (count,), kind, "local")
        for name, count, kind in (("words", 4, "int32"), ("factor", 2, "float16"), ("out", 8, "float16"))
    )

    def field(i, upper=None, less=8.0, word=None, byte=None):
        taken = load(words, 0) if word is None else word
        return call("nibble", taken, t % 4 if byte is None else byte, i % 2 if upper is None else upper) - less

    def looked_up(i):
        bits = [reinterpret(const(float(n), dt.float32), dt.int32) for n in range(16)]
        return call("table_nibble", load(words, 0), t % 4, i % 2, *bits)

    table = tensor("table", (256 * 64,), "float16", "shared", offset=0)

    def entry(i, part=None):
        return load(table, call("table_place", load(words, 0), t % 4, t % 32, i % 2 if part is None else part))

    def narrowed(value):
        return cast(value, "float16")

    scale, zero = (cast(load(factor, n), "float32") for n in range(2))
    rounded = [
        lambda i: field(i),
        lambda i: field(i, word=binary("^", load(words, 0), -0x77777778)),  # signs turned over
        lambda i: field(i, word=binary("^", load(words, 0), 0x08080888)),  # not alike in all bytes
        lambda i: field(i, word=binary("^", load(words, 0), -0x77777778), byte=number(2)),  # of all bytes of the word
        lambda i: field(i, 1 - i % 2, 56.0) * scale,
        lambda i: cast(narrowed(field(i, less=0.0) - zero), "float32") * scale,
        lambda i: cast(narrowed(looked_up(i)), "float32") * cast(load(factor, 0), "float32"),
        lambda i: looked_up(i),
        lambda i: entry(i),
        lambda i: cast(entry(i), "float32") * scale,
        lambda i: call(
            "fma", cast(entry(i), "float32"), zero, cast(narrowed(cast(entry(i), "float32") * scale), "float32")
        ),
        lambda i: call("fma", cast(entry(i), "float32"), zero, zero),  # not a pair, but the same number twice
        lambda i: entry(i, 1 - i % 2),  # not in the order of the table
        lambda i: (field(i) - zero) * scale,  # is rounded once only
        lambda i: field(i, 0),  # the same one twice
        lambda i: field(i, less=65.0),  # leaves no room for the field
    ]
    source = program([x, y], kernel(
        Alloc(words), Alloc(factor), Alloc(out), Alloc(table),
        memory.vector_copy(at(words, 0), at(x, t, 0), 16),
        put(factor, 0, cast(0.5, "float16")), put(factor, 1, cast(3.0, "float16")),
        *(loop(2, lambda i, value=value: put(out, i, narrowed(value(i)))) for value in rounded),
        memory.vector_copy(at(y, t, 0), at(out, 0), 16), shared_bytes=2 * 256 * 64,
    ))  # fmt: skip
    lines = [line.split(", ", 1)[1].split(";")[0] for line in body(source).splitlines() if "_pair" in line]
    assert_expected_inline(
        "\n".join(line.replace("tile::", "")[:110] for line in lines) + "\n",
        """\
nibble_pair<f16, 8, false, 0x0, true>(words[0], t % 4))
nibble_pair<f16, 8, false, 0x88, true>(words[0], t % 4))
nibble_pair<f16, 8, false, 0x0, true>(words[0] ^ 134744200, t % 4))
nibble_pair<f16, 8, false, 0x0, false>(words[0] ^ (-2004318072), 2))
pair_times<f16>(nibble_pair<f16, 56, true, 0x0, true>(words[0], t % 4), factor[0]))
pair_times<f16>(pair_less<f16>(nibble_pair<f16, 0, false, 0x0, true>(words[0], t % 4), factor[1]), factor[0]))
pair_times<f16>(table_pair<f16, false, 0x00000000, 0x00000000, 0x80008000, 0x80008000, 0x42403c00, 0x47464544,
table_pair<f16, false, 0x00000000, 0x00000000, 0x80008000, 0x80008000, 0x42403c00, 0x47464544, 0x49494848, 0x4
pair_at(table, words[0], t % 4, t % 32))
pair_times<f16>(pair_at(table, words[0], t % 4, t % 32), factor[0]))
pair_fma<f16>(pair_at(table, words[0], t % 4, t % 32), pair_of(factor[1]), pair_times<f16>(pair_at(table, word
fma(widen(table[table_place(words[0], t % 4, t % 32, i % 2)]), widen(factor, 1), widen(factor, 1)), fma(widen(
widen(table[table_place(words[0], t % 4, t % 32, 1 - i % 2)]), widen(table[table_place(words[0], t % 4, t % 32
(nibble(words[0], t % 4, i % 2) - 8.0f - widen(factor, 1)) * widen(factor, 0), (nibble(words[0], t % 4, (i + 1
nibble(words[0], t % 4, 0) - 8.0f, nibble(words[0], t % 4, 0) - 8.0f)
nibble(words[0], t % 4, i % 2) - 65.0f, nibble(words[0], t % 4, (i + 1) % 2) - 65.0f)
""",
    )
    compiles(source)


def test_fields_in_place_are_masked_together():
    x, y = tensor("x", (128, 4), "int32"), tensor("y", (128, 8), "float16")
    words, out = tensor("words", (4,), "int32", "local"), tensor("out", (8,), "float16", "local")

    def field(i, half=None, place=None, word=None):
        taken = load(words, 0) if word is None else word
        return call("nibble_in_place", taken, t % 4 if place is None else place, i % 2 if half is None else half)

    values = [
        field,
        lambda i: field(i, word=binary("^", load(words, 0), -0x77777778), place=number(2)),  # signs turned over
        lambda i: field(i, 1 - i % 2),  # the upper half first
        lambda i: field(i, place=i % 2),  # two places
        lambda i: field(i, 0),  # the same one twice
    ]
    source = program([x, y], kernel(
        Alloc(words), Alloc(out), memory.vector_copy(at(words, 0), at(x, t, 0), 16),
        *(loop(2, lambda i, value=value: put(out, i, cast(value(i), "float16"))) for value in values),
        memory.vector_copy(at(y, t, 0), at(out, 0), 16),
    ))  # fmt: skip
    lines = [line.split("tile::", 1)[1].split(";")[0] for line in body(source).splitlines() if "&out[i]" in line]
    assert lines[:2] == [
        "store_pair(&out[i], tile::pair_in_place<0x0>(words[0], t % 4))",
        "store_pair(&out[i], tile::pair_in_place<0x88>(words[0], 2))",
    ]
    assert len(lines) == 5 and all(line.startswith("narrow_pair(&out[i], tile::nibble_in_place") for line in lines[2:])
    compiles(source)


def test_messages():
    x = tensor("x", (128,), "float32")
    source = program([x], kernel(
        Assert(load(x, t) >= 0, "x >= 0, 100% \"sure\"", span=SPAN),
        Print("x at 50%", load(x, t), span=SPAN),
        Print("", t * 2, span=SPAN),
    ))  # fmt: skip
    assert_expected_inline(body(source), """\
extern "C" __global__ void __launch_bounds__(128, 1)
demo_kernel(const float* __restrict__ x) {
  const int t = threadIdx.x;
  if (!(x[t] >= 0.0f)) {  // forward.py:41
    printf("%s\\n", "forward.py:41: x >= 0, 100% \\"sure\\"");
    __trap();
  }
  printf("x at 50%%: %g\\n", (double)x[t]);  // forward.py:41
  printf("%lld\\n", (long long)(t * 2));  // forward.py:41
}
""")  # fmt: skip
    compiles(source, stack=8)  # the arguments of printf


def test_atomics():
    x, h, k = tensor("x", (128,), "float32"), tensor("h", (128,), "bfloat16"), tensor("k", (4,), "int32")
    old = Var("old", dt.int32)
    source = program([x, h, k], kernel(
        Do(memory.atomic(at(x, t), number(1.0, dt.float32), "add")),
        Do(memory.atomic(at(h, t), cast(load(x, t), "bfloat16"), "max")),
        Let(old, memory.atomic(at(k, 0), number(1), "add")),
        put(k, 1, old),
    ))  # fmt: skip
    assert_expected_inline(body(source), """\
extern "C" __global__ void __launch_bounds__(128, 1)
demo_kernel(float* x, tile::bf16* h, int32_t* k) {
  const int t = threadIdx.x;
  tile::atomic_add(x + t, 1.0f);
  tile::atomic_max(h + t, tile::narrow<tile::bf16>(x[t]));
  const int old = tile::atomic_add(k, (int32_t)1);
  k[1] = old;
}
""")  # fmt: skip
    compiles(source)


def test_warps():
    x, v, b = tensor("x", (128,), "float32"), tensor("v", (), "float32", "var"), tensor("b", (4,), "uint32")
    source = program([x, b], kernel(
        Alloc(v, load(x, t)),
        loop(5, lambda i: put(v, load(v) + memory.shuffle_xor(load(v), binary(">>", number(16), i)))),
        put(b, t // 32, memory.ballot(load(v) > 0)),
        memory.warp_barrier(),
        put(x, t, memory.shuffle(load(v), 0)),
    ))  # fmt: skip
    assert_expected_inline(body(source), """\
extern "C" __global__ void __launch_bounds__(128, 1)
demo_kernel(float* x, uint32_t* b) {
  const int t = threadIdx.x;
  float v = x[t];
  #pragma unroll
  for (int i = 0; i < 5; ++i) {
    v = v + tile::shuffle_xor(v, 16 >> i);
  }
  b[t / 32] = tile::vote_ballot(v > 0.0f);
  tile::warp_barrier();
  x[t] = tile::shuffle(v, 0);
}
""")  # fmt: skip
    compiles(source)


def test_registers_are_indexed_by_constants():
    """A serial loop over a local array is unrolled; one with bounds known only at run time is not."""
    x, r, n = tensor("x", (128, 16), "float32"), tensor("r", (16,), "float32", "local"), Var("n", dt.int32, "param")
    source = program([x, n], kernel(
        Alloc(r),
        loop(16, lambda i: put(r, i, load(x, t, i)), SERIAL),
        loop(n, lambda k: loop(16, lambda i: put(r, i, load(r, i) * 2)), SERIAL, "k"),
        loop(16, lambda i: put(x, t, i, load(r, i)), SERIAL),
    ))  # fmt: skip
    assert_expected_inline(body(source), """\
extern "C" __global__ void __launch_bounds__(128, 1)
demo_kernel(float* x, const int32_t n) {
  const int t = threadIdx.x;
  alignas(16) float r[16];
  #pragma unroll
  for (int i = 0; i < 16; ++i) {
    r[i] = x[t * 16 + i];
  }
  for (int k = 0; k < n; ++k) {
    #pragma unroll
    for (int i = 0; i < 16; ++i) {
      r[i] = r[i] * 2.0f;
    }
  }
  #pragma unroll
  for (int i = 0; i < 16; ++i) {
    x[t * 16 + i] = r[i];
  }
}
""")  # fmt: skip
    compiles(source)


def test_loops_that_start_far_away():
    """The variable has 32 bits if all values that it takes do, wherever the start may lie."""
    x, k = tensor("x", (64,), "int32"), Var("k", dt.int32, "param")
    source = program([x, k], kernel(loop(64, lambda i: put(x, i, 1), SERIAL, start=binary("*", k, k))))
    assert "for (int64_t i = (int64_t)k * k; i < 64; ++i) {" in body(source)  # which may be negative
    one = select(k > 0, 2, binary("*", t * 2**20, t * 2**20))
    source = program([x, k], kernel(loop(64, lambda i: put(x, i, 1), SERIAL, start=one)))
    assert "for (int i = (int)tile::min<int64_t>(k > 0 ? 2 : (int64_t)" in body(source)
    compiles(source)


def test_loops_end_without_a_division_by_a_size():
    """Where the size is not 0. A product of both has 32 bits if what is divided has."""
    x, size, rows = tensor("x", (64,), "int32"), Var("size", dt.int32, "dim"), Var("rows", dt.int32, "dim")
    view = Buffer("y", (size, rows), dt.int32, "global")
    for least, most, printed in (
        (1, 2**16, "int i = 0; i * size < rows"),
        (2, 2**30, "int i = 0; (int64_t)i * size < rows"),
        (1, 2**30, "int64_t i = 0; i * size < rows"),
    ):
        loops = loop((rows + (size - 1)) // size, lambda i: put(x, i % 64, 1), SERIAL)
        assumed = size >= least, size <= most, rows <= 2 * most - 1
        source = replace(program([x, view], kernel(loops)), assumed=assumed)
        assert f"for ({printed}; ++i) {{" in body(source), body(source)
        compiles(source)
    source = program([x, view], kernel(loops))
    assert "tile::floordiv" in body(source)


def test_unused_names_are_no_warning():
    x, name = tensor("x", (128,), "float32"), Var("name", dt.int32)
    source = program([x], kernel(Alloc(tensor("r", (4,), "float32", "local")), Let(name, t + 1), put(x, t, 1.0)))
    compiles(source)


def guarded(size, zeros, value=0.0):
    """A wide read where `t < n`, and `zeros` elements of a local array otherwise."""
    n, x = Var("n", dt.int32, "param"), tensor("x", (1024,), "float16")
    r = tensor("r", (size // 2,), "float16", "local")
    read = memory.vector_copy(at(r, 0), at(x, t * 8), size)
    other = loop(zeros, lambda i: put(r, i, number(value, dt.float16)))
    node = If(t < n, Block((read,)), Block((other,)))
    return program([x, n], kernel(Alloc(r), node, put(x, t, load(r, 1))))


def test_a_guarded_wide_read_has_no_branch():
    assert "tile::vector_read<16>(r, x + t * 8, t < n);" in body(guarded(16, 8))
    assert "vector_read" not in body(guarded(16, 4))  # the rest keeps what it held
    assert "vector_read" not in body(guarded(16, 8, 1.0))
    compiles(guarded(16, 8))


def test_an_address_from_memory_is_read_under_its_guard():
    n, x, table = Var("n", dt.int32, "param"), tensor("x", (1024,), "float16"), tensor("table", (128,), "int32")
    r = tensor("r", (8,), "float16", "local")
    read = memory.vector_copy(at(r, 0), at(x, load(table, t) * 8), 16)
    zeros = loop(8, lambda i: put(r, i, number(0.0, dt.float16)))
    node = If(t < n, Block((read,)), Block((zeros,)))
    source = program([x, table, n], kernel(Alloc(r), node, put(x, t, load(r, 1))))
    assert "vector_read" not in body(source)
    compiles(source)


PANELS = wgmma.Descriptor(128, 16, 1024)
TYPES = ("bfloat16", "bfloat16", "float32")
thread = Var("t", dt.int32, "thread")


def roles(*spans):
    return [Role(first, count, Block(())) for first, count in spans]


@pytest.mark.parametrize(
    ("spans", "tests"),
    [
        ([(0, 256), (256, 32)], ["t < 256", ""]),
        ([(256, 32), (0, 256)], ["t >= 256", ""]),
        ([(0, 128), (128, 128), (256, 128)], ["t < 128", "t < 256", ""]),
        ([(128, 128), (0, 64)], ["t >= 128 && t < 256", "t < 64"]),
        ([(0, 384)], [""]),
        ([(352, 32), (320, 32), (0, 32)], ["t >= 352", "t >= 320", "t < 32"]),
    ],
)
def test_branches(spans, tests):
    """No thread is asked what the branches before have answered."""
    threads, given = 384 if spans[0] not in [(0, 256), (256, 32)] else 288, roles(*spans)
    found = [condition(role, given[:n], threads, "t") for n, role in enumerate(given)]
    assert found == tests
    for thread in range(0, threads, 32):
        true = (n for n, test in enumerate(found) if eval(test.replace("&&", "and") or "True", {"t": thread}))
        taken = next(true, None)
        assert taken == next((n for n, (first, count) in enumerate(spans) if first <= thread < first + count), None)


def test_registers():
    def given(registers, threads, blocks=1):
        return registers_call(Role(0, 128, Block(()), registers), registers_at_start(threads, blocks))

    assert given(0, 384) == given(168, 384) == given(128, 512) == ""
    assert given(240, 384) == "tile::set_registers<240, true>();"
    assert given(24, 384) == "tile::set_registers<24, false>();"
    assert given(136, 256, 3) == "tile::set_registers<136, true>();"  # 80 each, of which three blocks have room
    assert given(80, 256, 3) == "" and given(136, 256) == "tile::set_registers<136, false>();"
    assert given(256, 128) == ""  # more a thread cannot have


def product(registers=(0, 0), producers=32, stages=2):
    """Two warpgroups multiply what a role of its own brings."""
    m = Var("m", dt.int32, "dim")
    a, c = tensor("A", (m, 1024), "bfloat16"), tensor("C", (m, 128), "float32")
    tile = tensor("tile", (stages, 128, 64), "bfloat16", "shared", offset=0)
    full = Buffer("full", (number(stages),), dt.uint64, "barrier", offset=stages * 16384, arrivals=1)
    empty = Buffer("empty", (number(stages),), dt.uint64, "barrier", offset=stages * 16384 + 8 * stages, arrivals=8)
    acc = tensor("acc", (64,), "float32", "local")

    def boxes():
        return TensorMap(a, (m, number(1024)), (number(1024), number(1)), (128, 64), 128)

    def multiply(k):
        here = at(tile, k % stages, 0, 0)
        group = thread // 128 * 8192
        steps = loop(4, lambda s: wgmma.wgmma(
            at(acc, 0), here, here, 128, TYPES, PANELS, PANELS, group + s * 32, s * 32), name="s")  # fmt: skip
        return (
            bulk.mbarrier_wait(at(full, k % stages), k // stages % 2), wgmma.wgmma_fence(), steps,
            wgmma.wgmma_commit(), wgmma.wgmma_wait(0), bulk.warp_arrive(at(empty, k % stages)),
        )  # fmt: skip

    def bring(k):
        ready = at(full, k % stages)
        load_box = bulk.tma_load(at(tile, k % stages, 0, 0), boxes(), (bx * 128, k * 64), ready, "evict_last")
        moves = bulk.mbarrier_expect(ready, 16384), load_box, bulk.mbarrier_arrive(ready)
        wait = bulk.mbarrier_wait(at(empty, k % stages), (k // stages + 1) % 2)
        return wait, If(thread - 256 == 0, Block(moves), Block(()))

    consume = (
        Alloc(acc), loop(64, lambda i: put(acc, i, 0.0)), loop(16, multiply, SERIAL, "k"),
        loop(64, lambda i: put(c, bx * 128 + thread // 2, thread % 2 * 64 + i, load(acc, i))),
    )  # fmt: skip
    produce = If(thread - 256 < 32, Block((loop(16, bring, SERIAL, "k"),)), Block(()))
    stmts = (
        Alloc(tile), Alloc(full), Alloc(empty),
        Role(0, 256, Block(consume), registers[0]), Role(256, producers, Block((produce,)), registers[1]),
    )  # fmt: skip
    shared = stages * 16384 + 16 * stages
    return init_mbarriers(program([a, c], kernel(
        *stmts, threads=256 + producers, thread=thread, grid=((m + 127) // 128,), shared_bytes=shared,
    )))  # fmt: skip


def test_text():
    source = product()
    assert_expected_inline(body(source).split("\n\n", 1)[1], """\
extern "C" __global__ void __launch_bounds__(288, 1)
demo_kernel(float* C, const __grid_constant__ tile::TensorMap A_map) {
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  const int t = threadIdx.x;
  const int bx = blockIdx.x;
  const int warpgroup = tile::warpgroup_index();
  tile::bf16* const tile_1 = reinterpret_cast<tile::bf16*>(shared_memory + 0);
  uint64_t* const full = reinterpret_cast<uint64_t*>(shared_memory + 32768);
  uint64_t* const empty = reinterpret_cast<uint64_t*>(shared_memory + 32784);
  if (t == 0) {
    tile::prefetch_map(&A_map);
    tile::mbarrier_init<1>(full);
    tile::mbarrier_init<1>(full + 1);
    tile::mbarrier_init<8>(empty);
    tile::mbarrier_init<8>(empty + 1);
    tile::fence_barrier_init();
  }
  tile::barrier();
  if (t < 256) {
    alignas(16) float acc[64];
    #pragma unroll
    for (int i = 0; i < 64; ++i) {
      acc[i] = 0.0f;
    }
    #pragma unroll 1
    for (int k = 0; k < 16; ++k) {
      tile::mbarrier_wait(full + k % 2, k / 2 % 2);
      tile::wgmma_fence();
      tile::wgmma_m64n128k16_f32_bf16_bf16_ss_x4<tile::Walk<128, 16, 1024, false, 32, 4, 0>, tile::Walk<128, 16, 1024, false, 32, 4, 0>>(acc, tile_1 + k % 2 * 8192, tile_1 + k % 2 * 8192, warpgroup * 8192, 0, true);
      tile::wgmma_commit();
      tile::wgmma_wait<0>();
      tile::warp_arrive(empty + k % 2);
    }
    #pragma unroll
    for (int i = 0; i < 64; ++i) {
      C[(int64_t)bx * 16384 + t / 2 * 128 + t % 2 * 64 + i] = acc[i];
    }
  } else {
    if (t - 256 < 32) {
      #pragma unroll 1
      for (int k = 0; k < 16; ++k) {
        tile::mbarrier_wait(empty + k % 2, (k / 2 + 1) % 2);
        if (t - 256 == 0) {
          tile::mbarrier_expect(full + k % 2, 16384);
          tile::tma_load_evict_last(tile_1 + k % 2 * 8192, &A_map, full + k % 2, bx * 128, k * 64);
          tile::mbarrier_arrive(full + k % 2);
        }
      }
    }
  }
}
""")  # fmt: skip  # noqa: E501
    (entry,) = emitted(source).entries
    assert entry.kinds == "PM" and entry.threads == 288 and not entry.early
    compiles(source, ("sm_90a",))


def test_registers_move():
    source = product((240, 24), 128, 3)
    text = body(source)
    assert text.index("set_registers<240, true>") < text.index("alignas(16) float acc")
    assert text.index("} else {\n    tile::set_registers<24, false>();") > 0
    compiles(source, ("sm_90a",))


def test_a_thread_of_a_role_is_known_to_lie_in_it():
    """So its index within the role divides as natural numbers do."""
    x = tensor("x", (128,), "int32")
    first = Role(64, 32, Block((put(x, thread, (thread - 64) // 2),)))
    second, after = Role(0, 32, Block((put(x, thread, (thread - 64) // 2),))), put(x, thread, (thread - 64) // 2)
    source = program([x], kernel(first, second, after, thread=thread))
    text = body(source)
    assert text.count("x[t] = (t - 64) / 2;") == 1 and text.count("x[t] = tile::floordiv<int>(t - 64, 2);") == 2
    assert "if (t >= 64 && t < 96) {" in text and "} else if (t < 32) {" in text
