# SPDX-License-Identifier: Apache-2.0
"""Training a small decoder on two processes through `backend="tile"`: one process's loss and gradients in eager.

Data parallel, fully sharded, and tensor and sequence parallel; and layers of torch_tile.nn in eager. Run as a script,
this file is one of the two processes.
"""

import functools
import os
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torch_tile.nn
from torch_tile.inductor.backend import tile
from torch_tile.inductor.compat import no_graph_caches
from torch_tile.inductor.dry_run import dry_run
from torch_tile.inductor.report.rows import collect

HIDDEN, HEADS, KV_HEADS, VOCABULARY, LENGTH = 32, 4, 2, 50, 6


class Attention(nn.Module):
    """Grouped heads; how many this process has follows from its weights."""

    def __init__(self):
        super().__init__()
        self.d = HIDDEN // HEADS
        self.wq, self.wo = nn.Linear(HIDDEN, HIDDEN, bias=False), nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.wk, self.wv = (nn.Linear(HIDDEN, KV_HEADS * self.d, bias=False) for _ in range(2))

    def forward(self, x):
        batch, length = x.shape[:2]
        q, k, v = (w(x).view(batch, length, -1, self.d).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.wo(y.transpose(1, 2).reshape(batch, length, -1))


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up = nn.Linear(HIDDEN, 48, bias=False), nn.Linear(HIDDEN, 48, bias=False)
        self.down = nn.Linear(48, HIDDEN, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)
        self.attention, self.mlp = Attention(), MLP()

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Tiled(nn.Module):
    """A block of torch_tile's own layers."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = torch_tile.nn.RMSNorm(HIDDEN), torch_tile.nn.LayerNorm(HIDDEN)
        self.up, self.down = torch_tile.nn.Linear(HIDDEN, 48, activation="gelu"), torch_tile.nn.Linear(48, HIDDEN)
        self.mlp = torch_tile.nn.SwiGLU(HIDDEN, 48)

    def forward(self, x):
        x = x + self.down(self.up(self.norm1(x)))
        return x + self.mlp(self.norm2(x))


class Decoder(nn.Module):
    def __init__(self, block, layers=1):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList(block() for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(HIDDEN), nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def loss_of(model, tokens):
    logits = model(tokens)
    return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def make(block):
    torch.manual_seed(5)
    model = Decoder(block)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.05)
    return model, torch.randint(VOCABULARY, (4, LENGTH))


def full(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def compiled(model, backend=dry_run):
    """The dry run leaves out code generation, which takes most of the time; `check_generated_code` has it."""
    return torch.compile(model, backend=functools.partial(backend, options={"select": "tile"}))


def check(name, block, prepare, shard_data, families):
    """`prepare(model)` -> what to run; the gradients stay on the model's parameters."""
    import torch.distributed as dist

    reference, tokens = make(block)
    want = loss_of(reference, tokens)
    want.backward()
    model, _ = make(block)
    run = prepare(model)
    here = tokens.chunk(2)[dist.get_rank()] if shard_data else tokens
    with collect() as report:
        loss = loss_of(run, here)
        loss.backward()
    loss = full(loss.detach())
    if shard_data:
        dist.all_reduce(loss)
        loss /= 2
    torch.testing.assert_close(loss, want.detach(), rtol=1e-4, atol=1e-5)
    for (key, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(full(p.grad), q.grad, rtol=1e-3, atol=1e-5, msg=lambda m, key=key: f"{key}: {m}")
    for family in families:
        found = {row.graph for row in report.replaced(family)}
        assert "forward" in found, f"{name}: {family} is in {found}\n{report}"
    print(name, "agrees", flush=True)


def ddp(model, wrap):
    from torch.nn.parallel import DistributedDataParallel

    return wrap(DistributedDataParallel(model))


def fsdp(model, mesh, wrap):
    from torch.distributed.fsdp import fully_shard

    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return wrap(model)


def tensor_parallel(model, mesh, wrap, sequence):
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    row = functools.partial(RowwiseParallel, output_layouts=Shard(1) if sequence else None)
    plan = {
        "attention.wq": ColwiseParallel(),
        "attention.wk": ColwiseParallel(),
        "attention.wv": ColwiseParallel(),
        "attention.wo": row(),
        "mlp.gate": ColwiseParallel(),
        "mlp.up": ColwiseParallel(),
        "mlp.down": row(),
    }
    if sequence:
        gather = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
        plan |= {"norm1": SequenceParallel(), "norm2": SequenceParallel()}
        plan |= {"attention": PrepareModuleInput(**gather), "mlp": PrepareModuleInput(**gather)}
    for layer in model.layers:
        parallelize_module(layer, mesh, plan)
    if sequence:
        ends = {
            "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        }
        parallelize_module(model, mesh, ends)
    return wrap(model)


def our_layers(model, mesh):
    """Every tile op of the model has DTensors for arguments."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    plan = {
        "norm1": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
        "norm2": SequenceParallel(),
        "mlp": PrepareModuleInput(
            input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),), use_local_output=False
        ),
        "mlp.gate_proj": ColwiseParallel(use_local_output=False),
        "mlp.up_proj": ColwiseParallel(use_local_output=False),
        "mlp.down_proj": RowwiseParallel(output_layouts=Shard(1)),
    }
    for layer in model.layers:
        parallelize_module(layer, mesh, plan)
    ends = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    return parallelize_module(model, mesh, ends)


ALL = ("attention", "norm", "gemm")
CASES = {
    "ddp": (Block, lambda mesh: functools.partial(ddp, wrap=compiled), True, ALL),
    "fsdp": (Block, lambda mesh: functools.partial(fsdp, mesh=mesh, wrap=compiled), True, ALL),
    "tensor parallel": (
        Block,
        lambda mesh: functools.partial(tensor_parallel, mesh=mesh, wrap=compiled, sequence=False),
        False,
        ALL,
    ),
    "sequence parallel": (
        Block,
        lambda mesh: functools.partial(tensor_parallel, mesh=mesh, wrap=compiled, sequence=True),
        False,
        ALL,
    ),
    "ddp, our layers, eager": (Tiled, lambda mesh: functools.partial(ddp, wrap=lambda m: m), True, ()),
    "tensor parallel, our layers, eager": (Tiled, lambda mesh: functools.partial(our_layers, mesh=mesh), False, ()),
    "fsdp, our layers, eager": (Tiled, lambda mesh: functools.partial(fsdp, mesh=mesh, wrap=lambda m: m), True, ()),
}


def check_generated_code(mesh):
    """Tile ops and collectives in one wrapper."""
    from torch._inductor.utils import run_and_get_code
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(6)
    model, x = MLP(), torch.randn(3, 4, HIDDEN)
    with torch.no_grad(), no_graph_caches():
        want = model(x)
        plan = {"gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
        got, codes = run_and_get_code(compiled(parallelize_module(model, mesh, plan), tile), x)
    torch.testing.assert_close(full(got), want, rtol=1e-4, atol=1e-5)
    assert "all_reduce" in codes[0] and "_torch_tile" in codes[0], codes[0]


def main(rank, store, *names):
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=2)
    mesh = dist.init_device_mesh("cpu", (2,))
    for name in names or CASES:
        torch._dynamo.reset()
        block, prepare, shard_data, families = CASES[name]
        check(name, block, prepare(mesh), shard_data, families)
    check_generated_code(mesh)
    dist.barrier()  # who leaves first would take the other down
    os._exit(0)  # gloo's threads may abort a process that ends in the ordinary way


@pytest.mark.slow
def test_two_ranks_train_as_one(two_ranks):
    two_ranks(__file__)


if __name__ == "__main__":
    main(*sys.argv[1:])
