# SPDX-License-Identifier: Apache-2.0
"""What tile ops cost on the host: through the dispatcher, as a call of the kernel, as generated code calls them; and
whole compiled models.

On a machine without a GPU as launch.py: everything but the driver. `python benchmarks/host_time.py [--seconds S]`
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from launch import cost, device, without_gpu
from timer import arguments

from torch_tile.hardware import Target
from torch_tile.inductor.backend import tile
from torch_tile.kernels import common
from torch_tile.kernels.attention import forward as attention
from torch_tile.kernels.gemm import gemm
from torch_tile.kernels.mla import decode as mla_decode
from torch_tile.kernels.norm import norm, softmax
from torch_tile.ops import launchers

BURST = 50  # calls that fit into the stream's queue


def half(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device=device()).to(torch.bfloat16)


def gemm_call(a: torch.Tensor, w: torch.Tensor, x: torch.Tensor, out: torch.Tensor) -> None:
    b = launchers.view(w, (1024, 1024), (1, 1024), 0)
    launchers.gemm(a, [b], [x], "t", "v0=add(acc0,x0);ret v0", torch.bfloat16, out=out)


def attention_call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> None:
    launchers.attention(q, k, v, None, True, out=out)


def mla_call(q: Any, q_pe: Any, kv: Any, k_pe: Any, lengths: Any, out: torch.Tensor) -> None:
    launchers.mla_decode(q, q_pe, kv, k_pe, None, lengths, out=out)


def calls() -> Mapping[str, tuple[Callable[..., object], tuple[torch.Tensor, ...], Callable[[], object]]]:
    """By name: a call as generated code has it, its arguments, and the op."""
    ops = torch.ops.tile
    x, r, w, y, total = half(64, 1024), half(64, 1024), half(1024), half(64, 1024), half(64, 1024)
    matrix, (q, k, v) = half(1024, 1024), (half(1, heads, 256, 128) for heads in (8, 2, 2))
    cache = half(4, 1, 128, 512), half(4, 1, 128, 64), half(4, 512, 512), half(4, 512, 64)
    lengths = torch.full((4,), 500, dtype=torch.int32, device=device())
    epilogue = "t", "v0=add(acc0,x0);ret v0", torch.bfloat16
    return {
        "gemm": (gemm_call, (x, matrix, r, y), lambda: ops.gemm(x, [matrix.mT], [r], *epilogue)),
        "attention": (attention_call, (q, k, v, half(1, 8, 256, 128)), lambda: ops.attention(q, k, v, None, True)),
        "mla_decode": (
            mla_call,
            (*cache, lengths, half(4, 1, 128, 512)),
            lambda: ops.mla_decode(*cache, None, lengths),
        ),
        "rms_norm": (lambda a, b, c: launchers.rms_norm(a, b, out=c), (x, w, y), lambda: ops.rms_norm(x, w)),
        "add_rms_norm": (
            lambda a, b, c, d, e: launchers.add_rms_norm(a, b, c, out=(d, e)),
            (x, r, w, y, total),
            lambda: ops.add_rms_norm(x, r, w),
        ),
        "softmax": (lambda a, c: launchers.softmax(a, out=c), (x, y), lambda: ops.softmax(x)),
        "torch.add(out=)": (lambda a, b, c: torch.add(a, b, out=c), (w, w, w), lambda: w + w),
    }


class Block(torch.nn.Module):
    """A layer of a transformer, as Llama has it but for the positions."""

    def __init__(self, width: int = 1024, heads: int = 8):
        super().__init__()
        make = functools.partial(torch.nn.Linear, bias=False)
        self.heads, self.norm, self.second_norm = heads, torch.nn.RMSNorm(width), torch.nn.RMSNorm(width)
        self.qkv, self.o = make(width, 3 * width), make(width, width)
        self.gate, self.up, self.down = make(width, 2 * width), make(width, 2 * width), make(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).reshape(batch, length, width))
        y = self.second_norm(x)
        return x + self.down(torch.nn.functional.silu(self.gate(y)) * self.up(y))


def best(call: Callable[[], object], seconds: float, burst: int) -> float:
    """Microseconds of a call in the best burst; sites replay from the third call on."""
    for _ in range(3):
        call()
    return min(cost(call, seconds, burst)) * 1e6


def model_times(seconds: float) -> None:
    """A model of eight layers, 37 tile ops or so, on the host."""
    model = torch.nn.Sequential(*(Block() for _ in range(8))).eval().to(device(), torch.bfloat16)
    x = half(1, 64, 1024)
    options = {"select": "tile"}
    backends: dict[str, Any] = {"tile": functools.partial(tile, options=options)}
    if device() == "cuda":
        backends["inductor"] = "inductor"
    for name, backend in backends.items():
        torch._dynamo.reset()
        run = functools.partial(torch.compile(model, backend=backend), x)
        print(f"8 layers, {name:9} {best(run, seconds, 5):8.1f} us")


def main() -> None:
    options = arguments(__doc__)
    if device() == "cpu":
        print("no GPU: everything but the driver's own work")
        without_gpu()
        machine = common.Machine(Target("cuda", 90), 132)
        for family in (attention, gemm, mla_decode, norm, softmax):
            family.machine_of = lambda x: machine
    print(f"{'us a call, best':16} {'op':>8} {'call':>8} {'site':>8}")
    with torch.inference_mode():
        for name, (function, args, op) in calls().items():
            made = launchers.site("t" * len(args), function)
            ways = op, functools.partial(function, *args), functools.partial(made, *args)
            times = [best(way, options.seconds, BURST) for way in (ways if "torch" not in name else ways[:2])]
            print(f"{name:16} " + " ".join(f"{each:8.2f}" for each in times), flush=True)
        turns(options.seconds)
    with torch.no_grad():
        model_times(options.seconds)


def turns(seconds: float) -> None:
    """A site that layers share: other weights, so another tensor map, for each call."""
    made, x, y = launchers.site("tttt", gemm_call), half(64, 1024), half(64, 1024)
    weights = [half(1024, 1024) for _ in range(8)]

    def call() -> None:
        for each in weights:
            made(x, each, x, y)

    print(f"{'gemm, in turns':16} {'':17} {best(call, seconds, 8) / len(weights):8.2f}")


if __name__ == "__main__":
    main()
