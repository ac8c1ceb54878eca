# SPDX-License-Identifier: Apache-2.0
"""Kernels whose authors order warps by hand, on a GPU: right, and right again while the machine is busy."""

import sys
from pathlib import Path

import pytest
import torch

import torch_tile
import torch_tile.language as T

sys.path.insert(0, str(Path(__file__).parents[1] / "golden"))
import hand_written

pytestmark = pytest.mark.cuda
TURNS = 30


@pytest.fixture(autouse=True)
def hopper():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("wgmma is Hopper's")


def again(kernel, inputs, want):
    """Many runs, all alike and near what is wanted."""
    compiled = torch_tile.compile(kernel, target="cuda:sm_90a")
    outs = [torch.full(want.shape, float("nan"), dtype=inputs[0].dtype, device="cuda") for _ in range(TURNS)]
    for out in outs:
        compiled(*inputs, out)
    torch.cuda.synchronize()
    torch.testing.assert_close(outs[0].double(), want, rtol=2e-2, atol=5e-2)
    assert all(torch.equal(out, outs[0]) for out in outs[1:])


@pytest.mark.parametrize("sizes", [(128, 128, 64), (512, 1024, 4096), (384, 2048, 320)])
@pytest.mark.parametrize("name", hand_written.GEMMS)
def test_gemms(name, sizes):
    m, n, k = sizes
    a, b = (torch.randn(shape, device="cuda").half() for shape in ((m, k), (k, n)))
    again(hand_written.GEMMS[name](m, n, k), (a, b), a.double() @ b.double())


@pytest.mark.parametrize(("queries", "keys"), [(128, 64), (128, 128), (4096, 4096)])
def test_attention(queries, keys):
    q, k, v = (torch.randn(n, 64, device="cuda").half() for n in (queries, keys, keys))
    scores = q.double() @ k.double().T
    weights = torch.exp2(scores - scores.amax(-1, keepdim=True))
    again(hand_written.attention(queries, keys), (q, k, v), weights / weights.sum(-1, keepdim=True) @ v.double())


def test_clusters_and_early_starts():
    @T.prim_func
    def kernel(A: T.Tensor((4096, 256), "float32"), C: T.Tensor((4096, 256), "float32")):
        with T.Kernel(4096, threads=128, cluster_dims=4) as bx:
            T.pdl_sync()
            for i in T.Parallel(256):
                C[bx, i] = A[bx, i] + T.block_rank_in_cluster() * 10000 + T.get_cluster_id()
            T.cluster_sync()
            T.pdl_trigger()

    compiled = torch_tile.compile(kernel, target="cuda:sm_90a")
    x, y = torch.randn(4096, 256, device="cuda"), torch.zeros(4096, 256, device="cuda")
    for _ in range(TURNS):  # each after the one before, which it may begin beside
        compiled(x, y)
        compiled(y, x)
    block = torch.arange(4096, device="cuda")
    step = (block % 4 * 10000 + block // 4).double()[:, None]
    torch.testing.assert_close(x.double() - y.double(), step.expand(4096, 256), rtol=0, atol=1)


@pytest.mark.parametrize("turned", [False, True])
def test_products_in_clusters(turned):
    """Every block of a cluster reads its own operands, of several panels: addresses of shared memory bear its rank.

    Blocks take turns with two halves of B, so that none loads for another one.
    """
    m, n, k = 512, 256, 192

    @T.prim_func
    def kernel(A: T.Tensor((m, k), "float16"), B: T.Tensor((2 * n, k) if turned else (k, 2 * n), "float16"),
               C: T.Tensor((m, n), "float16")):  # fmt: skip
        with T.Kernel(m // 64, threads=128, cluster_dims=4) as bx:
            a = T.alloc_shared((64, 64), "float16")
            b = T.alloc_shared((n, 64) if turned else (64, n), "float16")
            c = T.alloc_fragment((64, n), "float32")
            T.clear(c)
            for step in T.Pipelined(k // 64, num_stages=2):
                T.copy(A[bx * 64, step * 64], a)
                T.copy(B[bx % 2 * n, step * 64] if turned else B[step * 64, bx % 2 * n], b)
                T.gemm(a, b, c, transpose_B=turned)
            T.copy(c, C[bx * 64, 0])

    a, b = (torch.randn(shape, device="cuda").half() for shape in ((m, k), (2 * n, k) if turned else (k, 2 * n)))
    both = a.double() @ (b.T if turned else b).double()
    odd = (torch.arange(m, device="cuda") // 64 % 2).bool()[:, None]
    again(kernel, (a, b), torch.where(odd, both[:, n:], both[:, :n]))
