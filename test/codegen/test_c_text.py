# SPDX-License-Identifier: Apache-2.0
import ctypes
import itertools
import math
import random

import pytest
import torch

from torch_tile import intrinsics
from torch_tile.codegen.c_text import Names, Text, literal, string
from torch_tile.ir import dtype as dt
from torch_tile.ir.buffer import Buffer
from torch_tile.ir.expr import Const, Load, Var, binary, cast, const, maximum, select, unary
from torch_tile.runtime.host_compiler import compile_shared

i, n = Var("i", dt.int32, "loop"), Var("n", dt.int32, "dim")
p, q = Var("p", dt.int32, "let"), Var("q", dt.int32, "let")  # values from memory
x, y, h, d = (
    Var(name, t, "let") for name, t in zip("xyhd", (dt.float32, dt.float32, dt.float16, dt.float64), strict=True)
)
u, s = Var("u", dt.uint8, "let"), Var("s", dt.int8, "let")
A = Buffer("A", (const(9, dt.int32),), dt.int32, "global")
H = Buffer("H", (const(9, dt.int32),), dt.float16, "global")


def value(expr):
    return Text(Names()).value(expr)


TEXTS = {
    # precedence
    "(i + n) * 2": (i + n) * 2,
    "i + n * 2": i + n * 2,
    "i - (n - 3)": i - (n - 3),
    "i - n - 3": i - n - 3,
    "x / (y / x)": x / (y / x),
    "i < n && (i == 0 || n > 3)": binary("and", i < n, binary("or", i == 0, n > 3)),
    "!(i < n)": unary("not", i < n),
    "(i & 3) == 1": (i & 3) == 1,
    "(i & 3) << 2 | n": ((i & 3) << 2) | n,
    "-(x + y)": -(x + y),
    "- -x": unary("-", -x),
    "x - -y": x - -y,
    "(i < n ? x : y) + 1.0f": select(i < n, x, y) + 1,
    "i < n ? x : (p < q ? y : x)": select(i < n, x, select(p < q, y, x)),
    "(float)(i + 1)": cast(i + 1, "float32"),
    # integers: indices in 64 bits, narrow and unsigned ones wrap, comparisons of computed values are wide
    "tile::floordiv<int64_t>(i, 4)": i // 4,
    "n / 4": n // 4,
    "n % 4 * i": n % 4 * i,
    "tile::floormod<int32_t>(p, q)": p % q,
    "p * q": p * q,
    "p < q": p < q,
    "(int64_t)p * (int64_t)q < n": p * q < n,
    "i + 1 < (int64_t)A[i]": i + 1 < Load(A, (i,)),
    "A[(int64_t)p * 2]": Load(A, (p * 2,)),
    "A[(int64_t)A[i] + ((int64_t)u - 1)]": Load(A, (Load(A, (i,)) + (u - 1),)),
    "A[(int64_t)A[i] + (int64_t)(uint8_t)(u - 1)]": Load(A, (Load(A, (i,)) + cast(u - const(1, dt.uint8), "int32"),)),
    "(uint8_t)(u - u) < 3": u - u < 3,
    "(int8_t)(s * s)": s * s,
    "A[i] * A[i]": Load(A, (i,)) * Load(A, (i,)),
    "tile::max<int32_t>(p, 3)": maximum(p, 3),
    "tile::max<int64_t>(i, 3)": maximum(i, 3),
    "(int8_t)i": cast(i, "int8"),
    "(uint32_t)(i - 1)": cast(i - 1, "uint32"),
    "tile::convert<bool>(p)": cast(p, "bool"),
    # floats
    "tile::rounded<tile::f16>(h * h)": h * h,
    "h * x": h * x,
    "(double)x * d": x * d,
    "tile::rounded<tile::bf16>(x)": cast(x, "bfloat16"),
    "tile::rounded<tile::f16>((float)p)": cast(p, "float16"),
    "(float)d": cast(d, "float32"),
    "tile::widen(H[i])": Load(H, (i,)),
    "tile::convert<int8_t>(x)": cast(x, "int8"),
    "tile::floordiv<float>(x, y + 1.0f)": x // (y + 1),
    "tile::max(h, 0.0f)": maximum(h, 0),
}


@pytest.mark.parametrize("text", TEXTS)
def test_text(text):
    assert value(TEXTS[text]) == text


def test_names_are_unique_valid_and_reused_after_their_scope():
    names = Names(reserved=["taken"])
    a, b = Var("x", dt.int32, "loop"), Var("x", dt.int32, "loop")
    assert names.of(a) == "x" and names.of(b) == "x_1" and names.of(a) == "x"
    names.release(a)
    assert names.of(Var("x", dt.int32, "loop")) == "x"
    odd = {
        "": "v",
        "float": "float_1",
        "1st": "v1st",
        "__x": "v__x",
        "a.b": "a_b",
        "taken": "taken_1",
        "größe": "gr__e",
    }
    for name, wanted in odd.items():
        assert names.of(Var(name, dt.int32, "let")) == wanted


def test_string():
    assert string('a"b\\c\n%\x01é') == '"a\\"b\\\\c\\n%\\001\\303\\251"'


LITERALS = [
    (v, t)
    for t, values in {
        "float32": [0.0, -0.0, 1.5, -2.25, 1e-45, 3.4028234663852886e38, math.inf, -math.inf, math.nan, 0.1],
        "float64": [0.0, -0.0, 0.1, 1e308, 5e-324, math.inf, -math.inf, math.nan, -1e22],
        "float16": [65504.0, -0.0, 6e-8, math.inf, 0.1],
        "bfloat16": [3.38e38, math.nan],
        "float8_e4m3fn": [448.0, -0.015625],
        "int8": [-128, 127], "uint8": [255], "int16": [-(2**15)], "uint16": [2**16 - 1], "int32": [-(2**31), 2**31 - 1],
        "uint32": [2**32 - 1, 5], "int64": [-(2**63), 2**63 - 1, -(2**31), 2**40], "uint64": [2**64 - 1, 7],
        "bool": [True, False],
    }.items()
    for v in values
]  # fmt: skip


def test_literals():
    """Compiled, every literal is the number that it says."""
    consts = [const(v, dt.to_dtype(t)) for v, t in LITERALS]
    lines = [
        f"doubles[{k}] = {literal(c)};" if c.dtype.is_float else f"integers[{k}] = (unsigned long){literal(c)};"
        for k, c in enumerate(consts)
    ]
    head = '#include "cpu_types.h"\nextern "C" void fill(double* doubles, unsigned long* integers) {\n'
    library = ctypes.CDLL(str(compile_shared(head + "\n".join(lines) + "}\n")))
    doubles, integers = (ctypes.c_double * len(consts))(), (ctypes.c_uint64 * len(consts))()
    library.fill(doubles, integers)
    for k, c in enumerate(consts):
        if not c.dtype.is_float:
            assert integers[k] == int(c.value) % 2**64, c
        else:
            want = float(c.value)
            assert math.isnan(doubles[k]) if math.isnan(want) else doubles[k] == want, c
            assert math.copysign(1, doubles[k]) == math.copysign(1, want) or math.isnan(want), c


def random_expr(rng, leaves, depth):
    """An expression of one type; numbers have that type, too, as plain ones would widen it to int32, which may wrap."""

    def number(value):
        return const(value, leaves[0].dtype)

    if depth == 0 or rng.random() < 0.2:
        return rng.choice(leaves) if rng.random() < 0.8 else number(rng.randint(-3, 9))
    a, b = random_expr(rng, leaves, depth - 1), random_expr(rng, leaves, depth - 1)
    op = rng.choice(["+", "-", "*", "&", "|", "^", "neg", "inv", "select", "max", "//", "%", "<<", "cast", "bool"])
    if op == "neg":
        return -a
    if op == "inv":
        return ~a
    if op == "max":
        return maximum(a, b)
    if op == "select":
        return select(binary(rng.choice(["<", "==", ">="]), a, b), b, a)
    if op in ("//", "%"):
        return binary(op, a, number(rng.choice([1, 2, 3, 7])))
    if op == "<<":
        return binary(rng.choice(["<<", ">>"]), a, number(rng.choice([0, 1, 2])))
    if op == "cast":
        return cast(cast(a, rng.choice(["int8", "uint8", "int64", "uint16"])), leaves[0].dtype)
    if op == "bool":
        return cast(binary(rng.choice(["and", "or"]), a < b, a != number(3)), leaves[0].dtype)
    return binary(op, a, b)


def meaning(e, env):
    """The value in Python: int32 and int64 do not wrap, other integers do."""
    kind, to = type(e).__name__, e.dtype
    if kind == "Const":
        return int(e.value)
    if kind == "Var":
        return env[e.name]
    if kind == "Select":
        return meaning(e.a if meaning(e.condition, env) else e.b, env)
    if kind == "Unary":
        a = meaning(e.a, env)
        found = {"-": lambda: -a, "~": lambda: ~a, "not": lambda: not a}[e.op]()
    elif kind == "Cast":
        found = meaning(e.a, env)
        if e.type.kind == "bool":
            return found != 0
        if e.type == dt.int32 and e.a.dtype == dt.int64 and not -(2**31) <= found < 2**31:
            raise OverflowError  # an index does not wrap, a cast number does
        if e.type == dt.int64 or (e.type == dt.int32 and e.a.dtype in (dt.int32, dt.int64)):
            return found
        return const(found, e.type).value
    else:
        if e.op in ("and", "or"):
            a = meaning(e.a, env)
            return meaning(e.b, env) if bool(a) is (e.op == "and") else a
        a, b = meaning(e.a, env), meaning(e.b, env)
        found = {
            "+": lambda: a + b, "-": lambda: a - b, "*": lambda: a * b, "//": lambda: a // b, "%": lambda: a % b,
            "&": lambda: a & b, "|": lambda: a | b, "^": lambda: a ^ b, "<<": lambda: a << b, ">>": lambda: a >> b,
            "max": lambda: max(a, b),
            "<": lambda: a < b, "==": lambda: a == b, "!=": lambda: a != b, ">=": lambda: a >= b,
        }[e.op]()  # fmt: skip
    return found if to.kind == "bool" or to in (dt.int32, dt.int64) else const(found, to).value


def test_random_integer_expressions(seed):
    """Text, compiled, computes what the expression means; indices are made large enough to leave int32."""
    rng = random.Random(seed)
    families = {"index": (dt.int32, "loop", [-(2**20), -7, -1, 0, 3, 2**20]),
                "int8": (dt.int8, "let", [-128, -1, 0, 5, 127]),
                "uint8": (dt.uint8, "let", [0, 1, 200, 255]), "uint16": (dt.uint16, "let", [0, 3, 65535])}  # fmt: skip
    made, lines = [], []
    for family, (to, role, samples) in families.items():
        leaves = [Var(name, to, role) for name in "ab"]
        for _ in range(60):
            e = random_expr(rng, leaves, 3)
            if isinstance(e, Const | Var):
                continue
            text = Text(Names())
            kind = "int64_t" if family == "index" else "bool" if e.dtype.kind == "bool" else f"{e.dtype}_t"
            lines.append(f"out[{len(made)}] = (int64_t)({kind})({text.value(e)});")
            made.append((e, family, samples))
            lines[-1] = lines[-1].replace("out[", f"if (which == {list(families).index(family)}) out[")
    bodies = []
    for k, (to, _, _) in enumerate(families.values()):
        kind = "int64_t" if k == 0 else f"{to}_t"
        own = [line for line in lines if f"which == {k})" in line]
        bodies.append(f"{{ const {kind} a = ({kind})x, b = ({kind})y;\n" + "\n".join(own) + "}")
    head = '#include "cpu_math.h"\nextern "C" void run(int which, long x, long y, long* out) {\n'
    library = ctypes.CDLL(str(compile_shared(head + "\n".join(bodies) + "}\n")))
    out = (ctypes.c_int64 * len(made))()
    for which, (family, (_, _, samples)) in enumerate(families.items()):
        for a, b in itertools.product(samples, samples):
            library.run(which, ctypes.c_long(a), ctypes.c_long(b), out)
            for k, (e, of, _) in enumerate(made):
                try:
                    want = meaning(e, {"a": a, "b": b}) if of == family else 0
                except OverflowError:
                    continue
                if of == family and -(2**62) < want < 2**62:
                    assert out[k] == want, f"{e!r} as {value(e)} with a={a}, b={b}: {out[k]}, not {want}"


def test_calls_of_literals_keep_their_width():
    """The result of a call of literals is as wide as their type, also where C++ takes its own type from it."""
    made = [
        (f"{name} of {values} in {to}", intrinsics.call(name, *(const(v, to) for v in values)) << Var("s", to, "let"))
        for to in (dt.int64, dt.uint64)
        for name, values in (("abs", [1]), ("maximum", [1, 0]), ("minimum", [1, 2]), ("fmax", [1, 0]), ("fmin", [1, 2]))
    ]
    lines = [f"out[{k}] = {value(e)};" for k, (_, e) in enumerate(made)]
    head = '#include "cpu_math.h"\nextern "C" void run(long s, long* out) {\n'
    library = ctypes.CDLL(str(compile_shared(head + "\n".join(lines) + "}\n")))
    out = (ctypes.c_int64 * len(made))()
    library.run(ctypes.c_long(40), out)
    for (name, _), found in zip(made, out, strict=True):
        assert found == 1 << 40, name


def test_torch_types_are_spelled():
    for to in dt.ALL:
        assert isinstance(to.as_torch(), torch.dtype)
        assert value(cast(Var("v", to, "let"), "float64")) in ("v", "(double)v")


def test_small_floats_that_are_copied_keep_their_bits():
    """A conversion there and back would make all NaN one, and take time."""
    text = Text(Names())
    assert text.converted(Load(H, (i,)), dt.float16) == "tile::copied(H[i])"
    assert text.converted(Load(H, (i,)) + h, dt.float16) == "tile::narrow<tile::f16>(tile::widen(H[i]) + h)"
    assert text.converted(Load(H, (i,)), dt.float32) == "tile::widen(H[i])"
