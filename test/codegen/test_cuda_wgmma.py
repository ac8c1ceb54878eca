# SPDX-License-Identifier: Apache-2.0
"""Every product of a warpgroup compiles, from shared memory and from registers, without advice of the assembler."""

import itertools

import pytest
from expecttest import assert_expected_inline
from flat_kernels import at, compiles, emitted, kernel, load, loop, number, program, put, t, tensor
from hypothesis import given, strategies as st

from torch_tile.codegen.cuda_wgmma import Product, Steps, joined_product, wgmma_functions
from torch_tile.intrinsics import wgmma
from torch_tile.intrinsics.wgmma import PRODUCTS, Descriptor, accumulators, allowed_n
from torch_tile.ir import dtype as dt
from torch_tile.ir.expr import Var, binary, const
from torch_tile.ir.stmt import Alloc, For

ALONG, ACROSS = Descriptor(128, 16, 1024), Descriptor(128, 8192, 1024, True)


def one_product(n, types, a_walk, b_walk, keep=True, steps=1):
    """A kernel of a single product, whose accumulator begins as a tensor's elements, of one or more steps along K."""
    kind, of_b, of_d = types
    of_a, of_b = ("float32" if x == "tf32" else x for x in (kind, of_b))
    count = n * 64 // 128
    each = 64 * PRODUCTS[types] // 128
    a = tensor("a", (each * steps,), of_a, "local")
    in_shared = tensor("a_tile", (64, 128), of_a, "shared", offset=0)
    b, d = tensor("b_tile", (256, 64), of_b, "shared", offset=32768), tensor("d", (count,), of_d, "local")
    out = tensor("out", (128, count), of_d)
    read = tensor("read", (128, a.static_shape[0]), of_a)
    begin = (Alloc(a), loop(a.shape[0], lambda i: put(a, i, load(read, t, i)))) if a_walk is None else ()

    def product(k):
        where = at(a, k * each) if a_walk is None else at(in_shared, 0, 0)
        return wgmma.wgmma(at(d, 0), where, at(b, 0, 0), n, types, a_walk, b_walk, k * 48 + 32, k * 32 + 64, keep)

    return program([read, out], kernel(
        Alloc(in_shared), Alloc(b), Alloc(d), *begin,
        loop(count, lambda i: put(d, i, load(out, t, i))),
        wgmma.wgmma_fence(),
        product(number(0)) if steps == 1 else loop(steps, product),
        wgmma.wgmma_commit(), wgmma.wgmma_wait(0),
        loop(count, lambda i: put(out, t, i, load(d, i))),
        shared_bytes=65536,
    ))  # fmt: skip


def walks(types):
    """Ways in which A (None: in registers) and B may lie; only 16-bit types run across K."""
    ways = (ALONG, ACROSS) if types[0] in ("float16", "bfloat16") else (ALONG,)
    return list(itertools.product((None, *ways), ways))


@pytest.mark.parametrize("types", PRODUCTS, ids="-".join)
def test_every_product_compiles(types):
    for n, (a_walk, b_walk) in zip((8, 24, 64, 96, 128, 256), walks(types), strict=False):
        assert allowed_n(n, types[0])
        for steps in (1, 3):
            compiles(one_product(n, types, a_walk, b_walk, steps=steps), ("sm_90a",))


@pytest.mark.parametrize("types", [("bfloat16", "bfloat16", "float32"), ("int8", "uint8", "int32")], ids="-".join)
def test_the_largest(types, n=256):
    """An accumulator that takes half of a thread's registers."""
    compiles(one_product(n, types, None, ALONG), ("sm_90a",))
    compiles(one_product(n, types, ALONG, ALONG, t < 64), ("sm_90a",))


def test_text():
    source = one_product(8, ("float16", "float16", "float16"), None, ACROSS)
    (call,) = (s.call for s in source.kernels[0].body.stmts if getattr(getattr(s, "call", None), "name", "") == "wgmma")
    assert accumulators(call) == 4
    assert_expected_inline(wgmma_functions([Product(call), Product(call)]), """\

namespace tile {
template <class B>
TILE_DEVICE void wgmma_m64n8k16_f16_f16_f16_rs(f16* d, const void* a, const void* b, int a_step, int b_step, bool keep) {
  const unsigned* x = static_cast<const unsigned*>(a);
  unsigned* y = reinterpret_cast<unsigned*>(d);
  asm volatile(
      "{\\n"
      ".reg .pred keep;\\n"
      "setp.ne.b32 keep, %7, 0;\\n"
      "wgmma.mma_async.sync.aligned.m64n8k16.f16.f16.f16 "
      "{%0, %1}, "
      "{%2, %3, %4, %5}, %6, keep, 1, 1, %8;\\n"
      "}"
      : "+r"(y[0]), "+r"(y[1])
      : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "l"(B::from(b, b_step)), "r"(int(keep)), "n"(B::is_across));
}
}  // namespace tile
""")  # fmt: skip  # noqa: E501
    assert wgmma_functions([]) == ""
    text = emitted(source).text
    assert text.count("void wgmma_m64n8k16") == 1
    assert "tile::wgmma_m64n8k16_f16_f16_f16_rs<tile::Walk<128, 8192, 1024, true>>(d, a, b_tile, 32, 64, true);" in text


def test_text_of_several_steps():
    source = one_product(8, ("float16", "float16", "float32"), ALONG, ACROSS, steps=3)
    (product,) = filter(None, map(joined_product, (s for s in source.kernels[0].body.stmts if isinstance(s, For))))
    assert_expected_inline(wgmma_functions([product]), """\

namespace tile {
template <class A, class B>
TILE_DEVICE void wgmma_m64n8k16_f32_f16_f16_ss_x3(float* d, const void* a, const void* b, int a_step, int b_step, bool keep) {
#define TILE_STEP(a, b, keep) \\
      "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 " \\
      "{%0, %1, %2, %3}, " a ", " b ", " keep ", 1, 1, %7, %8;\\n"
  asm volatile(
      "{\\n"
      ".reg .pred keep, more;\\n"
      "setp.ne.b32 keep, %6, 0;\\n"
      ".reg .b64 x, y;\\n"
      "setp.eq.b32 more, %6, %6;\\n"
      TILE_STEP("%4", "%5", "keep")
      "add.s64 x, %4, %9;\\n"
      "add.s64 y, %5, %10;\\n"
      TILE_STEP("x", "y", "more")
      "add.s64 x, %4, %11;\\n"
      "add.s64 y, %5, %12;\\n"
      TILE_STEP("x", "y", "more")
      "}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "l"(A::from(a, a_step)), "l"(B::from(b, b_step)), "r"(int(keep)), "n"(A::is_across), "n"(B::is_across), "n"(A::step(1)), "n"(B::step(1)), "n"(A::step(2)), "n"(B::step(2)));
#undef TILE_STEP
}
}  // namespace tile
""")  # fmt: skip  # noqa: E501
    call = "tile::wgmma_m64n8k16_f32_f16_f16_ss_x3<tile::Walk<128, 16, 1024, false, 48, 3, 0>, "
    assert (
        f"  {call}tile::Walk<128, 8192, 1024, true, 32, 3, 0>>(d, a_tile, b_tile, 32, 64, true);"
        in emitted(source).text
    )


def test_text_of_several_steps_from_registers():
    source = one_product(8, ("float16", "float16", "float16"), None, ALONG, steps=2)
    (product,) = filter(None, map(joined_product, (s for s in source.kernels[0].body.stmts if isinstance(s, For))))
    assert_expected_inline(wgmma_functions([product]).split("(f16* d", 1)[1], """\
, const void* a, const void* b, int a_step, int b_step, bool keep) {
  const unsigned* x = static_cast<const unsigned*>(a);
  unsigned* y = reinterpret_cast<unsigned*>(d);
#define TILE_STEP(a, b, keep) \\
      "wgmma.mma_async.sync.aligned.m64n8k16.f16.f16.f16 " \\
      "{%0, %1}, " a ", " b ", " keep ", 1, 1, %12;\\n"
  asm volatile(
      "{\\n"
      ".reg .pred keep, more;\\n"
      "setp.ne.b32 keep, %11, 0;\\n"
      ".reg .b64 x, y;\\n"
      "setp.eq.b32 more, %11, %11;\\n"
      TILE_STEP("{%2, %3, %4, %5}", "%10", "keep")
      "add.s64 y, %10, %13;\\n"
      TILE_STEP("{%6, %7, %8, %9}", "y", "more")
      "}"
      : "+r"(y[0]), "+r"(y[1])
      : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(x[4]), "r"(x[5]), "r"(x[6]), "r"(x[7]), "l"(B::from(b, b_step)), "r"(int(keep)), "n"(B::is_across), "n"(B::step(1)));
#undef TILE_STEP
}
}  // namespace tile
""")  # fmt: skip  # noqa: E501


WALK = Descriptor(128, 16, 1024)
TYPES = ("bfloat16", "bfloat16", "float32")
A, B = tensor("a", (64, 128), "bfloat16", "shared"), tensor("b", (128, 128), "bfloat16", "shared")
X, D = tensor("x", (64,), "bfloat16", "local"), tensor("d", (256,), "float32", "local")
warpgroup = Var("w", dt.int32, "thread")


def product(k, a=None, d=0, keep=True, a_step=None, a_walk=WALK):
    """64 x 128, of the step that begins `k` x 16 columns into panels of 64."""
    moved = k * 16 // 64 * 8192 + k * 16 % 64 * 2
    a_step = moved + warpgroup * 4096 if a_step is None else a_step
    return wgmma.wgmma(
        at(D, d), at(A, 0, 0) if a is None else a, at(B, 0, 0), 128, TYPES, a_walk, WALK, a_step, moved, keep
    )


def test_steps_through_panels():
    found = joined_product(loop(8, lambda k: product(k, keep=binary(">", k, const(0, dt.int32)))))
    assert found.count == 8 and found.steps == (Steps(32, 4, 8192),) * 2
    assert [repr(x) for x in found.call.args[3:]] == ["w * 4096", "0", "False"]
    assert found.name == "wgmma_m64n128k16_f32_bf16_bf16_ss_x8"
    walk = "tile::Walk<128, 16, 1024, false, 32, 4, 8192>"
    assert found.spelling == f"{found.name}<{walk}, {walk}>"


def test_registers_of_a_follow_each_other():
    found = joined_product(loop(8, lambda k: product(k, at(X, k * 8), a_step=0, a_walk=None)))
    assert found.count == 8 and found.name.endswith("_rs_x8") and repr(found.call.args[1]) == repr(at(X, 0))
    assert joined_product(loop(8, lambda k: product(k, at(X, k * 4), a_step=0, a_walk=None))) is None
    assert joined_product(loop(4, lambda k: product(k, at(X, k * k), a_step=0, a_walk=None))) is None


@pytest.mark.parametrize(
    "body",
    [
        lambda k: product(k, keep=False),  # each step starts afresh
        lambda k: product(k, keep=binary(">", warpgroup, const(0, dt.int32))),
        lambda k: product(k, d=k * 64),
        lambda k: product(k, at(A, k, 0)),
        lambda k: product(k, a_step=k * warpgroup),
        lambda k: product(k, a_step=k * k * 16),
        lambda k: (product(k), product(k)),
    ],
)
def test_others_stay_loops(body):
    assert joined_product(loop(4, lambda k: product(k))) is not None
    assert joined_product(loop(4, body)) is None


def test_bounds():
    assert joined_product(loop(1, lambda k: product(k))) is None
    assert joined_product(loop(4, lambda k: product(k), start=1)) is None
    assert joined_product(loop(8, lambda k: product(k), step=2)) is None
    assert joined_product(loop(Var("n", dt.int32, "dim"), lambda k: product(k))) is None


@given(near=st.integers(1, 9), run=st.integers(1, 5), far=st.integers(0, 99), count=st.integers(2, 12))
def test_steps_are_found(near, run, far, count):
    starts = [i % run * near * 16 + i // run * far * 16 for i in range(count)]
    steps = Steps.of(starts)
    assert steps is not None and [steps.start(i) for i in range(count)] == starts


@given(st.lists(st.integers(0, 5), min_size=1, max_size=8))
def test_steps_say_what_they_are(starts):
    steps = Steps.of([0, *starts])
    assert steps is None or [steps.start(i) for i in range(len(starts) + 1)] == [0, *starts]
