# SPDX-License-Identifier: Apache-2.0
"""Numbers as arguments: rounded to their float type everywhere, and refused outside of their integer type."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import torch_tile
import torch_tile.language as T
from torch_tile.diagnostics.errors import LaunchError

FLOATS = {
    "float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64,
    "float8_e4m3fn": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2,
}  # fmt: skip
NUMBERS = (0.1, -0.3, 1 / 3, 1e-5, 1e-41, -0.0, 7, 1e6, 1e300, -1e39, float("inf"), float("nan"))
INTEGERS = {f"{sign}int{bits}": (bits, sign) for bits in (8, 16, 32, 64) for sign in ("", "u")} | {"bool": (1, "u")}


def stores(dtype: str, wide: str) -> Any:
    """A kernel that stores its argument and twice its argument, computed in its own type, as wide numbers."""

    @T.prim_func
    def kernel(a: getattr(T, dtype), O: T.Tensor((2,), wide)):
        with T.Kernel(1, threads=32):
            O[0] = T.cast(a, wide)
            O[1] = T.cast(a, wide) * T.cast(2, wide)

    return kernel


@pytest.mark.parametrize("dtype", FLOATS)
def test_floats_are_rounded_to_their_type(dtype: str, way: Callable[..., None]) -> None:
    kernel = stores(dtype, "float64")
    for number in NUMBERS:
        out = torch.zeros(2, dtype=torch.float64)
        way(kernel, number, out)
        exact = torch.tensor(number, dtype=torch.float64)
        if dtype == "float8_e4m3fn":  # has no infinity; before torch 2.13, numbers beyond the largest became NaN
            exact = exact.clamp(-448, 448)
        wanted = exact.to(FLOATS[dtype]).double()
        torch.testing.assert_close(out, torch.stack([wanted, 2 * wanted]), rtol=0, atol=0, equal_nan=True)
        assert torch.equal(out[0].signbit(), wanted.signbit()) or wanted.isnan()


def ends(dtype: str) -> tuple[int, int]:
    """The least and the greatest number of a type."""
    bits, sign = INTEGERS[dtype]
    return (0, 2**bits - 1) if sign else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


@pytest.mark.parametrize("dtype", INTEGERS)
def test_integers_keep_every_number_of_their_type(dtype: str, way: Callable[..., None]) -> None:
    wide = "uint64" if dtype == "uint64" else "int64"
    kernel = stores(dtype, wide)
    for number in {*ends(dtype), 0, 1}:
        out = torch.zeros(2, dtype=getattr(torch, wide))
        way(kernel, number, out)
        exact = [int(x) if wide == "int64" else int(x) % 2**64 for x in out.view(torch.int64).tolist()]
        shift = 2**63 if wide == "int64" else 0
        assert exact == [(n + shift) % 2**64 - shift for n in (number, 2 * number)]


@pytest.mark.parametrize("call", ["cpu", "interpret", "meaning"])
@pytest.mark.parametrize("dtype", INTEGERS)
def test_integers_outside_of_their_type_are_refused(dtype: str, call: str) -> None:
    from torch_tile.simulator.tile.interpreter import evaluate

    kernel, (low, high), out = stores(dtype, "int64"), ends(dtype), torch.zeros(2, dtype=torch.int64)
    compiled = torch_tile.compile(kernel, target="cpu" if call == "cpu" else "cuda:sm_80")
    run = {"cpu": compiled, "interpret": getattr(compiled, "interpret", None)}.get(
        call, lambda *a: evaluate(kernel, *a)
    )
    outside = [low - 1, high + 1, -(2**70), 2**70]
    given = [
        *outside,
        *(np.int64(n) for n in outside if abs(n) < 2**63),
        *(torch.tensor(n) for n in outside[:2] if abs(n) < 2**63),
    ]
    for number in given:
        with pytest.raises(LaunchError, match=re.escape(f"argument `a` = {int(number)} does not fit into {dtype}")):
            run(number, out)
    for number in (0.5, 1.0, "1", None, torch.tensor([1])):
        with pytest.raises(LaunchError, match="argument `a` must be a number of type"):
            run(number, out)
    assert not out.any()


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_integers_beyond_all_floats_are_refused(dtype: str) -> None:
    @T.prim_func
    def kernel(by: T.dtype(dtype), Y: T.Tensor((4,), "float32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(4):
                Y[i] = T.cast(by, "float32")

    compiled = torch_tile.compile(kernel, target="cpu")
    for number in (10**400, -(10**400)):
        with pytest.raises(LaunchError, match=r"argument `by` is an integer of .* bits, which no float"):
            compiled(number, torch.zeros(4))
