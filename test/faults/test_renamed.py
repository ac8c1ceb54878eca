# SPDX-License-Identifier: Apache-2.0
"""The same kernel under other names for its variables, parameters, modules and macros means the same."""

from __future__ import annotations

import importlib.util

import pytest
import torch

import torch_tile
from torch_tile.ir.node import alike
from torch_tile.simulator.tile.interpreter import evaluate

# Names in capitals are the author's to choose.
TEXT = """{future}
import torch_tile.language as LANG
from torch_tile.language import Ref as REFERENCE, macro as INLINED
from builtins import range as COUNT

@INLINED
def MACRO(ARRAY, LENGTH, RESULT: REFERENCE, FACTOR):
    for TURN in COUNT(LENGTH):
        RESULT += ARRAY[TURN] * FACTOR
    FACTOR = FACTOR + 1.0
    return FACTOR

def kernel_of(SIZE):
    @LANG.prim_func
    def KERNEL(INPUT: LANG.Tensor((SIZE, 32), "float32"), NUMBER: LANG.int32, OUTPUT: LANG.Tensor((SIZE,), "float32")):
        with LANG.Kernel(SIZE, threads=32) as BLOCK:
            TILE = LANG.alloc_fragment((32,), "float32")
            LANG.copy(INPUT[BLOCK, 0], TILE)
            ROW = LANG.alloc_local((32,), "float32")
            for INDEX in COUNT(32):
                ROW[INDEX] = INPUT[BLOCK, INDEX]
            TOTAL = LANG.alloc_var("float32")
            WEIGHT = 2.0
            if NUMBER > 3:
                WEIGHT = 0.5
            NEXT = MACRO(ROW, NUMBER, TOTAL, WEIGHT)
            LIMIT = LANG.alloc_var("int32", 0)
            while LIMIT < NUMBER:
                LIMIT += 2
                if LIMIT > 20:
                    break
            OUTPUT[BLOCK] = TOTAL + NEXT + LIMIT
    return KERNEL
"""
AUTHORS = """
    LANG REFERENCE INLINED COUNT MACRO ARRAY LENGTH RESULT TURN FACTOR SIZE KERNEL INPUT NUMBER OUTPUT BLOCK TILE ROW
    INDEX TOTAL WEIGHT NEXT LIMIT
"""
# What generated texts, launchers, the recorder or Python itself use, or what looks like something else.
NASTY = """
    range T tile thread threads blockIdx threadIdx out args kwargs self stream self_ ctx launch torch tensor ptr n m
    k i j left turns
    previous total name None_ int_ float_ half int8 float32 copy gemm max min len print list x_0 p b smem
    buffer shape strides data grid kernel main errno register double auto result now unbound loop bind condition then
    end_loop finished device shared bx by bz var value exp Ref macro prim_func serial branches _ _tile tile_ tile_1 size
    flag warp lane partial results partials answer bound turn
"""


def module_of(path, names, future):
    text = TEXT.replace("{future}", "from __future__ import annotations\n" if future else "")
    for number, name in enumerate(AUTHORS.split()):
        text = text.replace(name, f"@{number}@")
    for number, name in enumerate(names):
        text = text.replace(f"@{number}@", name)
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made.kernel_of(4)


def wanted(x, number):
    weight = 0.5 if number > 3 else 2.0
    limit = 0
    while limit < number and limit <= 20:
        limit += 2
    return x[:, :number].sum(1) * weight + weight + 1 + limit


@pytest.mark.parametrize("future", [False, True])
@pytest.mark.parametrize("case", range(6))
def test_any_names(tmp_path, case, future):
    plain = module_of(tmp_path / "plain.py", [f"{name.lower()}_of_mine" for name in AUTHORS.split()], future)
    nasty = NASTY.split()
    start = case * len(nasty) // 6
    names = (nasty[start:] + nasty[:start])[: len(AUTHORS.split())]
    other = module_of(tmp_path / "other.py", names, future)
    assert alike(plain.program.kernels[0], other.program.kernels[0])
    for number in (2, 5, 31):
        x = torch.randint(-9, 9, (4, 32)).float()
        for run in (evaluate, lambda kernel, *args: torch_tile.compile(kernel, target="cpu")(*args)):
            y = torch.zeros(4)
            run(other, x, number, y)
            assert torch.equal(y, wanted(x, number))
    for target in ("cuda:sm_80", "cuda:sm_90a"):
        y = torch.zeros(4)
        assert not torch_tile.compile(other, target=target).interpret(x, number, y)
        assert torch.equal(y, wanted(x, number))


def test_what_is_called_range_need_not_be_pythons(tmp_path):
    """An author's own function of that name is called."""
    path = tmp_path / "own.py"
    path.write_text("""
import torch_tile.language as T

def range(n):
    return [n, n + 1]

@T.prim_func
def kernel(A: T.Tensor((8,), "float32")):
    with T.Kernel(1) as _:
        for i in range(2):
            A[i] = 1.0
""")
    spec = importlib.util.spec_from_file_location("own", path)
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    a = torch.zeros(8)
    evaluate(made.kernel, a)
    assert a.tolist() == [0, 0, 1, 1, 0, 0, 0, 0]
