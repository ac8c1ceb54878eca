# SPDX-License-Identifier: Apache-2.0
"""GPU kernels take operands wherever they begin: compiled here, their launches checked as a GPU's would be."""

import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from shared_kernels import modules_of_kernels

from torch_tile.hardware import Target
from torch_tile.ir.buffer import Buffer
from torch_tile.jit import JITFunction
from torch_tile.kernels.attention.forward import attention
from torch_tile.kernels.common import Machine, entry_function, vector_of, view_as
from torch_tile.kernels.gemm.dequant import dequant_gemm
from torch_tile.kernels.gemm.gemm import gemm
from torch_tile.kernels.mla.decode import mla_decode
from torch_tile.kernels.norm.norm import add_rms_norm, layer_norm
from torch_tile.kernels.norm.softmax import softmax

GPU = Machine(Target("cuda", 90), 132)


@pytest.mark.slow
def test_no_module_computes_tensors_where_it_is_imported():
    """An operator's first call may be traced, and imports its kernels: a trace would hold their tables."""
    text = """
import importlib, sys
from torch.utils._python_dispatch import TorchDispatchMode

import torch_tile
from shared_kernels import modules_of_kernels

class Refuse(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func} while a module is imported")

before = set(sys.modules)
with Refuse():
    found = modules_of_kernels()
assert len(set(sys.modules) - before) >= 20 and len(found) > 20
"""
    subprocess.run([sys.executable, "-c", text], check=True, cwd=Path(__file__).parents[1])


@pytest.fixture
def launches(monkeypatch):
    """Kernels are compiled for a GPU, and only the checks of their launches run; counts launches."""
    for module in modules_of_kernels():
        monkeypatch.setattr(module, "machine_of", lambda x: GPU)
    compile, done = JITFunction.compile, []

    def checked(self, *args, **kwargs):
        launcher = compile(self, *args, **kwargs).launcher

        def launch(*operands):
            launcher.whole.sizes_of(operands, "cpu")
            for param, operand in zip(launcher.everything, operands, strict=True):
                if isinstance(param, Buffer):
                    launcher.address(param, operand)
            done.append(self.__name__)

        return launch

    monkeypatch.setattr(JITFunction, "compile", checked)
    return done


def tensors(dtype):
    """Operands of each family by name, with sizes that take wide accesses where they may."""

    def x(*shape, dtype=dtype):
        return torch.randn(shape).to(dtype)

    lens, table = torch.tensor([100, 128], dtype=torch.int32), torch.arange(4, dtype=torch.int32).reshape(2, 2)
    keep, added = torch.ones(1, 1, 64, 96, dtype=torch.bool), x(1, 1, 64, 96)
    full, row, column, scalar = x(2, 32, 64), x(64), x(2, 32, 1), x(1)
    heads = {"q": x(1, 2, 64, 64), "k": x(1, 2, 96, 64), "v": x(1, 2, 96, 64)}
    queries = {"q": x(2, 1, 16, 64), "q_pe": x(2, 1, 16, 16)}
    text = "a=mul(acc0,x0);b=add(a,x1);c=sub(b,x2);d=div(c,x3);ret d"
    return {
        "gemm": (
            lambda a, b, t, r, c, s: gemm(a, [b], [t, r, c, s], "trcs", text, dtype),
            {"a": x(2, 32, 48), "b": x(2, 48, 64), "t": full, "r": row, "c": column, "s": scalar},
        ),
        "gemm of long k": (
            lambda a, b, r: gemm(a, [b], [r], "r", "v=add(acc0,x0);ret v", dtype),
            {"a": x(32, 4096), "b": x(64, 4096).mT, "r": x(64, dtype=torch.float32)},
        ),
        "one row": (
            lambda a, b, r: gemm(a, [b], [r], "r", "v=add(acc0,x0);ret v", dtype),
            {"a": x(1, 256), "b": x(64, 256).mT, "r": x(64)},
        ),
        "weights of few bits": (
            lambda a, b, s, z, r: dequant_gemm(a, [b], [s], [z], 4, False, 0, [r], "r", "v=add(acc0,x0);ret v", dtype),
            {"a": x(5, 256), "b": x(64, 128).to(torch.uint8), "s": x(64, 2), "z": x(64, 2), "r": x(64)},
        ),
        "attention": (attention, heads),
        "attention, bool mask": (attention, {**heads, "mask": keep}),
        "attention, mask": (attention, {**heads, "mask": added}),
        "mla": (mla_decode, {**queries, "kv": x(2, 128, 64), "k_pe": x(2, 128, 16)}),
        "mla, pages": (
            mla_decode,
            {**queries, "kv": x(4, 64, 64), "k_pe": x(4, 64, 16), "block_table": table, "seq_lens": lens},
        ),
        "add_rms_norm": (add_rms_norm, {"x": x(5, 256), "residual": x(5, 256), "weight": x(256)}),
        "layer_norm": (layer_norm, {"x": x(5, 256), "weight": x(256), "bias": x(256, dtype=torch.float32)}),
        "softmax": (lambda x: softmax(x, -1, torch.float32), {"x": x(3, 5, 256)}),
    }


def elsewhere(x, by):
    """A copy that begins `by` elements after a multiple of 64 bytes, with the same strides."""
    memory = torch.zeros(x.numel() + by + 64 // x.element_size(), dtype=x.dtype)
    first = -memory.data_ptr() % 64 // x.element_size()
    return memory[first + by :].as_strided(x.shape, x.stride()).copy_(x)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("case", tensors(torch.float32))
def test_operands_begin_anywhere(case, dtype, launches):
    function, operands = tensors(dtype)[case]
    for number, moved in enumerate((None, *operands)):
        by = 1 + (number + (dtype == torch.float32)) % 2  # elements
        before = len(launches)
        function(**{name: elsewhere(x, by if name == moved else 0) for name, x in operands.items()})
        assert len(launches) > before


@pytest.mark.parametrize("shape", [(1, 32), (1, 3, 32), (3, 1, 32), (1, 1, 32), (0, 32), (3, 0, 32), (3, 32)])
def test_view_as_ignores_strides_of_single_elements(shape):
    steps = [*torch.empty(shape).stride()]
    for d, size in enumerate(shape[:-1]):
        x = torch.arange(4096, dtype=torch.uint8).as_strided(
            shape, [*steps[:d], 17 if size <= 1 else 32, *steps[d + 1 :]]
        )
        for dtype in (torch.uint8, torch.int32, torch.float16):
            torch.testing.assert_close(
                view_as(x, dtype),
                torch.empty(shape, dtype=x.dtype).copy_(x).view(dtype),
                rtol=0,
                atol=0,
                equal_nan=True,
            )
    for shape in ((1,), (3, 1), (1, 1), (2, 3, 1)):
        steps = [*torch.empty(shape).stride()]
        x = torch.randn(64).as_strided(shape, [*steps[:-1], 20])
        assert torch.equal(view_as(x, torch.uint8), torch.empty(shape).copy_(x).view(torch.uint8))
    x = torch.arange(4096, dtype=torch.uint8).as_strided((3, 32), (33, 1))
    with pytest.raises(RuntimeError, match="stride"):
        view_as(x, torch.int32)


def test_vector_of():
    x = elsewhere(torch.randn(4, 16), 0)
    assert vector_of((x,), (16,)) == 4 and vector_of((x, x.half()), (16,)) == 8
    assert vector_of((x,), (18,)) == vector_of((x[:, 1:],), ()) == vector_of((x[:, :15].contiguous(),), ()) == 1
    one = x[:1].as_strided((1, 16), (17, 1))
    assert vector_of((one,), ()) == vector_of((x, one), (16,)) == 4
    assert vector_of((one[:, 1:],), ()) == vector_of((one[:, :15],), (15,)) == 1


class Halves(NamedTuple):
    x: torch.Tensor
    scale: float = 1.0


def halves(x, scale=1.0):
    """What `split` below computes, but for the marks that it leaves."""
    return x[::2] * scale, x[1::2] * scale


@entry_function(Halves, halves, lambda args: (args.x.new_empty(len(args.x) // 2), args.x.new_empty(len(args.x) // 2)))
def split(args: Halves, even: torch.Tensor, odd: torch.Tensor | None, mark: float = 0.0) -> bool:
    if args.scale < 0:
        return False
    even.copy_(args.x[::2] * args.scale + mark)
    if odd is not None:
        odd.copy_(args.x[1::2] * args.scale + mark)
    return True


@pytest.mark.parametrize("scale", [2.0, -2.0])
def test_entry_functions_fill_results_or_ask_the_reference(scale):
    x, mark = torch.rand(8), 5.0
    want = [half + (mark if scale > 0 else 0.0) for half in halves(x, scale)]
    assert all(map(torch.equal, split(x, scale, mark=mark), want))
    even, odd = torch.zeros(4), torch.zeros(4)
    got = split(x, scale=scale, mark=mark, even=even, odd=odd)
    assert got[0] is even and got[1] is odd and all(map(torch.equal, got, want))
    first, none = split(x, scale, mark=mark, odd=None)
    assert none is None and torch.equal(first, want[0])
    assert split(torch.rand(8, device="meta"), scale)[1].shape == (4,)
