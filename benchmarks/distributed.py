# SPDX-License-Identifier: Apache-2.0
"""Training steps of a decoder on several processes: eager, Inductor and `backend="tile"` in turns.

`python -m benchmarks.distributed [--layers 4] [--length 4096] [--only ddp,fsdp,tensor] [--seconds S]`

A process for each GPU, by NCCL; two by gloo where there is no GPU. A line for each way to divide the work: median
milliseconds of a step (forward, loss, backward) on the slowest process, and how far its loss is from eager's.
"""

from __future__ import annotations

import argparse
import functools
import math
import os
import socket
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from torch_tile.inductor.backend import tile

VOCABULARY = 32000
BACKENDS: dict[str, Any] = {"eager": "eager", "Inductor": "inductor", "tile": tile}


class Attention(nn.Module):
    """Grouped heads; how many this process has follows from its weights."""

    def __init__(self, width: int, d: int):
        super().__init__()
        self.d = d
        self.wq, self.wo = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.wk, self.wv = (nn.Linear(width, width // 4, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length = x.shape[:2]
        q, k, v = (w(x).view(batch, length, -1, self.d).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.wo(y.transpose(1, 2).reshape(batch, length, -1))  # type: ignore[no-any-return]


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, width: int):
        super().__init__()
        self.gate, self.up = (nn.Linear(width, 3 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


class Block(nn.Module):
    """A layer as Llama has it but for the positions."""

    def __init__(self, width: int, d: int):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention, self.mlp = Attention(width, d), MLP(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))  # type: ignore[no-any-return]


class Decoder(nn.Module):
    """Tokens to logits."""

    def __init__(self, layers: int, width: int, d: int):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(Block(width, d) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def ddp(model: Decoder, mesh: Any) -> nn.Module:
    """Each process has all weights and its own tokens."""
    return nn.parallel.DistributedDataParallel(model)


def fsdp(model: Decoder, mesh: Any) -> nn.Module:
    """Weights are gathered layer by layer."""
    from torch.distributed.fsdp import fully_shard

    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def tensor(model: Decoder, mesh: Any) -> nn.Module:
    """Heads and hidden columns are divided; all processes have the same tokens."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    columns = ("attention.wq", "attention.wk", "attention.wv", "mlp.gate", "mlp.up")
    plan: dict[str, Any] = {name: ColwiseParallel() for name in columns}
    plan |= {name: RowwiseParallel() for name in ("attention.wo", "mlp.down")}
    for layer in model.layers:
        parallelize_module(layer, mesh, plan)
    return model


WAYS: dict[str, Callable[[Decoder, Any], nn.Module]] = {"ddp": ddp, "fsdp": fsdp, "tensor": tensor}


def step_time(run: Callable[[], torch.Tensor], seconds: float, device: str) -> tuple[float, float]:
    """Median seconds of a step on the slowest process, and the loss."""
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    loss = run()
    run()
    samples: list[float] = []
    end = time.monotonic() + seconds
    while True:
        dist.barrier()
        synchronize()
        start = time.perf_counter()
        run()
        synchronize()
        samples.append(time.perf_counter() - start)
        again = torch.tensor(float(time.monotonic() < end and len(samples) < 50), device=device)
        dist.all_reduce(again, dist.ReduceOp.MIN)
        if not again.item() and len(samples) >= 3:
            break
    result = torch.tensor([statistics.median(samples), 0.0], device=device)
    dist.all_reduce(result, dist.ReduceOp.MAX)
    return result[0].item(), loss.item()


def work(rank: int, size: int, port: int, options: argparse.Namespace) -> None:
    """What one process does."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if device == "cuda" else "gloo", rank=rank, world_size=size)
    mesh = dist.init_device_mesh(device, (size,))
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    for name in options.only.split(","):
        losses, times = {}, {}
        for backend, value in BACKENDS.items():
            torch.manual_seed(7)
            torch._dynamo.reset()
            model = Decoder(options.layers, options.width, options.width // options.heads).to(device, dtype)
            tokens = torch.randint(VOCABULARY, (1, options.length), device=device)
            chosen = functools.partial(value, options={"select": options.select}) if callable(value) else value
            model_run = torch.compile(WAYS[name](model, mesh), backend=chosen)
            run = functools.partial(one_step, model_run, model, tokens)
            times[backend], losses[backend] = step_time(run, options.seconds, device)
            del model, model_run, run
        if rank == 0:
            found = "  ".join(f"{backend} {1e3 * t:.2f} ms" for backend, t in times.items())
            off = {backend: abs(loss - losses["eager"]) / math.log(VOCABULARY) for backend, loss in losses.items()}
            ratio = times["Inductor"] / times["tile"]
            print(
                f"{name:7} {found}  {ratio:.3f} x Inductor  loss off by {off['Inductor']:.1e}, {off['tile']:.1e}",
                flush=True,
            )
    dist.destroy_process_group()


def one_step(run: Callable[[torch.Tensor], torch.Tensor], model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Loss and gradients."""
    for p in model.parameters():
        p.grad = None
    loss = F.cross_entropy(run(tokens).flatten(0, 1).float(), tokens.flatten())
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    gpu = torch.cuda.is_available()
    parser.add_argument("--layers", type=int, default=4 if gpu else 1)
    parser.add_argument("--width", type=int, default=4096 if gpu else 64)
    parser.add_argument("--heads", type=int, default=32 if gpu else 8)
    parser.add_argument("--length", type=int, default=4096 if gpu else 16)
    parser.add_argument("--only", default="ddp,fsdp,tensor")
    parser.add_argument("--select", default="fastest", help="as the option of the backend")
    parser.add_argument("--seconds", type=float, default=3.0 if gpu else 0.2, help="for timing each of a line's runs")
    options = parser.parse_args()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    size = torch.cuda.device_count() if gpu else 2
    torch.multiprocessing.spawn(work, (size, port, options), nprocs=size)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
