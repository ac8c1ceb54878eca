# SPDX-License-Identifier: Apache-2.0
"""Integers of indices and sizes wrap when they are stored, not before; int32 of elements wraps at each operation."""

import itertools
import random
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import torch_tile
import torch_tile.language as T

FACTORS = (2_000_000_000, -1_999_999_999, 123_456_789)


def _wrapped(x: int) -> int:
    return (x + 2**31) % 2**32 - 2**31


def _looked_at(x: int) -> list[int]:
    """What depends on the upper bits of a number."""
    return [x >> 8, x // 7, x % 1000, int(x > 5), max(x, -5) // 3, (x if x < 0 else x >> 1) >> 2]


def _looked_at_in_text(x: object) -> list[object]:
    return [
        x >> 8, x // 7, x % 1000, T.cast(x > 5, "int32"), T.max(x, -5) // 3,
        T.if_then_else(x < 0, x, x >> 1) >> 2,
    ]  # fmt: skip


@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("of", ["block", "nest", "loop", "scalar", "name"])
def test_what_indices_make_is_exact(of: str, factor: int, way: Callable[..., None]) -> None:
    @T.prim_func
    def kernel(O: T.Tensor((4, 32, 6), "int32"), n: T.int32):
        with T.Kernel(4, threads=32) as b:
            for i in T.Parallel(32):
                for k in T.serial(2):
                    index = {"block": b, "nest": i, "loop": k, "scalar": n, "name": b + i}[of]
                    y = index * factor
                    for place, value in enumerate(_looked_at_in_text(y)):
                        O[b, i, place] = value

    o = torch.zeros(4, 32, 6, dtype=torch.int32)
    way(kernel, o, 11)
    for b, i in ((0, 0), (1, 3), (3, 31)):
        index = {"block": b, "nest": i, "loop": 1, "scalar": 11, "name": b + i}[of]
        assert o[b, i].tolist() == [_wrapped(v) for v in _looked_at(index * factor)], (b, i)


@pytest.mark.parametrize("factor", FACTORS)
def test_products_of_elements_wrap(factor: int, seed: int, way: Callable[..., None]) -> None:
    @T.prim_func
    def kernel(A: T.Tensor((32,), "int32"), O: T.Tensor((32,), "int32"), P: T.Tensor((32,), "int32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(32):
                O[i] = (A[i] * factor) >> 8
                P[i] = (A[i] * A[31 - i] + A[i]) >> 3

    torch.manual_seed(seed)
    a = torch.randint(-(2**31), 2**31, (32,), dtype=torch.int32)
    o, p = torch.zeros_like(a), torch.zeros_like(a)
    way(kernel, a, o, p)
    values = a.tolist()
    assert o.tolist() == [_wrapped(x * factor) >> 8 for x in values]
    assert p.tolist() == [_wrapped(x * y + x) >> 3 for x, y in zip(values, reversed(values), strict=True)]


def test_compilers_may_use_that_sums_do_not_wrap(seed: int, way: Callable[..., None]) -> None:
    """Two natural numbers: NVRTC took their sum for natural, and its remainder for that of an unsigned number."""

    @T.prim_func
    def kernel(
        A: T.Tensor((32,), "int32"), B: T.Tensor((32,), "int64"), O: T.Tensor((32, 4), "int32"),
        P: T.Tensor((32, 4), "int64"), F: T.Tensor((32,), "float32"),
    ):  # fmt: skip
        with T.Kernel(1, threads=32):
            for i in T.Parallel(32):
                a, b = A[i] & 0x7FFFFFFF, B[i] & 0x7FFFFFFFFFFFFFFF
                O[i, 0] = (a + a) % 1000
                O[i, 1] = (a * 3) // 7
                O[i, 2] = -(A[i]) // 5
                O[i, 3] = T.abs(A[i]) // 3
                P[i, 0] = (b + b) % 1000
                P[i, 1] = (b * 3) // 7
                P[i, 2] = T.max(b + 1, b) // 2
                P[i, 3] = (0 - B[i] - 1) // 3
                F[i] = T.cast((a + a) % 1000, "float32")

    ends = torch.tensor([-(2**31), -1, 2**31 - 1, 2**30], dtype=torch.int32)
    long_ends = torch.tensor([-(2**63), -1, 2**63 - 1, 2**62], dtype=torch.int64)
    torch.manual_seed(seed)
    a = torch.cat([ends, torch.randint(-(2**31), 2**31, (28,), dtype=torch.int32)])
    b = torch.cat([long_ends, torch.randint(-(2**63), 2**63 - 1, (28,), dtype=torch.int64)])
    o, p, f = torch.zeros(32, 4, dtype=torch.int32), torch.zeros(32, 4, dtype=torch.int64), torch.zeros(32)
    way(kernel, a, b, o, p, f)
    short, long = a & 0x7FFFFFFF, b & 0x7FFFFFFFFFFFFFFF
    down = lambda x, y: torch.div(x, y, rounding_mode="floor")  # noqa: E731
    wanted = [(short + short) % 1000, down(short * 3, 7), down(-a, 5), down(torch.abs(a), 3)]
    assert torch.equal(o, torch.stack(wanted, 1))
    wanted = [(long + long) % 1000, down(long * 3, 7), down(torch.maximum(long + 1, long), 2), down(0 - b - 1, 3)]
    assert torch.equal(p, torch.stack(wanted, 1))
    assert torch.equal(f, ((short + short) % 1000).float())


@pytest.mark.parametrize("first", [True, False])
def test_names_of_elements_wrap_wherever_they_are_used(first: bool, seed: int, way: Callable[..., None]) -> None:
    """A name whose value is stored, before or behind a product of it, still names an element."""

    @T.prim_func
    def kernel(A: T.Tensor((32,), "int32"), O: T.Tensor((32, 3), "int32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(32):
                x = A[i]
                y = x ^ 5
                if first:
                    O[i, 0] = x
                    O[i, 1] = y
                O[i, 2] = (y * 123_456_789) >> 8
                if not first:
                    O[i, 1] = y
                    O[i, 0] = x

    torch.manual_seed(seed)
    a = torch.randint(-(2**30), 2**30, (32,), dtype=torch.int32)
    o = torch.zeros(32, 3, dtype=torch.int32)
    way(kernel, a, o)
    assert o.tolist() == [[x, x ^ 5, _wrapped((x ^ 5) * 123_456_789) >> 8] for x in a.tolist()]
    assert "wrapv" in torch_tile.compile(kernel, target="cpu").source  # g++ may be right without, by chance


def test_wider_than_64_bits(seed: int, way: Callable[..., None]) -> None:
    """A product of int32 that is computed in 64 bits, because it is cast to them, wraps there."""

    @T.prim_func
    def kernel(A: T.Tensor((32,), "int32"), P: T.Tensor((32,), "int64")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(32):
                P[i] = T.cast(((A[i] << 8) * 2147483647) & 65535, "int64")

    torch.manual_seed(seed)
    a = torch.cat([torch.tensor([-(2**31), 2**31 - 1]), torch.randint(-(2**31), 2**31, (30,))]).int()
    p = torch.zeros(32, dtype=torch.int64)
    way(kernel, a, p)
    assert p.tolist() == [((x << 8) * 2147483647) & 65535 for x in a.tolist()]


@pytest.mark.parametrize("of", ["block", "nest", "loop", "scalar", "name"])
def test_what_indices_make_beyond_64_bits_wraps(of: str, seed: int, way: Callable[..., None]) -> None:
    """A compiler that takes a product for small would drop the end of the loop around it."""
    factor = (2**63 - 1, -(2**62), 2**61 + 1)[seed % 3]

    @T.prim_func
    def kernel(O: T.Tensor((2, 8, 9), "int32"), n: T.int32):
        with T.Kernel(2, threads=32) as b:
            for i in T.Parallel(8):
                for k in range(2, 9, 3):
                    x = {"block": b + 7, "nest": i + 9, "loop": k, "scalar": n, "name": b * 3 + i + 5}[of]
                    if ((T.int64(factor) * x) & 1099511627775) == 126:
                        break
                    O[b, i, k] = T.cast((T.int64(factor) * x) >> 33, "int32")

    o = torch.zeros(2, 8, 9, dtype=torch.int32)
    way(kernel, o, 1_000_003)
    for b, i, k in itertools.product(range(2), range(8), range(2, 9, 3)):
        x = {"block": b + 7, "nest": i + 9, "loop": k, "scalar": 1_000_003, "name": b * 3 + i + 5}[of]
        product = (factor * x + 2**63) % 2**64 - 2**63
        assert o[b, i, k] == _wrapped(product >> 33)


@pytest.mark.parametrize("of", ["block", "nest", "loop", "scalar"])
def test_casts_to_32_bits_cut(of: str, seed: int, way: Callable[..., None]) -> None:
    """An int64 of an index and an element keeps its lower 32 bits where it becomes an int32, whatever reads it."""

    @T.prim_func
    def kernel(A: T.Tensor((8,), "int64"), O: T.Tensor((2, 8, 3, 4), "int64"), n: T.int32):
        with T.Kernel(2, threads=32) as b:
            for i in T.Parallel(8):
                for k in T.serial(3):
                    index = {"block": b + 3, "nest": i, "loop": k, "scalar": n}[of]
                    x = T.cast(A[i] * index + 2**40, "int32")
                    O[b, i, k, 0] = x // 2
                    O[b, i, k, 1] = T.cast(x, "int64") + 1
                    O[b, i, k, 2] = T.if_then_else(x < 7, 1, 0)
                    O[b, i, k, 3] = T.max(x, -5) % 1000

    torch.manual_seed(seed)
    a, o = torch.randint(-(2**50), 2**50, (8,)), torch.zeros(2, 8, 3, 4, dtype=torch.int64)
    way(kernel, a, o, 7)
    for b, i, k in itertools.product(range(2), range(8), range(3)):
        x = _wrapped(int(a[i]) * {"block": b + 3, "nest": i, "loop": k, "scalar": 7}[of] + 2**40)
        assert o[b, i, k].tolist() == [x // 2, x + 1, int(x < 7), max(x, -5) % 1000]


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16"])
def test_operations_of_narrow_types_wrap(dtype: str, way: Callable[..., None]) -> None:
    """C++ computes them as int, which the product of two uint16 leaves."""

    @T.prim_func
    def kernel(A: T.Tensor((6, 6, 2), dtype), O: T.Tensor((6, 6, 4), dtype), P: T.Tensor((6, 6), "bool")):
        with T.Kernel(1, threads=32):
            for i, j in T.Parallel(6, 6):
                O[i, j, 0] = A[i, j, 0] * A[i, j, 1]
                O[i, j, 1] = A[i, j, 0] * A[i, j, 1] - A[i, j, 1] * A[i, j, 1] + A[i, j, 0]
                O[i, j, 2] = (A[i, j, 0] << T.cast(7, dtype)) // T.cast(3, dtype)
                O[i, j, 3] = A[i, j, 0] * A[i, j, 1] * A[i, j, 0] % T.cast(5, dtype)
                P[i, j] = A[i, j, 0] * A[i, j, 1] > A[i, j, 0]

    info = torch.iinfo(getattr(torch, dtype))
    numbers = [info.min, info.max, info.max - 1, 1, 3, info.max // 2 + 1]
    pairs = torch.tensor(list(itertools.product(numbers, numbers))).view(6, 6, 2)
    x, y = pairs[..., 0], pairs[..., 1]

    def wrapped(n: torch.Tensor) -> torch.Tensor:
        return (n - info.min) % 2**info.bits + info.min

    quotient, cube = wrapped(x << 7) // 3, wrapped(wrapped(x * y) * x) % 5
    wanted = torch.stack([wrapped(x * y), wrapped(x * y - y * y + x), quotient, cube], -1)
    out, greater = torch.zeros(6, 6, 4, dtype=getattr(torch, dtype)), torch.zeros(6, 6, dtype=torch.bool)
    way(kernel, pairs.to(out.dtype), out, greater)
    assert torch.equal(out.long(), wanted) and torch.equal(greater, wrapped(x * y) > x)


WIDTHS = {f"{sign}int{bits}": bits for bits in (8, 16, 32, 64) for sign in ("", "u")}
WRAPPING = [dtype for dtype in WIDTHS if dtype != "int32"]  # of sizes, whose results are exact


def _held(x: int, dtype: str) -> int:
    """The number of a type that a number wraps to."""
    least = 0 if dtype[0] == "u" else -(2 ** (WIDTHS[dtype] - 1))
    return (x - least) % 2 ** WIDTHS[dtype] + least


@pytest.mark.parametrize("dtype", WRAPPING)
@pytest.mark.parametrize("named", [False, True], ids=["at once", "named"])
def test_operations_of_parameters_wrap(dtype: str, named: bool, seed: int, way: Callable[..., None]) -> None:
    """A compiler that takes sums of parameters for small would drop signs, ends of loops and conditions."""
    of, bits = getattr(T, dtype), WIDTHS[dtype]
    factor = _held(0x9E3779B97F4A7C15 | 1, dtype)
    out = f"{'u' if dtype[0] == 'u' else ''}int64"

    @T.prim_func
    def kernel(O: T.Tensor((9,), out), n: of, m: of):
        with T.Kernel(1, threads=32):
            y = T.alloc_var(dtype, n + m) if named else n + m
            O[0] = T.cast(y // of(7), out)
            O[1] = T.cast((n - m) >> 3, out)
            O[2] = T.cast((n * of(factor)) % of(100), out)
            O[3] = T.cast(n * m - m * m + n, out)
            O[4] = T.cast(T.max(y, of(5)) // of(3), out)
            if n + of(1) > n:
                O[5] = T.cast(1, out)
            turns = T.alloc_var("int32", 0)
            for k in T.serial(6):
                if n + T.cast(k, dtype) == m:
                    break
                turns = k + 1
            O[6] = T.cast(turns, out)
            O[7] = T.cast((n << of(bits - 3)) // of(2), out)
            O[8] = T.cast(~n * of(3) % of(11), out)

    def meaning(n: int, m: int) -> list[int]:
        held = lambda x: _held(x, dtype)  # noqa: E731
        turns = next((k for k in range(6) if held(n + k) == m), 6)
        return [
            held(n + m) // 7, held(n - m) >> 3, held(n * factor) % 100, held(n * m - m * m + n),
            max(held(n + m), 5) // 3, int(held(n + 1) > n), turns, held(n << (bits - 3)) // 2, held(~n * 3) % 11,
        ]  # fmt: skip

    least, most = _held(2 ** (bits - 1), dtype) if dtype[0] != "u" else 0, _held(-1, dtype)
    most = most if dtype[0] == "u" else 2 ** (bits - 1) - 1
    pairs = [(most, most), (most, least), (least, most), (least, 1), (most - 2, _held(most + 1, dtype)), (1, 3)]
    torch.manual_seed(seed)
    pairs += [(_held(int(a), dtype), _held(int(b), dtype)) for a, b in torch.randint(-(2**63), 2**63 - 1, (4, 2))]
    for n, m in pairs:
        o = torch.zeros(9, dtype=getattr(torch, out))
        way(kernel, o, n, m)
        assert o.tolist() == meaning(n, m), (n, m)


@pytest.mark.parametrize("shift", [-(2**63) + 1, 2**63 - 1, 2**62 + 2**61, -(2**62) - 2**61])
def test_what_is_chosen_or_divided_beyond_64_bits_wraps(shift: int, seed: int, way: Callable[..., None]) -> None:
    """The interval of the exact number orders it, and finds its remainder; the wrapped one lies elsewhere."""
    top = 2**63 - 1

    @T.prim_func
    def kernel(A: T.Tensor((32,), "int32"), O: T.Tensor((2, 32, 6), "int64"), n: T.int32):
        with T.Kernel(2, threads=32) as b:
            for i in T.Parallel(32):
                y = (T.cast(A[i], "int64") + shift) + (T.int64(shift // 2) + b + n)
                O[b, i, 0] = T.max(n, y)
                O[b, i, 1] = T.min(y, T.int64(5) + b)
                O[b, i, 2] = y % top
                O[b, i, 3] = y // (top // 2)
                O[b, i, 4] = T.clamp(y, -8, 8)
                O[b, i, 5] = T.clamp(T.int64(top - 1) << ((b + n) & 63), 0, 8)

    torch.manual_seed(seed)
    a = torch.randint(-(2**31), 2**31, (32,), dtype=torch.int32)
    o = torch.zeros(2, 32, 6, dtype=torch.int64)
    n = 3
    way(kernel, a, o, n)
    for b in range(2):
        for i, x in enumerate(a.tolist()):
            y = _held(x + shift + shift // 2 + b + n, "int64")
            shifted = _held((top - 1) << (b + n), "int64")
            wanted = [max(n, y), min(y, 5 + b), y % top, y // (top // 2), min(max(y, -8), 8), min(max(shifted, 0), 8)]
            assert o[b, i].tolist() == wanted, (b, i)


@pytest.mark.parametrize("of", ["shift", "product", "sum", "difference"])
def test_what_wraps_is_ordered_beside_uint64_as_it_is(of: str, seed: int, way: Callable[..., None]) -> None:
    """The interval of the exact number has one sign; the number of 64 bits may have the other."""

    def made(c: Any, s: Any, k: Any) -> Any:
        return {
            "shift": lambda: c << (s & 63), "product": lambda: c * (s & 63),
            "sum": lambda: c + c * (s & 1) + c * (k & 1), "difference": lambda: c * (s & 7) - c // 3 * (k & 3),
        }[of]()  # fmt: skip

    for c in (-5593112636897632084, 2**62, 2**33, random.Random(seed).randrange(-(2**63), 2**63)):

        @T.prim_func
        def kernel(O: T.Tensor((2,), "uint64"), P: T.Tensor((2,), "int64"), s: T.int32, k: T.int32):
            with T.Kernel(1, threads=32):
                O[0] = T.max(made(T.int64(c), s, k), T.uint64(5))  # noqa: B023
                O[1] = T.min(made(T.int64(c), s, k), T.uint64(5))  # noqa: B023
                P[0] = T.max(made(T.int64(c), s, k), 0)  # noqa: B023
                P[1] = T.min(made(T.int64(c), s, k), 0)  # noqa: B023

        for s, k in ((0, 1), (1, 3), (2, 0), (7, 2), (33, 1), (63, 3)):
            o, p = torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
            way(kernel, o.view(torch.uint64), p, s, k)
            x = _held(made(c, s, k), "int64")
            assert [*o.tolist(), *p.tolist()] == [max(x, 5), min(x, 5), max(x, 0), min(x, 0)], (c, s, k)


@pytest.mark.parametrize("dtype", ["float64", "float32", "uint64", "int32", "uint8", "bool"])
def test_int32_elements_are_exact_through_int64(dtype: str, way: Callable[..., None]) -> None:
    """A cast to int64 keeps them exact, whatever it is cast to next."""

    @T.prim_func
    def kernel(A: T.Tensor((8,), "uint8"), O: T.Tensor((8,), dtype)):
        with T.Kernel(1, threads=32):
            for i in T.serial(8):
                O[i] = T.cast(T.cast(T.cast(A[i], "int32") * 2**30 + 2**30, "int64"), dtype)

    out = torch.zeros(8, dtype=getattr(torch, dtype))
    way(kernel, torch.arange(8, dtype=torch.uint8), out)
    exact = torch.tensor([x * 2**30 + 2**30 for x in range(8)])
    wanted = exact.view(torch.uint64) if dtype == "uint64" else exact.to(out.dtype)
    assert out.tolist() == wanted.tolist()


def test_int32_elements_beside_uint64_are_exact(way: Callable[..., None]) -> None:
    """Their cast to int64, which keeps them exact, is no part of the one to uint64."""

    @T.prim_func
    def kernel(A: T.Tensor((8,), "uint8"), O: T.Tensor((2, 8), "uint64"), P: T.Tensor((8,), "uint8")):
        with T.Kernel(1, threads=32):
            for i in T.serial(8):
                O[0, i] = T.max(T.cast(A[i], "int32") * 2**30 + 2**30, T.uint64(5))
                O[1, i] = T.cast(T.cast(T.cast(A[i], "int32") * 2**30 - 2**31, "int64"), "uint64")
                wrapped = T.cast(A[i], "int32") * 2**30 + 2**30
                P[i] = T.max(T.cast(T.min(T.max(wrapped, 0), 7), "uint8"), T.uint8(3))

    a, o, p = (
        torch.arange(8, dtype=torch.uint8),
        torch.zeros(2, 8, dtype=torch.int64),
        torch.zeros(8, dtype=torch.uint8),
    )
    way(kernel, a, o.view(torch.uint64), p)
    exact = [x * 2**30 + 2**30 for x in range(8)]
    assert o.tolist() == [exact, [x * 2**30 - 2**31 for x in range(8)]]
    assert p.tolist() == [max(min(max(_held(x, "int32"), 0), 7), 3) for x in exact]


@pytest.mark.parametrize("dtype", ["int32", "int64"])
@pytest.mark.parametrize("named", [False, True], ids=["at once", "named"])
@pytest.mark.parametrize("of", ["block", "nest", "loop", "scalar", "sum"])
def test_naturals_that_leave_64_bits_are_none(of: str, named: bool, dtype: str, way: Callable[..., None]) -> None:
    """Sums and products of naturals wrap at 64 bits, named or not: a quotient of naturals is another instruction."""
    part = 1_234_567_890

    def made(at: Any, k: Any, b: Any) -> Any:
        return (T.cast(at, dtype) * part + k) * part * 7 + b

    def looked_at(x: Any) -> list[Any]:
        return [
            x // 5, x % 1000, x // 2_000_000_011, T.ceildiv(x, 7), T.cast(x > 5, dtype), T.max(x, 3) // 7,
            T.if_then_else(x < 0, 1, x % 16),
        ]  # fmt: skip

    @T.prim_func
    def kernel(O: T.Tensor((7, 2, 8, 9), dtype), n: T.int32):
        with T.Kernel(2, threads=32) as b:
            for i in T.Parallel(8):
                for k in range(2, 9):
                    at = {"block": b + 7, "nest": i + 9, "loop": k, "scalar": n + 5, "sum": b * 3 + i + k}[of]
                    x = made(at, k, b)
                    O[0, b, i, k] = looked_at(x if named else made(at, k, b))[0]
                    O[1, b, i, k] = looked_at(x if named else made(at, k, b))[1]
                    O[2, b, i, k] = looked_at(x if named else made(at, k, b))[2]
                    O[3, b, i, k] = looked_at(x if named else made(at, k, b))[3]
                    O[4, b, i, k] = looked_at(x if named else made(at, k, b))[4]
                    O[5, b, i, k] = looked_at(x if named else made(at, k, b))[5]
                    O[6, b, i, k] = looked_at(x if named else made(at, k, b))[6]

    o = torch.zeros(7, 2, 8, 9, dtype=getattr(torch, dtype))
    way(kernel, o, 3)
    for b, i, k in itertools.product(range(2), range(8), range(2, 9)):
        at = {"block": b + 7, "nest": i + 9, "loop": k, "scalar": 8, "sum": b * 3 + i + k}[of]
        x = _held((at * part + k) * part * 7 + b, "int64")
        wanted = [
            x // 5, x % 1000, x // 2_000_000_011, -(-x // 7), int(x > 5), max(x, 3) // 7, 1 if x < 0 else x % 16,
        ]  # fmt: skip
        assert o[:, b, i, k].tolist() == [_held(w, dtype) for w in wanted], (b, i, k)


def test_products_of_uint16_are_no_signed_ones() -> None:
    @T.prim_func
    def kernel(A: T.Tensor((8,), "uint16"), O: T.Tensor((8,), "uint16")):
        with T.Kernel(1, threads=8):
            for i in T.Parallel(8):
                O[i] = A[i] * A[7 - i]

    for target in ("cpu", "cuda:sm_80"):
        text = torch_tile.compile(kernel, target=target).get_kernel_source()
        assert re.search(r"\(unsigned\)A\[\w+\] \* A\[7 - ", text)
