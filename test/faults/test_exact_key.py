# SPDX-License-Identifier: Apache-2.0
"""Compile-time values share a kernel only where no kernel can tell them apart."""

import itertools
import math
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

import torch_tile
import torch_tile.language as T
from torch_tile.language.outside import exact_key

OTHER_NAN = struct.unpack("d", struct.pack("Q", 0xFFF8000000000001))[0]
NUMBERS = [0, 0.0, -0.0, False, True, 1, 1.0, 1 + 0j, math.nan, OTHER_NAN, np.float32(0), np.float64(-0.0), np.int32(0)]


@dataclass(frozen=True)
class _Options:
    scale: Any


WRAPS = [lambda v: v, lambda v: (v,), lambda v: [2, [v]], lambda v: {"a": v}, lambda v: frozenset([v]), _Options]


@pytest.mark.parametrize("wrap", WRAPS)
def test_keys_tell_numbers_apart(wrap: Any) -> None:
    keys = [exact_key(wrap(n)) for n in NUMBERS]
    assert all(a != b for a, b in itertools.combinations(keys, 2))
    assert keys == [exact_key(wrap(n)) for n in NUMBERS]
    assert hash(tuple(keys)) is not None


@pytest.mark.parametrize("of", [lambda records: records, lambda records: records[0]], ids=["array", "record"])
def test_records_of_objects(of: Any) -> None:
    def records(size: int, inner: Any) -> Any:
        fields: Any = [("size", "int32"), ("inner", object), ("pair", object, (2,))]
        return of(np.array([(size, inner, (inner, 0))], dtype=fields))

    given = [*itertools.product((1, 2), NUMBERS)]
    keys = [exact_key(records(*each)) for each in given]
    assert all(a != b for a, b in itertools.combinations(keys, 2))
    assert keys == [exact_key(records(*each)) for each in given]
    held = [1.0]
    found = records(1, held)
    before = exact_key(found)
    held[0] = 2.0
    assert exact_key(found) != before


def test_eager_kernels_and_lazy_ones() -> None:
    @torch_tile.jit(target="cpu")
    def eager(A, s=1.0):
        A: T.Tensor((8,), "float32")
        B = T.empty((8,), "float32")
        with T.Kernel(1, threads=32):
            for i in T.Parallel(8):
                B[i] = A[i] / T.float32(s)
        return B

    @torch_tile.jit(target="cpu", out_idx=-1)
    def lazy(s):
        @T.prim_func
        def main(A: T.Tensor((8,), "float32"), B: T.Tensor((8,), "float32")):
            with T.Kernel(1, threads=32):
                for i in T.Parallel(8):
                    B[i] = A[i] / T.float32(s[0] if isinstance(s, tuple) else s)

        return main

    ones = torch.ones(8)
    scales = (2.0, -0.0, 0.0, 2, True, 1)
    want = [0.5, -math.inf, math.inf, 0.5, 1.0, 1.0]
    assert [eager(ones, s)[0].item() for s in scales] == want
    assert [lazy(s)(ones)[0].item() for s in scales] == want
    assert [lazy((s,))(ones)[0].item() for s in scales] == want
    assert lazy(2.0) is lazy(2.0) and lazy(math.nan) is lazy(math.nan)
    assert lazy(True) is not lazy(1)
