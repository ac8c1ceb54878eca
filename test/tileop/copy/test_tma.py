# SPDX-License-Identifier: Apache-2.0
"""Bulk copies of tiles: every element goes where the layout says, all bytes are expected, and why some are refused."""

from __future__ import annotations

import dataclasses
import itertools
import sys
from pathlib import Path

import numpy as np
import pytest
from expecttest import assert_expected_inline

import torch_tile.language as T
from torch_tile.diagnostics.errors import TileError
from torch_tile.ir import dtype as dt
from torch_tile.ir.arith_util import evaluate
from torch_tile.ir.buffer import Buffer
from torch_tile.ir.dtype import DType
from torch_tile.ir.expr import Expr, Load, Var, const
from torch_tile.ir.layout import Layout, row_major, shared_tile
from torch_tile.tileop.copy.op import Copy
from torch_tile.tileop.copy.tma import TmaCopy, refuses, refuses_shares

sys.path.insert(0, str(Path(__file__).parents[1]))
for folder in (Path(__file__).parents[1], Path(__file__).parent):
    sys.path.insert(0, str(folder))
from hopper_model import box_bytes, box_places, calls, places_of  # noqa: E402

N = Var("n", dt.int32, "dim", 8)
ODD = Var("odd", dt.int32, "dim")


def number(x: int | Expr) -> Expr:
    return x if isinstance(x, Expr) else const(x, dt.int32)


@dataclasses.dataclass(frozen=True)
class Case:
    """A tile and the part of a tensor that it is copied from or to, as (start, extent) in each dimension."""

    tensor: tuple[int | Expr, ...] = (256, 256)
    part: tuple[tuple[int | Expr, int], ...] = ((64, 64), (128, 64))
    tile: tuple[int, ...] = (64, 64)
    inside: tuple[tuple[int | Expr, int] | None, ...] = ()
    dtype: DType = dt.float16
    layout: Layout | None = None
    strides: tuple[int | Expr, ...] | None = None
    align: int | None = None
    to: DType | None = None  # of the tile, if another

    def buffers(self, on_threads) -> tuple[Buffer, Buffer]:
        """The tensor and the tile."""
        of = self.to or self.dtype
        strides = None if self.strides is None else tuple(map(number, self.strides))
        tensor = on_threads.buffer("X", self.tensor, self.dtype, "global")
        layout = self.layout or shared_tile(self.tile, of.bits)
        return dataclasses.replace(tensor, strides=strides, align=self.align), on_threads.buffer(
            "s", self.tile, of, "shared", layout
        )

    def copy(self, on_threads, store: bool = False) -> TmaCopy:
        """A load that counts for element 1 of an array of mbarriers, or a store."""
        tensor, tile = self.buffers(on_threads)
        outside = on_threads.box(tensor)
        ranges = tuple(
            dataclasses.replace(r, start=number(s), extent=number(e))
            for r, (s, e) in zip(outside.ranges, self.part, strict=True)
        )
        inner = on_threads.box(tile)
        chosen = (*self.inside, *[None] * (tile.rank - len(self.inside)))
        inner = dataclasses.replace(
            inner,
            ranges=tuple(
                r if x is None else dataclasses.replace(r, start=number(x[0]), extent=number(x[1]))
                for r, x in zip(inner.ranges, chosen, strict=True)
            ),
        )
        outside = dataclasses.replace(outside, ranges=ranges)
        ready = on_threads.buffer("ready", (2,), dt.uint64, "barrier")
        return TmaCopy(inner, outside) if store else TmaCopy(outside, inner, barrier=Load(ready, (number(1),)))


def ctx_of(on_threads, target: str = "sm_90a"):
    return on_threads(32, target).ctx


LOADS = [
    Case(),
    Case(tile=(64, 128), part=((0, 64), (0, 128))),
    Case(tile=(128, 576), part=((0, 128), (0, 576)), tensor=(N, 576)),
    Case(tile=(64, 32), part=((0, 64), (32, 32))),
    Case(tile=(64, 16), part=((0, 64), (48, 16))),
    Case(tile=(384, 64), part=((0, 384), (64, 64)), tensor=(512, 256)),
    Case(tile=(3, 64, 64), inside=((2, 1),)),
    Case(tile=(1, 64, 64), inside=((0, 1),)),
    Case(tile=(2, 64, 128), inside=((1, 1), (8, 16), (64, 64)), part=((16, 16), (0, 64))),
    Case(tile=(60, 64), part=((0, 60), (0, 64))),
    Case(tile=(256, 64), part=((0, 256), (0, 64)), dtype=dt.float32),
    Case(tile=(64, 128), part=((0, 64), (0, 128)), dtype=dt.float8_e4m3fn),
    Case(tile=(64, 256), part=((0, 64), (0, 256)), dtype=dt.int8),
    Case(tile=(64, 64), layout=row_major((64, 64))),
    Case(tile=(16, 256), part=((0, 16), (0, 256)), layout=row_major((16, 256))),
    Case(tile=(2, 24), part=((0, 2), (0, 24)), layout=row_major((2, 24))),
    Case(tile=(4, 16, 24), part=((4, 4), (16, 16), (0, 24)), tensor=(8, 32, 24), layout=row_major((4, 16, 24))),
    Case(tile=(4, 16, 24), part=((16, 16), (0, 24)), inside=((3, 1),), layout=row_major((4, 16, 24))),
    Case(tile=(4, 512), part=((4, 4), (0, 512)), tensor=(8, 512), layout=row_major((4, 512))),
    Case(tile=(4, 512), part=((4, 4), (2, 1), (0, 512)), tensor=(8, 3, 512), layout=row_major((4, 512))),
    Case(tile=(4, 1, 320), part=((4, 4), (2, 1), (0, 320)), tensor=(8, 3, 320), layout=row_major((4, 1, 320))),
    Case(
        tile=(2, 3, 512), part=((0, 2), (1, 1), (0, 3), (1, 1), (0, 512)), tensor=(N, 2, 3, 2, 512),
        layout=row_major((2, 3, 512)),
    ),
    Case(tile=(64,), part=((64, 64),), tensor=(256,)),
    Case(tile=(64, 64), tensor=(2, N, 3, 64), part=((1, 1), (64, 64), (2, 1), (0, 64))),
    Case(tile=(64, 128), tensor=(2, 3, ODD, 96), part=((1, 1), (2, 1), (64, 64), (0, 128))),
    Case(tile=(64, 64), tensor=(N, N), strides=(N * 3, 1)),
    Case(tile=(8, 64), tensor=(1, 64), part=((0, 8), (0, 64)), strides=(ODD, 1)),
    Case(tile=(64, 64), align=16),
    Case(tile=(64, 64), part=((ODD, 64), (N, 64))),
    Case(tile=(304, 16), part=((0, 304), (0, 16)), tensor=(512, 256)),
    Case(tile=(264, 64), part=((0, 264), (0, 64)), tensor=(512, 256)),
    Case(tile=(304, 24), part=((0, 304), (0, 24)), tensor=(512, 256), layout=row_major((304, 24))),
    Case(tile=(2, 300, 64), part=((0, 2), (0, 300), (0, 64)), tensor=(4, 512, 64), layout=row_major((2, 300, 64))),
]  # fmt: skip
SIZES = {N: 200, ODD: 7}


def moved(case: Case, op: TmaCopy, ctx, name: str) -> tuple[dict[int, tuple[int, ...]], int]:
    """Which element of the tensor each byte of the tile gets or gives, and the bytes of all boxes."""
    found: dict[int, tuple[int, ...]] = {}
    total = 0
    for called, args, _ in calls(op.lower_cuda(ctx), {ctx.thread: 0, **SIZES}):
        if called != name:
            continue
        (tile, first), box = args[:2] if name == "tma_load" else args[1::-1]
        coordinates = args[3:] if name == "tma_load" else args[2:]
        place = coordinates[: len(box.box)]
        for byte, offset in box_places(tile, first, box):
            assert byte not in found
            found[byte] = tuple(p + o for p, o in zip(place, offset, strict=True))
        total += box_bytes(box)
    return found, total


def wanted(case: Case, op: TmaCopy, tile: Buffer) -> dict[int, tuple[int, ...]]:
    """The same by the meaning of a copy."""
    sides = (op.dst, op.src) if op.barrier is not None else (op.src, op.dst)
    points = []
    for region in sides:
        ranges = [
            range(int(evaluate(r.start, SIZES)), int(evaluate(r.start, SIZES)) + r.extent.value) for r in region.ranges
        ]
        points.append(list(itertools.product(*ranges)))
    byte = {index: place for place, index in places_of(tile).items()}
    return {byte[inside]: outside for inside, outside in zip(*points, strict=True)}


@pytest.mark.parametrize("store", [False, True], ids=["load", "store"])
@pytest.mark.parametrize("case", LOADS, ids=str)
def test_every_element_goes_to_its_place(on_threads, case: Case, store: bool) -> None:
    ctx, op = ctx_of(on_threads), case.copy(on_threads, store)
    assert refuses(op, ctx) is None
    got, total = moved(case, op, ctx, "tma_store" if store else "tma_load")
    tile = (op.src if store else op.dst).buffer
    assert got == wanted(case, op, tile)
    done = list(calls(op.lower_cuda(ctx), {ctx.thread: 0, **SIZES}))
    if store:
        assert [name for name, *_ in done[-2:]] == ["bulk_commit", "bulk_wait"]
        assert done[-1][2].options == (0, True)
    else:
        assert done[0][:2] == ("mbarrier_expect", ((op.barrier.buffer, (1,)), total))
        assert all(args[2] == (op.barrier.buffer, (1,)) for _, args, _ in done[1:])
        assert total == len(got) * case.dtype.itemsize


def random_case(random: np.random.Generator) -> Case:
    """Up to three dimensions of a tile, with single indices between them on both sides, and rows of any width."""
    pick = lambda *of: of[random.integers(len(of))]  # noqa: E731
    dtype = pick(dt.int8, dt.float16, dt.float32)
    unit = 16 // dtype.itemsize
    copied = [pick(1, 2, 3, 8, 16) for _ in range(pick(0, 1, 2))] + [unit * pick(1, 2, 3, 4, 8, 20, 40)]

    def spread(rank: int) -> list[int]:
        """The places of the copied dimensions among so many."""
        return [*sorted(random.choice(rank - 1, len(copied) - 1, replace=False).tolist()), rank - 1]

    tensor, part = [pick(2, 5) for _ in range(pick(*range(len(copied), 6)))], []
    places = dict(zip(spread(len(tensor)), copied, strict=True))
    for n, size in enumerate(tensor):
        extent = places.get(n, 1)
        start = int(random.integers(size)) * (unit if n == len(tensor) - 1 else 1)
        tensor[n] = extent * 2 + (8 * unit if n == len(tensor) - 1 else size)
        part.append((start, extent))
    tile, inside = [], list[tuple[int, int] | None]()
    rank = pick(*range(len(copied), 5))
    places = dict(zip(spread(rank), copied, strict=True))
    for n in range(rank):
        extent, times = places.get(n, 1), pick(1, 1, 2, 3)
        tile.append(extent * times)
        inside.append((int(random.integers(times)) * extent, extent))
    layout = row_major(tuple(tile)) if rank == 1 or pick(True, False) else None
    return Case(tuple(tensor), tuple(part), tuple(tile), tuple(inside), dtype, layout)


def test_what_is_not_refused_goes_to_its_place(on_threads, seed: int) -> None:
    random, ctx, copied = np.random.default_rng(seed), ctx_of(on_threads), 0
    for _ in range(400):
        case = random_case(random)
        for store in (False, True):
            op = case.copy(on_threads, store)
            if refuses(op, ctx) is None:
                copied += 1
                got, _ = moved(case, op, ctx, "tma_store" if store else "tma_load")
                assert got == wanted(case, op, (op.src if store else op.dst).buffer), case
    assert copied > 100


def test_one_thread_copies(on_threads) -> None:
    ctx, op = ctx_of(on_threads), Case().copy(on_threads)
    assert not list(calls(op.lower_cuda(ctx), {ctx.thread: 1}))
    op = dataclasses.replace(op, by=1)
    assert [bool(list(calls(op.lower_cuda(ctx), {ctx.thread: n}))) for n in range(3)] == [False, True, False]


def test_the_map_is_of_the_whole_tensor(on_threads) -> None:
    """So that what lies outside reads 0 and is not written, as T.copy has it."""
    case = Case(tensor=(2, 3, ODD, 96), tile=(64, 128), part=((1, 1), (2, 1), (64, 64), (0, 128)))
    ctx = ctx_of(on_threads)
    maps = [
        args[1] for name, args, _ in calls(case.copy(on_threads).lower_cuda(ctx), {ctx.thread: 0}) if name == "tma_load"
    ]
    assert len(maps) == 2 and np.prod(maps[0].box) == 64 * 64
    for one in maps:
        assert [evaluate(n, SIZES) for n in one.sizes] == [2, 3, 7, 96]
        assert [evaluate(n, SIZES) for n in one.strides] == [3 * 7 * 96, 7 * 96, 96, 1]
        assert (one.box, one.swizzle) == ((1, 1, 64, 64), 128)


def test_what_thread_0_does(on_threads) -> None:
    case = Case(tile=(2, 64, 128), inside=((1, 1),), part=((64, 64), (0, 128)))
    ctx = ctx_of(on_threads)
    text = repr(case.copy(on_threads).lower_cuda(ctx))
    for place in (" T.tensor_map", " T.address_of(ready[1]), 64"):
        text = text.replace(place, "\n       " + place)
    assert_expected_inline(
        text.replace(" \n", "\n"),
        """\
if t == 0:
    T.evaluate(T.call("mbarrier_expect", T.address_of(ready[1]), 16384, dtype=T.int32))
    T.evaluate(T.call("tma_load", T.address_of(s[1, 0, 0]),
        T.tensor_map(X, (256, 256), (256, 1), box=(64, 64), swizzle=128),
        T.address_of(ready[1]), 64, 0, dtype=T.int32, options=("",)))
    T.evaluate(T.call("tma_load", T.address_of(s[1, 0, 64]),
        T.tensor_map(X, (256, 256), (256, 1), box=(64, 64), swizzle=128),
        T.address_of(ready[1]), 64, 64, dtype=T.int32, options=("",)))""",
    )
    assert ctx.build.remarks[-1].became == "2 bulk copies of 64 x 64, swizzled over 128 bytes"


WHOLE_PANELS = "the slice of `s` does not consist of whole panels of 64"
EQUAL_BOXES = "`s` does not consist of equal boxes of at most 256 rows"
WHY = [
    (Case(tile=(300, 16), part=((0, 300), (0, 16)), tensor=(512, 256)), EQUAL_BOXES),
    (Case(tile=(257, 64), part=((0, 257), (0, 64)), tensor=(512, 256)), EQUAL_BOXES),
    (Case(tile=(262, 8), part=((0, 262), (0, 8)), tensor=(512, 256), layout=row_major((262, 8))), EQUAL_BOXES),
    (Case(dtype=dt.float32, to=dt.float16), "float32 is converted to float16 on the way"),
    (Case(dtype=dt.bool_), "no bulk copy moves bool"),
    (
        Case(tensor=(2,) * 4 + (64, 64), part=((0, 1),) * 4 + ((0, 64), (0, 64))),
        "`X` has 6 dimensions, and tensor maps have at most 5",
    ),
    (Case(align=8), "`X` may not start at a multiple of 16 bytes"),
    (Case(strides=(256, 2)), "`X` is not dense along its last dimension"),
    (Case(strides=(1, 256)), "`X` is not dense along its last dimension"),
    (Case(tensor=(256, ODD)), "the stride of dimension 0 of `X` may not be a multiple of 16 bytes"),
    (Case(part=((0, 64), (ODD, 64))), "the columns of `X` may not start at a multiple of 16 bytes"),
    (Case(strides=(260, 1)), "the stride of dimension 0 of `X` may not be a multiple of 16 bytes"),
    (
        Case(tensor=(4, 8, 64), strides=(516, 64, 1), part=((0, 1), (0, 8), (0, 64)), tile=(8, 64)),
        "the stride of dimension 0 of `X` may not be a multiple of 16 bytes",
    ),
    (Case(part=((0, 64), (0, 1)), tile=(64,)), "the last dimension is not copied along"),
    (Case(layout=Layout.parse("[64:72m | 64:1m]")), "`s` lies neither in panels nor row by row"),
    (Case(tile=(64, 128), inside=(None, (32, 64))), WHOLE_PANELS),
    (Case(tile=(64, 128), inside=(None, (0, 32)), part=((0, 64), (0, 32))), WHOLE_PANELS),
    (Case(tile=(128, 64), inside=((4, 64),)), "the slice of `s` may not start at a multiple of 8 rows"),
    (Case(tile=(128, 64), inside=((ODD, 64),)), "the slice of `s` may not start at a multiple of 8 rows"),
    (
        Case(tensor=(4, 64, 64), tile=(2, 64, 64), part=((0, 2), (0, 64), (0, 64))),
        "`s` is copied in more than two dimensions",
    ),
    (
        Case((8, 8, 24), ((0, 2), (0, 2), (0, 24)), (2, 3, 24), (None, (0, 2)), layout=row_major((2, 3, 24))),
        "the slice of `s` is not dense",
    ),
    (Case(tile=(64, 20), part=((0, 64), (0, 20))), "rows of 20 elements are no boxes of whole 16 bytes"),
    (
        Case((64, 512), ((0, 8), (0, 264)), (8, 264), layout=row_major((8, 264))),
        "rows of 264 elements are no boxes of whole 16 bytes",
    ),
    (Case(tile=(3, 8, 8), inside=((1, 1),), part=((0, 8), (0, 8)), layout=row_major((3, 8, 8))), ""),
    (
        Case(tile=(4, 3, 24), inside=(None, (1, 1)), part=((0, 4), (0, 24)), layout=row_major((4, 3, 24))),
        "the slice of `s` is not dense",
    ),
    (
        Case(tile=(3, 4, 8), inside=((1, 1),), part=((0, 4), (0, 8)), layout=row_major((3, 4, 8))),
        "the slice of `s` may not start at a multiple of 128 bytes",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("case", "why"), WHY, ids=[why for _, why in WHY])
def test_refusals(on_threads, case: Case, why: str) -> None:
    ctx = ctx_of(on_threads)
    assert (refuses(case.copy(on_threads), ctx) or "") == why
    if case.to is None:
        assert (refuses(case.copy(on_threads, store=True), ctx) or "") == why


ENDS = [
    Case(tensor=(256, 250), strides=(256, 1)),
    Case(tile=(64,), part=((64, 64),), tensor=(ODD,)),
    Case(tile=(64,), part=((64, 64),), tensor=(252,)),
]


@pytest.mark.parametrize("case", ENDS)
def test_stores_do_not_cross_ends_of_rows_inside_of_16_bytes(on_threads, case: Case) -> None:
    """They would write on behind the row; loads do not."""
    ctx = ctx_of(on_threads)
    assert refuses(case.copy(on_threads), ctx) is None
    assert refuses(case.copy(on_threads, store=True), ctx) == "the rows of `X` may not end at a multiple of 16 bytes"


@pytest.mark.parametrize("start", [-8, ODD - 64, 64 - ODD, ODD // (ODD + ODD % 3) * 64 - ODD])
@pytest.mark.parametrize("row", [True, False])
def test_stores_do_not_start_in_front_of_the_tensor(on_threads, start, row: bool) -> None:
    case = Case(part=((start, 64), (0, 64)) if row else ((0, 64), (start * 8, 64)))
    ctx = ctx_of(on_threads)
    assert refuses(case.copy(on_threads), ctx) is None
    assert refuses(case.copy(on_threads, store=True), ctx) == "the slice of `X` may start in front of it"


def test_refusals_of_targets_and_scopes(on_threads) -> None:
    case = Case()
    assert refuses(case.copy(on_threads), ctx_of(on_threads, "sm_80")) == "cuda:sm_80 has no bulk copies of tiles"
    _, tile = case.buffers(on_threads)
    fragment = on_threads.buffer("f", (64, 64), dt.float16, "fragment")
    op = Copy(on_threads.box(tile), on_threads.box(fragment))
    assert refuses(op, ctx_of(on_threads)) == "bulk copies go between global and shared memory"


def test_a_load_that_is_refused_is_an_error_and_a_store_an_ordinary_copy(on_threads) -> None:
    case, ctx = Case(tensor=(256, ODD)), ctx_of(on_threads)
    with pytest.raises(TileError, match="bulk_copy"):
        case.copy(on_threads).lower_cuda(ctx)
    case.copy(on_threads, store=True).lower_cuda(ctx)
    note = ctx.build.remarks[-1]
    assert (note.became, note.why_not) == (
        "an ordinary copy", "the stride of dimension 0 of `X` may not be a multiple of 16 bytes",
    )  # fmt: skip


def test_meaning(launch) -> None:
    """Where there are no bulk copies, in the interpreter and on a CPU, it is T.copy."""
    import torch

    @T.prim_func
    def through(X: T.Tensor((24, 40), T.float32), Y: T.Tensor((24, 40), T.float32)):
        with T.Kernel(2, 2, threads=64) as (bx, by):
            ready = T.alloc_barrier(1, (1,))
            s = T.alloc_shared((16, 32), T.float32)
            T.tma_copy(X[by * 16, bx * 32], s, barrier=ready[0])
            T.tma_copy(s, Y[by * 16, bx * 32])

    x, y = torch.rand(24, 40), torch.zeros(24, 40)
    launch(through, x, y)
    torch.testing.assert_close(y, x, rtol=0, atol=0)


def test_findings(complaint) -> None:
    @T.prim_func
    def no_barrier(X: T.Tensor((64, 64), T.float16)):
        with T.Kernel(1, threads=32):
            s = T.alloc_shared((64, 64), T.float16)
            T.tma_copy(X, s)  # here

    @T.prim_func
    def registers(X: T.Tensor((64, 64), T.float16)):
        with T.Kernel(1, threads=32):
            f = T.alloc_fragment((64, 64), T.float16)
            T.tma_copy(X, f)  # here

    assert "`barrier` is missing" in complaint(no_barrier, "bad_argument")
    assert "`src` goes from global to fragment memory" in complaint(registers, "bad_argument")


def test_barriers_are_single_elements() -> None:
    with pytest.raises(TileError, match=r"give one mbarrier, as in barrier=ready\[stage\]"):

        @T.prim_func
        def whole(X: T.Tensor((64, 64), T.float16)):
            with T.Kernel(1, threads=32):
                ready = T.alloc_barrier(1, (2,))
                s = T.alloc_shared((64, 64), T.float16)
                T.tma_copy(X, s, barrier=ready)


@pytest.mark.parametrize("count", [2, 3, 4, 8])
@pytest.mark.parametrize("case", LOADS, ids=str)
def test_blocks_that_share_a_load(on_threads, case: Case, count: int) -> None:
    """Their parts are the whole, each of as many bytes; each expects the bytes of all."""
    ctx, whole = ctx_of(on_threads), case.copy(on_threads)
    if refuses_shares(whole, count) is not None:
        return
    rank = Var("rank", dt.int32, "block")
    op = dataclasses.replace(whole, blocks=number((1 << count) - 1), share=rank, shares=count)
    assert refuses(op, ctx) is None
    found: dict[int, tuple[int, ...]] = {}
    for n in range(count):
        SIZES[rank] = n
        part, size = moved(case, op, ctx, "tma_load")
        assert not set(part) & set(found)
        found |= part
        done = list(calls(op.lower_cuda(ctx), {ctx.thread: 0, **SIZES}))
        assert done[0][:2] == ("mbarrier_expect", ((op.barrier.buffer, (1,)), count * size))
        assert all(args[-1] == (1 << count) - 1 and call.options == ("", "multicast") for _, args, call in done[1:])
    assert found == wanted(case, op, op.dst.buffer)


PARTS = [  # how many can share, and the boxes of each
    (Case(), {2: 1, 4: 1, 8: 1}),
    (Case(tile=(64, 128), part=((0, 64), (0, 128))), {2: 1, 4: 2, 8: 2}),  # a panel each, then parts of both
    (Case(tile=(128, 192), part=((0, 128), (0, 192))), {2: 3, 3: 1, 4: 3, 8: 3}),
    (Case(tile=(60, 64), part=((0, 60), (0, 64))), {}),
    (Case(tile=(64, 32), part=((0, 64), (32, 32))), {2: 1, 4: 1, 8: 1}),
    (Case(tile=(24, 64), part=((0, 24), (0, 64))), {3: 1}),
    (Case(tile=(64, 64), layout=row_major((64, 64))), {2: 1, 4: 1, 8: 1}),
    (Case(tile=(2, 24), part=((0, 2), (0, 24)), layout=row_major((2, 24))), {}),
    (Case(tile=(4, 16, 24), part=((4, 4), (16, 16), (0, 24)), tensor=(8, 32, 24), layout=row_major((4, 16, 24))),
     {2: 2, 4: 1}),
    (Case(tile=(256,), part=((64, 256),), tensor=(512,)), {2: 1, 4: 1}),
]  # fmt: skip


@pytest.mark.parametrize(("case", "boxes"), PARTS, ids=str)
def test_how_many_blocks_can_share_a_load(on_threads, case: Case, boxes: dict[int, int]) -> None:
    ctx, whole = ctx_of(on_threads), case.copy(on_threads)
    for count in (2, 3, 4, 8):
        why = refuses_shares(whole, count)
        assert (why is None) == (count in boxes), (count, why)
        if why is not None:
            assert why == f"`s` has no {count} equal parts of whole boxes"
            continue
        op = dataclasses.replace(whole, blocks=number(1), share=number(0), shares=count)
        assert len(list(calls(op.lower_cuda(ctx), {ctx.thread: 0, **SIZES}))) == 1 + boxes[count], count


def test_a_layout_that_cannot_be_cut_is_told(on_threads) -> None:
    ctx, whole = ctx_of(on_threads), Case(tile=(60, 64), part=((0, 60), (0, 64))).copy(on_threads)
    with pytest.raises(TileError, match="no 2 equal parts of whole boxes"):
        dataclasses.replace(whole, blocks=number(3), share=number(0), shares=2).lower_cuda(ctx)
