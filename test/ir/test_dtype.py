# SPDX-License-Identifier: Apache-2.0
import copy
import math
import pickle
import random
import struct

import numpy
import pytest
import torch

from torch_tile.ir import dtype as dt
from torch_tile.ir.expr import Cast, Const, Var


@pytest.mark.parametrize("t", dt.ALL, ids=str)
def test_every_type_is_torchs(t):
    assert dt.to_dtype(t.as_torch()) is t and dt.to_dtype(str(t)) is t and dt.to_dtype(t) is t
    assert t.itemsize == t.as_torch().itemsize
    assert t.is_float == t.as_torch().is_floating_point
    assert repr(t) == f"T.{t}" and str(t) == t.name


def test_other_spellings():
    assert [dt.to_dtype(p) for p in (bool, int, float)] == [dt.bool_, dt.int32, dt.float32]
    assert (
        dt.to_dtype("float") == dt.float32
        and dt.to_dtype("half") == dt.float16
        and dt.to_dtype("e4m3") == dt.float8_e4m3fn
    )


@pytest.mark.parametrize("value", ["float17", 3, None, str, torch.complex64, object()])
def test_what_is_no_type(value):
    with pytest.raises(ValueError, match="is not a dtype"):
        dt.to_dtype(value)


def test_a_type_converts():
    assert isinstance(dt.float16(Var("x", dt.float32)), Cast)
    literal = dt.int8(300)
    assert isinstance(literal, Const) and literal.value == 44


def test_promotion():
    known = {
        (dt.float16, dt.int64): dt.float16,
        (dt.float16, dt.bfloat16): dt.float32,
        (dt.float8_e4m3fn, dt.float8_e5m2): dt.float32,
        (dt.float8_e4m3fn, dt.float16): dt.float16,
        (dt.float32, dt.float64): dt.float64,
        (dt.int32, dt.uint32): dt.int64,
        (dt.int64, dt.uint64): dt.int64,
        (dt.int8, dt.uint8): dt.int16,
        (dt.int32, dt.uint8): dt.int32,
        (dt.bool_, dt.uint8): dt.uint8,
        (dt.uint8, dt.uint16): dt.uint16,
    }
    for (a, b), both in known.items():
        assert dt.promote(a, b) == both, (a, b)
    for a in dt.ALL:
        assert dt.promote(a, a) == a
        for b in dt.ALL:
            assert dt.promote(a, b) == dt.promote(b, a)
            assert dt.promote(a, b).is_float == (a.is_float or b.is_float)


def test_integers_promote_as_in_torch():
    signed = (dt.bool_, dt.int8, dt.int16, dt.int32, dt.int64, dt.uint8)
    for a in signed:
        for b in signed:
            assert dt.promote(a, b).as_torch() == torch.promote_types(a.as_torch(), b.as_torch()), (a, b)


@pytest.mark.parametrize("name", dt.FORMATS)
def test_rounding_is_torchs(name, seed):
    t = dt.BY_NAME[name]
    wide = torch.float64 if t.bits >= 32 else torch.float32  # torch rounds float64 to the small types by way of float32
    values = [random.choice([1, -1]) * random.random() * 2.0 ** random.randint(-155, 130) for _ in range(500)]
    values += [random.uniform(-500, 500) for _ in range(500)]
    values += [0.0, -0.0, 65504.0, 65519.0, 65520.0, 448.0, 463.0, 2.0**-10, 1.5 * 2.0**-9, 2.0**-149, 2.0**-150]
    values += [math.nan] + ([] if name == "float8_e4m3fn" else [math.inf, -math.inf, 3e38, 1e300])
    given = torch.tensor(values, dtype=torch.float64).to(wide)
    if name == "float8_e4m3fn":  # beyond the largest number torch saturates or gives nan, as its version likes
        given = given.clamp(-448, 448)
    for value, want in zip(given.tolist(), given.to(t.as_torch()).double().tolist(), strict=True):
        got = dt.rounded(value, t)
        assert struct.pack("d", got) == struct.pack("d", want) or (got != got and want != want), (value, got, want)


def test_e4m3fn_saturates():
    for value in (449.0, 480.0, 1e30, math.inf):
        assert dt.rounded(value, dt.float8_e4m3fn) == 448.0 and dt.rounded(-value, dt.float8_e4m3fn) == -448.0
    assert math.isnan(dt.rounded(math.nan, dt.float8_e4m3fn))


@pytest.mark.parametrize("t", dt.ALL, ids=str)
def test_a_type_is_its_name(t):
    """So that branches of an author go the same way whichever of the spellings a kernel was given."""
    assert isinstance(t, str) and t == t.name and t.name == t and (t != t.name) is False and hash(t) == hash(t.name)
    assert type(t.name) is str and f"{t}" == t.name and t.startswith(t.name[:3]) and t.upper() == t.name.upper()
    assert {t: 1}[t.name] == 1 and {t.name: 2}[t] == 2 and t in (t.name,) and t.name in (t,) and t in {t.name}
    assert getattr(torch, t) is t.as_torch()
    assert t == t.as_torch() and t.as_torch() == t and (t != t.as_torch()) is False
    assert copy.deepcopy(t) is t and pickle.loads(pickle.dumps(t)) is t
    assert [u for u in dt.ALL if u == t] == [t] and [u for u in dt.ALL if u == t.name] == [t]
    assert t != "float" and t != 3 and t is not None and t != torch.complex64
    if hasattr(numpy, t.name):
        kind = numpy.dtype(t.name)
        assert t == kind and t == kind.type and dt.to_dtype(kind) is t and dt.to_dtype(kind.type) is t and kind == t
        assert numpy.zeros(2, t).dtype == t
    else:
        assert t != numpy.dtype("float16")


def test_types_of_numpy_are_told_apart():
    assert dt.float16 != numpy.dtype("float32") and dt.float16 != numpy.float32 and dt.bool_ == numpy.bool_
    with pytest.raises(ValueError, match="is not a dtype"):
        dt.to_dtype(numpy.zeros(2, "float16"))


def test_a_type_of_nothing_is_a_new_name():
    """TileLang's `T.let(T.int32(), value)` binds it."""
    name = dt.int32()
    assert isinstance(name, Var) and name.dtype is dt.int32 and name is not dt.int32()


def test_numbers_arrays_and_tensors_saturate_alike():
    given = [1e9, -math.inf, math.nan, 3.0]
    for dtype in (dt.float8_e4m3fn, dt.float8_e5m2, dt.float16):
        one = [dt.saturated(x, dtype) for x in given]
        numpy.testing.assert_array_equal(dt.saturated(numpy.array(given), dtype), one)
        numpy.testing.assert_array_equal(dt.saturated(torch.tensor(given, dtype=torch.float64), dtype).numpy(), one)
        assert one[0] == dt.SATURATED.get(dtype.name, 1e9)


@pytest.mark.parametrize("source", ["float8_e5m2", "float16", "float64", "int8", "int32"])
@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2"])
def test_tensors_become_float8_within_its_range(name, source):
    most, of = dt.SATURATED[name], dt.to_dtype(source)
    numbers = [0.0, 1.0, -7.0] if of.is_integer else [0.0, -2.0, 50000.0, -math.inf, math.nan]
    given = torch.tensor(numbers, dtype=torch.float64).to(of.as_torch())
    want = [math.copysign(min(abs(x), most), x) for x in given.double().tolist()]
    found = dt.converted(given, dt.to_dtype(name)).double().tolist()
    for x, y in zip(want, found, strict=True):
        known = source == name or abs(x - y) <= abs(x) / 8  # of one type they are kept
        assert known or (math.isnan(x) and math.isnan(y)), (x, y)
