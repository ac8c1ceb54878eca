# SPDX-License-Identifier: Apache-2.0
"""Tensor maps: what the driver is asked for, what is refused, and how launches get them; the driver is a stand-in."""

import ctypes

import pytest
import torch
from fake_cuda import OnCpu

import torch_tile.language as T
from torch_tile.compiler.sources import CudaSource, Entry, MapArg
from torch_tile.diagnostics.errors import InternalError, LaunchError
from torch_tile.hardware import Target
from torch_tile.ir.dtype import int32
from torch_tile.ir.expr import Const, Var, to_expr
from torch_tile.ir.stmt import dimensions
from torch_tile.runtime.tensor_map import (
    ALIGNMENT,
    KEPT,
    SIZE,
    TensorMaps,
    aligned_memory,
    map_form,
)


def arg_of(sizes, strides, box, swizzle=0, dtype="bfloat16", itemsize=2, position=0):
    exprs = (tuple(to_expr(x) if isinstance(x, int) else x for x in each) for each in (sizes, strides))
    return MapArg(position, *exprs, box, swizzle, dtype, itemsize)


def test_forms_are_the_drivers():
    m, s = Var("m", int32, "dim"), Var("s", int32, "dim")
    form = map_form(arg_of((3, m, 64), (s * m, s, 1), (1, 128, 32), 64, position=2), "x", {m: 500, s: 72})
    assert form == ("x", 2, 9, (64, 500, 3), (144, 72000), (32, 128, 1), 2, 2)
    assert map_form(arg_of((4, 128), (128, 1), (4, 64)), "x", {}).promotion == 3
    assert map_form(arg_of((4, 127), (128, 1), (4, 64)), "x", {}).promotion == 2
    assert map_form(arg_of((7,), (1,), (8,)), "x", {}).strides == ()


@pytest.mark.parametrize(
    ("dtype", "itemsize", "number"),
    [("int8", 1, 0), ("uint8", 1, 0), ("bool", 1, 0), ("float8_e4m3fn", 1, 0), ("float8_e5m2", 1, 0), ("uint16", 2, 1),
     ("uint32", 4, 2), ("int32", 4, 3), ("int64", 8, 5), ("float16", 2, 6), ("float32", 4, 7), ("float64", 8, 8),
     ("bfloat16", 2, 9)],
)  # fmt: skip
def test_types(dtype, itemsize, number):
    assert map_form(arg_of((4, 64), (64, 1), (4, 16), 0, dtype, itemsize), "x", {}).data_type == number


def test_a_single_elements_stride_is_anything():
    form = map_form(arg_of((5, 1, 1), (64, 3, 7), (1, 1, 8)), "x", {})
    assert (form.sizes, form.strides) == ((1, 1, 5), (16, 128))
    form = map_form(arg_of((1, 8), (-(2**60), 1), (1, 8)), "x", {})
    assert form.strides == (16,)
    assert map_form(arg_of((2**32, 8), (0, 1), (1, 8)), "x", {}).strides == (0,)


REFUSED = [
    ((0, 64), (64, 1), "`x` has size 0 in dimension 0; .*compute without the kernel where a tensor is empty"),
    ((4, 0), (64, 1), "`x` has size 0 in dimension 1"),
    ((2**32 + 1, 64), (64, 1), "`x` has size 4294967297 in dimension 0; .*take 1 to 4294967296: split the tensor"),
    ((4, 64), (128, 2), "`x` must have stride 1 in its last dimension, got 2; pass .contiguous"),
    ((4, 64), (65, 1), r"`x` has stride 65 \(130 bytes\) in dimension 0; .*rows padded to 8 elements"),
    ((4, 64), (2**39, 1), r"`x` has stride 549755813888 \(1099511627776 bytes\) in dimension 0; .*below 2\^40"),
    ((4, 64), (-64, 1), r"`x` has stride -64 \(-128 bytes\)"),
]


@pytest.mark.parametrize(("sizes", "strides", "message"), REFUSED)
def test_tensors_without_a_map(sizes, strides, message):
    with pytest.raises(LaunchError, match=f"argument {message}"):
        map_form(arg_of(sizes, strides, (4, 64)), "x", {})


BOXES = [
    ((0, 64), 0, "bfloat16", 2, r"boxes of \(0, 64\) elements"),
    ((257, 64), 0, "bfloat16", 2, r"boxes of \(257, 64\) elements"),
    ((4, 12), 0, "bfloat16", 2, r"boxes of \(4, 12\) elements"),
    ((64,), 0, "bfloat16", 2, r"boxes of \(64,\) elements"),
    ((4, 64), 96, "bfloat16", 2, "rows of 128 bytes, which no swizzle over 96 spans"),
    ((4, 64), 64, "bfloat16", 2, "rows of 128 bytes, which no swizzle over 64 spans"),
    ((4, 64), 0, "complex64", 8, "no tensor maps of complex64"),
]


@pytest.mark.parametrize(("box", "swizzle", "dtype", "itemsize", "message"), BOXES)
def test_boxes_that_no_map_has(box, swizzle, dtype, itemsize, message):
    with pytest.raises(InternalError, match=message):
        map_form(arg_of((4, 64), (64, 1), box, swizzle, dtype, itemsize), "x", {})
    with pytest.raises(InternalError, match="boxes of"):
        map_form(arg_of((2,) * 6, (16,) * 5 + (1,), (1,) * 5 + (8,)), "x", {})


def test_memory_is_aligned_and_kept():
    kept = [aligned_memory() for _ in range(20)]
    assert all(ctypes.addressof(m) % ALIGNMENT == 0 and ctypes.sizeof(m) == SIZE for m in kept)
    for n, memory in enumerate(kept):
        memory.raw = bytes([n]) * SIZE
    assert [set(memory.raw) for memory in kept] == [{n} for n in range(20)]


def test_maps_are_kept_by_address(fake_cuda):
    maps = TensorMaps(map_form(arg_of((4, 64), (64, 1), (4, 64), 128), "x", {}), fake_cuda.driver)
    first = maps.at(1024)
    assert maps.at(1024) is first and maps.at(2048) is not first and fake_cuda.number("encoded").value == 2
    for n in range(KEPT):
        maps.at(4096 + 16 * n)
    assert fake_cuda.number("encoded").value == 2 + KEPT
    assert maps.at(1024) is not first and maps.at(1024).raw[:8] == first.raw[:8]
    with pytest.raises(LaunchError, match="argument `x` must begin at a multiple of 16 bytes, and 0x408 is none"):
        maps.at(1032)
    fake_cuda.number("refuse_maps").value = 1
    with pytest.raises(
        LaunchError, match=r"no tensor map of argument `x` \(sizes \(64, 4\).*cuTensorMapEncodeTiled: CUDA"
    ):
        maps.at(8192)


def test_a_driver_that_knows_none(fake_cuda, monkeypatch):
    maps = TensorMaps(map_form(arg_of((4, 64), (64, 1), (4, 64)), "x", {}), fake_cuda.driver)
    monkeypatch.setattr(fake_cuda.driver, "library", object())
    with pytest.raises(LaunchError, match="this machine has no cuTensorMapEncodeTiled; a newer driver does"):
        maps.at(1024)


# Launches.


@pytest.fixture
def copy(way, fake_cuda):
    """A launcher of copies from x to y in boxes: parameters y's map, m, x, x's map, the stride of x, a number."""
    m, s = T.dynamic("m, s")

    @T.prim_func
    def copy(x: T.StridedTensor((2, m, 64), (s, 64, 1), "float16"), n: T.int32, y: T.Tensor((2, m, 64), "float16")):
        with T.Kernel(m, 2, threads=32) as (i, j):
            y[j, i, 0] = x[j, i, 0] + n

    program = copy.program
    rows, step = dimensions(program)
    sizes = Const(2, int32), rows, Const(64, int32)
    last = Const(64, int32), Const(1, int32)
    x_map = MapArg(0, sizes, (step, *last), (1, 16, 32), 64, "float16", 2)
    y_map = MapArg(1, sizes, (rows * 64, *last), (1, 8, 64), 128, "float16", 2)
    args = y_map, rows, 0, x_map, step, program.params[1]

    def launcher(**fields):
        entry = Entry("kernel", args, program.kernels[0].grid, 32, 0, None, "MiPMqi")._replace(**fields)
        return OnCpu(program, CudaSource("", (entry,), (16, 16)), b"\x7fELF", Target("cuda", 90))

    fake_cuda.number("slots").value, fake_cuda.number("map_slots").value = 6, 0b1001
    return launcher


def shown(found):
    return (
        found.address, list(found.sizes[: found.rank]), list(found.strides[: found.rank - 1]),
        list(found.boxes[: found.rank]), found.data_type, found.swizzle,
    )  # fmt: skip


def test_launches_with_maps(copy, fake_cuda):
    launcher = copy()
    for rows in (3, 40, 3):
        x, y = torch.randn(3, 2 * rows, 64).half()[:2, :rows], torch.empty(2, rows, 64).half()
        for n in range(3):
            launcher.begin(x, n, y)
            (record,) = fake_cuda.launches()
            assert shown(record.maps[0]) == (y.data_ptr(), [64, rows, 2], [128, 128 * rows], [64, 8, 1], 6, 3)
            assert shown(record.maps[1]) == (x.data_ptr(), [64, rows, 2], [128, 256 * rows], [32, 16, 1], 6, 2)
            assert list(record.slots[:6]) == [0, rows, x.data_ptr(), 0, 128 * rows, n]
            assert not record.is_extended and list(record.grid) == [rows, 2, 1]


def test_only_new_addresses_are_encoded(way, copy, fake_cuda):
    launcher, encoded = copy(), fake_cuda.number("encoded")
    x, y, other = (torch.zeros(2, 5, 64).half() for _ in range(3))
    for _ in range(4):
        launcher.begin(x, 1, y)
    made = encoded.value
    assert made == (2 if way == "python" else 4)  # the first launch is Python's
    for _ in range(3):
        launcher.begin(x, 1, other)
    assert encoded.value == made + 1
    fake_cuda.launches()
    for target in (y, other, y, other):
        launcher.begin(x, 1, target)
        (record,) = fake_cuda.launches()
        assert [m.address for m in record.maps[:2]] == [target.data_ptr(), x.data_ptr()]


@pytest.mark.parametrize("way", ["native"], indirect=True)
def test_the_native_way_needs_no_python(copy, fake_cuda, monkeypatch):
    launcher = copy(cluster=(2, 1, 1), early=True)
    x, y = torch.zeros(2, 6, 64).half(), torch.zeros(2, 6, 64).half()
    launcher.begin(x, 1, y)
    monkeypatch.setattr(launcher, "plans", {})
    monkeypatch.setattr(launcher, "plan", lambda *args: pytest.fail("a known form is planned again"))
    for target in (y, x, y.clone()):
        launcher.begin(x, 1, target)
    assert len(fake_cuda.launches()) == 4


def test_maps_that_the_driver_refuses(copy, fake_cuda):
    launcher = copy()
    x, y = torch.zeros(2, 6, 64).half(), torch.zeros(2, 6, 64).half()
    for _ in range(2):
        launcher.begin(x, 1, y)
    fake_cuda.number("refuse_maps").value = 1
    with pytest.raises(LaunchError, match="there is no tensor map of argument `y`"):
        launcher.begin(x, 1, y.clone())
    launcher.begin(x, 1, y)
    assert len(fake_cuda.launches()) == 3


def test_addresses_and_forms_without_a_map(copy, fake_cuda):
    launcher = copy()
    y = torch.empty(2, 3, 64).half()
    launcher.begin(y.clone(), 1, y)
    for _ in range(2):
        with pytest.raises(LaunchError, match="`x` must begin at a multiple of 16 bytes"):
            launcher.begin(torch.empty(385).half()[1:].view(2, 3, 64), 1, y)
        with pytest.raises(LaunchError, match=r"`x` has stride 196 \(392 bytes\) in dimension 0"):
            launcher.begin(torch.empty(2, 196).half()[:, :192].view(2, 3, 64), 1, y)
    assert len(fake_cuda.launches()) == 1
    launcher.begin(y[:, :0], 1, y[:, :0].contiguous())  # no blocks, so no maps
    assert not fake_cuda.launches()


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("cluster", [(1, 1, 1), (2, 1, 1), (2, 2, 1)])
def test_clusters_and_early_starts(cluster, early, copy, fake_cuda):
    launcher = copy(cluster=cluster, early=early)
    x = torch.zeros(2, 6, 64).half()
    for _ in range(3):
        launcher.begin(x, 1, x.clone())
    for record in fake_cuda.launches():
        assert (tuple(record.cluster), bool(record.early)) == (cluster, early)
        assert bool(record.is_extended) == (early or cluster != (1, 1, 1))
    if cluster[0] == 2:
        with pytest.raises(LaunchError, match="kernel has 5 blocks in x, which are no clusters of 2"):
            launcher.begin(x[:, :5], 1, x[:, :5].contiguous())


def test_failures_are_the_drivers(copy, fake_cuda):
    launcher = copy(early=True)
    x = torch.zeros(2, 6, 64).half()
    launcher.begin(x, 1, x)
    fake_cuda.number("refuse").value = 700
    with pytest.raises(LaunchError, match=r"cuLaunchKernel(Ex)?: CUDA_ERROR_FAKE \(700\)"):
        launcher.begin(x, 1, x)
