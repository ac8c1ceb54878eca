# SPDX-License-Identifier: Apache-2.0
"""Packages of AOTInductor and C++ wrappers on a GPU: the cubins are in them, and torch_tile is not needed."""

import functools
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

import torch_tile
from torch_tile.inductor.report.rows import collect

pytestmark = pytest.mark.cuda

RUN = """
import sys
sys.modules["torch_tile"] = None  # so that importing it fails
import torch
model = torch._inductor.aoti_load_package(sys.argv[1])
inputs = torch.load(sys.argv[2])
results = [model(*args) for args in inputs]
again = model(*inputs[0])
torch.testing.assert_close(again, results[0], rtol=0, atol=0)
torch.save([r if isinstance(r, torch.Tensor) else r[0] for r in results], sys.argv[3])
"""

LINKER = """#!/bin/sh
case " $* " in *" -shared "*) set -- "$@" -Wl,-Bsymbolic ;; esac
exec c++ "$@"
"""


class Block(nn.Module):
    def __init__(self, width=256, heads=4):
        super().__init__()
        self.heads = heads
        self.norm, self.last = nn.RMSNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width, bias=False)
        self.gate, self.up, self.down = (nn.Linear(width, width, bias=False) for _ in range(3))

    def forward(self, x):
        batch, length, width = x.shape
        parts = self.qkv(self.norm(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4).unbind(0)
        h = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(h.transpose(1, 2).reshape(batch, length, width))
        y = self.last(x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


@pytest.fixture
def model(device, seed):
    torch.manual_seed(seed)
    return Block().to(device, torch.bfloat16).eval().requires_grad_(False)


def assert_right(got, model, x):
    """As near to float64 as eager is, or twice as far."""
    wide = Block().to(x.device, torch.float64)
    wide.load_state_dict(model.state_dict())
    wanted = wide(x.double())
    error, eager = ((y.double() - wanted).abs().max().item() for y in (got, model(x)))
    assert error <= 2 * eager + 1e-3, (error, eager)


@pytest.fixture
def own_symbols(tmp_path):
    """Packages use their own std::regex: libtorch exports one of another libstdc++, in which they would crash."""
    linker = tmp_path / "c++"
    linker.write_text(LINKER)
    linker.chmod(0o755)
    with torch._inductor.config.patch({"cpp.cxx": (None, str(linker))}):
        yield


@pytest.mark.usefixtures("own_symbols")
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_package_runs_without_us(dynamic, model, device, tmp_path):
    batch, length = torch.export.Dim("batch", min=1, max=64), torch.export.Dim("length", min=1, max=4096)
    shapes = {"x": {0: batch, 1: length}} if dynamic else None
    sizes = [(4, 512), *([(1, 1), (3, 77), (2, 1500)] if dynamic else [])]
    inputs = [(torch.randn(*size, 256, device=device, dtype=torch.bfloat16),) for size in sizes]
    exported = torch.export.export(model, inputs[0], dynamic_shapes=shapes)
    with collect() as report:
        package = torch._inductor.aoti_compile_and_package(
            exported,
            package_path=str(tmp_path / "model.pt2"),
            inductor_configs=torch_tile.inductor_configs(options={"select": "tile"}),
        )
    assert {r.family for r in report.replaced()} == {"gemm", "attention", "norm"}, str(report)
    torch.save(inputs, tmp_path / "inputs.pt")
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    command = [sys.executable, "-c", RUN, package, str(tmp_path / "inputs.pt"), str(tmp_path / "results.pt")]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    for got, (x,) in zip(torch.load(tmp_path / "results.pt"), inputs, strict=True):
        assert_right(got, model, x)


def test_cpp_wrapper(model, device):
    x = torch.randn(2, 300, 256, device=device, dtype=torch.bfloat16)
    torch._dynamo.reset()
    with torch.no_grad(), torch._inductor.config.patch(cpp_wrapper=True):
        run = torch.compile(model, backend=functools.partial(torch_tile.tile, options={"select": "tile"}))
        assert_right(run(x), model, x)
        assert_right(run(x[:1, :299].contiguous()), model, x[:1, :299])
