# SPDX-License-Identifier: Apache-2.0
"""Packages of AOTInductor and C++ wrappers contain our kernels: they run where torch_tile cannot be imported."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import torch_tile
from torch_tile.inductor.report.rows import collect
from torch_tile.runtime.host_compiler import find_compiler

RUN = """
import sys
sys.modules["torch_tile"] = None  # so that importing it fails
import torch
model = torch._inductor.aoti_load_package(sys.argv[1])
results = [model(*args) for args in torch.load(sys.argv[2])]
torch.save([r if isinstance(r, torch.Tensor) else tuple(r) for r in results], sys.argv[3])
assert not any(name.startswith("torch_tile.") for name in sys.modules)
"""

# The same without Python: rows, columns and width are those of floats in a file.
PROGRAM = """
#include <ATen/ATen.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <fstream>
int main(int, char** argv) {
  torch::inductor::AOTIModelPackageLoader model(argv[1]);
  auto x = at::empty({std::stol(argv[3]), std::stol(argv[4]), std::stol(argv[5])});
  std::ifstream(argv[2], std::ios::binary).read((char*)x.data_ptr(), x.nbytes());
  auto y = model.run({x})[0].contiguous();
  std::ofstream(std::string(argv[2]) + ".out", std::ios::binary).write((const char*)y.data_ptr(), y.nbytes());
}
"""


class Block(nn.Module):
    """A decoder layer, and what else there are kernels for."""

    def __init__(self, width: int = 48, heads: int = 4):
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
        y = x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))
        return y, y.softmax(-1)


def packaged(model, args, folder, dynamic=None):
    """The path of a package, and the report of its compilation."""
    exported = torch.export.export(model, args, dynamic_shapes=dynamic)
    configs = torch_tile.inductor_configs(options={"select": "tile"})
    with collect() as report:
        path = torch._inductor.aoti_compile_and_package(
            exported, package_path=str(folder / "model.pt2"), inductor_configs=configs
        )
    return path, report


def run_elsewhere(package: str, inputs: list, folder: Path) -> list:
    """What a package gives in a process that has torch and not torch_tile, with nothing in its caches."""
    torch.save(inputs, folder / "inputs.pt")
    empty = folder / "empty"
    empty.mkdir()
    moved = Path(package).rename(folder / "moved.pt2")
    keep = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "TORCH_TILE_CACHE_DIR")}
    environment = {**keep, "TORCH_TILE_CACHE_DIR": str(empty), "TORCHINDUCTOR_CACHE_DIR": str(empty / "inductor")}
    command = [sys.executable, "-c", RUN, str(moved), str(folder / "inputs.pt"), str(folder / "results.pt")]
    done = subprocess.run(command, cwd=empty, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert [each.name for each in empty.iterdir() if each.name != "inductor"] == []
    return torch.load(folder / "results.pt")


def run_without_python(package: Path, x: torch.Tensor, folder: Path) -> torch.Tensor:
    """What a program in C++ gets from a package; the first result, of the form of `x`."""
    source, program, data = folder / "main.cpp", folder / "main", folder / "x"
    source.write_text(PROGRAM)
    torch_folder = Path(torch.__file__).parent
    includes = [f"-I{torch_folder / 'include'}{more}" for more in ("", "/torch/csrc/api/include")]
    libraries = [f"-L{torch_folder / 'lib'}", f"-Wl,-rpath,{torch_folder / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10"]
    flags = ["-std=c++20", "-O0", f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
    command = [*find_compiler().command, *flags, str(source), *includes, *libraries, "-o", str(program)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    data.write_bytes(x.numpy().tobytes())
    subprocess.run([str(program), str(package), str(data), *map(str, x.shape)], check=True, capture_output=True)
    return torch.frombuffer(bytearray(Path(f"{data}.out").read_bytes()), dtype=x.dtype).view(x.shape)


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_package_runs_without_us(dynamic, tmp_path, seed):
    torch.manual_seed(seed)
    model = Block().eval().requires_grad_(False)
    batch, length = torch.export.Dim("batch", min=1, max=64), torch.export.Dim("length", min=1, max=512)
    shapes = {"x": {0: batch, 1: length}} if dynamic else None
    package, report = packaged(model, (torch.randn(3, 17, 48),), tmp_path, shapes)
    assert {r.family for r in report.replaced()} == {"gemm", "attention", "norm", "softmax"}, str(report)
    assert not report.select(status="kept"), str(report)
    sizes = [(3, 17)] + ([(1, 1), (2, 5), (7, 130), (1, 64)] if dynamic else [(3, 17)])
    inputs = [(torch.randn(*size, 48),) for size in sizes]
    wide = Block().double()
    wide.load_state_dict(model.state_dict())
    for found, (x,) in zip(run_elsewhere(package, inputs, tmp_path), inputs, strict=True):
        for got, wanted in zip(found, wide(x.double()), strict=True):
            torch.testing.assert_close(got.double(), wanted, rtol=1e-4, atol=1e-4)
    if dynamic:
        x = torch.randn(5, 23, 48)
        got = run_without_python(tmp_path / "moved.pt2", x, tmp_path)
        torch.testing.assert_close(got.double(), wide(x.double())[0], rtol=1e-4, atol=1e-4)


class Rows(nn.Module):
    """Kernels for rows are cut for their length, which here is known at run time only but in the second softmax."""

    def forward(self, x, mask):
        y, _ = torch.ops.tile.add_rms_norm(x.transpose(1, 2), mask.expand(3, 32, -1), None, 1e-5)
        return (y + mask).softmax(-1), torch.ops.tile.softmax(x, 0)


def test_what_cannot_be_embedded_stays_inductors(tmp_path, caplog):
    length = torch.export.Dim("length", min=2, max=512)
    shapes = {"x": {1: length}, "mask": {0: length}}
    args = torch.randn(3, 20, 32), torch.randn(20)
    package, report = packaged(Rows(), args, tmp_path, shapes)
    assert len(report.replaced()) == 1
    (row,) = report.select("softmax", "kept")
    assert row.reason.startswith("not to be called from C++"), str(report)
    assert "tile.add_rms_norm" in caplog.text and "is compiled by Inductor" in caplog.text
    inputs = [args, (torch.randn(3, 7, 32), torch.randn(7))]
    for found, (x, mask) in zip(run_elsewhere(package, inputs, tmp_path), inputs, strict=True):
        y = nn.functional.rms_norm((x.transpose(1, 2) + mask).double(), (x.shape[1],), eps=1e-5)
        for got, wanted in zip(found, ((y + mask).softmax(-1), x.double().softmax(0)), strict=True):
            torch.testing.assert_close(got.double(), wanted, rtol=1e-4, atol=1e-5)


class Modulated(nn.Module):
    """Norms with what stands around them; the last dimension is known, as rows are cut for it."""

    def __init__(self):
        super().__init__()
        self.to_rows = nn.Linear(16, 96)

    def forward(self, x, y, c):
        shift, scale, gate = self.to_rows(c).unsqueeze(1).chunk(3, -1)
        x = x + gate * y
        return nn.functional.layer_norm(x, (32,)) * (1 + scale) + shift, nn.functional.rms_norm(x + 1, (32,)) * scale, x


@pytest.mark.parametrize("dynamic", [False, True])
def test_norms_with_what_stands_around_them(dynamic, tmp_path, seed):
    torch.manual_seed(seed)
    model = Modulated().eval().requires_grad_(False)
    batch, length = torch.export.Dim("batch", min=2, max=64), torch.export.Dim("length", min=2, max=512)
    shapes = {"x": {0: batch, 1: length}, "y": {0: batch, 1: length}, "c": {0: batch}} if dynamic else None
    package, report = packaged(
        model, (torch.randn(3, 5, 32), torch.randn(3, 5, 32), torch.randn(3, 16)), tmp_path, shapes
    )
    assert [row.what.partition(" with ")[2] != "" for row in report.replaced("norm")] == [True] * 2, str(report)
    sizes = [(3, 5), (2, 9), (7, 2)] if dynamic else [(3, 5)]
    inputs = [(torch.randn(b, n, 32), torch.randn(b, n, 32), torch.randn(b, 16)) for b, n in sizes]
    wide = Modulated().double()
    wide.load_state_dict(model.state_dict())
    for found, given in zip(run_elsewhere(package, inputs, tmp_path), inputs, strict=True):
        for got, wanted in zip(found, wide(*(t.double() for t in given)), strict=True):
            torch.testing.assert_close(got.double(), wanted, rtol=1e-4, atol=1e-4)


class Decode(nn.Module):
    """The last queries over a cache of any length: where they stand is known at run time only."""

    def forward(self, q, k, v):
        return torch_tile.ops.attention(q, k, v, causal=True, q_offset=k.shape[2] - q.shape[2])


def test_decoding_over_a_cache_of_any_length(tmp_path, seed):
    torch.manual_seed(seed)
    make = lambda queries, keys: (torch.randn(2, 4, queries, 16), *torch.randn(2, 2, 2, keys, 16))  # noqa: E731
    keys = torch.export.Dim("keys", min=4, max=4096)
    shapes = {"q": None, "k": {2: keys}, "v": {2: keys}}
    path, report = packaged(Decode(), make(3, 50), tmp_path, shapes)
    assert len(report.replaced()) == 1, str(report)
    inputs = [make(3, n) for n in (50, 4, 333)]
    for args, got in zip(inputs, run_elsewhere(path, inputs, tmp_path), strict=True):
        torch.testing.assert_close(got, Decode()(*args), rtol=1e-4, atol=1e-5)
