# SPDX-License-Identifier: Apache-2.0
"""Causal linear attention by chunks: products inside a chunk, a state of keys times values between chunks."""

import torch

import torch_tile
import torch_tile.language as T


@torch_tile.jit(out_idx=[-1])
def linear_attention_of(heads, dim, chunk=64):
    batch, length = T.dynamic("batch, length")
    shape = (batch, heads, length, dim)

    @T.prim_func
    def linear_attention(
        Q: T.Tensor(shape, "float32"), K: T.Tensor(shape, "float32"), V: T.Tensor(shape, "float32"),
        O: T.Tensor(shape, "float32"),
    ):  # fmt: skip
        with T.Kernel(heads, batch, threads=128) as (bh, bb):
            q = T.alloc_shared((chunk, dim), "float32")
            k = T.alloc_shared((chunk, dim), "float32")
            v = T.alloc_shared((chunk, dim), "float32")
            scores = T.alloc_fragment((chunk, chunk), "float32")
            visible = T.alloc_shared((chunk, chunk), "float32")
            state = T.alloc_fragment((dim, dim), "float32")  # the sum of outer products of all earlier keys and values
            earlier = T.alloc_shared((dim, dim), "float32")
            out = T.alloc_fragment((chunk, dim), "float32")
            T.clear(state)
            for s in T.serial(T.ceildiv(length, chunk)):
                T.copy(Q[bb, bh, s * chunk, 0], q)
                T.copy(K[bb, bh, s * chunk, 0], k)
                T.copy(V[bb, bh, s * chunk, 0], v)
                T.copy(state, earlier)
                T.gemm(q, earlier, out, clear_accum=True)
                T.gemm(q, k, scores, transpose_B=True, clear_accum=True)
                for i, j in T.Parallel(chunk, chunk):
                    visible[i, j] = T.if_then_else(j <= i, scores[i, j], 0)
                T.gemm(visible, v, out)
                T.gemm(k, v, state, transpose_A=True)
                T.copy(out, O[bb, bh, s * chunk, 0])

    return linear_attention


q, k, v = (torch.randn(2, 2, 150, 32) * 0.3 for _ in range(3))
out = linear_attention_of(2, 32)(q, k, v)
exact = (q.double() @ k.double().mT).tril() @ v.double()
torch.testing.assert_close(out.double(), exact, rtol=1e-4, atol=1e-4)
print(f"length  chunk  error against float64\n{150:6}  {64:5}  {(out - exact).abs().max():.1e}")
