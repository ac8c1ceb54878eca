# SPDX-License-Identifier: Apache-2.0
"""Find a race without a GPU: run the threads of a kernel in the simulator.

A kernel that names its threads is responsible for its barriers. The simulator runs the compiled kernel, all threads of
a block side by side, and names both lines of every conflict.
"""

# %%
# Each thread writes one number and reads its neighbour's. Warps run at different speeds, so a barrier is needed.

import torch

import torch_tile
import torch_tile.language as T


def rotate_left(threads, with_barrier):
    @T.prim_func
    def rotate(X: T.Tensor((threads,), "float32"), Y: T.Tensor((threads,), "float32")):
        with T.Kernel(1, threads=threads):
            t = T.get_thread_binding(0)
            mine = T.alloc_shared((threads,), "float32")
            mine[t] = X[t]
            if with_barrier:
                T.sync_threads()
            Y[t] = mine[(t + 1) % threads]

    return rotate


# %%
# The compiler inserts barriers for what it sees, also here. Nothing can be inserted between
# blocks, though: the next kernel lets all blocks add to one number without an atomic update.


def sum_of_blocks(blocks, atomic):
    @T.prim_func
    def total(X: T.Tensor((blocks,), "float32"), S: T.Tensor((1,), "float32")):
        with T.Kernel(blocks, threads=32) as bx:
            if atomic:
                T.atomic_add(S[0], X[bx])
            else:
                S[0] = S[0] + X[bx]

    return total


x = torch.randn(64)
y = torch.empty(64)
kernel = torch_tile.compile(rotate_left(64, with_barrier=False), target="cuda:sm_80")  # compiles without a GPU
findings = kernel.interpret(x, y)
print(f"rotate: {len(findings)} findings; the compiler inserted the barrier that was left out")
torch.testing.assert_close(y, x.roll(-1))

# %%
# The findings name the place, both accesses and why no order holds between them.

for atomic in (False, True):
    kernel = torch_tile.compile(sum_of_blocks(8, atomic), target="cuda:sm_80")
    total = torch.zeros(1)
    findings = kernel.interpret(x[:8], total)
    print(f"atomic={atomic}: {len(findings)} findings")
    if findings:
        print(findings.report())
    assert bool(findings) != atomic
torch.testing.assert_close(total[0], x[:8].sum())
