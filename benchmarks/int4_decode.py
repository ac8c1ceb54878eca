# SPDX-License-Identifier: Apache-2.0
"""Time one token of a Llama-8B shape with int4 weights beside bfloat16: `python -m benchmarks.int4_decode`.

A model of plain torch has layers of Llama-8B's sizes, and a cache of keys and values. Forms of it take turns, each in a
CUDA graph: bfloat16 under Inductor and under backend="tile", and int4 (128 columns a scale) under backend="tile". A
graph has no gaps between layers, so that a few layers tell the ratio of 32. Errors are against float64.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torch_tile  # noqa: F401  # registers the backend
from benchmarks.timer import measure
from torch_tile.nn import QuantizedLinear

WIDTH, HEADS, SHARED, DIM, INNER = 4096, 32, 8, 128, 14336  # SHARED: heads of keys
GROUP = 128


class Layer(nn.Module):
    """A layer of Llama over a cache that holds `length` tokens."""

    k: Tensor
    v: Tensor

    def __init__(self, length: int, scale: int = 1) -> None:
        super().__init__()
        width, inner = WIDTH // scale, INNER // scale
        self.heads, self.shared = HEADS // scale, max(1, SHARED // scale)
        self.qkv = nn.Linear(width, (self.heads + 2 * self.shared) * DIM, bias=False)
        self.o = nn.Linear(self.heads * DIM, width, bias=False)
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)
        self.norms = nn.ModuleList(nn.RMSNorm(width, eps=1e-5) for _ in range(2))
        for name in ("k", "v"):
            self.register_buffer(name, torch.randn(1, self.shared, length, DIM))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, place: Tensor, mask: Tensor) -> Tensor:
        """Map `[1, 1, width]`; `place` is the token's place in the cache, and `mask` hides places behind it."""
        joined = self.qkv(self.norms[0](x)).view(1, 1, -1, DIM).transpose(1, 2)
        q, k, v = joined.split([self.heads, self.shared, self.shared], 1)
        q, k = (t * cos + torch.cat([-t[..., DIM // 2 :], t[..., : DIM // 2]], -1) * sin for t in (q, k))
        keys, values = self.k.index_copy_(2, place, k), self.v.index_copy_(2, place, v)
        attended = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=True)
        x = x + self.o(attended.transpose(1, 2).reshape(1, 1, -1))
        y = self.norms[1](x)
        out: Tensor = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return out


class Decoder(nn.Module):
    """Layers in a row."""

    def __init__(self, layers: int, length: int, scale: int = 1) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(length, scale) for _ in range(layers))

    def forward(self, x: Tensor, *rest: Tensor) -> Tensor:
        """Map the hidden state of one token."""
        for layer in self.layers:
            x = layer(x, *rest)
        return x


def quantized(linear: nn.Linear) -> QuantizedLinear:
    """Round a weight to 4 bits in groups of 128 columns, as GPTQ's layers hold them."""
    weight = linear.weight.detach()
    groups = weight.float().unflatten(1, (-1, GROUP))
    scales = (groups.abs().amax(2) / 7).clamp_min(1e-8).to(weight.dtype)
    codes = (groups / scales.float()[..., None]).round().clamp(-8, 7).add(8).flatten(1).to(torch.uint8)
    return QuantizedLinear(codes[:, ::2] | codes[:, 1::2] << 4, scales, bits=4, offset=8)


def with_int4(model: Decoder) -> tuple[Decoder, Decoder]:
    """Return the model with int4 weights, and one whose weights have the same values."""
    narrow, same = copy.deepcopy(model), copy.deepcopy(model)
    for layer, other in zip(narrow.layers, same.layers, strict=True):
        for name, linear in list(layer.named_children()):
            if isinstance(linear, nn.Linear):
                setattr(layer, name, quantized(linear))
                getattr(other, name).weight.data = getattr(layer, name).dequantize(linear.weight.dtype)
    return narrow, same


def inputs(width: int, length: int, device: str, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Make a token near the end of the cache: its state, the angles, its place, and the mask."""
    angles = torch.randn(DIM // 2, device=device).repeat(2)
    place = torch.tensor([length - 2], device=device)
    mask = (torch.arange(length, device=device) <= place)[None, None, None]
    return (
        torch.randn(1, 1, width, device=device, dtype=dtype),
        angles.cos().to(dtype),
        angles.sin().to(dtype),
        place,
        mask,
    )


def in_graph(call: Callable[[], Tensor]) -> Callable[[], object]:
    """Record a call in a CUDA graph; return what replays it."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


@torch.no_grad()
def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--length", type=int, default=1024, help="tokens that the cache holds")
    parser.add_argument("--scale", type=int, default=1, help="divides all widths, to try the program without a GPU")
    parser.add_argument("--seconds", type=float, default=10.0)
    options = parser.parse_args(given)
    device, dtype = "cuda" if torch.cuda.is_available() else "cpu", torch.bfloat16
    torch.manual_seed(0)
    with torch.device(device):
        model = Decoder(options.layers, options.length, options.scale).to(dtype).eval()
    narrow, same = with_int4(model)
    args = inputs(WIDTH // options.scale, options.length, device, dtype)
    exact = copy.deepcopy(same).double()(*(x.double() if x.is_floating_point() else x for x in args))
    forms = {
        "bfloat16, Inductor": torch.compile(same),
        "bfloat16, tile": torch.compile(copy.deepcopy(same), backend="tile"),
        "int4, tile": torch.compile(narrow, backend="tile"),
    }
    calls = {}
    for name, form in forms.items():
        error = ((form(*args).double() - exact).norm() / exact.norm()).item()
        print(f"{name}: error {error:.1e}", flush=True)
        if error > 0.03:
            print(f"{name} is WRONG")
            return 1
        call = partial(form, *args)
        calls[name] = in_graph(call) if device == "cuda" else call
    times = measure(calls, options.seconds, device)
    for name, time in times.items():
        share, layer = times["bfloat16, Inductor"].median / time.median, time.median * 1e6 / options.layers
        print(f"{name:20} {layer:8.2f} us a layer +-{time.spread:.1%}, {share:.2f} x Inductor's")
    return 0


if __name__ == "__main__":
    sys.exit(main())
