# SPDX-License-Identifier: Apache-2.0
"""Where a block stands in its cluster, and its cluster in the grid."""

import pytest
import torch

import torch_tile as tilelang
import torch_tile.language as T
from torch_tile.diagnostics.errors import TileError
from torch_tile.simulator.tile.interpreter import evaluate


def test_places_and_sizes():
    @T.prim_func
    def kernel(out: T.Tensor((2, 4, 6), "int32")):
        with T.Kernel(4, 2, threads=32, cluster_dims=(2, 1, 1)) as (bx, by):
            ids = T.get_cluster_ids()
            values = [ids[0], ids[1], T.get_cluster_size(), T.get_cluster_extent(0), T.get_cluster_extents()[1]]
            for n, value in enumerate([*values, T.block_rank_in_cluster()]):
                out[by, bx, n] = value
            T.cluster_arrive_relaxed()
            T.cluster_wait()

    out = torch.zeros(2, 4, 6).int()
    findings = tilelang.compile(kernel, target="cuda:sm_90a").interpret(out)
    assert not findings, findings.report()
    assert out.tolist() == [[[x // 2, y, 2, 2, 1, x % 2] for x in range(4)] for y in range(2)]


def test_a_tile_for_all_blocks_of_a_cluster():
    @T.prim_func
    def kernel(A: T.Tensor((2, 64, 64), "float16"), B: T.Tensor((4, 64, 64), "float16")):
        with T.Kernel(4, threads=128, cluster_dims=(2, 1, 1)) as bx:
            tile = T.alloc_shared((64, 64), "float16")
            T.copy_cluster(A[0, 0, 0], tile, cluster_mask=0b11)
            T.copy(tile, B[bx, 0, 0])

    a, b = torch.randn(2, 64, 64).half(), torch.empty(4, 64, 64).half()
    findings = tilelang.compile(kernel, target="cuda:sm_90a").interpret(a, b)
    assert not findings, findings.report()
    assert torch.equal(b, a[0].expand(4, 64, 64))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("src", {"cluster_mask": 3}), ("cluster_mask", {"cluster_mask": 4}), ("cluster_mask", {"cluster_mask": 0}),
        ("dst_block", {"dst_block": 2}), ("dst_block", {"dst_block": 0.5}), ("remote_barrier", {"remote_barrier": 1}),
        ("src", {"dst_block": 1}), ("cluster_mask", {"dst_block": 1, "cluster_mask": 1}),
    ],
)  # fmt: skip
def test_copies_that_no_cluster_makes(name, options):
    with pytest.raises(TileError, match=f"argument `{name}`"):

        @T.prim_func
        def kernel(A: T.Tensor((4, 64, 64), "float16"), B: T.Tensor((64, 64), "float16")):
            with T.Kernel(4, threads=128, cluster_dims=(2, 1, 1)) as bx:
                tile = T.alloc_shared((64, 64), "float16")
                other = T.alloc_shared((1,), "int32")
                other[0] = bx + 1
                T.copy_cluster(A[other[0], 0, 0] if name == "src" else A[0, 0, 0], tile, **options)


@pytest.mark.parametrize("mask", [0b0011, 0b1010, 0b1111, 0b0001])
def test_blocks_get_what_the_first_of_them_reads(mask):
    @T.prim_func
    def kernel(A: T.Tensor((32, 128), "float16"), B: T.Tensor((32, 128), "float16")):
        with T.Kernel(8, 2, threads=64, cluster_dims=(4, 1, 1)) as (bx, by):
            tile = T.alloc_shared((16, 16), "float16")
            T.copy_cluster(A[by * 16, bx * 16], tile, cluster_mask=mask)
            T.copy(tile, B[by * 16, bx * 16])

    a, b = torch.randn(32, 128).half(), torch.full((32, 128), torch.nan).half()
    findings = tilelang.compile(kernel, target="cuda:sm_90a").interpret(a, b)
    assert not findings, findings.report()
    first = (mask & -mask).bit_length() - 1
    ranks = torch.tensor([first if mask >> r & 1 else r for r in range(4)])
    wanted = a.reshape(32, 2, 4, 16)[:, :, ranks].reshape(32, 128)
    assert torch.equal(b, wanted)
    c = torch.full((32, 128), torch.nan).half()
    tilelang.compile(kernel, target="cpu")(a, c)
    assert torch.equal(c, wanted)


@pytest.mark.parametrize(("mask", "sizes"), [(0b0011, (48, 64)), (0b1010, (64, 32)), (0b1111, (64, 24)),
                                             (0b1110, (24, 40)), (0b0100, (24, 40))])  # fmt: skip
@pytest.mark.parametrize("slots", [1, 3])
def test_bulk_copies_for_the_blocks_of_a_mask(mask, sizes, slots):
    """Each block of the mask gets the lowest one's tile, in equal parts from all of them; other blocks read their own.

    The mbarriers go round more than once.
    """
    rows, columns = sizes

    @T.prim_func
    def kernel(A: T.Tensor((5, 8, rows, columns), "float32"), B: T.Tensor((5, 8, rows, columns), "float32")):
        with T.Kernel(8, threads=64, cluster_dims=4) as bx:
            tile = T.alloc_shared((slots, rows, columns), "float32")
            full = T.alloc_barrier([64] * slots)
            for k in T.serial(5):
                T.tma_copy(A[k, bx, :, :], tile[k % slots, :, :], barrier=full[k % slots], cluster_mask=mask,
                           leader_scope_threads=64)  # fmt: skip
                T.mbarrier_arrive(full[k % slots])
                T.mbarrier_wait_parity(full[k % slots], k // slots % 2)
                T.copy(tile[k % slots, :, :], B[k, bx, :, :])
                T.cluster_sync()

    a, b = torch.randn(5, 8, rows, columns), torch.full((5, 8, rows, columns), torch.nan)
    made = tilelang.compile(kernel, target="cuda:sm_90a")
    findings = made.interpret(a, b)
    assert not findings, findings.report()
    first = (mask & -mask).bit_length() - 1
    ranks = [n // 4 * 4 + (first if mask >> n % 4 & 1 else n % 4) for n in range(8)]
    assert torch.equal(b, a[:, ranks])
    assert ("tma_load_multicast" in made.get_kernel_source()) == (mask.bit_count() > 1)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("cluster_mask", {"cluster_mask": 0}), ("cluster_mask", {"cluster_mask": 16}),
        ("cluster_mask", {"cluster_mask": True}), ("cluster_mask", {"cluster_mask": 3, "blocks": 3}),
        ("cluster_mask", {"cluster_mask": 3, "barrier": None}), ("leader_scope_threads", {"leader_scope_threads": 32}),
    ],
)  # fmt: skip
def test_bulk_copies_that_no_cluster_makes(name, options):
    with pytest.raises(TileError, match=f"argument `{name}`"):

        @T.prim_func
        def kernel(A: T.Tensor((4, 64, 64), "float16")):
            with T.Kernel(4, threads=128, cluster_dims=4):
                tile, full = T.alloc_shared((64, 64), "float16"), T.alloc_barrier(1)
                T.tma_copy(A[0, :, :], tile, **{"barrier": full, **options})


def test_each_copy_starts_by_itself():
    """The fix of `leader_scope_threads`: one thread starts the copies of all warps, each with its mbarrier."""

    @T.prim_func
    def kernel(A: T.Tensor((8, 160), "float32"), B: T.Tensor((8, 160), "float32")):
        with T.Kernel(2, threads=128) as bx:
            warp = T.get_thread_binding() // 32
            tile = T.alloc_shared((4, 160), "float32")
            full = T.alloc_barrier([32] * 4)
            for w in T.unroll(4):
                T.tma_copy(A[bx * 4 + w, :], tile[w, :], barrier=full[w])
            T.mbarrier_arrive(full[warp])
            T.mbarrier_wait_parity(full[warp], 0)
            for i in T.serial(5):
                column = i * 32 + T.get_thread_binding() % 32
                B[bx * 4 + warp, column] = tile[warp, column]

    a, b = torch.randn(8, 160), torch.full((8, 160), torch.nan)
    findings = tilelang.compile(kernel, target="cuda:sm_90a").interpret(a, b)
    assert not findings, findings.report()
    assert torch.equal(a, b)


@pytest.mark.parametrize("kind", ["float32", "float16", "int8", "float8_e4m3fn"])
@pytest.mark.parametrize("by_barrier", [False, True])
def test_tiles_for_the_next_block(kind, by_barrier):
    """Each block of a cluster of four stores a part of its tile to the next one; what it has is converted."""

    @T.prim_func
    def kernel(A: T.Tensor((8, 24, 20), "float32"), B: T.Tensor((8, 24, 20), kind)):
        with T.Kernel(8, threads=64, cluster_dims=4) as bx:
            rank = T.block_rank_in_cluster()
            mine = T.alloc_shared((24, 20), "float32")
            given = T.alloc_shared((24, 20), kind)
            ready = T.alloc_cluster_barrier([1])
            T.copy(A[bx, :, :], mine)
            T.fill(given, 1)
            T.cluster_sync()
            if by_barrier:
                T.copy_cluster(mine[4:20, :], given[4:20, :], dst_block=(rank + 1) % 4, remote_barrier=ready[0])
                T.mbarrier_wait_parity(ready[0], 0)
            else:
                T.copy_cluster(mine[4:20, :], given[4:20, :], dst_block=(rank + 1) % 4)
                T.cluster_sync()
            T.copy(given, B[bx, :, :])
            T.cluster_sync()

    a, dtype = torch.randn(8, 24, 20) * 9, getattr(torch, kind)
    wanted = torch.ones(8, 24, 20).to(dtype)
    wanted[:, 4:20] = a.view(2, 4, 24, 20).roll(1, 1).view(8, 24, 20)[:, 4:20].to(dtype)
    b = torch.zeros(8, 24, 20).to(dtype)
    made = tilelang.compile(kernel, target="cuda:sm_90a")
    findings = made.interpret(a, b)
    assert not findings, findings.report()
    assert torch.equal(b.float(), wanted.float()) and made.cubin
    if not by_barrier:
        c = torch.zeros(8, 24, 20).to(dtype)
        evaluate(kernel, a, c)
        assert torch.equal(c.float(), wanted.float())
    with pytest.raises(TileError, match="on target cpu"):
        tilelang.compile(kernel, target="cpu")


def exchange(synced=True, waits=True):
    """Two blocks of which the first stores to the second; without a step that orders them something is wrong."""

    @T.prim_func
    def kernel(A: T.Tensor((256,), "float32"), B: T.Tensor((256,), "float32")):
        with T.Kernel(2, threads=128, cluster_dims=(2, 1, 1)) as pid:
            source, target = T.alloc_shared((256,), "float32"), T.alloc_shared((256,), "float32")
            come = T.alloc_cluster_barrier([1])
            T.fill(target, 0)
            if synced:
                T.cluster_sync()
            if pid == 0:
                for i in T.Parallel(256):
                    source[i] = A[i]
                T.copy_cluster(source, target, dst_block=1, remote_barrier=come[0])
            if pid == 1:
                if waits:
                    T.mbarrier_wait_parity(come[0], 0)
                for i in T.Parallel(256):
                    B[i] = target[i]

    return kernel


def test_a_block_waits_for_what_another_one_stores():
    a, b = torch.randn(256), torch.zeros(256)
    findings = tilelang.compile(exchange(), target="cuda:sm_90a").interpret(a, b)
    assert not findings, findings.report()
    assert torch.equal(a, b)
    for lacking in ({"synced": False}, {"waits": False}):
        assert tilelang.compile(exchange(**lacking), target="cuda:sm_90a").interpret(a, b)


def test_parts_of_a_sum_meet_in_the_first_block():
    """A product whose four blocks each add a part; a slot for each rank, and one mbarrier for three arrivals."""

    @T.prim_func
    def kernel(A: T.Tensor((32, 256), "float16"), B: T.Tensor((256, 32), "float16"), C: T.Tensor((32, 32), "float32")):
        with T.Kernel(4, threads=128, cluster_dims=(4, 1, 1)):
            a, b = T.alloc_shared((32, 64), "float16"), T.alloc_shared((64, 32), "float16")
            c = T.alloc_fragment((32, 32), "float32")
            parts = T.alloc_shared((4, 32, 32), "float32")
            come = T.alloc_cluster_barrier([3])
            rank = T.block_rank_in_cluster()
            T.copy(A[0, rank * 64], a)
            T.copy(B[rank * 64, 0], b)
            T.gemm(a, b, c, clear_accum=True)
            T.copy(c, parts[rank, :, :])
            T.cluster_sync()
            if rank != 0:
                T.copy_cluster(parts[rank, :, :], parts[rank, :, :], dst_block=0, remote_barrier=come[0])
            if rank == 0:
                T.mbarrier_wait_parity(come[0], 0)
                for i, j in T.Parallel(32, 32):
                    C[i, j] = parts[0, i, j] + parts[1, i, j] + parts[2, i, j] + parts[3, i, j]

    a, b, c = torch.randn(32, 256).half(), torch.randn(256, 32).half(), torch.zeros(32, 32)
    findings = tilelang.compile(kernel, target="cuda:sm_90a").interpret(a, b, c)
    assert not findings, findings.report()
    torch.testing.assert_close(c.double(), a.double() @ b.double(), rtol=1e-3, atol=1e-3)
