# SPDX-License-Identifier: Apache-2.0
"""Packages of AOTInductor and C++ wrappers contain our kernels: they run where torch_tile cannot be imported."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest
import sympy
import torch
from torch import nn
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils._sympy.functions import FloorDiv, Mod

import torch_tile
from torch_tile.hardware import Target
from torch_tile.inductor.codegen.cpp_wrapper import embedded, headers, printed
from torch_tile.inductor.codegen.symbolic_launch import NotEmbedded, Symbols, TensorMeta, record
from torch_tile.inductor.report.rows import collect
from torch_tile.kernels import split_k
from torch_tile.kernels.attention import forward as attention
from torch_tile.kernels.common import Machine
from torch_tile.kernels.gemm import gemm
from torch_tile.kernels.mla import decode as mla_decode
from torch_tile.kernels.norm import norm, softmax
from torch_tile.ops import launchers
from torch_tile.runtime.host_compiler import find_compiler

sys.path.insert(0, str(Path(__file__).parents[2] / "runtime"))
from fake_cuda import CONTEXT, FakeCuda, count_as_gpu, fake_library, install

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


HALF = torch.float16


@pytest.fixture
def hopper(monkeypatch) -> FakeCuda:
    """Tensors of the CPU count as those of an H200, whose driver writes down what it is asked for."""
    machine = Machine(Target("cuda", 90), 132)
    for module in (attention, split_k, gemm, mla_decode, norm, softmax):
        monkeypatch.setattr(module, "machine_of", lambda x: machine, raising=False)
    fake = install(monkeypatch)
    count_as_gpu(monkeypatch)
    return fake


def meta_of(x: torch.Tensor) -> TensorMeta:
    return TensorMeta(x.dtype, x.device, x.shape, x.stride())


def built(text: str, folder: Path) -> ctypes.CDLL:
    """A library of generated functions, which takes the stand-in for the driver."""
    source, library = folder / "wrapper.cpp", folder / "wrapper.so"
    source.write_text(f'#define TILE_LIBCUDA "{fake_library().library._name}"\n{headers()}\n{text}')
    command = [*find_compiler().command, "-std=c++17", "-O1", "-shared", "-fPIC", "-Wall", "-Werror"]
    unused = ["-Wno-unused-function", "-Wno-unused-variable"]
    done = subprocess.run([*command, *unused, str(source), "-o", str(library), "-ldl"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[:3000]
    return ctypes.CDLL(str(library))


def exported(made, name="run") -> str:
    """The text of a function that Python can call; what it throws is its result."""
    return (
        "\n".join(made.code.values()) + made.function(f"{name}_") + "\n"
        f'extern "C" const char* {name}(const uint64_t* pointers, const int64_t* numbers) {{\n'
        "  static std::string what;\n"
        f"  try {{ {name}_(pointers, numbers, nullptr); return nullptr; }}\n"
        "  catch (const std::exception& problem) { what = problem.what(); return what.c_str(); }\n}\n"
    )


def call(library, tensors, numbers=(), name="run") -> str:
    function = library[name]
    function.restype = ctypes.c_char_p
    pointers = (ctypes.c_uint64 * len(tensors))(*(t if isinstance(t, int) else t.data_ptr() for t in tensors))
    what = function(pointers, (ctypes.c_int64 * max(1, len(numbers)))(*numbers))
    return (what or b"").decode()


def workspaces(made, sizes=None) -> list[torch.Tensor]:
    known = lambda each: [int(n.subs(sizes)) if isinstance(n, sympy.Expr) else n for n in each]  # noqa: E731
    return [torch.empty_strided(known(w.size), known(w.stride), dtype=w.dtype) for w in made.workspaces]


def shown(launches, slots):
    """What a stand-in was asked for, but for handles."""
    return [
        (list(r.grid), list(r.block), r.shared, list(r.cluster), r.early, list(r.slots[:slots]),
         [(m.address, list(m.sizes), list(m.strides), list(m.boxes), m.swizzle, m.promotion) for m in r.maps])
        for r in launches
    ]  # fmt: skip


def a_gemm(rows=512):
    a, b, bias = torch.randn(rows, 128, dtype=HALF), torch.randn(384, 128, dtype=HALF), torch.randn(384, dtype=HALF)
    run = lambda a, b, bias, out: launchers.gemm(a, [b.mT], [bias], "r", "v0=add(acc0,x0);ret v0", HALF, out=out)  # noqa: E731
    return run, [a, b, bias, torch.empty(rows, 384, dtype=HALF)]


def a_norm(rows=33):
    x = torch.randn(rows, 256, dtype=HALF)
    return lambda x, w, out: launchers.rms_norm(x, w, 1e-5, out=out), [
        x,
        torch.randn(256, dtype=HALF),
        torch.empty_like(x),
    ]


def an_attention(length=256):
    q, k, v = (torch.randn(1, 4, length, 64, dtype=HALF) for _ in range(3))
    run = lambda q, k, v, out: launchers.attention(q, k, v, None, True, out=out)  # noqa: E731
    return run, [q, k, v, torch.empty_like(q)]


def a_softmax():
    x = torch.randn(40, 72)
    return lambda x, out: launchers.softmax(x[:, 8:], out=out), [x, torch.empty(40, 64)]


@pytest.mark.parametrize("case", [a_gemm, a_norm, an_attention, a_softmax])
def test_launches_are_those_of_the_call(case, hopper, tmp_path):
    run, tensors = case()
    recorded = record(lambda given: run(*given), [meta_of(t) for t in tensors], Symbols(None))
    made = embedded(recorded)
    (entry,) = recorded.plan.launches[0].kernel.launcher.source.entries
    library, extra = built(exported(made), tmp_path), workspaces(made)
    for _ in range(2):
        compare(library, run, tensors, extra, entry, hopper)
    hopper.library.cuCtxSetCurrent(ctypes.c_uint64(CONTEXT))
    if any(kind == "M" for kind in entry.kinds):
        assert "begin at multiples of 16 bytes" in call(library, [tensors[0].data_ptr() + 2, *tensors[1:], *extra])
    hopper.number("refuse").value = 700
    assert "CUDA_ERROR_FAKE (700)" in call(library, [*tensors, *extra])
    hopper.library.cuCtxSetCurrent(ctypes.c_uint64(0))
    assert "no CUDA context is current" in call(library, [*tensors, *extra])


@pytest.mark.parametrize(("case", "sizes"), [(a_gemm, (512, 640)), (a_norm, (33, 1, 700)), (an_attention, (256, 200))])
def test_sizes_may_come_with_the_call(case, sizes, hopper, tmp_path):
    """The first size is the typical one; the others are served by the same kernel."""
    env = ShapeEnv()
    symbol = env.create_symbol(sizes[0], ConstantSource("n"), dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None)
    run, tensors = case(sizes[0])
    recorded = record(lambda given: run(*given), [in_symbols(t, sizes[0], symbol) for t in tensors], Symbols(env))
    made = embedded(recorded)
    (entry,) = recorded.plan.launches[0].kernel.launcher.source.entries
    library = built(exported(made), tmp_path)
    for size in sizes:
        run, tensors = case(size)
        compare(library, run, tensors, workspaces(made, {symbol: size}), entry, hopper, [size])


def in_symbols(x: torch.Tensor, size: int, symbol: sympy.Symbol) -> TensorMeta:
    """The form of a contiguous tensor, `symbol` standing for the one dimension of `size`."""
    shape = [symbol if n == size else n for n in x.shape]
    strides = [sympy.prod(shape[d + 1 :]) for d in range(len(shape))]
    return TensorMeta(x.dtype, x.device, shape, strides)


def compare(library, run, tensors, extra, entry, hopper, numbers=()):
    """Check that a library asks the driver for what the call itself does."""
    hopper.number("slots").value = len(entry.kinds)
    hopper.number("map_slots").value = sum(1 << n for n, kind in enumerate(entry.kinds) if kind == "M")
    hopper.launches()
    run(*tensors)
    wanted = shown(hopper.launches(), len(entry.kinds))
    hopper.library.cuCtxSetCurrent(ctypes.c_uint64(CONTEXT))
    assert call(library, [*tensors, *extra], numbers) == ""
    found = shown(hopper.launches(), len(entry.kinds))
    known = {t.data_ptr() for t in tensors}
    for (*_, slots, _), (*_, slots_wanted, _) in zip(found, wanted, strict=True):
        for n, want in enumerate(slots_wanted):
            if entry.kinds[n] == "P" and want not in known and slots[n] in {t.data_ptr() for t in extra}:
                slots[n] = want
    assert found == wanted
    hopper.library.cuCtxSetCurrent(ctypes.c_uint64(0))


def test_a_library_is_part_of_the_text(tmp_path, seed, monkeypatch):
    (tmp_path / "files").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "files"))
    torch.manual_seed(seed)
    x, w = torch.randn(7, 33), torch.randn(19, 33)
    out = torch.empty(7, 19)
    run = lambda x, w, out: launchers.gemm(x, [w.mT], [], "", "v0=relu(acc0);ret v0", torch.float32, out=out)  # noqa: E731
    made = embedded(record(lambda given: run(*given), [meta_of(t) for t in (x, w, out)], Symbols(None)))
    assert call(built(exported(made), tmp_path), [x, w, out, *workspaces(made)]) == ""
    torch.testing.assert_close(out.double(), (x.double() @ w.double().T).relu(), rtol=1e-4, atol=1e-5)
    assert list((tmp_path / "files").iterdir()) == []  # it was opened from one that is gone


def test_expressions(seed):
    s, t = sympy.symbols("s t", integer=True, positive=True)
    name = {s: "s", t: "t"}.__getitem__
    assert printed(FloorDiv(s + 127, 128) * 3, name) == "(3ll * tile::floor_div((127ll + s), 128ll))"
    assert printed(sympy.And(sympy.Eq(Mod(s, 8), 0), s**2 > t), name).count("s * s") == 1
    assert printed(sympy.Max(s, t, 4), name).count("tile::most") == 2
    with pytest.raises(NotEmbedded, match="no form in C"):
        printed(sympy.sin(s), name)
