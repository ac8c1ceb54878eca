# SPDX-License-Identifier: Apache-2.0
"""Values of wrong types for each argument of each public function, class and operator: the error names the argument."""

import inspect
import types
import typing
from collections.abc import Callable

import numpy as np
import pytest
import torch

import torch_tile
import torch_tile.testing
from torch_tile import nn, ops
from torch_tile.integrations import serving
from torch_tile.nn import functional, packing
from torch_tile.ops.registry import OPERATORS, hints_of

NO_TENSORS = ("a text", 3, [1.0], np.ones(2))
WRONG = {
    bool: ("yes", None, 2.5, [True]),
    int: ("3", 2.5, [1], None),
    float: ("0.1", [1.0], None),
    str: (3, ["a"], None),
    torch.Tensor: (*NO_TENSORS, None),
    torch.dtype: ("float16", 3),
    torch.nn.Module: (3, "a text", torch.ones(2)),
    Callable: (3, "a text", [len]),
    "tensors": (torch.ones(2), 3, ["a"], [3]),
}
"""Values that a type of annotations does not take."""
FITTING = {
    bool: False,
    int: 4,
    float: 1.0,
    str: "none",
    torch.dtype: torch.float32,
    "tensors": [],
    Callable: lambda *x: None,
}
MODULES = {"nn": nn, "functional": functional, "packing": packing, "serving": serving, "testing": torch_tile.testing}


def public():
    """Every public function and class with typed arguments, by a name for the test."""
    for where, module in MODULES.items():
        for name, value in vars(module).items():
            is_own = getattr(value, "__module__", "").startswith("torch_tile") and callable(value)
            listed = name in getattr(module, "__all__", (name,)) and not name.startswith("_")
            defined = where == "nn" or getattr(value, "__module__", "") == module.__name__
            if is_own and listed and defined and hasattr(value, "__wrapped__" if where != "nn" else "__name__"):
                yield f"{where}.{name}", value
    for name in ops.__all__:
        yield f"ops.{name}", getattr(ops, name)
    for name in ("do_bench", "explain", "replace_layers", "show", "custom_op"):
        yield name, getattr(torch_tile, name)


PUBLIC = dict(public())


def parameters_of(function):
    """The typed parameters of a function: their kinds, and the words of `WRONG` that they take."""
    target = function.__init__ if inspect.isclass(function) else function
    try:
        hints = typing.get_type_hints(inspect.unwrap(target))
    except NameError:  # imported for type checkers only
        hints = {}
    for parameter in inspect.signature(function).parameters.values():
        hint = hints.get(parameter.name, parameter.annotation)
        union = typing.get_origin(hint) in (typing.Union, types.UnionType)
        yield parameter, kinds_of(typing.get_args(hint) if union else (hint,))


def kinds_of(hints):
    """The keys of `WRONG` for parts of an annotation, with None for types that it does not have."""
    found = []
    for hint in hints:
        if typing.get_origin(hint) is not None and typing.get_args(hint) == (torch.Tensor,):
            found.append("tensors")
        elif typing.get_origin(hint) is Callable:
            found.append(Callable)
        elif hint is type(None) or getattr(hint, "__name__", "") == "SymInt":
            found.append("nothing" if hint is type(None) else int)
        else:
            found.append(hint if hint in WRONG else None)
    return found


def mistakes(parameters):
    """Each parameter with each value that its annotation refuses."""
    for parameter, kinds in parameters:
        if None in kinds:
            continue
        kinds = [kind for kind in kinds if kind != "nothing"]
        optional = len(kinds) < len(dict(parameters).get(parameter, kinds))
        if len(kinds) == 1:
            for value in WRONG[kinds[0]]:
                if not (value is None and (optional or parameter.default is None)):
                    yield parameter.name, value


def fitting(kinds):
    """A value that fits an annotation, as far as the tests know."""
    wanted = [kind for kind in kinds if kind not in (None, "nothing")]
    if not wanted:
        return torch.ones(4, 4)
    return torch.nn.Linear(4, 4) if wanted[0] is torch.nn.Module else FITTING.get(wanted[0], torch.ones(4, 4))


def check(call, parameters, name):
    parameters = list(parameters)
    needed = {
        p.name: fitting(kinds) for p, kinds in parameters
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    }  # fmt: skip
    for wrong, value in mistakes(parameters):
        with pytest.raises((TypeError, ValueError)) as told:
            call(**{**needed, wrong: value})
        assert wrong in str(told.value), (name, wrong, value, told.value)


@pytest.mark.parametrize("name", PUBLIC)
def test_the_error_names_the_argument(name):
    check(PUBLIC[name], parameters_of(PUBLIC[name]), name)


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_of_the_dispatcher_name_it_too(name):
    """`torch.ops.tile.NAME(...)`, whose arguments torch checks first."""
    args = OPERATORS[name].args
    tensor = {hint: torch.Tensor for hint in hints_of(args).values() if isinstance(hint, typing.TypeVar)}
    parameters = []
    for parameter in inspect.signature(args).parameters.values():
        hint = hints_of(args)[parameter.name]
        union = typing.get_origin(hint) in (typing.Union, types.UnionType)
        parts = typing.get_args(hint) if union else (hint,)
        typed = [tensor.get(p, p[torch.Tensor] if getattr(p, "__parameters__", ()) else p) for p in parts]
        parameters.append((parameter, kinds_of(typed)))
    check(getattr(torch.ops.tile, name), parameters, name)


@pytest.mark.parametrize("name", PUBLIC)
def test_a_misspelt_keyword_is_named(name):
    if any(p.kind is p.VAR_KEYWORD for p in inspect.signature(PUBLIC[name]).parameters.values()):
        pytest.skip("it takes keywords of any name")
    with pytest.raises(TypeError, match="misspelt"):
        PUBLIC[name](misspelt=1)
