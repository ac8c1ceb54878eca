# SPDX-License-Identifier: Apache-2.0
import ast
import importlib
import inspect
from dataclasses import fields

import pytest

import torch_tile
from torch_tile import language, nn, ops
from torch_tile.autotuner.result import SearchSettings, Settings
from torch_tile.options import KNOWN, CompileOptions
from torch_tile.tools import stub

# What a user's model takes is the model's business.
PASSED_ON = {"explain": {"args", "kwargs"}}


def test_the_stub_is_what_the_language_offers() -> None:
    """`python -m torch_tile.tools.stub` writes it anew."""
    assert stub.FILE.read_text() == stub.text()


def test_the_stub_names_everything() -> None:
    names = set()
    for node in ast.parse(stub.FILE.read_text()).body:
        if isinstance(node, ast.ImportFrom):
            names |= {each.asname or each.name for each in node.names}
        elif isinstance(node, ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.AnnAssign):
            names.add(ast.unparse(node.target))
    wanted = stub.public_names().keys()
    assert len(wanted) > 380 and {"copy", "gemm", "exp2", "float16", "reduce_max", "Tensor"} <= wanted
    assert wanted <= names and set(language.__all__) <= names


def test_editors_see_what_the_package_imports_when_it_is_asked_for() -> None:
    """Each name of the lazy table is imported for type checkers, from where the table says; submodules they find."""
    block = next(node for node in ast.parse(inspect.getsource(torch_tile)).body if isinstance(node, ast.If))
    assert ast.unparse(block.test) == "TYPE_CHECKING"
    seen = {
        each.asname or each.name: (node.module, each.name)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for each in node.names
    }
    for name, place in torch_tile._LAZY.items():
        module, _, attribute = place.partition(":")
        if not name.startswith("_") and module != name:
            where = f"torch_tile.{module}" if attribute else f"torch_tile.{module}".rpartition(".")[0]
            assert seen.get(name) == (where, attribute or name), name
            assert getattr(importlib.import_module(where), attribute or name) is getattr(torch_tile, name)


@pytest.mark.every_sample
@pytest.mark.parametrize("module", [language, torch_tile, nn, ops], ids=lambda m: m.__name__)
def test_parameters_have_names(module) -> None:
    """No public function hides its parameters behind *args or **kwargs; `*extents` are several of one kind."""
    hidden = []
    names = stub.public_names() if module is language else module.__all__
    for name in names:
        value = getattr(module, name)
        if not callable(value) or (inspect.isclass(value) and not value.__module__.startswith("torch_tile")):
            continue
        try:
            parameters = inspect.signature(value).parameters.values()
        except ValueError:  # an exception: its message
            assert issubclass(value, Exception)
            continue
        for each in parameters:
            vague = each.kind is each.VAR_POSITIONAL and each.name in ("args", "options", "rest", "others")
            vague |= each.kind is each.VAR_KEYWORD and not str(each.annotation).startswith("Unpack[")
            if vague and each.name not in PASSED_ON.get(name, ()):
                hidden.append(f"{name}: {each}")
    assert not hidden


def test_options_of_editors_are_those_of_the_code() -> None:
    assert CompileOptions.__annotations__.keys() == set(KNOWN) - {"out_idx", "target"}
    assert SearchSettings.__annotations__.keys() == {each.name for each in fields(Settings)}


def test_help_is_a_page() -> None:
    """What each name takes and gives: a signature and a description, of several lines for operations on tiles."""
    for name in ("gemm", "copy", "reduce_max", "Kernel", "Pipelined", "Parallel", "alloc_shared"):
        assert len(inspect.getdoc(getattr(language, name)).splitlines()) >= 5, name
    assert not [name for name, value in stub.public_names().items() if not inspect.getdoc(value)]
