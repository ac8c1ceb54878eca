# SPDX-License-Identifier: Apache-2.0
"""Threads of one warp that update a row of shared memory where threads have parted."""

import pytest
import torch
from emulate import EmulatedLauncher

import torch_tile
import torch_tile.language as T
from torch_tile.codegen.cuda import emit_cuda
from torch_tile.compiler.context import Build
from torch_tile.diagnostics.errors import TileError
from torch_tile.hardware import Target
from torch_tile.lowering import cuda_passes, lower

ROWS = 8  # elements of a warp's row


def ranks(n, warps, per_row=1, synced="turns", by_lane=True):
    """Number the elements of equal keys: warps have parts of the keys, and lanes with a key read its counter.

    The last of these lanes writes it back. `per_row` warps share a row.
    """
    threads, part = 32 * warps, T.ceildiv(n, 32 * warps) * 32

    @T.prim_func
    def kernel(K: T.Tensor((n,), "int32"), R: T.Tensor((n,), "int32"), C: T.Tensor((warps, ROWS), "int32")):
        with T.Kernel(1, threads=threads):
            tx = T.get_thread_binding()
            warp, lane = tx // 32, tx % 32
            row = warp // per_row
            s = T.alloc_shared((warps, ROWS), "int32")
            for i in T.serial(lane, ROWS, 32):
                s[warp, i] = 0
            T.sync_threads()
            for first in T.serial(warp * part + (lane if by_lane else 0), (warp + 1) * part, 32):
                i = first if by_lane else first + lane
                key = T.Select(i < n, K[T.min(i, n - 1)], -1)
                mask = T.match_any_sync(key)
                below = T.popcount(T.cast(mask, "uint32") & ((T.uint32(1) << T.cast(lane, "uint32")) - T.uint32(1)))
                if key >= 0:
                    before = s[row, key]
                    if (T.cast(mask, "uint32") >> T.cast(lane, "uint32")) == T.uint32(1):
                        s[row, key] = before + T.cast(below, "int32") + 1
                    R[i] = before + T.cast(below, "int32")
                if synced == "turns":
                    T.sync_warp()
            T.sync_threads()
            if synced == "behind":
                T.sync_warp()
            for i in T.serial(lane, ROWS, 32):
                C[warp, i] = s[warp, i]

    return kernel


def wanted(keys, warps):
    part = -(-len(keys) // (32 * warps)) * 32
    counts, found = torch.zeros(warps, ROWS, dtype=torch.int32), torch.full_like(keys, -1)
    for i, key in enumerate(keys.tolist()):
        if key >= 0:
            found[i] = counts[i // part, key]
            counts[i // part, key] += 1
    return found, counts


@pytest.mark.parametrize("n", [1, 77, 300])
@pytest.mark.parametrize("warps", [1, 3])
@pytest.mark.parametrize("by_lane", [True, False], ids=["a_lane_counts", "a_warp_counts"])
def test_lanes_that_read_before_one_writes(n, warps, by_lane, seed):
    keys = torch.randint(-1, ROWS, (n,), dtype=torch.int32, generator=torch.Generator().manual_seed(seed))
    function, build = ranks(n, warps, by_lane=by_lane), Build(Target.of("cuda:sm_80"))
    text = emit_cuda(lower(function.program, cuda_passes(build)), build, function.program)
    assert text.text.count("tile::lanes_barrier()") == 1

    def simulated(*args):
        assert not torch_tile.compile(function, target="cuda:sm_80").interpret(*args)

    for run in (simulated, EmulatedLauncher(function.program, text, seed=seed)):
        found, counts = torch.full_like(keys, -1), torch.zeros(warps, ROWS, dtype=torch.int32)
        run(keys, found, counts)
        for got, right in zip((found, counts), wanted(keys, warps), strict=True):
            assert torch.equal(got, right)


@pytest.mark.parametrize(
    "made",
    [
        lambda: ranks(300, 4, per_row=2),
        lambda: ranks(300, 4, synced="behind"),
        lambda: ranks(300, 4, synced="nowhere", by_lane=False),
    ],
    ids=["two_warps_share_a_row", "no_barrier_between_turns", "no_barrier_of_the_author"],
)
def test_what_no_warp_can_order(made):
    with pytest.raises(TileError, match="divergent_hazard"):
        torch_tile.compile(made(), target="cuda:sm_80")


@pytest.mark.parametrize("where", ["before", "behind"])
def test_lanes_that_were_elsewhere_have_not_met(where):
    """A barrier of some lanes orders nothing that the rest of their warp did."""

    @T.prim_func
    def kernel(A: T.Tensor((64,), "int32"), B: T.Tensor((64,), "int32")):
        with T.Kernel(1, threads=64):
            tx = T.get_thread_binding()
            warp, lane = tx // 32, tx % 32
            s = T.alloc_shared((2, 32), "int32")
            if A[tx] > 0:
                if where == "before":
                    s[warp, lane] = A[tx]
                if A[tx] > 1:
                    s[warp, (lane + 1) % 32] = A[tx]
                    B[tx] = s[warp, (lane + 2) % 32]
                if where != "before":
                    B[tx] = s[warp, (lane + 3) % 32]
            T.sync_warp()

    compiled = Build(Target.of("cuda:sm_80"))
    flat = lower(kernel.program, cuda_passes(compiled))
    text = emit_cuda(flat, compiled, kernel.program).text
    assert text.count("tile::lanes_barrier()") == 2, text
