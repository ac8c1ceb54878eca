# SPDX-License-Identifier: Apache-2.0
"""Where a block stands in its cluster, and its cluster in the grid."""

import pytest
import torch

import torch_tile as tilelang
import torch_tile.language as T
from torch_tile.diagnostics.errors import TileError


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
        ("dst_block", {"dst_block": 1}), ("remote_barrier", {"remote_barrier": 1}),
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
