# SPDX-License-Identifier: Apache-2.0
"""TileLang's names: each works, or is refused with what to write instead; none is unknown."""

import inspect
import re
from pathlib import Path

import pytest

import torch_tile.language as T
from torch_tile.diagnostics.errors import TileError
from torch_tile.language.misuse import FAMILIES, INSTEAD, instead


def read_names():
    """Every name with the section that it stands in."""
    text = (Path(__file__).parent / "tilelang_names.txt").read_text()
    sections = re.findall(r"^\[(.*)\]\n((?:\w.*\n)+)", text, re.MULTILINE)
    assert len(sections) == 3
    found = {}
    for title, names in sections:
        lanes = (2, 4, 8, 16, 32, 64) if "lanes" in title else ()
        found |= {f"{name}x{n}" if n else name: title for name in names.split() for n in lanes or ("",)}
    return found


NAMES = read_names()
HERE = frozenset(vars(T)) | {name for name in NAMES if hasattr(T, name)}


def test_none_is_unknown():
    assert len(NAMES) == 713
    unknown = [name for name in NAMES if name not in HERE and not instead(name)]
    assert not unknown


@pytest.mark.parametrize("name", sorted(set(NAMES) - HERE))
def test_a_refusal_says_why(name):
    with pytest.raises(TileError) as caught:
        getattr(T, name)
    assert caught.value.code == "unknown_name" and instead(name) in str(caught.value)
    assert not hasattr(T, name)


def test_refusals_name_what_there_is():
    """`T.name` in a refusal is a name of the language, also `T.alloc_...`'s."""
    for reason in (*INSTEAD.values(), *(reason for _, reason in FAMILIES)):
        for name in re.findall(r"\bT\.(\w+)", reason):
            assert name in HERE or any(known.startswith(name) for known in HERE), (name, reason)


def test_what_works_is_not_refused_as_well():
    assert not [name for name in INSTEAD if name in HERE and not inspect.ismodule(vars(T)[name])]
