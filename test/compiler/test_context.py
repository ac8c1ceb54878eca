# SPDX-License-Identifier: Apache-2.0
"""The schedule report that a compilation carries along."""

from torch_tile.compiler.context import Build, Remark
from torch_tile.diagnostics.errors import Span
from torch_tile.hardware import Target


def test_notes_keep_their_order():
    build = Build(Target("cuda", 90))
    build.remark(None, "T.copy", "cp.async, 16 bytes")
    build.remark(None, "T.copy", "scalar loads", "rows are not a multiple of 4 bytes")
    assert build.remarks == [
        Remark(None, "T.copy", "cp.async, 16 bytes"),
        Remark(None, "T.copy", "scalar loads", "rows are not a multiple of 4 bytes"),
    ]
    assert Build(Target()).remarks == []


def test_what_is_noted_again_is_one_row():
    build = Build(Target("cuda", 90))
    here, there = (Span("/home/me/kernel.py", line, line, 4, 20) for line in (12, 13))
    for _ in range(3):
        build.remark(here, "T.copy", "ldmatrix_x4")
        build.remark(there, "T.copy", "ldmatrix_x4")
    build.remark(here, "T.copy", "ldmatrix_x4", "a reason")
    found = build.schedule("matmul")
    assert len(found.remarks) == 7 and [count for _, count in found.rows] == [3, 3, 1]
    assert str(found).splitlines() == [
        "matmul for cuda:sm_90a: 3 notes, 1 of what could be faster",
        "  kernel.py:12  T.copy  3 x ldmatrix_x4",
        "  kernel.py:13  T.copy  3 x ldmatrix_x4",
        "  kernel.py:12  T.copy  ldmatrix_x4",
        "                        why not faster: a reason",
    ]


def test_the_report_prints_as_a_table():
    build = Build(Target("cuda", 90))
    build.remark(Span("/home/me/kernel.py", 12, 12, 4, 20), "T.copy", "cp.async, 16 bytes")
    build.remark(None, "assembler", "slower code", "something was serialised")
    found = build.schedule("matmul")
    assert found.slow == found.remarks[1:]
    assert str(found).splitlines() == [
        "matmul for cuda:sm_90a: 2 notes, 1 of what could be faster",
        "  kernel.py:12  T.copy     cp.async, 16 bytes",
        "  -             assembler  slower code",
        "                           why not faster: something was serialised",
    ]
    assert str(Build(Target()).schedule("f")) == "f for cpu: 0 notes, 0 of what could be faster"
