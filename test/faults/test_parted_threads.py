# SPDX-License-Identifier: Apache-2.0
"""Operations of all threads where only some come by: each is done whole, or is an error at its line.

A copy in one warp's branch stored a part, or nothing; loops that threads leave at different times were not looked at.
"""

import os
import random
import textwrap

import pytest
import torch

import torch_tile.language as T
from torch_tile.compiler.context import Build
from torch_tile.diagnostics.errors import InternalError, TileError
from torch_tile.hardware import Target
from torch_tile.lowering import cuda_passes, lower
from torch_tile.simulator.interpret import interpret

OPS = {
    "load": "T.copy(A, s)",
    "store": "T.copy(s, B)",
    "store of a fragment": "T.copy(f, B)",
    "load of a fragment": "T.copy(s, f)",
    "fill": "T.fill(s, 3.0)",
    "fill of a fragment": "T.fill(f, 3.0)",
    "gemm": "T.gemm(h, h, f)",
    "reduction": "T.reduce_sum(f, r, dim=1)",
    "reduction of shared": "T.reduce_max(s, r, dim=1)",
    "scan": "T.cumsum(s, dim=0)",
    "transpose": "T.transpose(s, u)",
    "nest": "for i, j in T.Parallel(32, 32):\n    s[i, j] = i * 32 + j",
    "nest over memory": "for i, j in T.Parallel(32, 32):\n    B[i, j] = i * 32 + j",
    "atomics": "T.atomic_add(B, s)",
    "bulk store": "T.tma_copy(s, B)",
    "bulk sum": "T.tma_copy(s, B, combine='add')",
    "own fragment": "q = T.alloc_fragment((32, 32), 'float32')\nT.fill(q, 1.0)\nT.copy(q, B)",
    "element": "f[0, 0] = 3.0",
}
FORMS = {
    "first warp": "if tx < 32:\n    {op}",
    "second warp": "if T.get_warp_idx() == 1:\n    {op}",
    "last warps": "if tx < 64:\n    n = n + 1\nelse:\n    {op}",
    "lane": "if tx == 5:\n    {op}",
    "elected": "if T.shuffle_elect(32):\n    {op}",
    "elected of a warp": "if T.get_warp_idx() == 2 and T.shuffle_elect(32):\n    {op}",
    "lanes": "if T.get_lane_idx() < 4:\n    {op}",
    "odd threads": "if tx % 2 == 1:\n    if tx % 4 == 1:\n        {op}",
    "name": "w = tx // 32\nif w == 3:\n    {op}",
    "variable": "n = tx // 64\nif n > 0:\n    {op}",
    "variable of a branch": "if tx < 32:\n    n = 1\nif n > 0:\n    {op}",
    "variable made of memory": "v = T.alloc_var('float32', A[0, tx % 32])\nif v > 0:\n    {op}",
    "array": "o = T.alloc_local((2,), 'int32')\no[1] = tx\nif o[1] > 5:\n    {op}",
    "old value": "v = T.alloc_var('float32')\nv = T.atomic_add(C[0], tx, return_prev=True)\nif v > 40:\n    {op}",
    "break": "for k in T.serial(3):\n    if tx < 32:\n        break\n    {op}",
    "continue": "for k in T.serial(3):\n    if tx < 32:\n        continue\n    {op}",
    "break behind": "for k in T.serial(3):\n    {op}\n    if tx < 32:\n        break",
    "break of a while": "while n < 3:\n    n = n + 1\n    if tx < 32:\n        break\n    {op}",
    "else of a loop": "for k in T.serial(3):\n    if tx < 32:\n        break\nelse:\n    {op}",
    "turns": "for k in T.serial(tx):\n    {op}",
    "turns of a while": "while n < tx:\n    n = n + 1\n    {op}",
    "return": "if tx < 32:\n    T.thread_return()\n{op}",
}
TOGETHER = {
    "all": "if tx < 128:\n    {op}",
    "data": "if A[0, 0] > -100.0:\n    {op}",
    "loop inside": "for k in T.serial(1):\n    for m in T.serial(2):\n        if tx < 32:\n            break\n    {op}",
    "break of all": "for k in T.serial(3):\n    if k == 1:\n        break\n    {op}",
}
HEAD = """
@T.prim_func
def kernel(A: T.Tensor((32, 32), "float32"), B: T.Tensor((32, 32), "float32"), C: T.Tensor((1,), "float32"),
           S: T.Tensor((2, 32, 32), "float32"), F: T.Tensor((32, 32), "float32"), R: T.Tensor((32,), "float32")):
    with T.Kernel(1, threads=128):
        tx = T.get_thread_binding()
        n = T.alloc_var("int32", 0)
        s, u = T.alloc_shared((32, 32), "float32"), T.alloc_shared((32, 32), "float32")
        h = T.alloc_shared((32, 32), "float16")
        f, r = T.alloc_fragment((32, 32), "float32"), T.alloc_fragment((32,), "float32")
        T.copy(A, s)
        T.copy(A, u)
        T.copy(A, h)
        T.copy(A, f)
        T.fill(r, 1.0)
"""
TAIL = """
T.sync_threads()
T.copy(s, S[0])
T.copy(u, S[1])
T.copy(f, F)
T.copy(r, R)
"""
REFUSED = {"parted_threads", "bulk_copy", "foreign_element", "mixed_roles", "divergent_hazard"}


def done(op, form, arch, folder):
    """What memory holds behind an operation in a form, or the error."""
    lines = []
    for line in form.split("\n"):
        inner = textwrap.indent(OPS[op], line[: len(line) - len(line.lstrip())])
        lines.append(inner if line.strip() == "{op}" else line)
    text = HEAD + textwrap.indent("\n".join(lines) + TAIL, " " * 8)
    path = folder / "kernel.py"
    path.write_text(text)
    space = {"T": T}
    a = torch.arange(1024.0).reshape(32, 32) % 7 - 3
    args = [a, *(torch.zeros(n) for n in ((32, 32), 1, (2, 32, 32), (32, 32), 32))]
    try:
        exec(compile(text, str(path), "exec"), space)
        kernel = space["kernel"].program
        flat = lower(kernel, cuda_passes(Build(Target.of(arch))))
    except TileError as error:
        assert not isinstance(error, InternalError)
        return error
    findings = interpret(flat, kernel, args)
    assert not findings, f"{op}: {findings.report()}"
    return [args[1], *args[3:]]


ALL = os.environ.get("TORCH_TILE_ALL_WAYS") == "1"


def drawn(seed, count):
    """Operations and a target by seed, or all operations."""
    draw = random.Random(seed)
    return list(OPS) if ALL else draw.sample(list(OPS), count), draw.choice(["cuda:sm_80", "cuda:sm_90a"])


@pytest.mark.parametrize("form", FORMS)
def test_what_only_some_threads_reach_is_whole_or_refused(form, tmp_path, seed):
    ops, arch = drawn(seed, 5)
    for op in ops:
        found = done(op, FORMS[form], arch, tmp_path)
        if isinstance(found, list):
            assert all(map(torch.equal, found, done(op, "{op}", arch, tmp_path))), op
            continue
        codes = {each.code for each in found.diagnostics}
        assert codes <= REFUSED, found
        if codes & {"parted_threads", "bulk_copy"}:  # the line of the operation
            assert any(line.strip().partition("(")[0] in str(found) for line in OPS[op].splitlines()), found


@pytest.mark.parametrize("form", ["break", "continue", "break behind", "array", "variable made of memory", "turns"])
def test_loops_and_values_that_part_threads_are_seen(form, tmp_path, seed):
    """Ops that no warp does alone are refused there, whatever the target."""
    ops, arch = drawn(seed, 5)
    for op in ops:
        assert not isinstance(done(op, FORMS[form], arch, tmp_path), list), op


@pytest.mark.parametrize("form", TOGETHER)
def test_what_all_threads_reach_is_done(form, tmp_path, seed):
    for op in drawn(seed, 4)[0]:
        found, wanted = done(op, TOGETHER[form], "cuda:sm_90a", tmp_path), done(op, "{op}", "cuda:sm_90a", tmp_path)
        assert isinstance(found, list), found
        assert all(map(torch.equal, found, wanted)), op


def test_a_bulk_copy_is_started_by_a_thread_that_comes(tmp_path):
    """Thread 0 may take another branch: nothing was stored, and nobody waited."""
    wanted = done("bulk store", "{op}", "cuda:sm_90a", tmp_path)
    for form in ("second warp", "last warps", "lane", "lanes", "odd threads", "name", "elected of a warp"):
        found = done("bulk store", FORMS[form], "cuda:sm_90a", tmp_path)
        assert isinstance(found, list) and torch.equal(found[0], wanted[0]), (form, found)
    named = FORMS["second warp"].replace("{op}", "T.tma_copy(s, B, by=3)")
    refused = done("bulk store", named, "cuda:sm_90a", tmp_path)
    assert "thread 3 does not come by" in str(refused)
    assert "tma_copy" in str(done("bulk store", FORMS["lane"], "cuda:sm_80", tmp_path))
