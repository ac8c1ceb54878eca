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
MEETINGS = {
    "barrier": "T.sync_threads()",
    "TIR's barrier": "T.tvm_storage_sync('shared')",
    "count": "got = T.syncthreads_count(tx > 3)",
    "cluster": "T.cluster_sync()",
    "cluster in two steps": "T.cluster_arrive()\nT.cluster_wait()",
    "warp": "T.sync_warp()",
    "lanes": "got = T.warp_reduce_max(tx)",
    "shuffle": "got = T.shfl_xor(tx, 1)",
    "vote": "got = T.any_sync(tx > 3)",
    "number": "T.sync_threads(1, 128)",
}
OF_WARPS = {"warp", "lanes", "shuffle", "vote"}  # of which each warp comes whole, or none of its lanes
BY_DATA = {"variable made of memory", "array", "old value", "turns of a while"}  # only the simulator sees which lanes
REFUSED = {"parted_threads", "bulk_copy", "foreign_element", "mixed_roles", "divergent_hazard"}


def done(op, form, arch, folder, blocks="1", tail=TAIL):
    """What memory holds behind an operation in a form, or the error."""
    lines = []
    for line in form.split("\n"):
        inner = textwrap.indent({**OPS, **MEETINGS}[op], line[: len(line) - len(line.lstrip())])
        lines.append(inner if line.strip() == "{op}" else line)
    head = HEAD.replace("T.Kernel(1,", f"T.Kernel({blocks},")
    text = head + textwrap.indent("\n".join(lines) + tail, " " * 8)
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


@pytest.mark.parametrize("form", {**FORMS, **TOGETHER})
def test_threads_that_meet_come_or_are_refused(form, tmp_path, seed):
    """A barrier of all threads in a branch of some threads was accepted, and waited forever."""
    for op in MEETINGS if ALL else random.Random(seed).sample(list(MEETINGS), 5):
        if op in OF_WARPS and form in BY_DATA:
            continue
        blocks = "2, cluster_dims=2" if "cluster" in op else "1"
        found = done(op, {**FORMS, **TOGETHER}[form], "cuda:sm_90a", tmp_path, blocks, "")
        if form in TOGETHER or op in OF_WARPS:
            halves = form in ("lane", "lanes", "elected", "elected of a warp", "odd threads", "turns")
            assert isinstance(found, list) is (form in TOGETHER or not halves), (op, found)
            continue
        (one, *_) = found.diagnostics
        told = ("parted_barrier", "parted_warp", "bad_argument") if op == "number" else ("parted_barrier",)
        assert one.code in told and one.span.source().strip() in MEETINGS[op], found


def test_what_all_threads_counted_may_decide_about_barriers(tmp_path):
    """Counts over the block are the same in all threads, so that loops may turn by them."""
    together = (
        "if T.syncthreads_or(tx > 3):\n    {op}",
        "go = T.alloc_var('int32', 1)\nwhile go > 0:\n    n = n + 1\n    {op}\n    go = T.syncthreads_or(n < tx)",
    )
    for form in together:
        for op in ("barrier", "load", "gemm"):
            assert isinstance(done(op, form, "cuda:sm_90a", tmp_path), list), (op, form)


@pytest.mark.parametrize("op", ["barrier", *sorted(OF_WARPS)])
def test_turns_that_threads_begin_apart_are_counted(op, tmp_path):
    """Each thread may have elements of its own: all come by equally often if these are as many for each."""
    leaves = "    if tx > 3:\n        break\n"
    for stop, body, met in ((384, "", True), (385, "", False), (384, leaves, False)):
        found = done(op, f"for n in T.serial(tx, {stop}, 128):\n{body}    {{op}}", "cuda:sm_90a", tmp_path)
        assert isinstance(found, list) is met, found


@pytest.mark.parametrize(("condition", "alike"), [
    ("bx == 0", False), ("bx % 2 == 0", False), ("T.block_rank_in_cluster() == 1", False), ("A[0, bx] > 0", False),
    ("bx // 2 == 0", True), ("T.get_cluster_id() == 1", True), ("A[0, bx // 2] > 0", True), ("bx < 4", True),
])  # fmt: skip
def test_blocks_of_a_cluster_meet_where_all_of_them_come(condition, alike, tmp_path):
    path = tmp_path / "kernel.py"
    head = HEAD.replace("T.Kernel(1, threads=128)", "T.Kernel(4, threads=128, cluster_dims=2) as bx")
    path.write_text(f"{head}\n        if {condition}:\n            T.cluster_sync()\n")
    space = {"T": T}
    exec(compile(path.read_text(), str(path), "exec"), space)
    try:
        lower(space["kernel"].program, cuda_passes(Build(Target.of("cuda:sm_90a"))))
    except TileError as error:
        assert error.code == "parted_barrier" and not alike
    else:
        assert alike
