# SPDX-License-Identifier: Apache-2.0
"""Training on several ranks by FSDP2: parameters are sharded, and the layers of torch_tile compute with whole ones.

Two processes with gloo stand for two GPUs; `torchrun --nproc-per-node 8` with NCCL runs the same loop.
"""

import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import torch_tile.nn

WIDTH, RANKS, STEPS = 64, 2, 3


class Block(nn.Module):
    """A gated feed-forward layer behind an RMS norm, with a residual."""

    def __init__(self):
        super().__init__()
        self.norm = torch_tile.nn.RMSNorm(WIDTH)
        self.mlp = torch_tile.nn.SwiGLU(WIDTH, 2 * WIDTH)

    def forward(self, x):
        return x + self.mlp(self.norm(x))


def model_and_data():
    """The same model and the same eight rows on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block()), torch.randn(8, WIDTH), torch.randn(8, WIDTH)


def losses_of(model, x, y, whole):
    """A few steps of Adam; the loss over all rows, which `whole` averages over ranks."""
    optimizer, losses = torch.optim.Adam(model.parameters(), lr=1e-2), []
    for _ in range(STEPS):
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(whole(loss.detach()))
    return losses


# %%
# Each rank shards the blocks, then the model, and takes its part of the rows.


def train(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=RANKS)
    model, x, y = model_and_data()
    mesh = init_device_mesh("cpu", (RANKS,))
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)

    def average(loss):
        dist.all_reduce(loss)
        return (loss / RANKS).item()

    losses = losses_of(model, x.chunk(RANKS)[rank], y.chunk(RANKS)[rank], average)
    if rank == 0:
        torch.save(losses, os.path.join(folder, "losses"))
    dist.destroy_process_group()


# %%
# The losses are those of one process with all rows.

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(train, args=(folder,), nprocs=RANKS)
        sharded = torch.load(os.path.join(folder, "losses"))
    alone = losses_of(*model_and_data(), whole=float)
    torch.testing.assert_close(torch.tensor(sharded), torch.tensor(alone), rtol=1e-4, atol=1e-5)
    print("loss, 2 ranks   " + "  ".join(f"{loss:.4f}" for loss in sharded))
    print("loss, 1 process " + "  ".join(f"{loss:.4f}" for loss in alone))
