# SPDX-License-Identifier: Apache-2.0
"""Cross-entropy over a vocabulary that no tile holds: the online log-sum-exp of a row, piece by piece."""

import torch

import torch_tile
import torch_tile.language as T


@torch_tile.jit
def cross_entropy(logits, labels, block=512):
    M, V = T.const("M, V")
    logits: T.Tensor((M, V), "float32")
    labels: T.Tensor((M,), "int64")
    loss = T.empty((M,), "float32")
    with T.Kernel(M, threads=128) as row:
        x = T.alloc_fragment((block,), "float32")
        row_max = T.alloc_fragment((1,), "float32")
        before = T.alloc_fragment((1,), "float32")
        part = T.alloc_fragment((1,), "float32")
        row_sum = T.alloc_fragment((1,), "float32")
        T.fill(row_max, -1e30)
        T.clear(row_sum)
        for s in T.Pipelined(T.ceildiv(V, block), num_stages=2):
            for i in T.Parallel(block):
                inside = s * block + i < V
                x[i] = T.if_then_else(inside, logits[row, s * block + i], -T.infinity("float32"))
            T.copy(row_max, before)
            T.reduce_max(x, row_max, dim=0, clear=False)
            for i in T.Parallel(block):
                x[i] = T.exp(x[i] - row_max[0])
            T.reduce_sum(x, part, dim=0)
            for i in T.Parallel(1):
                row_sum[i] = row_sum[i] * T.exp(before[i] - row_max[i]) + part[i]
        for i in T.Parallel(1):
            loss[row + i] = row_max[i] + T.log(row_sum[i]) - logits[row, labels[row]]
    return loss


logits, labels = torch.randn(20, 5003) * 5, torch.randint(0, 5003, (20,))
loss = cross_entropy(logits, labels)
exact = torch.nn.functional.cross_entropy(logits.double(), labels, reduction="none")
torch.testing.assert_close(loss.double(), exact, rtol=1e-5, atol=1e-5)
print(f"rows  classes  error against float64\n{20:4}  {5003:7}  {(loss - exact).abs().max():.1e}")
