# SPDX-License-Identifier: Apache-2.0
"""TileLang's names: each works, or is refused with what to write instead; none is unknown."""

import inspect
import re
from pathlib import Path

import pytest

import torch_tile.language as T
from torch_tile.diagnostics.errors import TileError
from torch_tile.language import misuse
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


@pytest.mark.every_sample
def test_none_is_unknown():
    assert len(NAMES) == 713
    unknown = [name for name in NAMES if name not in HERE and not instead(name)]
    assert not unknown


@pytest.mark.every_sample
@pytest.mark.parametrize("name", sorted(set(NAMES) - HERE))
def test_a_refusal_says_why(name):
    with pytest.raises(TileError) as caught:
        getattr(T, name)
    assert caught.value.code == "unknown_name" and instead(name) in str(caught.value)
    assert not hasattr(T, name)


@pytest.mark.every_sample
def test_refusals_name_what_there_is():
    """`T.name` in a refusal is a name of the language, also `T.alloc_...`'s."""
    for reason in (*INSTEAD.values(), *(reason for _, reason in FAMILIES)):
        for name in re.findall(r"\bT\.(\w+)", reason):
            assert name in HERE or any(known.startswith(name) for known in HERE), (name, reason)


def test_what_works_is_not_refused_as_well():
    assert not [name for name in INSTEAD if name in HERE and not inspect.ismodule(vars(T)[name])]


# Keywords of other languages: (function of T, keyword, what the advice must name).
FOREIGN_KEYWORDS = (
    ("copy", "mask", "writes there are dropped"),
    ("copy", "other", "annotate_safe_value"),
    ("copy", "boundary_check", "reads outside"),
    ("Kernel", "grid", "T.Kernel(m, n"),
    ("Kernel", "num_warps", "threads=128"),
    ("Kernel", "num_stages", "T.Pipelined"),
    ("Kernel", "num_threads", "`threads`"),
    ("gemm", "alpha", "T.Parallel(m, n)"),
    ("gemm", "accum_dtype", "dtype of C"),
    ("gemm", "out", "third operand"),
    ("Parallel", "step", "A[start + step * i]"),
    ("Pipelined", "unroll", "leave it out"),
    ("alloc_shared", "init", "T.clear(tile)"),
    ("reduce_sum", "keepdim", "(m, 1) keeps the dimension"),
    ("reduce_max", "keep_dims", "(m, 1) keeps the dimension"),
    ("reduce_max", "dtype", "dtype of the result"),
    ("atomic_add", "mask", "`if condition:`"),
    ("fill", "dtype", "T.alloc_"),
)


@pytest.mark.parametrize(("function", "keyword", "advice"), FOREIGN_KEYWORDS)
def test_keywords_of_other_languages_have_advice(function: str, keyword: str, advice: str) -> None:
    text = f"{function}() got an unexpected keyword argument {keyword!r}"
    found = misuse.bad_call(function, getattr(T, function), text, None)
    assert found.code == "unknown_keyword" and advice in str(found), found


@pytest.mark.parametrize(
    ("names", "advice"),
    [
        (("argmax", "arg_max", "reduce_argmax"), "T.reduce_max(src"),
        (("argmin", "reduce_argmin"), "T.reduce_min(src"),
        (("atomic_cas", "atomicCAS", "atomic_compare_exchange", "atomic_cmpxchg"), "no compare-and-swap"),
        (("atomic_xchg", "atomicExch", "atomic_exchange", "atomic_swap"), "T.atomic_store writes"),
    ],
)
def test_spellings_of_one_absent_operation_have_its_advice(names: tuple[str, ...], advice: str) -> None:
    for name in names:
        assert name not in HERE and advice in instead(name)


def test_advice_is_for_keywords_that_no_function_has() -> None:
    """A row of the table names functions of T, and no parameter of any of them."""
    for functions, keywords, _ in misuse._KEYWORDS:
        named = [name for name in dir(T) if re.fullmatch(functions, name) and callable(getattr(T, name))]
        assert named, functions
        for name in named:
            own = inspect.signature(getattr(T, name)).parameters.values()
            taken = [p.name for p in own if p.kind is not p.VAR_POSITIONAL and re.fullmatch(keywords, p.name)]
            assert not taken, (name, taken)
