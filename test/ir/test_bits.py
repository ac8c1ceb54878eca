# SPDX-License-Identifier: Apache-2.0
"""T.reinterpret against torch's `view`: on the CPU, in both interpreters, and as machine code of GPUs."""

import itertools
import math
import random

import pytest
import torch

import torch_tile
import torch_tile.language as T
from torch_tile.diagnostics.errors import TileError
from torch_tile.hardware import Target
from torch_tile.ir import dtype as dt
from torch_tile.ir.bits import passes
from torch_tile.ir.expr import Call, Const, const
from torch_tile.runtime.nvrtc import compile_cubin
from torch_tile.simulator.tile.interpreter import evaluate

KINDS = {
    64: ("float64", "int64", "uint64"),
    32: ("float32", "int32", "uint32"),
    16: ("float16", "bfloat16", "int16", "uint16"),
    8: ("float8_e4m3fn", "float8_e5m2", "int8", "uint8"),
}
PAIRS = [pair for kinds in KINDS.values() for pair in itertools.permutations(kinds, 2)]
COUNT = 320
EDGES = {64: [0, -(2**63), 1, -1, 0x7FF << 52], 32: [0, -(2**31), 1, -1, 0x7F800000, 0x7FC00123]}


def any_bits(dtype, but_nan_of=()):
    """Elements of every kind: small numbers, infinities, denormals, and NaN but those of some types."""
    bits = dt.to_dtype(dtype).bits
    signed = getattr(torch, f"int{bits}")
    values = torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1, (COUNT,), dtype=torch.int64)
    if bits == 8:
        values = torch.arange(COUNT) % 256 - 128
    values[: len(EDGES.get(bits, ()))] = torch.tensor(EDGES.get(bits, ()), dtype=torch.int64)
    values = values.to(signed)
    for name in but_nan_of:
        values[values.view(getattr(torch, name)).double().isnan()] = 0
    return values.view(getattr(torch, dtype))


def kernel_of(source, to):
    """The bits of elements, of sums with what is read, and back again."""

    @T.prim_func
    def kernel(x: T.Tensor((COUNT,), source), y: T.Tensor((COUNT,), to), z: T.Tensor((COUNT,), source)):
        with T.Kernel(T.ceildiv(COUNT, 64), threads=64) as bx:
            for i in T.Parallel(64):
                y[bx * 64 + i] = T.reinterpret(x[bx * 64 + i], to)
            for i in T.Parallel(64):
                z[bx * 64 + i] = T.reinterpret(T.reinterpret(-x[bx * 64 + i], to), source)

    return kernel


def same_bits(a, b):
    width = getattr(torch, f"int{a.element_size() * 8}")
    return torch.equal(a.view(width), b.view(width))


def check(run, source, to, nan):
    x = any_bits(source, () if nan else (source, to))
    signed = getattr(torch, f"int{x.element_size() * 8}")
    y, z = torch.zeros_like(x).view(getattr(torch, to)), torch.zeros_like(x)
    run(x, y, z)
    assert same_bits(x, y)
    if nan:
        return
    want = (-x.double()).to(x.dtype) if x.is_floating_point() else (-x.view(signed)).view(x.dtype)
    through = want.view(y.dtype)  # a NaN on the way stays one, but need not keep its bits
    known = ~through.double().isnan()
    assert same_bits(z.view(signed)[known], want.view(signed)[known])


@pytest.mark.parametrize("source, to", PAIRS, ids=lambda x: x)
def test_as_view_does(source, to):
    kernel = kernel_of(source, to)
    gpu = torch_tile.compile(kernel, target="cuda:sm_90a")
    compiled = torch_tile.compile(kernel, target="cpu")
    check(compiled, source, to, nan=True)
    for run in (compiled, lambda *args: evaluate(kernel, *args), gpu.interpret):
        check(run, source, to, nan=False)


def test_machine_code():
    """All pairs of types in one kernel, for three chips."""

    @T.prim_func
    def kernel(x: T.Tensor((len(PAIRS), 64), "int64"), y: T.Tensor((len(PAIRS), 64), "int64")):
        with T.Kernel(1, threads=64):
            for n, (source, to) in enumerate(PAIRS):
                for i in T.Parallel(64):
                    y[n, i] = T.cast(T.reinterpret(T.cast(x[n, i], source), to), "int64")

    for chip in ("sm_80", "sm_90a", "sm_120a"):
        text = torch_tile.compile(kernel, target=f"cuda:{chip}").get_kernel_source()
        assert "tile::reinterpret<tile::bf16, int16_t>" in text
        cubin = compile_cubin(text, Target.of(f"cuda:{chip}"))
        assert cubin.warnings == []
        assert all((used.spills, used.stack) == (0, 0) for used in cubin.resources.values())


def test_what_lies_in_memory_is_not_decoded():
    """NaN of small types keep their bits from memory to memory."""
    kernel = kernel_of("int16", "bfloat16")
    for target, frame in (("cpu", "y["), ("cuda:sm_90a", "y[")):
        text = torch_tile.compile(kernel, target=target).get_kernel_source()
        line = next(line for line in text.splitlines() if "tile::reinterpret" in line and frame in line)
        assert "narrow" not in line and "widen" not in line


@pytest.mark.parametrize("source, to", PAIRS, ids=lambda x: x)
def test_literals_are_folded(source, to):
    for number in (1, -2, 0, 5) if "int" in source else (1.0, -2.5, -0.0, math.inf):
        value = const(number, dt.to_dtype(source))
        found = T.reinterpret(value, to)
        if isinstance(found, Call):
            assert "float8" in source + to or math.isinf(number) or number == -2
            continue
        assert isinstance(found, Const) and found.dtype == T.dtype(to)
        signed = getattr(torch, f"int{dt.to_dtype(source).bits}")
        bits = [torch.tensor(v.value, dtype=v.dtype.as_torch()).view(signed).item() for v in (value, found)]
        assert bits[0] == bits[1]


def test_numbers_orders_and_text():
    assert T.reinterpret(0x3F800000, "float32").value == 1.0
    assert T.reinterpret("float32", 0xBF800000).value == -1.0
    assert T.reinterpret(1.0, T.int32).value == 0x3F800000
    assert T.reinterpret(torch.uint32, -1.0).value == 0xBF800000
    assert T.reinterpret(0x3F80, "bfloat16").value == 1.0 and T.reinterpret(-1, "uint8").value == 255
    assert isinstance(T.reinterpret(0x7FC00000, "float32"), Call)  # NaN
    value = T.float32(2.0)
    assert T.reinterpret(value, "float32") is value
    assert "T.reinterpret(x[bx * 64 + i], T.int32)" in repr(kernel_of("float32", "int32"))
    assert "T.reinterpret(x[bx * 64 + i], T.int32)" in repr(kernel_of("uint32", "int32"))


def test_bits_can_be_computed_with():
    """The exponent of floats, and an int that is compared and indexes."""

    @T.prim_func
    def kernel(x: T.Tensor((64,), "float32"), y: T.Tensor((64,), "int32"), table: T.Tensor((256,), "int32")):
        with T.Kernel(1, threads=64):
            for i in T.Parallel(64):
                exponent = (T.reinterpret(x[i], "int32") >> 23) & 255
                y[i] = table[exponent] if T.reinterpret(x[i], "int32") >= 0 else -table[exponent]

    x, table = torch.randn(64), torch.arange(256, dtype=torch.int32) - 127
    want = torch.frexp(x).exponent - 1
    want = torch.where(x < 0, -want, want)
    for run in (
        torch_tile.compile(kernel, target="cpu"),
        lambda *args: evaluate(kernel, *args),
        torch_tile.compile(kernel, target="cuda:sm_90a").interpret,
    ):
        y = torch.zeros(64, dtype=torch.int32)
        run(x, y, table)
        assert torch.equal(y, want)


def other_width():
    @T.prim_func
    def kernel(A: T.Tensor((4,), "float32"), B: T.Tensor((4,), "int16")):
        with T.Kernel(1) as _:
            B[0] = T.reinterpret(A[0], "int16")  # here


def of_bool():
    @T.prim_func
    def kernel(A: T.Tensor((4,), "bool"), B: T.Tensor((4,), "int8")):
        with T.Kernel(1) as _:
            B[0] = T.reinterpret(A[0], "int8")  # here


def of_a_name():
    @T.prim_func
    def kernel(A: T.Tensor((4,), "float32"), B: T.Tensor((4,), "int32")):
        with T.Kernel(1) as _:
            B[0] = T.reinterpret(A[0], "int23")  # here


@pytest.mark.parametrize(
    "case, text",
    [
        (other_width, "`dtype` int16 has 16 bits, but the value is of dtype float32, which has 32"),
        (of_bool, "`value` is bool"),
        (of_a_name, "'int23' is not a dtype"),
    ],
)
def test_refusals_show_the_line(case, text):
    with pytest.raises(TileError) as caught:
        case()
    assert text in str(caught.value)
    assert caught.value.span.source().endswith("# here")


@pytest.mark.parametrize("width", [1, 2, 4, 8, 16])
def test_neighbours_are_free_of_conflicts(width):
    assert passes([lane * width for lane in range(32)], width) == 1


@pytest.mark.parametrize(("stride", "expected"), [(4, 1), (8, 2), (12, 1), (64, 16), (128, 32), (132, 1), (0, 1)])
def test_strided_words(stride, expected):
    assert passes([lane * stride for lane in range(32)], 4) == expected


def test_eight_lanes_of_sixteen_bytes_are_one_group(seed):
    rows = list(range(8))
    random.shuffle(rows)
    assert passes([row * 128 for row in rows] * 4, 16) == 8
    assert passes([row * 128 + 16 * (row ^ 5) for row in rows] * 4, 16) == 1
    assert passes([0] * 16 + [128] * 16, 16) == 1  # the groups do not meet
