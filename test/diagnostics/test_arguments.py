# SPDX-License-Identifier: Apache-2.0
"""Arguments that do not fit a signature or an annotation are named, with what is expected."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import torch_tile.nn.functional
import torch_tile.ops
from torch_tile.diagnostics.arguments import (
    Count,
    FloatDtype,
    Size,
    calls_back,
    can_take,
    explains_misfits,
    names_parameters,
    renames,
)
from torch_tile.nn import Attention


@names_parameters
def all_kinds(
    x: Tensor,
    w: Tensor | None = None,
    *,
    flag: bool = False,
    count: int = 1,
    rate: float = 0.0,
    name: str = "",
    dtype: torch.dtype | None = None,
    call: Callable[[int], int] | None = None,
    layer: nn.Module | None = None,
    sizes: Sequence[int] = (),
    options: Mapping[str, Any] | None = None,
    anything: Any = None,
    unknown: NotHere = None,  # noqa: F821 - as names that are imported for type checkers only
) -> str:
    return "ran"


X = torch.ones(2)
FITTING = [
    {}, {"w": X}, {"flag": True}, {"flag": 1}, {"flag": np.bool_(False)}, {"count": np.int64(3)}, {"rate": 1},
    {"rate": np.float32(2)}, {"name": "a"}, {"dtype": torch.float16}, {"call": len}, {"layer": nn.ReLU()},
    {"sizes": (1, 2)}, {"sizes": torch.Size([1])}, {"options": {}}, {"anything": ...}, {"unknown": 3},
]  # fmt: skip
REFUSED = {
    "flag": [("no", "'no'; expected True or False"), (2, "2; expected True or False"), (X, "of type Tensor")],
    "count": [("3", "'3'; expected an integer"), (1.5, "1.5; expected an integer"), (X, "of type Tensor")],
    "rate": [("0.1", "'0.1'; expected a number"), (None, "None; expected a number")],
    "name": [(3, "3; expected a text"), (str, "the class str; expected a text")],
    "dtype": [("float16", "'float16'; expected a torch.dtype or None")],
    "call": [(3, "3; expected a function or None"), (X, "expected a function or None: lambda: f(x)")],
    "layer": [(nn.ReLU, "the class ReLU; expected an nn.Module or None")],
    "sizes": [(3, "3; expected a list"), ("12", "'12'; expected a list")],
    "options": [("a", "'a'; expected a dict or None")],
    "w": [(np.ones(2), "of type ndarray; expected a tensor or None: torch.from_numpy(w)")],
}


@pytest.mark.parametrize("named", FITTING, ids=str)
def test_what_fits(named) -> None:
    assert all_kinds(X, **named) == "ran"


@pytest.mark.parametrize(("name", "value", "text"), [(n, *case) for n, cases in REFUSED.items() for case in cases])
def test_what_does_not(name, value, text) -> None:
    with pytest.raises(TypeError) as told:
        all_kinds(X, **{name: value})
    assert str(told.value).startswith(f"all_kinds: {name} is ") and text in str(told.value)


def test_signatures() -> None:
    with pytest.raises(
        TypeError, match=r"unexpected keyword argument 'counts'; did you mean count\?; its parameters are"
    ):
        all_kinds(X, counts=3)
    with pytest.raises(TypeError, match="missing a required argument: 'x'"):
        all_kinds()
    with pytest.raises(TypeError, match=r"both: x is of type Linear; expected a tensor: x\.weight"):
        names_parameters(both)(nn.Linear(2, 2))  # the wrong kind says more than the missing argument


def both(x: Tensor, size: int) -> None:
    pass


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ((X, (2,), X), "w is of type tuple; expected a tensor or None: leave it out, what is given behind it fits"),
        ((X, 2), "w is 2; expected a tensor or None: give None for w, as 2 fits count"),
        ((X, "b"), "w is 'b'; expected a tensor or None: give it by name, name='b'"),
        ((2,), "x is 2; expected a tensor: torch.tensor(x)"),
        (([X, X],), "x is of type list; expected a tensor: x[0], or torch.stack(x)"),
        (([2.0], X, 3), "x is of type list; expected a tensor: torch.tensor(x)"),  # the rest is where it belongs
        ((X, None, "a", X), "count is 'a'; expected an integer"),
    ],
    ids=str,
)
def test_arguments_one_place_off(args, text) -> None:
    def places(x: Tensor, w: Tensor | None = None, count: int = 1, name: str = "") -> None:
        pass

    with pytest.raises(TypeError) as told:
        names_parameters(places)(*args)
    assert str(told.value).endswith(text)


def test_functions_for_texts_shapes_and_options_by_place() -> None:
    with pytest.raises(TypeError, match=r"name is of type function; expected a text: its name, as 'relu'"):
        all_kinds(X, name=nn.functional.relu)
    with pytest.raises(TypeError, match="w is of type tuple; expected a tensor or None: leave it out, sizes are read"):
        all_kinds(X, (2, 3))
    with pytest.raises(TypeError, match="too many positional arguments; give flag and what follows by name"):
        all_kinds(X, None, True)


@pytest.mark.parametrize(
    ("keyword", "text"),
    [("axis", "did you mean dim?"), ("dropout_p", "apply F.dropout to the result"), ("qqqq", "its parameters")],
)
def test_keywords_of_other_libraries(keyword, text) -> None:
    def fold(x: Tensor, dim: int = 0) -> None:
        pass

    with pytest.raises(TypeError, match=f"unexpected keyword argument '{keyword}'; .*{re.escape(text)}"):
        names_parameters(fold)(X, **{keyword: 1})


def test_a_call_that_fails_is_explained() -> None:
    @explains_misfits
    def size(x: Tensor, dim: int = 0) -> int:
        return x.shape[dim]

    assert size(X) == 2
    with pytest.raises(TypeError, match=r"size: x is of type list; expected a tensor: torch\.tensor\(x\)"):
        size([1.0])  # type: ignore[arg-type]
    with pytest.raises(IndexError):  # its own error: the arguments fit
        size(X, 5)
    assert torch.compile(lambda x: x + size(x), backend="eager", fullgraph=True)(X)[0] == 3


def test_notes_on_functions_of_users() -> None:
    with pytest.raises(ZeroDivisionError) as told, calls_back("f calls g(x)"):
        raise ZeroDivisionError
    assert told.value.__notes__ == ["f calls g(x)"]


def test_can_take() -> None:
    assert can_take(lambda a, b=1: a, 1) and can_take(print, 5)
    assert not can_take(lambda: 0, 1) and not can_take(3, 0)


@renames(q="query", lengths="seq_lens", **{"bs[0]": "words"})
def inner(text: str) -> None:
    raise ValueError(text)


@renames("outer", query="x")
def outer(text: str) -> None:
    inner(text)


@pytest.mark.parametrize(
    ("said", "named_by_inner", "named_by_outer"),
    [
        ("tile.op: q has 2 rows, as q", "inner: query has 2 rows, as query", "outer: x has 2 rows, as x"),
        ("tile.op: k has q's rows: no q", "inner: k has query's rows: no q", "outer: k has x's rows: no q"),
        ("tile.op: bs[0]'s rows, bs[0]' rows", "inner: words' rows, words' rows", "outer: words' rows, words' rows"),
        ("tile.op: bs[0] and all_lengths", "inner: words and all_lengths", "outer: words and all_lengths"),
        ("tile.op: lengths holds -1", "inner: seq_lens holds -1", "outer: seq_lens holds -1"),
        ("zeros: q is negative", "zeros: q is negative", "zeros: q is negative"),
    ],
)
def test_errors_of_operators_name_the_arguments_of_the_caller(said, named_by_inner, named_by_outer) -> None:
    for function, named in ((inner, named_by_inner), (outer, named_by_outer)):
        with pytest.raises(ValueError) as told:
            function(said)
        assert str(told.value) == named


@names_parameters
def sized(pages: Size = 0, heads: Count | None = None, dtype: FloatDtype | None = None) -> str:
    return "ran"


@pytest.mark.parametrize(
    "named", [{}, {"pages": 0}, {"pages": np.int64(3), "heads": 1}, {"dtype": torch.bfloat16}], ids=str
)
def test_sizes_and_dtypes_that_fit(named) -> None:
    assert sized(**named) == "ran"


@pytest.mark.parametrize(
    ("named", "text"),
    [
        ({"pages": -1}, "pages is -1; expected an integer of at least 0"),
        ({"heads": 0}, "heads is 0; expected an integer of at least 1 or None"),
        ({"heads": True}, "heads is True; expected an integer of at least 1 or None"),
        ({"dtype": torch.int64}, "expected a torch.dtype of floats or None"),
    ],
    ids=str,
)
def test_sizes_and_dtypes_that_do_not(named, text) -> None:
    with pytest.raises(TypeError, match=text):
        sized(**named)


@pytest.mark.parametrize("make", [lambda x: x[0], lambda x: x[..., :-1], lambda x: x.to("meta"), lambda x: x.bool()])
def test_an_operators_error_in_a_layer_names_the_layer_and_what_it_got(make):
    layer = Attention(32, 2)
    x = make(torch.randn(2, 5, 32))
    with pytest.raises((RuntimeError, TypeError)) as told:
        layer(x)
    assert f"in the call of the layer Attention with {x.dtype} {list(x.shape)} on {x.device}" in told.value.__notes__


@pytest.mark.parametrize(
    "module, name, meant",
    [
        (torch_tile.ops, "group_norm", "torch.nn.functional.group_norm"),
        (torch_tile.nn, "Embedding", "torch.nn.Embedding"),
        (torch_tile.nn.functional, "gelu", "torch.nn.functional.gelu"),
        (torch_tile, "einsum", "torch.einsum"),
        (torch_tile.nn, "Liner", "Linear?"),
        (torch_tile.ops, "softmx", "softmax?"),
        (torch_tile.nn.functional, "rotat", "rotate?"),
    ],
)
def test_names_that_torch_alone_has_are_named(module, name, meant) -> None:
    with pytest.raises(AttributeError) as caught:
        getattr(module, name)
    assert str(caught.value).endswith(meant)


def test_a_tensor_that_is_given_twice_and_a_layer_called_with_another_thing() -> None:
    layer, x = Attention(64, 4), torch.ones(2, 3, 64)
    with pytest.raises(TypeError, match=r"position_embeddings is of type Tensor; .*: the call takes this tensor once"):
        layer(x, x, x)
    quantized = torch_tile.nn.QuantizedLinear.from_linear(nn.Linear(64, 64))
    with pytest.raises(TypeError, match=r"input is of type ndarray; expected a tensor: torch.from_numpy\(input\)"):
        quantized(x.numpy())
