# SPDX-License-Identifier: Apache-2.0
"""Attention as printed in articles on TileLang: changed are imports, white space, and what a comment says."""

import math

import pytest
import torch

import torch_tile as tilelang
import torch_tile.language as T


# "TileLang Code Examples", FlashAttention V2, as printed but for the target (there "cuda").
@tilelang.jit(target="cpu", out_idx=[3])
def flash_attention_v2(batch, n_heads, seq_len, head_dim, block_M, block_N):
    """
    Compute attention: O = softmax(Q @ K^T / sqrt(d)) @ V

    Uses online softmax to avoid materializing full attention matrix.
    Memory complexity: O(seq_len) instead of O(seq_len^2)
    """

    @T.prim_func
    def main(
        Q: T.Buffer((batch, n_heads, seq_len, head_dim), "float16"),
        K: T.Buffer((batch, n_heads, seq_len, head_dim), "float16"),
        V: T.Buffer((batch, n_heads, seq_len, head_dim), "float16"),
        O: T.Buffer((batch, n_heads, seq_len, head_dim), "float16"),
    ):
        scale = T.float32(1.0) / T.sqrt(T.float32(head_dim))

        # Each block processes block_M query tokens
        with T.Kernel(T.ceildiv(seq_len, block_M), n_heads, batch, threads=128) as (bx, by, bz):
            # Shared memory allocation
            Q_shared = T.alloc_shared((block_M, head_dim), "float16")
            K_shared = T.alloc_shared((block_N, head_dim), "float16")
            V_shared = T.alloc_shared((block_N, head_dim), "float16")

            # Register fragments
            S_local = T.alloc_fragment((block_M, block_N), "float32")  # Scores
            O_local = T.alloc_fragment((block_M, head_dim), "float32")  # Output accumulator

            # Online softmax statistics (per query token)
            m_current = T.alloc_fragment((block_M,), "float32")  # Max scores
            l_current = T.alloc_fragment((block_M,), "float32")  # Sum of exp

            # Apply swizzle layouts
            T.annotate_layout(
                {
                    Q_shared: T.make_swizzled_layout(Q_shared),
                    K_shared: T.make_swizzled_layout(K_shared),
                    V_shared: T.make_swizzled_layout(V_shared),
                }
            )

            # Initialize
            T.fill(m_current, -1e9)  # Start with very negative value
            T.clear(l_current)
            T.clear(O_local)

            # Load Q tile (stays constant for this block)
            T.copy(Q[bz, by, bx * block_M, 0], Q_shared)

            # Iterate over K, V tiles
            num_kv_tiles = T.ceildiv(seq_len, block_N)
            for k in T.Pipelined(num_kv_tiles, num_stages=2):
                # Load K, V tiles
                T.copy(K[bz, by, k * block_N, 0], K_shared)
                T.copy(V[bz, by, k * block_N, 0], V_shared)

                # Compute attention scores: S = Q @ K^T
                T.clear(S_local)
                T.gemm(Q_shared, K_shared, S_local, transpose_B=True)

                # Scale scores
                for i, j in T.Parallel(block_M, block_N):
                    S_local[i, j] = S_local[i, j] * scale

                # Online softmax update
                m_prev = T.alloc_fragment((block_M,), "float32")
                T.copy(m_current, m_prev)

                # Compute new max
                T.reduce_max(S_local, m_current, dim=1)

                # Update statistics and scores
                for i in T.Parallel(block_M):
                    # Correction factor for previous values
                    correction = T.exp(m_prev[i] - m_current[i])
                    l_current[i] = l_current[i] * correction

                    # Update output with correction
                    for d in T.Parallel(head_dim):
                        O_local[i, d] = O_local[i, d] * correction

                # Exponentiate current scores
                for i, j in T.Parallel(block_M, block_N):
                    S_local[i, j] = T.exp(S_local[i, j] - m_current[i])

                # Update denominator
                for i in T.Parallel(block_M):
                    row_sum = T.float32(0.0)
                    for j in T.Parallel(block_N):
                        row_sum = row_sum + S_local[i, j]
                    l_current[i] = l_current[i] + row_sum

                # Accumulate weighted values: O += S @ V
                T.gemm(S_local, V_shared, O_local, transpose_B=False)

            # Final normalization
            for i, d in T.Parallel(block_M, head_dim):
                O_local[i, d] = O_local[i, d] / l_current[i]

            # Write output
            T.copy(O_local, O[bz, by, bx * block_M, 0])

    return main


@pytest.mark.parametrize("shape", [(1, 2, 64, 32, 32, 32), (2, 1, 48, 16, 32, 16)], ids=str)
def test_flash_attention_v2(shape, launch):
    """The kernel masks nothing, so it is right where the keys fill whole tiles; queries may be ragged."""
    batch, heads, length, dim, _, _ = shape
    q, k, v = (torch.randn(batch, heads, length, dim).half() for _ in range(3))
    o = torch.full_like(q, math.nan)
    launch(flash_attention_v2(*shape), q, k, v, o)
    scores = q.double() @ k.double().transpose(-1, -2) / math.sqrt(dim)
    torch.testing.assert_close(o.double(), scores.softmax(-1) @ v.double(), rtol=2e-3, atol=2e-3)


# "TileLang Code Examples", DeepSeek MLA decoding, as printed but for the target (there "cuda").
@tilelang.jit(target="cpu", out_idx=[3])
def mla_decode_kernel(batch, n_heads, kv_len, head_dim, latent_dim, block_M, block_N):
    """
    DeepSeek MLA decode with split-KV for better GPU utilization.

    MLA compresses KV cache: (seq_len, n_heads, head_dim) -> (seq_len, latent_dim)
    This kernel handles the expanded attention computation efficiently.
    """

    @T.prim_func
    def main(
        Q: T.Buffer((batch, n_heads, 1, head_dim), "float16"),  # Single token
        KV_compressed: T.Buffer((batch, kv_len, latent_dim), "float16"),
        KV_proj: T.Buffer((latent_dim, n_heads, head_dim), "float16"),  # Projection weights
        O: T.Buffer((batch, n_heads, 1, head_dim), "float16"),
    ):
        scale = T.float32(1.0) / T.sqrt(T.float32(head_dim))

        # Split KV sequence across blocks for parallelism
        with T.Kernel(
            T.ceildiv(kv_len, block_N),  # Split along KV sequence
            n_heads,
            batch,
            threads=128,
        ) as (bx, by, bz):
            # Shared memory
            Q_shared = T.alloc_shared((1, head_dim), "float16")
            KV_shared = T.alloc_shared((block_N, head_dim), "float16")
            KV_comp_shared = T.alloc_shared((block_N, latent_dim), "float16")

            # Register fragments
            S_local = T.alloc_fragment((1, block_N), "float32")  # Attention scores
            O_local = T.alloc_fragment((1, head_dim), "float32")

            # Softmax statistics for this split
            scores_max = T.alloc_fragment((1,), "float32")
            scores_sum = T.alloc_fragment((1,), "float32")

            # Apply layouts
            T.annotate_layout(
                {
                    Q_shared: T.make_swizzled_layout(Q_shared),
                    KV_shared: T.make_swizzled_layout(KV_shared),
                    KV_comp_shared: T.make_swizzled_layout(KV_comp_shared),
                }
            )

            # Load Q for this head (single token for decoding)
            T.copy(Q[bz, by, 0, 0], Q_shared)

            # Load compressed KV for this split
            T.copy(KV_compressed[bz, bx * block_N, 0], KV_comp_shared)

            # Decompress KV using projection
            # K = KV_compressed @ KV_proj (for this head)
            T.clear(KV_shared)
            # This is simplified - actual implementation may use specific patterns
            for i in range(block_N):
                for d in range(head_dim):
                    for l in range(latent_dim):
                        KV_shared[i, d] += KV_comp_shared[i, l] * KV_proj[l, by, d]

            # Compute attention scores: S = Q @ K^T
            T.clear(S_local)
            # Use FullCol policy for better performance with narrow Q
            T.gemm(Q_shared, KV_shared, S_local, transpose_B=True, policy=T.GemmWarpPolicy.FullCol)

            # Scale and softmax
            for j in T.Parallel(block_N):
                S_local[0, j] = S_local[0, j] * scale

            # Find max for numerical stability
            T.fill(scores_max, -1e9)
            for j in T.Parallel(block_N):
                scores_max[0] = T.max(scores_max[0], S_local[0, j])

            # Exp and sum
            T.clear(scores_sum)
            for j in T.Parallel(block_N):
                S_local[0, j] = T.exp(S_local[0, j] - scores_max[0])
                scores_sum[0] = scores_sum[0] + S_local[0, j]

            # Normalize
            for j in T.Parallel(block_N):
                S_local[0, j] = S_local[0, j] / scores_sum[0]

            # Compute output: O = S @ V (V same as K in MLA)
            T.clear(O_local)
            T.gemm(S_local, KV_shared, O_local, transpose_B=False)

            # Write output (will be reduced across splits in subsequent step)
            T.copy(O_local, O[bz, by, 0, 0])

    return main


def test_mla_decode(launch):
    """All splits write one place, so the printed kernel alone is right for a single split."""
    batch, heads, length, dim, latent = 2, 2, 8, 16, 8
    q, kv = torch.randn(batch, heads, 1, dim).half(), torch.randn(batch, length, latent).half()
    proj, o = torch.randn(latent, heads, dim).half(), torch.full((batch, heads, 1, dim), math.nan).half()
    launch(mla_decode_kernel(batch, heads, length, dim, latent, block_M=1, block_N=length), q, kv, proj, o)
    expanded = torch.einsum("bkl,lhd->bhkd", kv.double(), proj.double())
    weights = (q.double() @ expanded.transpose(-1, -2) / math.sqrt(dim)).softmax(-1)
    # K and V are kept in float16 while they are summed up.
    torch.testing.assert_close(o.double(), weights @ expanded, rtol=2e-2, atol=2e-2)
