# SPDX-License-Identifier: Apache-2.0
import pytest

import torch_tile
import torch_tile.language as T
from torch_tile.carver.arch import CPU, CUDA
from torch_tile.tools import Analyzer


@torch_tile.jit
def product(A, B, block, dtype="float16"):
    M, N, K = T.const("M N K")
    A: T.Tensor[(M, K), dtype]
    B: T.Tensor[(K, N), dtype]
    C = T.empty((M, N), "float32")
    with T.Kernel(T.ceildiv(N, block), T.ceildiv(M, block), threads=128) as (bx, by):
        a = T.alloc_shared((block, 32), dtype)
        b = T.alloc_shared((32, block), dtype)
        c = T.alloc_fragment((block, block), "float32")
        T.clear(c)
        for k in T.Pipelined(T.ceildiv(K, 32), num_stages=2):
            T.copy(A[by * block, k * 32], a)
            T.copy(B[k * 32, bx * block], b)
            T.gemm(a, b, c)
        T.copy(c, C[by * block, bx * block])
    return C


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("device", [CUDA("cuda:sm_90a"), CUDA("cuda:sm_80"), CPU()], ids=["sm_90a", "sm_80", "cpu"])
def test_work_of_a_product(device, dtype):
    """Flops do not depend on dtypes, and tiles are loaded once for each block."""
    m, n, k, block = 256, 128, 96, 64
    result = Analyzer.analysis(product.get_tir(M=m, N=n, K=k, block=block, dtype=dtype), device)
    size = 2 if dtype == "float16" else 4
    assert result.total_flops == 2 * m * n * k
    assert result.total_global_bytes == (n // block * m * k + m // block * n * k) * size + 4 * m * n
    assert result.estimated_time >= result.total_global_bytes / (result.expected_bandwidth_GBps * 1e9) > 0
    assert result.expected_tflops > 0


def test_other_names_of_tools():
    with pytest.raises(ImportError):
        from torch_tile.tools import Analyser  # noqa: F401
