# SPDX-License-Identifier: Apache-2.0
import pytest

import torch_tile.language as T
from torch_tile.diagnostics import errors as diagnostics
from torch_tile.diagnostics.catalog import CATALOGUE
from torch_tile.diagnostics.errors import (
    Diagnostic,
    InternalError,
    Span,
    TileError,
    diagnose,
    error,
    fields_of,
)


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "author.py"
    path.write_text("one\n    two = three(four)\nfive(\n  six)\n")
    return str(path)


def test_render_shows_the_line_and_what_to_do(source):
    span = Span(source, 2, 2, 10, 21)
    note = Span(source, 3, 4, 0, 6)
    found = diagnose("bad_dtype", span, notes=[(note, "first seen here"), (None, "a thought")], got="float99")
    assert found.render() == "\n".join([
        "error[bad_dtype]: 'float99' is not a dtype",
        f"  --> {source}:2:11",
        "   |     two = three(four)",
        "   |           ^^^^^^^^^^^",
        f"  --> {source}:3:1  first seen here",
        "   | five(",
        "   | ^^^^^",
        "  note: a thought",
        "  fix: use T.float16, 'float16', torch.float16, ...",
    ])  # fmt: skip


def test_render_without_a_file():
    assert diagnose("bad_dtype", None, got=3).render().splitlines()[0] == "error[bad_dtype]: 3 is not a dtype"
    lines = diagnose("bad_dtype", Span("<gone>", 7, 7, 0, 1), got=3).render().splitlines()
    assert lines[1] == "  --> <gone>:7:1" and len(lines) == 3


def test_an_error_holds_every_finding(source):
    span = Span(source, 1, 1, 0, 3)
    raised = TileError(diagnose("bad_dtype", span, got=1), diagnose("bad_scope", None, got="x", known="a, b"))
    assert raised.code == "bad_dtype" and raised.span is span
    assert str(raised).count("error[") == 2 and "unknown buffer scope 'x'" in str(raised)


@pytest.mark.every_sample
@pytest.mark.parametrize("code", CATALOGUE)
def test_every_entry_can_be_filled_in(code):
    made = diagnose(code, None, **{name: f"<{name}>" for name in fields_of(code)})
    assert isinstance(made, Diagnostic) and made.fix
    for name in fields_of(code):
        assert f"<{name}>" in made.message + made.fix


def test_a_missing_field_is_our_mistake():
    with pytest.raises(KeyError):
        diagnose("bad_scope", None, got="x")


def test_errors_point_at_the_line_being_traced():
    assert error("bad_dtype", None, got=1).span is None

    with pytest.raises(TileError) as caught:

        @T.prim_func
        def kernel(x: T.Tensor((4,), "float32")):
            with T.Kernel(1) as _:
                T.alloc_shared((4,), "float99")  # here

    assert caught.value.span.source().endswith("# here")
    assert caught.value.span.source()[caught.value.span.column :].startswith("T.alloc_shared(")
    assert diagnostics.current_span() is None  # tracing is over


def test_internal_errors_ask_to_be_reported():
    text = str(InternalError("lost", Span("a.py", 3, 3, 4, 5)))
    assert "lost (while compiling a.py:3:5)" in text and "bug in torch_tile" in text and "TORCH_TILE_DUMP" in text
    assert not issubclass(InternalError, TileError)


@pytest.mark.parametrize(
    ("wrong", "kinds"),
    [
        (lambda a: T.fill(a, 1, valu=2), {TypeError, ValueError}),
        (lambda a: T.fill(), {TypeError, ValueError}),
        (lambda a: T.fill(a, "x"), {ValueError}),
        (lambda a: T.alloc_shared((-1,)), {ValueError}),
        (lambda a: T.no_such_name, {AttributeError, ValueError}),
    ],
)
def test_which_of_pythons_errors_they_are(wrong, kinds):
    """TileLang raises ValueError for mistakes in kernels, and Python TypeError for unknown arguments."""
    with pytest.raises(TileError) as caught:

        @T.prim_func
        def kernel(A: T.Tensor((4,), "float32")):
            with T.Kernel(1):
                wrong(A)

    assert {kind for kind in (TypeError, AttributeError, ValueError) if isinstance(caught.value, kind)} == kinds
    assert caught.value.diagnostics and caught.value.span is not None
