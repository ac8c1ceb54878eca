# SPDX-License-Identifier: Apache-2.0
"""Small models and what must not change their results: other orders, layouts, dtypes, batches and splits.

A model and a relation are drawn by seed. Both sides are compiled by backend="tile", so that different kernels, masks
and tails meet; each is also compared with eager float64.
"""

import copy
import random

import pytest
import torch
from torch import nn
from torch.nn import functional as F

WIDTHS = (24, 32, 40)


class Attention(nn.Module):
    """Attention over all positions, by torch's operator or written out."""

    def __init__(self, width, written):
        super().__init__()
        self.heads, self.written = 2, written
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in "qkv")

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        if self.written:
            y = torch.softmax(q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5, dim=-1) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v)
        return y.transpose(1, 2).flatten(-2)


class Gated(nn.Module):
    """The feed-forward layer of Llama."""

    def __init__(self, width):
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(width, 2 * width), nn.Linear(width, 2 * width),
                                         nn.Linear(2 * width, width, bias=False))  # fmt: skip

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Residual parts behind norms."""

    def __init__(self, norms, parts):
        super().__init__()
        self.norms, self.parts = nn.ModuleList(norms), nn.ModuleList(parts)

    def forward(self, x):
        for norm, part in zip(self.norms, self.parts, strict=True):
            x = x + part(norm(x))
        return x


def drawn(source):
    """A model of two parts, and an input for it: [batch, positions, width]."""
    width = source.choice(WIDTHS)
    kinds = [
        lambda: Attention(width, False),
        lambda: Attention(width, True),
        lambda: Gated(width),
        lambda: nn.Sequential(nn.Linear(width, 3 * width), nn.GELU(), nn.Linear(3 * width, width)),
    ]
    norms = [source.choice([nn.RMSNorm, nn.LayerNorm])(width) for _ in range(2)]
    model = Block(norms, [source.choice(kinds)() for _ in range(2)])
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    return model.eval(), torch.randn(source.choice([2, 4]), source.choice([5, 16, 33]), width)


def permuted(model, x):
    order = torch.randperm(x.shape[1])
    return model, x[:, order], lambda y: y[:, torch.argsort(order)]


def laid_out(model, x):
    """The input's memory has another order."""
    dims = random.choice([(1, 0, 2), (2, 0, 1), (0, 2, 1)])
    other = x.permute(dims).contiguous().permute(*torch.argsort(torch.tensor(dims)).tolist())
    return model, other, lambda y: y


def cast(model, x):
    return copy.deepcopy(model).double(), x.double(), lambda y: y.float()


def batched(model, x):
    """Further rows do not change the first ones."""
    return model, torch.cat([x, x.flip(0) * 3, x]), lambda y: y[-len(x) :]


def part(model, x):
    return model, x[1:], lambda y: y


def split(model, x):
    """Each linear layer as two, of some rows of its weight each."""
    made = copy.deepcopy(model)
    for parent in list(made.modules()):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, nn.Linear):
                setattr(parent, name, Halves(layer))
    return made, x, lambda y: y


class Halves(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.weights = nn.ParameterList(layer.weight.detach().tensor_split(2))
        self.biases = None if layer.bias is None else nn.ParameterList(layer.bias.detach().tensor_split(2))

    def forward(self, x):
        return torch.cat(
            [F.linear(x, w, None if self.biases is None else self.biases[n]) for n, w in enumerate(self.weights)], -1
        )


RELATIONS = {f.__name__: f for f in (permuted, laid_out, cast, batched, part, split)}


def compiled(model, x):
    torch._dynamo.reset()
    with torch.no_grad():
        return torch.compile(model, backend="tile", options={"select": "tile"})(x)


@pytest.mark.parametrize("turn", range(2))
def test_results_agree(turn, seed):
    source = random.Random(f"{seed} {turn}")
    random.seed(seed + turn)
    torch.manual_seed(seed + turn)
    model, x = drawn(source)
    name = source.choice(list(RELATIONS)[turn::2])
    other, given, back = RELATIONS[name](model, x)
    with torch.no_grad():
        exact = copy.deepcopy(model).double()(x.double()).float()
    one = compiled(model, x)
    two = back(compiled(other, given))
    if name == "part":
        torch.testing.assert_close(two, one[1:], rtol=2e-4, atol=2e-4)
    else:
        torch.testing.assert_close(two, one, rtol=2e-4, atol=2e-4)
    torch.testing.assert_close(one, exact, rtol=2e-4, atol=2e-4)
