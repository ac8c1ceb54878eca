# SPDX-License-Identifier: Apache-2.0
"""T.cast with a rounding, saturation or random bits: of every number between two neighbours of the target type."""

import pytest
import torch

import torch_tile
import torch_tile.language as T
from torch_tile.diagnostics.errors import TileError

N = 2048
SMALL = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")


def kernel_of(source, target, **options):
    @T.prim_func
    def kernel(A: T.Tensor((N,), source), R: T.Tensor((N,), "uint32"), B: T.Tensor((N,), target)):
        with T.Kernel(1, threads=128) as _:
            for i in T.Parallel(N):
                B[i] = T.cast(A[i], target, **options, rbits=R[i] if options.get("round") == "rs" else None)

    return kernel


def numbers(source, target):
    """Of all sizes, exact ones, ones halfway, too large and too small ones."""
    if source.startswith("int"):
        return torch.randint(-(2**31), 2**31 - 1, (N,)).bitwise_right_shift(torch.randint(0, 31, (N,))).to(torch.int32)
    x = torch.randn(N, dtype=torch.float64) * torch.exp2(torch.randint(-28, 20, (N,)).double())
    values = finite(target)
    exact = values[torch.randint(0, len(values), (N,))]
    halves = exact + torch.exp2(torch.floor(torch.log2(exact.abs().clamp(min=2**-30))) - 4)
    x[:400], x[400:800] = exact[:400], halves[400:800]
    x[800:808] = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e30, -1e30, 1e-30])
    return x.to(getattr(torch, source))


def finite(target):
    """All finite values of a type of at most 16 bits, in order, as float64; some of a wider one."""
    dtype = getattr(torch, target)
    if target == "float32":
        return torch.cat([torch.randn(999).double().float().double(), torch.zeros(1).double()]).sort().values
    codes = torch.arange(2 ** (8 * dtype.itemsize)).to(torch.int16 if dtype.itemsize == 2 else torch.uint8)
    found = codes.view(dtype).double()
    return found[found.isfinite()].unique()


def neighbours(x, target):
    """The greatest value of the target type not above each of x, and the least not below; infinite beyond the ends."""
    x = x.double()
    if target == "float32":
        nearest = x.float()
        step = torch.full_like(nearest, torch.inf)
        low = torch.where(nearest.double() > x, torch.nextafter(nearest, -step), nearest).double()
        return low, torch.where(nearest.double() < x, torch.nextafter(nearest, step), nearest).double()
    values = torch.cat([torch.tensor([-torch.inf]).double(), finite(target), torch.tensor([torch.inf]).double()])
    above = torch.searchsorted(values, x.nan_to_num(0.0, torch.inf, -torch.inf)).clamp(max=len(values) - 1)
    exact = values[above] == x
    return values[torch.where(exact, above, above - 1)], values[above]


def ended(x, target):
    """What stands for infinity: conversions to float8 saturate."""
    most = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}.get(target, torch.inf)
    return x.clamp(-most, most)


def same(got, wanted, x):
    known = ~x.double().isnan()
    assert got.double()[~known].isnan().all()
    torch.testing.assert_close(got.double()[known], wanted[known], rtol=0, atol=0)


CASES = [("float32", t) for t in SMALL] + [
    ("float64", "float32"),
    ("float16", "float8_e4m3fn"),
    ("bfloat16", "float16"),
]


@pytest.mark.parametrize("how", ["rz", "ru", "rd", "rp", "rm"])
@pytest.mark.parametrize(("source", "target"), [*CASES, ("int32", "float16"), ("int32", "float32")])
def test_directed_roundings(way, source, target, how):
    x = numbers(source, target)
    b = torch.zeros(N, dtype=getattr(torch, target))
    way(kernel_of(source, target, round=how), x, torch.zeros(N, dtype=torch.uint32), b)
    low, high = neighbours(x, target)
    inwards = torch.where(x.double() > 0, low, high)
    same(b, ended({"rz": inwards, "ru": high, "rp": high, "rd": low, "rm": low}[how], target), x)


@pytest.mark.parametrize(("source", "target"), CASES[:4])
def test_random_rounding(way, source, target):
    x = numbers(source, target)
    x[1000:] = x[900].abs().clamp(1, 8) * 0 + 1 + 0.3 * 2**-11  # one number, often
    r = torch.randint(0, 2**32, (N,)).to(torch.uint32)
    b = torch.zeros(N, dtype=getattr(torch, target))
    way(kernel_of(source, target, round="rs"), x, r, b)
    low, high = neighbours(x, target)
    size, near = x.double().abs(), torch.minimum(low.abs(), high.abs())
    far = torch.maximum(low.abs(), high.abs())
    share = torch.where(far > near, (size - near) / (far - near), 0.0).nan_to_num(0.0)
    outwards = (r.to(torch.int64) >> 8).double() * 2**-24 < share
    wanted = torch.copysign(torch.where(outwards, far, near), x.double())
    same(b, ended(wanted, target), x)
    assert 0 <= outwards[1000:].double().mean() < 0.5


@pytest.mark.parametrize("how", [None, "rn", "rz", "ru"])
@pytest.mark.parametrize(("source", "target"), CASES[:4])
def test_saturation(way, source, target, how):
    x = numbers(source, target)
    b = torch.zeros(N, dtype=getattr(torch, target))
    way(kernel_of(source, target, round=how, sat="satfinite"), x, torch.zeros(N, dtype=torch.uint32), b)
    most = finite(target)[-1]
    clamped = x.double().clamp(-most, most)
    low, high = neighbours(clamped, target)
    if how == "rz":
        wanted = torch.where(clamped > 0, low, high)
    else:
        wanted = high if how == "ru" else clamped.to(b.dtype).double()
    same(b, wanted, x)


@pytest.mark.parametrize("target", ["float8_e4m3fn", "float8_e5m2"])
def test_float8_saturates_unless_told_not_to(way, target):
    @T.prim_func
    def kernel(A: T.Tensor((N,), "float32"), B: T.Tensor((4, N), target), C: T.Tensor((4,), target)):
        with T.Kernel(1, threads=64):
            tile = T.alloc_fragment((N,), "float32")
            T.copy(A, tile)
            for i in T.Parallel(N):
                B[0, i] = T.cast(A[i], target)
                B[1, i] = T.cast(A[i], target, sat=False)
                B[3, i] = A[i]
            T.copy(tile, B[2, 0:N])
            C[0] = T.cast(-1e6, target)
            C[1] = 1e6
            C[2] = T.cast(T.infinity("float32"), target)
            C[3] = T.cast(1e6, target, sat=False)

    x, most = numbers("float32", target), finite(target)[-1].item()
    x[900:908] = torch.tensor([464.0, 464.1, -464.1, 448.0, 61439.0, 61440.0, -61440.0, 57345.0])
    b, c = torch.zeros(4, N, dtype=getattr(torch, target)), torch.zeros(4, dtype=getattr(torch, target))
    way(kernel, x, b, c)
    for row in (0, 2, 3):
        same(b[row], x.double().clamp(-most, most).to(b.dtype).double(), x)
    first, beyond = {"float8_e4m3fn": (464.1, torch.nan), "float8_e5m2": (61440.0, torch.inf)}[target]
    over = torch.where(x > 0, beyond, -beyond).double()
    wanted = torch.where(x.abs() >= first, over, b[0].double())
    assert torch.equal(b[1].double().nan_to_num(7.0), wanted.nan_to_num(7.0))
    assert c[:3].tolist() == [-most, most, most]
    assert c[3].isnan() if target == "float8_e4m3fn" else c[3].isinf()


@pytest.mark.parametrize("how", [None, "rn", "rz", "ru", "rd"])
@pytest.mark.parametrize("target", ["int8", "uint8", "int32", "uint32", "int64"])
def test_floats_as_integers(way, target, how):
    x = torch.randn(N) * torch.exp2(torch.randint(-2, 70, (N,)).float())
    x[:8] = torch.tensor([0.5, 1.5, -0.5, -1.5, torch.nan, torch.inf, -torch.inf, 2.0**31])
    b = torch.zeros(N, dtype=getattr(torch, target))
    way(kernel_of("float32", target, round=how, sat="satfinite"), x, torch.zeros(N, dtype=torch.uint32), b)
    step = {"rn": torch.round, "ru": torch.ceil, "rd": torch.floor}.get(how, torch.trunc)
    info = torch.iinfo(b.dtype)
    wanted = [
        min(max(int(v), info.min), info.max) if abs(v) < 2**100 else 0
        for v in step(x).nan_to_num(0.0, 2.0**90, -(2.0**90)).tolist()
    ]
    assert b.tolist() == wanted


def test_integers_saturate(way):
    x = torch.randint(-(2**31), 2**31 - 1, (N,), dtype=torch.int32) >> torch.randint(0, 31, (N,), dtype=torch.int32)
    for target in ("int8", "uint16"):
        b = torch.zeros(N, dtype=getattr(torch, target))
        way(kernel_of("int32", target, sat="satfinite"), x, torch.zeros(N, dtype=torch.uint32), b)
        info = torch.iinfo(b.dtype)
        assert b.tolist() == x.clamp(info.min, info.max).tolist()


def test_literals_are_rounded_alike():
    @T.prim_func
    def kernel(B: T.Tensor((4,), "float16")):
        with T.Kernel(1) as _:
            B[0] = T.cast(1.0001, "float16", round="ru")
            B[1] = T.cast(-1.0001, "float16", "rz")
            B[2] = T.cast(1e9, "float16", sat="satfinite")
            B[3] = T.Cast("float16", 2.0)

    b = torch.zeros(4, dtype=torch.float16)
    torch_tile.compile(kernel, target="cpu")(b)
    assert b.tolist() == [1 + 2**-10, -1.0, 65504.0, 2.0]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"round": "rx"}, "give one of|did you mean"),
        ({"round": "rs"}, "rbits"),
        ({"rbits": 3}, "rbits. is given with round=None"),
        ({"sat": "finite"}, "satfinite"),
    ],
)
def test_what_it_is_not_is_refused(options, text):
    with pytest.raises(TileError, match=text):

        @T.prim_func
        def kernel(A: T.Tensor((4,), "float32"), B: T.Tensor((4,), "float16")):
            with T.Kernel(1) as _:
                B[0] = T.cast(A[0], "float16", **options)


@pytest.mark.parametrize(("source", "target", "how"), [("int64", "float32", "rz"), ("float32", "int32", "rs")])
def test_what_no_target_rounds_is_refused(source, target, how):
    with pytest.raises(TileError, match="bad_argument"):
        kernel_of(source, target, round=how)


@pytest.mark.parametrize("source", ["float32", "float64"])
def test_floats_beyond_the_signed_numbers_fit_uint64(source, way):
    @T.prim_func
    def kernel(A: T.Tensor((8,), source), B: T.Tensor((8,), "uint64"), a: T.float64, C: T.Tensor((1,), "uint64")):
        with T.Kernel(1, threads=32) as _:
            for i in T.Parallel(8):
                B[i] = T.cast(A[i], "uint64")
            C[0] = T.cast(a, "uint64")

    numbers = [0, 3, 2**31, 2**62, 2**63, 2**63 + 2**41, 2**64 - 2**40, 10**19 // 2**41 * 2**41]
    b, c = torch.zeros(8, dtype=torch.uint64), torch.zeros(1, dtype=torch.uint64)
    way(kernel, torch.tensor(numbers, dtype=getattr(torch, source)), b, 1.5 * 2.0**63, c)
    assert b.tolist() == numbers and c.tolist() == [3 * 2**62]
