# SPDX-License-Identifier: Apache-2.0
"""Expressions as CUDA C++: where arithmetic is widened, and what is copied bit by bit."""

import ctypes
import math
import random

import numpy as np
import pytest

from torch_tile.codegen.c_text import Names
from torch_tile.codegen.cuda_text import CudaText, int_type
from torch_tile.intrinsics.memory import atomic, here
from torch_tile.ir import dtype as dt
from torch_tile.ir.bounds import Interval
from torch_tile.ir.buffer import Buffer
from torch_tile.ir.expr import (
    Address,
    Binary,
    Call,
    Const,
    Load,
    Select,
    Var,
    binary,
    cast,
    const,
    maximum,
    select,
    unary,
)
from torch_tile.ir.node import walk
from torch_tile.runtime.host_compiler import compile_shared, csrc_dir

# t and i are small, n and m are any dimension, b a block index, s a stride passed in 64 bits
t, i = Var("t", dt.int32, "thread"), Var("i", dt.int32, "loop")
n, m, s = (Var(name, dt.int32, "dim") for name in "nms")
b = Var("b", dt.int32, "block")
q, w = Var("q", dt.int32, "let"), Var("w", dt.int64, "let")
x, h = Var("x", dt.float32, "let"), Var("h", dt.float16, "let")
u = Var("u", dt.uint8, "let")
size = (const(9, dt.int32),)
A, H, F = (Buffer(name, size, kind, "global") for name, kind in (("A", dt.int32), ("H", dt.float16), ("F", dt.float32)))


def text():
    made = CudaText(Names())
    for var, high in ((t, 127), (i, 7), (n, 2**31 - 2**16), (m, 2**31 - 2**16), (b, 2**24 - 1)):
        made.bind(var, Interval(0, high))
    made.bind(s, Interval(0))
    return made


TEXTS = {
    # 32 bits where they are enough
    "t * 8 + i": t * 8 + i,
    "t / 8 % 4": t // 8 % 4,
    "b * 64 + t < n": b * 64 + t < n,
    "(n + 127) / 128": (n + 127) // 128,
    "tile::floordiv<int>(t - 5, 8)": (t - 5) // 8,
    "i - 3": binary("+", i, -3),
    # NVRTC drops what divides by a 0 that it proves; of sizes it knows nothing
    "t / tile::divisor<int>(0)": t // const(0, dt.int32),
    "t % tile::divisor<int>(i)": t % i,
    "t / (i + 1)": t // (i + 1),
    "t / tile::divisor<int>(m % 8 * i)": t // (m % 8 * i),
    "b % ((n + 127) / 128 * 2)": b % ((n + 127) // 128 * 2),
    "t / tile::divisor<int>(n % 1)": Binary("//", t, Binary("%", n, const(1, dt.int32))),
    "(uint8_t)(u / tile::divisor<uint8_t>(u))": u // u,
    "tile::floordiv<int64_t>(w, tile::wrapping_add<int64_t>(w, 1))": w // (w + 1),
    # a remainder of less than twice the divisor, such as the version of a tile two iterations ahead
    "tile::wrapped<6>(i + 2)": (i + 2) % 6,
    "tile::wrapped<3>(t % 3 + 2)": (t % 3 + 2) % 3,
    # a quotient of 0 or 1, such as the parity of a stage
    "(int)(i + 2 >= 6)": (i + 2) // 6,
    "(int)(t % 7 >= 5) * 3": t % 7 // 5 * 3,
    "(i + 2) / 4": (i + 2) // 4,
    "((int)tile::floormod<int64_t>((int64_t)q * q, 7) + 2) % 7 < n": ((q * q) % 7 + 2) % 7 < n,
    "(i + 4) % 5 * 5 + (t % 4 + 3) % 4": (i + 4) % 5 * 5 + (t % 4 + 3) % 4,
    # 64 where they are not, from where they are not
    "(int64_t)(b * 64 + t) * n + i": (b * 64 + t) * n + i,
    "(int64_t)b * 524288 + i": b * 524288 + i,
    "(int64_t)n * m * i": n * m * i,
    "i + (int64_t)n * m": i + n * m,
    "s * (i + 1)": s * (i + 1),
    "(int64_t)n * m / 4 < b": n * m // 4 < b,
    "tile::max<int64_t>((int64_t)n * m, 1)": maximum(n * m, 1),
    "-(n + 1)": unary("-", n + 1),
    # values from memory are int32 as written, but comparisons see the number
    "tile::wrapping_mul<int>(q, q)": q * q,
    "(int64_t)q + 1 < n": q + 1 < n,
    "(int64_t)q * 128 + i": q * 128 + i,
    "tile::wrapping_add<int64_t>(w, 1)": w + 1,
    "(int64_t)t": cast(t, "int64"),
    "(int)w": cast(w, "int32"),
    "tile::wrapping_add<int64_t>((int64_t)n * m, w)": cast(n * m, "int64") + w,
    "(float)(t + 1)": cast(t + 1, "float32"),
    # other types
    "(uint8_t)(u + u)": u + u,
    "tile::rounded<tile::f16>(h * h)": h * h,
    "tile::widen(H[i])": Load(H, (i,)),
    "-tile::infinity()": const(-math.inf, dt.float32),
    "(double)tile::nan()": const(math.nan, dt.float64),
    "tile::exp2(x)": Call("exp2", (x,), dt.float32),
    "tile::atomic_add(F + i, x)": atomic(Address(F, (i,)), x, "add"),
    "tile::widen(tile::atomic_max(H + i, tile::narrow<tile::f16>(h)))": atomic(Address(H, (i,)), h, "max"),
    "tile::atomic_add(A, (int32_t)1)": atomic(Address(A, (const(0, dt.int32),)), const(1, dt.int32), "add"),
    # operands of exactly the element's type, whatever C++ computes them in
    "tile::atomic_add(A, (int32_t)((int64_t)b * 2000000 & 7))": atomic(
        Address(A, (const(0, dt.int32),)), binary("&", b * 2000000, 7), "add"
    ),
    "tile::atomic_add(A, (int32_t)q)": atomic(Address(A, (const(0, dt.int32),)), q, "add"),
    "tile::atomic_add(A, A[i])": atomic(Address(A, (const(0, dt.int32),)), Load(A, (i,)), "add"),
    "i < 3 ? x : 0.0f": select(i < 3, x, 0),
}


@pytest.mark.parametrize("wanted", TEXTS)
def test_text(wanted):
    assert text().value(TEXTS[wanted]) == wanted


def test_elements_and_their_conversion():
    out, zero = text(), const(0, dt.float16)
    assert out.element(F, ((b * 64 + t) * n + i,)) == "F[(int64_t)(b * 64 + t) * n + i]"
    assert out.element(A, (Load(A, (i,)) * 16 + i,)) == "A[(int64_t)A[i] * 16 + i]"
    assert out.converted(Load(H, (i,)), dt.float16) == "H[i]"  # bit by bit
    assert out.converted(Select(i < 3, Load(H, (i,)), zero), dt.float16) == "i < 3 ? H[i] : tile::f16{}"
    assert out.converted(h * h, dt.float16) == "tile::narrow<tile::f16>(h * h)"
    chosen = Select(h * h < h, h, zero)
    assert out.converted(chosen, dt.float16).startswith("tile::narrow<tile::f16>(tile::rounded<tile::f16>(h * h) < h ?")
    assert out.converted(n * m, dt.int32) == "(int)((int64_t)n * m)"
    assert int_type(dt.int32, True) == "int64_t" and int_type(dt.int32, False) == "int"
    assert int_type(dt.float16, False) == "float"


def test_headers_are_collected():
    out = text()
    out.value(Call("exp2", (x,), dt.float32))
    out.value(atomic(Address(F, (i,)), x, "add"))
    assert out.headers == {"cuda_math.h", "cuda_atomic.h"}


def random_index(depth):
    """An index and its value as Python computes it from `env`."""
    if depth == 0 or random.random() < 0.1:
        leaf = random.choice([t, i, n, m, b, const(random.choice([1, 3, 64, 4096, 100000]), dt.int32)])
        return leaf, lambda env: env[leaf] if isinstance(leaf, Var) else leaf.value
    (a, f), (c, g) = random_index(depth - 1), random_index(depth - 1)
    op = random.choice(["+", "*", "+", "*", "-", "//", "%", "min", "max"])
    if op in ("//", "%"):
        c, g = const(k := random.choice([2, 7, 64]), dt.int32), lambda env: k
    python = {
        "+": lambda p, r: p + r, "-": lambda p, r: p - r, "*": lambda p, r: p * r, "//": lambda p, r: p // r,
        "%": lambda p, r: p % r, "min": min, "max": max,
    }[op]  # fmt: skip
    return Binary(op, a, c), lambda env: python(f(env), g(env))


def test_indices_do_not_wrap():
    """Random index arithmetic, compiled for this machine, gives what Python's whole numbers give."""
    cases = []
    while len(cases) < 60:
        index, value = random_index(4)
        out = text()
        parts = [out.interval(part) for part in walk(index)]
        if not isinstance(index, Const) and all(max(-p.low, p.high) < 2**62 for p in parts):
            cases.append((index, value))
    body = "".join(f"  out[{k}] = {text().value(index)};\n" for k, (index, _) in enumerate(cases))
    (wrapped,) = (x for x in (csrc_dir() / "cuda_math.h").read_text().splitlines() if " int wrapped(" in x)
    library = ctypes.CDLL(str(compile_shared(
        '#include <stdint.h>\n#include "cpu_math.h"\n#define TILE_DEVICE inline\n'
        f"namespace tile {{ {wrapped} }}\n"
        f'extern "C" void f(int64_t* out, int t, int i, int n, int m, int b) {{\n{body}}}\n'
    )))  # fmt: skip
    for _ in range(20):
        env = {t: random.randrange(128), i: random.randrange(8), b: random.randrange(2**24)}
        env |= {v: random.choice([random.randrange(1, 5000), random.randrange(1, 2**31 - 2**16)]) for v in (n, m)}
        got = np.zeros(len(cases), np.int64)
        library.f(ctypes.c_void_p(got.ctypes.data), *(env[v] for v in (t, i, n, m, b)))
        for (index, value), found in zip(cases, got, strict=True):
            assert found == value(env), (index, text().value(index))


def test_block_indices_and_what_they_are_made_of():
    """Below their extent, which is positive where a kernel runs; a quotient by one factor is below the other."""
    out, splits = text(), Var("splits", dt.int32, "param")
    bx, by = Var("bx", dt.int32, "block"), Var("by", dt.int32, "block")
    out.bind_block(by, splits)
    assert out.interval(splits).low == 1
    out = text()
    out.bind_block(bx, (n + 127) // 128 * splits)
    assert out.interval(splits).low == 1 and out.interval(bx).low == 0
    assert out.value(bx // splits * 128 + t < n) == "bx / splits * 128 + t < n"
    assert out.value(bx % splits) == "bx % splits"
    other = text()
    other.bind_block(bx, m)  # a dimension of any size
    assert other.interval(bx) == Interval(0, 2**31 - 2**16 - 1) and other.interval(m).low == 1
    other.bind_block(bx, n * m, 65535)  # a grid has no more
    assert other.interval(bx) == Interval(0, 65534)


def test_values_that_fit_are_narrowed_where_they_are_made():
    """What follows is computed in 32 bits."""
    out = text()
    inside = binary("max", binary("min", n * m - t, const(128, dt.int32)), const(0, dt.int32))
    want = "t < tile::max<int>((int)tile::min<int64_t>((int64_t)n * m - t, 128), 0)"
    assert out.value(binary("<", t, inside)) == want
    assert out.value((n * m - t) % 8 + 1) == "(int)tile::floormod<int64_t>((int64_t)n * m - t, 8) + 1"
    assert out.value((n * m - t) // 8 + 1) == "tile::floordiv<int64_t>((int64_t)n * m - t, 8) + 1"


def test_ranges_of_quotients_and_of_values_computed_anew():
    out = text()
    assert out.interval(t // n) == Interval(0, 127)  # nothing is divided by 0
    assert out.value(here(t) // 8) == "tile::here(t) / 8"
