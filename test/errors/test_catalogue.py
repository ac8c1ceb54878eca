# SPDX-License-Identifier: Apache-2.0
"""The catalogue as a whole: every entry can be met, and says what to do."""

import ast
import importlib.util
import re
from pathlib import Path

import pytest

import torch_tile
from torch_tile.diagnostics.catalog import CATALOGUE
from torch_tile.diagnostics.errors import diagnose, fields_of

PACKAGE = Path(torch_tile.__file__).parent
# Those which no kernel fails with.
WARNINGS = {
    "perhaps_unwritten",
    "unwritten_part",
    "writes_nothing",
    "block_race",
    "iteration_race",
    "role_race",
    "swapped_indices",
    "outside",
    "one_starts",
    "no_schedule",
    "far_shift",
    "kept_sum",
    "never_waited",
    "behind_end",
    "past_end",
    "cleared_sum",
    "idle_index",
    "no_blocks",
    "repeated_copy",
    "narrow_sum",
    "same_parity",
    "unused_parameter",
    "slow_product",
    "repeated_op",
    "no_iteration",
    "drawn_once",
    "float_to_bool",
    "unread_write",
    "unread_tail",
    "miscounted",
    "missing_index",
    "equal_elements",
}


def load(path):
    spec = importlib.util.spec_from_file_location(f"errors_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.every_sample
def test_every_entry_has_a_kernel_that_fails_with_it():
    """The modules beside this one run each function of their CASES, which must fail with the code that stands there."""
    modules = [load(path) for path in Path(__file__).parent.glob("test_*.py") if path != Path(__file__)]
    assert set(CATALOGUE) - WARNINGS == {code for module in modules for code, _ in module.CASES.values()}


@pytest.mark.every_sample
@pytest.mark.parametrize("code", CATALOGUE)
def test_entries_are_sentences_with_a_fix(code):
    message, fix = CATALOGUE[code]
    assert message and fix
    found = diagnose(code, None, **{name: f"<{name}>" for name in fields_of(code)})
    assert "{" not in found.message + found.fix
    assert found.render().startswith(f"error[{code}]: {found.message}\n") and f"fix: {found.fix}" in found.render()


@pytest.mark.every_sample
def test_the_compiler_raises_only_catalogued_codes():
    """Every code given to `error` and `diagnose` is an entry, and every entry is raised somewhere."""
    raised = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            name = getattr(node.func, "id", "") if isinstance(node, ast.Call) else ""
            if name in ("error", "diagnose") and node.args and isinstance(node.args[0], ast.Constant):
                raised.add(node.args[0].value)
    assert raised == set(CATALOGUE)


def test_fields_are_filled_where_an_entry_is_raised():
    """A missing field would be a KeyError in the middle of an author's error."""
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("error", "diagnose")):
                continue
            if not (node.args and isinstance(node.args[0], ast.Constant)) or any(k.arg is None for k in node.keywords):
                continue
            given, wanted = {k.arg for k in node.keywords} - {"notes"}, fields_of(node.args[0].value)
            assert wanted <= given <= wanted | {"fix"}, f"{path}:{node.lineno}"


def test_messages_mark_the_columns():
    from torch_tile.diagnostics.errors import Span

    here = next(n for n, line in enumerate(Path(__file__).read_text().splitlines(), 1) if "MARK ME" in line)
    span = Span(__file__, here, here, 4, 8)
    text = diagnose("bad_dtype", span, got="x").render()
    source = span.source()
    assert re.search(re.escape(f"--> {__file__}:{here}:5"), text)
    assert f"   | {source}\n   | {' ' * 4}{'^' * 4}\n" in text
