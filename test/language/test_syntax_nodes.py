# SPDX-License-Identifier: Apache-2.0
"""Walks over syntax trees find what Python's own walks find, in the same order, and positions are the same."""

import ast
from pathlib import Path

import pytest

from torch_tile.language.syntax_nodes import fill_positions, nodes_of, parts_of

FILES = sorted(Path(__file__).parents[2].glob("torch_tile/language/*.py"))[::9]
CONTEXTS = (ast.Load, ast.Store, ast.Del)


def plain(nodes):
    return [node for node in nodes if not isinstance(node, CONTEXTS)]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_walks_are_pythons(file):
    tree = ast.parse(file.read_text())
    found = nodes_of(tree)
    assert all(a is b for a, b in zip(found, plain(ast.walk(tree)), strict=True))
    for node in found:
        assert all(a is b for a, b in zip(parts_of(node), plain(ast.iter_child_nodes(node)), strict=True))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_positions_are_pythons(file):
    one, other = (ast.parse(file.read_text()) for _ in range(2))
    for tree in (one, other):
        for number, node in enumerate(nodes_of(tree)):
            for name in node._attributes[: number % 5]:
                delattr(node, name)
    assert ast.dump(one, include_attributes=True) == ast.dump(other, include_attributes=True)
    fill_positions(one)
    ast.fix_missing_locations(other)
    assert ast.dump(one, include_attributes=True) == ast.dump(other, include_attributes=True)
