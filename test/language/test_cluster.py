# SPDX-License-Identifier: Apache-2.0
"""Where a block stands in its cluster, and its cluster in the grid."""

import torch

import torch_tile as tilelang
import torch_tile.language as T


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
