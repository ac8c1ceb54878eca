# SPDX-License-Identifier: Apache-2.0
"""Names and paths of the author's in generated text: no macro, no keyword, no end of a comment."""

import importlib.util
import re
import subprocess

import pytest
import torch

import torch_tile
from torch_tile.codegen.c_text import Names, comment
from torch_tile.codegen.cpu import HEADERS
from torch_tile.hardware import Target
from torch_tile.ir import dtype as dt
from torch_tile.ir.expr import Var
from torch_tile.runtime.host_compiler import compile_shared, csrc_dir, find_compiler
from torch_tile.runtime.nvrtc import compile_cubin

KEYWORDS = """
    alignas and asm auto bool char8_t class co_await concept const_cast constinit default do double else enum export
    float for goto if int long namespace new not nullptr operator register requires short signed sizeof static
    template this typename union unsigned using virtual void volatile wchar_t xor_eq restrict typeof final
    __global__ __shared__ __device__ __restrict__ __launch_bounds__ __syncthreads warpSize dim3 half float4 uint3
    errno stdin NULL EOF printf linux unix i386 size_t int64_t uint8_t tile memcpy main
"""
FOREIGN = ["größe", "größe_", "é", "Ω", "__x", "_X", "变量", "ſ", "x_", "ª"]
AUTHORS = ["INT64_MIN", "RAND_MAX", "TILE_DEVICE", "alloca", "double", "register", "größe", "_GNU_SOURCE", "INFINITY"]


def macros():
    """All that the headers of a CPU text define, and those of csrc/ for GPUs."""
    text = "#include <stdio.h>\n#include <stdlib.h>\n" + "".join(f'#include "{h}"\n' for h in HEADERS)
    compiler = find_compiler()
    command = [*compiler.command, *compiler.flags, f"-I{csrc_dir()}", "-dM", "-E", "-x", "c++", "-"]
    made = subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout
    ours = "".join(path.read_text() for path in csrc_dir().glob("*.h"))
    return sorted(set(re.findall(r"^ *# *define +(\w+)", made + ours, re.MULTILINE)))


def declarations(names):
    """A function with a variable of each name, and whether all names differ."""
    unique = Names()
    found = [unique.of(Var(name, dt.int32, "let")) for name in names]
    assert len(set(found)) == len(names)
    return "void f() {\n" + "".join(f"  {{ int {name} = 1; (void){name}; }}\n" for name in found) + "}\n"


def test_no_name_is_a_macro_or_keyword_of_a_cpu_text():
    known = macros()
    assert len(known) > 400 and "INT64_MIN" in known and "RAND_MAX" in known
    includes = "#include <stdio.h>\n#include <stdlib.h>\n" + "".join(f'#include "{h}"\n' for h in HEADERS)
    compile_shared(includes + declarations([*known, *KEYWORDS.split(), *FOREIGN]))
    unique = Names()
    assert not {unique.of(Var(name, dt.int32, "let")) for name in known} & set(known)


def test_no_name_is_a_macro_or_keyword_of_a_cuda_text():
    headers = [path.name for path in csrc_dir().glob("*.h") if not re.match("cpu_|launch|embedded", path.name)]
    includes = "".join(f'#include "{name}"\n' for name in ["cuda_types.h", "cuda_math.h", *sorted(headers)])
    text = includes + "__global__ " + declarations([*macros(), *KEYWORDS.split(), *FOREIGN])
    assert compile_cubin(text, Target.of("cuda:sm_90a")).data


def module_of(path, text):
    path.write_text(text)
    spec = importlib.util.spec_from_file_location("kernels_of_a_test", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


KERNEL = """
import torch_tile.language as T

@T.prim_func
def {name}({name}: T.Tensor((32,), "float32"), out: T.Tensor((32,), "float32"), n: T.int32):
    with T.Kernel(1, threads=32) as _:
        for i in T.Parallel(32):
            out[i] = {name}[i] + n
"""


@pytest.mark.parametrize("name", AUTHORS)
def test_kernels_with_such_names(name, tmp_path):
    kernel = getattr(module_of(tmp_path / "kernels.py", KERNEL.format(name=name)), name)
    x, out = torch.randn(32), torch.empty(32)
    torch_tile.compile(kernel, target="cpu")(x, out, 3)
    assert torch.equal(out, x + 3)
    compiled = torch_tile.compile(kernel, target="cuda:sm_80")
    assert compiled.cubin and compiled.launcher.source.entries[0].name.isascii()


@pytest.mark.parametrize("name", ["a\n#error of the path.py", "b\\\nc.py", "\N{LINE SEPARATOR}\r#error.py", "*/ü.py"])
def test_paths_end_no_comment(name, tmp_path):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    kernel = module_of(tmp_path / name, KERNEL.format(name="x")).x
    x, out = torch.randn(32), torch.empty(32)
    torch_tile.compile(kernel, target="cpu")(x, out, 3)
    assert torch.equal(out, x + 3)
    assert torch_tile.compile(kernel, target="cuda:sm_80").cubin


def test_comments():
    assert comment("größe.py:3") == "größe.py:3"
    assert comment("a\nb\\\r\u2028\udc80") == r"a\nb\\\r\u2028\udc80"
