# SPDX-License-Identifier: Apache-2.0
"""Recorded calls as C++: it makes the launches that the call itself makes. The GPU's driver is a stand-in."""

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest
import sympy
import torch
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils._sympy.functions import FloorDiv, Mod

from torch_tile.hardware import Target
from torch_tile.inductor.codegen.cpp_text import embedded, headers, printed
from torch_tile.inductor.codegen.symbolic_launch import Form, NotEmbedded, Symbols, record
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


def form_of(x: torch.Tensor) -> Form:
    return Form(x.dtype, x.device, x.shape, x.stride())


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
    recorded = record(lambda given: run(*given), [form_of(t) for t in tensors], Symbols(None))
    made = embedded(recorded)
    (entry,) = recorded.calls[0].launcher.source.entries
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
    (entry,) = recorded.calls[0].launcher.source.entries
    library = built(exported(made), tmp_path)
    for size in sizes:
        run, tensors = case(size)
        compare(library, run, tensors, workspaces(made, {symbol: size}), entry, hopper, [size])


def in_symbols(x: torch.Tensor, size: int, symbol: sympy.Symbol) -> Form:
    """The form of a contiguous tensor, `symbol` standing for the one dimension of `size`."""
    shape = [symbol if n == size else n for n in x.shape]
    strides = [sympy.prod(shape[d + 1 :]) for d in range(len(shape))]
    return Form(x.dtype, x.device, shape, strides)


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
    made = embedded(record(lambda given: run(*given), [form_of(t) for t in (x, w, out)], Symbols(None)))
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
