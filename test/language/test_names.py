# SPDX-License-Identifier: Apache-2.0
"""What is found in the source: names that behave as variables, names read after an `if`, names carried by a loop."""

import ast
import textwrap

import pytest

from torch_tile.language.names import Reads, mutable_names


def tree_of(body):
    return ast.parse("def f(a, b, n):\n" + textwrap.indent(textwrap.dedent(body), "    ")).body[0]


def live(body):
    """For each `if`, in order: the names bound in it, marked with ! if they may be read after it."""
    tree = tree_of(body)
    reads = Reads(tree)
    found = sorted((n for n in ast.walk(tree) if isinstance(n, ast.If)), key=lambda n: n.lineno)
    return [" ".join(name + "!" * is_live for name, is_live in reads.of_branches(n)) for n in found]


def carried(body):
    tree = tree_of(body)
    reads = Reads(tree)
    found = sorted((n for n in ast.walk(tree) if isinstance(n, ast.For | ast.While)), key=lambda n: n.lineno)
    return [" ".join(reads.carried(n)) for n in found]


AFTER = {
    "read": ("if a: x = 1\nelse: x = 2\nb(x)", ["x!"]),
    "bound again": ("if a: x = 1\nx = 2\nb(x)", ["x"]),
    "read in what binds it": ("if a: x = 1\nx = x + 1", ["x!"]),
    "added to": ("if a: x = 1\nx += 1", ["x!"]),
    "one of two": ("if a: x, (y, z) = 1, (2, 3)\nx = y", ["x y! z"]),
    "in one branch later": ("if a: x = 1\nif b: x = 2\nn(x)", ["x!", "x!"]),
    "in both branches later": ("if a: x = 1\nif b: x = 2\nelse: x = 3\nn(x)", ["x", "x!"]),
    "elif": ("if a: x = 1\nelif b: x = 2\nelse: y = 3\nn(x)", ["x! y", "x! y"]),
    "next turn": ("for i in n:\n  b(x)\n  if a: x = 1", ["x!"]),
    "bound first in each turn": ("for i in n:\n  x = 0\n  b(x)\n  if a: x = 1", ["x"]),
    "while's condition": ("while x:\n  if a: x = 1", ["x!"]),
    "after a break": ("for i in n:\n  if a:\n    x = 1\n    break\n  x = 2\nb(x)", ["x"]),
    "after a continue": ("for i in n:\n  b(x)\n  if a:\n    x = 1\n    continue\n  x = 2", ["x"]),
    "return": ("if a: x = 1\nreturn x", ["x!"]),
    "function inside": ("def g(): return x\nif a: x = 1\nx = 2", ["x!"]),
    "lambda": ("g = lambda: x\nif a: x = 1\nx = 2", ["x!"]),
    "with": ("if a: x = y = 1\nwith n(y) as x: b(x)", ["x y!"]),
    "try": ("try:\n  if a: x = 1\nfinally:\n  b(x)", ["x!"]),
    "match": ("match n:\n  case 1:\n    if a: x = 1\n  case _: b(x)", ["x!"]),
    "loops, imports, walruses, functions": (
        "if a:\n  import q.r, s as t\n  for i in n: pass\n  (w := 1)\n  def g(): u = 1\n  [v for v in n]\nb(t, w)",
        ["q t! i w! g"],
    ),
    "annotations": ("if a: x: int = 1\nb(x)", ["x!"]),
    "of elsewhere": ("global x\nif a: x = y = 1\nb(x, y)", ["y!"]),
}


@pytest.mark.parametrize("case", AFTER)
def test_names_read_after_branches(case):
    body, found = AFTER[case]
    assert live(body) == found


CARRIED = {
    "sum": ("for i in n: x = x + 1", ["x"]),
    "bound first": ("for i in n:\n  x = 1\n  b(x)\n  x = 2", [""]),
    "bound in both branches": ("for i in n:\n  if a: x = 1\n  else: x = 2\n  b(x)", [""]),
    "bound in one branch": ("for i in n:\n  if a: x = 1\n  b(x)", ["x"]),
    "range": ("for i in n:\n  n = i", [""]),
    "loop variable": ("for i in n: i = i + 1", [""]),
    "inner": ("for i in n:\n  x = 0\n  for j in n: x += j\n  b(x)", ["", "x"]),
    "while": ("while n > 0: n = n - 1", ["n"]),
    "continue": ("for i in n:\n  if a: continue\n  b(x)\n  x = 1", ["x"]),
}


@pytest.mark.parametrize("case", CARRIED)
def test_names_carried_by_loops(case):
    body, found = CARRIED[case]
    assert carried(body) == found


LEFT = {
    "read": ("for i in n:\n  if a: break\n  x = y = 1\nb(x)", ["x"]),
    "not read": ("for i in n:\n  x = 1\n  if a: continue\nx = 2\nb(x)", [""]),
    "inner": ("while a:\n  for i in n:\n    if a: break\n    x = 1\n  b(x)", ["", "x"]),
    "read in the next turn": ("for j in n:\n  for i in n: x = 1\n  if a: b(x)\n  x = 2", ["", "x"]),
    "no way out": ("for i in n: x = 1\nb(x)", ["x"]),
    "else": ("for i in n: x = 1\nelse: b(x)", ["x"]),
}


@pytest.mark.parametrize("case", LEFT)
def test_names_read_after_loops(case):
    body, found = LEFT[case]
    tree = tree_of(body)
    reads = Reads(tree)
    loops = sorted((n for n in ast.walk(tree) if isinstance(n, ast.For | ast.While)), key=lambda n: n.lineno)
    assert [" ".join(reads.of_loop(n)) for n in loops] == found


def test_names_bound_at_two_depths():
    assert mutable_names(tree_of("x = y = z = 0\nfor i in n:\n  x = 1\n  z: int\nif a: w = y\nelse: w = x")) == {"x"}
