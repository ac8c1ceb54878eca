# SPDX-License-Identifier: Apache-2.0
"""Blocks of a cluster in the interpreters: what they read of each other, and what goes wrong between them."""

import pytest
import torch

import torch_tile
import torch_tile.language as T
from torch_tile.diagnostics.errors import TileError
from torch_tile.simulator.tile.interpreter import evaluate


def kernel_of(rank, ends=lambda bx: None, blocks=6, cluster=3):
    """C: what the block of rank `rank(bx, i)` has of its row of A."""

    @T.prim_func
    def kernel(A: T.Tensor((blocks, 32), "float32"), C: T.Tensor((blocks, 32), "float32")):
        with T.Kernel(blocks, threads=32, cluster_dims=cluster) as bx:
            tile = T.alloc_shared((32,), "float32")
            T.copy(A[bx, 0], tile)
            ends(bx)
            T.cluster_sync()
            for i in T.Parallel(32):
                C[bx, i] = T.at_rank(tile[i], rank(bx, i))
            T.cluster_sync()

    return kernel


def by_tiles(kernel, a, c):
    evaluate(kernel, a, c)


def by_threads(kernel, a, c):
    findings = torch_tile.compile(kernel, target="cuda:sm_90a").interpret(a, c)
    assert not findings, findings.report()


@pytest.mark.parametrize("run", [by_tiles, by_threads])
def test_ranks_that_differ_between_iterations(run):
    a, c = torch.randn(6, 32), torch.full((6, 32), float("nan"))
    run(kernel_of(lambda bx, i: (bx + i) % 3), a, c)
    block, place = torch.arange(6)[:, None], torch.arange(32)
    assert torch.equal(c, a[block // 3 * 3 + (block + place) % 3, place])


@pytest.mark.parametrize("rank", [lambda bx, i: bx, lambda bx, i: -1])
def test_blocks_that_a_cluster_has_not(rank):
    with pytest.raises(TileError) as caught:
        evaluate(kernel_of(rank), torch.randn(6, 32), torch.empty(6, 32))
    assert caught.value.code == "out_of_bounds" and "a cluster of 3 blocks" in str(caught.value)
    compiled = torch_tile.compile(kernel_of(rank), target="cuda:sm_90a")
    assert compiled.interpret(torch.randn(6, 32), torch.empty(6, 32)).kinds == {"out_of_bounds"}


def test_a_block_that_fails_keeps_no_other_waiting():
    def ends(bx):
        T.device_assert(bx != 4, "not this one")

    with pytest.raises(TileError) as caught:
        evaluate(kernel_of(lambda bx, i: 0, ends), torch.randn(6, 32), torch.empty(6, 32))
    assert caught.value.code == "device_assert"


def test_a_grid_of_no_clusters():
    with pytest.raises(torch_tile.diagnostics.errors.LaunchError, match="4 blocks in x are no clusters of 3"):
        evaluate(kernel_of(lambda bx, i: 0, blocks=4), torch.randn(4, 32), torch.empty(4, 32))
