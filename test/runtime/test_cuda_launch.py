# SPDX-License-Identifier: Apache-2.0
"""Launches through the stand-in driver, on CPU tensors: the way in Python and the native one, to the same effect."""

import itertools
import struct
import threading

import pytest
import torch
from fake_cuda import OnCpu

import torch_tile.language as T
from torch_tile.codegen.cuda import CudaSource, Entry
from torch_tile.diagnostics.errors import LaunchError
from torch_tile.hardware import Target
from torch_tile.ir.dtype import to_dtype
from torch_tile.ir.expr import Var
from torch_tile.runtime import cuda_launch
from torch_tile.runtime.aliases import overlap
from torch_tile.runtime.cuda_launch import Launch, Plan, slot_of

CUBIN = b"\x7fELF and the rest"


def launcher_of(function, kinds=None, alignment=None, out_idx=(), **fields):
    """A launcher of a program, whose kernels take every tensor, dimension and scalar in order."""
    program = function.program
    tensors = [p for p in program.params if not isinstance(p, Var)] + [*program.outputs, *program.workspaces]
    from torch_tile.ir.stmt import dimensions

    names = (*range(len(tensors)), *dimensions(program), *(p for p in program.params if isinstance(p, Var)))
    kinds = kinds or "P" * len(tensors) + "i" * (len(names) - len(tensors))
    entries = tuple(
        Entry(
            f"kernel_{n}", names, k.grid, k.threads[0], fields.get("shared", 0), None, kinds, fields.get("folds", False)
        )
        for n, k in enumerate(program.kernels)
    )
    made = CudaSource("", entries, tuple(alignment or [4] * len(tensors)), fields.get("disjoint", ()))
    return OnCpu(program, made, CUBIN, Target("cuda", 90), out_idx), len(names)


@pytest.fixture
def add():
    m, s = T.dynamic("m, s")

    @T.prim_func
    def add(x: T.StridedTensor((m, 6), (s, 1), "float32"), y: T.Tensor((m, 6), "float32"), scale: T.float32,
            n: T.int64, out: T.Tensor((m, 6), "float32")):  # fmt: skip
        with T.Kernel(T.ceildiv(m, 4), 2, threads=96) as (b, c):
            for i, j in T.Parallel(4, 6):
                out[b * 4 + i, j] = x[b * 4 + i, j] + y[b * 4 + i, j] * scale + n + c

    return add


def twice(launcher, *args):
    """The first call goes through Python in any case."""
    return [launcher.begin(*args) for _ in range(2)]


def test_what_the_driver_is_asked_for(way, add, fake_cuda, monkeypatch):
    launcher, slots = launcher_of(add, "PPPiqfq", shared=100000)
    fake_cuda.number("slots").value = slots
    x, y, out = torch.randn(9, 8)[:, :6], torch.randn(9, 6), torch.empty(9, 6)
    for args in ((x, y, 0.1, -5, out), (x, y, 3, True, out), (x[:3], y[:3], 1e300, 2**62, out[:3])):
        twice(launcher, *args)
        first, second = fake_cuda.launches()
        assert bytes(first) == bytes(second)
        rows = args[0].shape[0]
        assert list(first.grid) == [-(-rows // 4), 2, 1] and list(first.block) == [96, 1, 1]
        assert (first.shared, first.context, first.stream) == (100000, 0x1000, 0)
        assert list(first.slots[:3]) == [t.data_ptr() for t in (x, y, out)]
        assert list(first.slots[3:5]) == [rows, 8]
        assert first.slots[5] == int.from_bytes(
            bytes(torch.tensor([args[2]]).float().view(torch.uint8).tolist()), "little"
        )
        assert first.slots[6] == int(args[3]) % 2**64
    assert fake_cuda.modules() == [0x1000] and fake_cuda.shared_allowed() == [100000]
    assert (launcher.begin == launcher.start) == (way == "python")
    assert fake_cuda.current() == 0


def test_the_native_way_is_the_short_one(fake_cuda, add, monkeypatch):
    launcher, _ = launcher_of(add, "PPPiqfq")
    x, y, out = torch.randn(9, 6), torch.randn(9, 6), torch.empty(9, 6)
    launcher.begin(x, y, 1.0, 2, out)
    calls = []
    original = launcher.plan
    monkeypatch.setattr(launcher, "plan", lambda *args: calls.append(args) or original(*args))
    monkeypatch.setattr(launcher, "plans", {})
    for _ in range(3):
        launcher.begin(torch.nn.Parameter(x), y, 0.5, 7, out)
    assert not calls and len(fake_cuda.launches()) == 4
    for other in (torch.randn(9, 7)[:, :6], torch.randn(9, 6)[::1]):
        launcher.begin(other, y, 1.0, 2, out)
    assert len(calls) == 1 and len(fake_cuda.launches()) == 2


REFUSED = {
    "count": (lambda x, y, s, n, out: (x, y, s, n), r"add takes 5 arguments \(x, y, scale, n, out\), got 4"),
    "type": (lambda x, y, s, n, out: (x, [1.0], s, n, out), "`y` must be a tensor, got list"),
    "dtype": (lambda x, y, s, n, out: (x.double(), y, s, n, out), "`x` must have dtype torch.float32"),
    "rank": (lambda x, y, s, n, out: (x[0], y, s, n, out), r"`x` must have 2 dimensions, got shape \[6\]"),
    "shape": (lambda x, y, s, n, out: (x, y[:3], s, n, out), r"`y` must have size 8 \(m\) in dimension 0, got 3"),
    "strides": (lambda x, y, s, n, out: (x, y.T.contiguous().T, s, n, out), "`y` must be contiguous"),
    "device": (lambda x, y, s, n, out: (x.to("meta"), y, s, n, out), "`x` must be on cpu, got a tensor on meta"),
    "sparse": (lambda x, y, s, n, out: (x, y.to_sparse(), s, n, out), "`y` must be a plain dense tensor"),
    "negative": (lambda x, y, s, n, out: (torch._neg_view(x), y, s, n, out), "`x` must be a plain dense tensor"),
    "alignment": (
        lambda x, y, s, n, out: (x, torch.empty(49).narrow(0, 1, 48).view(8, 6), s, n, out),
        r"`y` must begin at a multiple of 16 bytes, and 0x[0-9a-f]+ is none; pass \.clone",
    ),
    "number": (lambda x, y, s, n, out: (x, y, "1", n, out), "`scale` must be a number of type float32, got str"),
    "fraction": (lambda x, y, s, n, out: (x, y, s, 1.5, out), "`n` must be a number of type int64, got float"),
    "range": (lambda x, y, s, n, out: (x, y, s, 2**63, out), "`n` = 9223372036854775808 does not fit into int64"),
    "no memory": (lambda x, y, s, n, out: (torch._efficientzerotensor(8, 6), y, s, n, out), "`x` has no memory"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_name_the_argument(case, way, add, fake_cuda):
    change, message = REFUSED[case]
    launcher, _ = launcher_of(add, "PPPiqfq", [16, 16, 4])
    good = torch.randn(8, 6), torch.randn(8, 6), 0.5, 3, torch.empty(8, 6)
    launcher.begin(*good)
    for _ in range(2):
        with pytest.raises(LaunchError, match=message):
            launcher.begin(*change(*good))
    assert len(fake_cuda.launches()) == 1


@pytest.mark.filterwarnings("ignore:Accessing the data pointer")
def test_fake_tensors_are_refused(way, add, fake_cuda):
    from torch._subclasses import FakeTensorMode

    launcher, _ = launcher_of(add, "PPPiqfq")
    x = torch.randn(8, 6)
    launcher.begin(x, x, 1.0, 1, x)
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = torch.randn(8, 6)
    with pytest.raises((LaunchError, RuntimeError)):
        launcher.begin(fake, x, 1.0, 1, x)
    assert len(fake_cuda.launches()) == 1


def test_results_are_allocated(way, fake_cuda):
    m = T.dynamic("m")

    @T.prim_func
    def two(x: T.Tensor((m, 4), "float32"), double: T.Tensor((m, 4), "float32"), half: T.Tensor((m,), "float16")):
        with T.Kernel(m) as b:
            for j in T.Parallel(4):
                double[b, j] = x[b, j] * 2.0
            half[b] = T.cast(x[b, 0], "float16")

    for out_idx, shapes in (([1], [(3, 4)]), ([2, 1], [(3,), (3, 4)])):
        launcher, slots = launcher_of(two, out_idx=out_idx, alignment=[4, 4, 2])
        fake_cuda.number("slots").value = slots
        given = [torch.randn(3, 4), torch.empty(3, dtype=torch.float16)][: 3 - len(out_idx)]
        for got in twice(launcher, *given):
            made = [got] if isinstance(got, torch.Tensor) else got
            assert [tuple(t.shape) for t in made] == shapes
        *_, last = fake_cuda.launches()
        by_position = dict(zip(out_idx, made, strict=True)) | {0: given[0]}
        assert all(last.slots[position] == t.data_ptr() for position, t in by_position.items())
        with pytest.raises(LaunchError, match="two takes"):
            launcher.begin()


def test_empty_grids_and_empty_tensors(way, add, fake_cuda):
    launcher, _ = launcher_of(add, "PPPiqfq")
    nothing = torch.empty(0, 6)
    twice(launcher, nothing, nothing, 1.0, 1, nothing)
    assert fake_cuda.launches() == []


def test_several_kernels_and_grids_of_scalars(way, fake_cuda):
    m = T.dynamic("m")

    @T.prim_func
    def both(x: T.Tensor((m,), "float32"), n: T.int32):
        with T.Kernel(n, threads=64) as b:
            x[b] = 1.0
        with T.Kernel(m, 3, n, threads=32) as (b, c, d):
            x[b] = c + d

    launcher, slots = launcher_of(both)
    fake_cuda.number("slots").value = slots
    x = torch.randn(5)
    for n, _ in itertools.product((7, 2, 0), range(2)):
        launcher.begin(x, n)
        grids = [list(r.grid) for r in fake_cuda.launches()]
        assert grids == ([[n, 1, 1], [5, 3, n]] if n else [])


@pytest.mark.parametrize(("grid", "axis"), [((1, 70000), "y"), ((1, 1, 65536), "z"), ((2**31, 1), "x")])
def test_grids_that_no_gpu_has(grid, axis, way, fake_cuda):
    @T.prim_func
    def wide(x: T.Tensor((4,), "float32"), n: T.int64):
        with T.Kernel(*(n if g > 1 else 1 for g in grid)) as _:
            x[0] = 1.0

    launcher, _ = launcher_of(wide)
    with pytest.raises(LaunchError, match=f"blocks in {axis}; the GPU allows"):
        launcher.begin(torch.zeros(4), max(grid))


def test_grids_that_fold(way, fake_cuda):
    """Too many blocks in y or z are launched in x, if the kernel can tell."""

    @T.prim_func
    def deep(x: T.Tensor((4,), "float32"), n: T.int32):
        with T.Kernel(3, n, 2) as _:
            x[0] = 1.0

    launcher, _ = launcher_of(deep, folds=True)
    for n, grid in ((65535, [3, 65535, 2]), (65536, [3 * 65536 * 2, 1, 1])):
        twice(launcher, torch.zeros(4), n)
        assert [list(r.grid) for r in fake_cuda.launches()] == [grid] * 2
    with pytest.raises(LaunchError, match="kernel_0 has 2400000000 blocks in x; the GPU allows 2147483647"):
        launcher.begin(torch.zeros(4), 400_000_000)


def test_sizes_past_32_bits(way, fake_cuda):
    m = T.dynamic("m")

    @T.prim_func
    def clear(x: T.StridedTensor((m,), (0,), "int8")):
        with T.Kernel(1) as _:
            x[0] = 0

    x = torch.zeros(1, dtype=torch.int8).expand(2**31)
    launcher, _ = launcher_of(clear, "Pi", [1])
    with pytest.raises(LaunchError, match="size `m` = 2147483648 is too large for a 32-bit index"):
        launcher.begin(x)
    launcher, _ = launcher_of(clear, "Pq", [1])
    launcher.begin(x)


def test_other_scalars(way, fake_cuda):
    kinds = ["bool", "int8", "uint8", "uint16", "uint32", "uint64", "float16", "bfloat16", "float64", "float8_e4m3fn"]
    values = [True, -3, 200, 60000, 2**32 - 1, 2**64 - 1, 0.1, 0.1, 0.1, 0.3]
    for name, value in zip(kinds, values, strict=True):
        kind = getattr(T, name)

        @T.prim_func
        def keep(x: T.Tensor((1,), name), value: kind):
            with T.Kernel(1) as _:
                x[0] = value

        dtype = to_dtype(name).as_torch()
        launcher, slots = launcher_of(keep)
        fake_cuda.number("slots").value = slots
        twice(launcher, torch.zeros(1, dtype=dtype), value)
        wanted = bytes(torch.tensor([value], dtype=dtype).view(torch.uint8).tolist())
        for record in fake_cuda.launches():
            assert struct.pack("Q", record.slots[1]) == wanted.ljust(8, b"\0" if value >= 0 else b"\xff"), name


def test_failures_of_the_driver(way, add, fake_cuda):
    launcher, _ = launcher_of(add, "PPPiqfq")
    x = torch.randn(8, 6)
    launcher.begin(x, x, 1.0, 1, x)
    fake_cuda.number("refuse").value = 719
    with pytest.raises(LaunchError, match=r"cuLaunchKernel: CUDA_ERROR_FAKE \(719\): it was asked to fail"):
        launcher.begin(x, x, 1.0, 1, x)
    assert fake_cuda.current() == 0


def test_more_forms_than_are_remembered(way, fake_cuda, monkeypatch):
    monkeypatch.setattr(cuda_launch, "MOST_FORMS", 8)
    m = T.dynamic("m")

    @T.prim_func
    def fill(x: T.Tensor((m,), "float32")):
        with T.Kernel(m) as b:
            x[b] = 1.0

    launcher, _ = launcher_of(fill)
    x = torch.zeros(2500)
    for n in [*range(1, 2500, 2), *range(1, 2500, 7)]:
        launcher.begin(x[:n])
        (record,) = fake_cuda.launches()
        assert record.grid[0] == n
    assert len(launcher.plans) <= 8


def test_threads(way, add, fake_cuda):
    """Launches share nothing, and a thread without a context gets the device's for the launch only."""
    launcher, slots = launcher_of(add, "PPPiqfq")
    fake_cuda.number("slots").value = slots
    wrong = []

    def work(rows):
        x = torch.randn(rows, 6)
        for n in range(200):
            launcher.begin(x, x, 1.0, n, x)
        wrong.append(fake_cuda.current())

    threads = [threading.Thread(target=work, args=(rows,)) for rows in (3, 50)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert wrong == [0, 0]


def test_other_devices_and_chips(add, fake_cuda, monkeypatch):
    launcher, _ = launcher_of(add, "PPPiqfq")
    functions = launcher.load(fake_cuda.driver, 2)
    assert {f.context for f in functions.values()} == {0x1002} and launcher.load(fake_cuda.driver, 2) is functions
    fake_cuda.number("capability").value = 80
    with pytest.raises(
        LaunchError, match=r"add is compiled for sm_90a, and device 1 is an sm_80; compile with target='cuda:sm_80'"
    ):
        launcher.load(fake_cuda.driver, 1)


def test_plans_are_packed_word_by_word():
    plan = Plan(2**64 - 1, 0, (Launch(7, (1, 2, 3), 64, 5, ((0, 1), (2, 2**63)), (), (2, 4, 1), True),), 4096)
    assert struct.unpack("19q", plan.packed()) == (
        -1, 4096, 1, 0, 7, 1, 2, 3, 64, 5, 2, 4, 1, 1, 2, 0, 1, 2, -(2**63),
    )  # fmt: skip


def test_small_floats_are_rounded_to_their_type():
    assert slot_of(Var("a", to_dtype("float16"), "param"), 1.0) == 0x3C00
    assert slot_of(Var("a", to_dtype("float32"), "param"), 1e300) == 0x7F800000


def test_no_gpu(add, monkeypatch):
    def missing():
        raise LaunchError("there is no NVIDIA driver on this machine")

    monkeypatch.setattr(cuda_launch, "driver", missing)
    launcher, _ = launcher_of(add, "PPPiqfq")
    x = torch.randn(8, 6)
    with pytest.raises(LaunchError, match=r"compiled for cuda:sm_90a and cannot run here: there is no.*target='cpu'"):
        launcher.begin(x, x, 1.0, 1, x)
    with pytest.raises(LaunchError, match="add takes 5 arguments"):
        launcher.begin(x)


def test_overlapping_arguments_are_refused(way, add, fake_cuda):
    """At each call, whatever was launched before; what only interleaves is taken."""
    launcher, _ = launcher_of(add, "PPPiqfq", disjoint=((0, 2), (1, 2)))
    x, y, out = torch.randn(9, 12), torch.randn(9, 6), torch.empty(9, 6)
    twice(launcher, x[:, :6], y, 1.0, 2, out)
    for _ in range(2):
        with pytest.raises(
            LaunchError, match="arguments `y` and `out` overlap, and add reads `y` while it writes `out`"
        ):
            launcher.begin(x[:, :6], out, 1.0, 2, out)
        both = torch.empty(10 * 6 + 9 * 12)
        one, other = both[9 * 6 :][: 9 * 12].view(9, 12)[:, :6], both[3 : 3 + 54].view(9, 6)
        with pytest.raises(LaunchError, match="`x` and `out` overlap"):
            launcher.begin(one, y, 1.0, 2, other)
        launcher.begin(one, one.new_empty(9, 6), 1.0, 2, both[:54].view(9, 6))
        launcher.begin(x[:, :6], y, 1.0, 2, out)
    assert len(fake_cuda.launches()) == 6


def test_what_overlaps():
    x = torch.empty(6, 8, dtype=torch.bfloat16)
    assert overlap(x, x) and overlap(x[1:], x[:2]) and overlap(x[:, ::2], x[:, 4:])
    assert not overlap(x[:3], x[3:]) and not overlap(x[:, :4], x[:, 4:]) and not overlap(x[:, ::2], x[:, 1::2])
    assert not overlap(x[:0], x) and overlap(x.view(torch.int32), x[5]) and overlap(x[:1].expand(9, 8), x)
