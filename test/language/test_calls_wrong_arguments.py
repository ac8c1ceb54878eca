# SPDX-License-Identifier: Apache-2.0
"""Values of wrong types for each parameter of each function of T: the error names the author's line."""

import inspect
from types import FunctionType

import pytest
import torch

import torch_tile.language as T
from torch_tile.diagnostics.errors import TileError

WRONG = {
    "nothing": None, "a text": "wrong!", "an object": object(), "a tensor of torch": torch.zeros(3),
    "a dict": {"a": 1}, "a list": [1, "a"], "a function": lambda: 0, "a fraction": 2.5,
}  # fmt: skip
TILES = ("src", "a", "A", "buffer", "base", "data", "tile")
RESULTS = ("dst", "out", "c", "C", "b", "B")
# What decorators take without effect here, as TileLang has it.
ANYTHING = {
    "private", "check_well_formed", "eager_jit", "hygienic",
}  # fmt: skip
FUNCTIONS = [name for name in T.__all__ if isinstance(getattr(T, name), FunctionType)]


def fitting(parameter, tiles):
    """A value that fits a parameter, as far as its name and annotation tell."""
    if parameter.name in ("dtype", "to"):
        return "float32"
    if parameter.name == "shape":
        return (32, 32)
    if "Tile" in str(parameter.annotation) or parameter.name in TILES:
        return tiles[0]
    if parameter.name in RESULTS:
        return tiles[1]
    if "int" in str(parameter.annotation) and "Callable" not in str(parameter.annotation):
        return 1
    return "x" if "str" in str(parameter.annotation) else tiles[2]


def call(function, wrong, value, tiles):
    """Call a function with a value for one parameter, and what may fit for all others without a default."""
    given, named = [], {}
    for parameter in inspect.signature(function).parameters.values():
        needed = parameter.default is parameter.empty and parameter.kind is not parameter.VAR_POSITIONAL
        if parameter.kind is parameter.VAR_KEYWORD or not (needed or parameter.name == wrong):
            continue
        one = value if parameter.name == wrong else fitting(parameter, tiles)
        by_place = parameter.kind in (parameter.POSITIONAL_ONLY, parameter.VAR_POSITIONAL)
        if by_place or (needed and not named and parameter.kind is not parameter.KEYWORD_ONLY):
            given.append(one)
        else:
            named[parameter.name] = one
    function(*given, **named)


def refusal(function, wrong, value):
    """The error of a kernel that calls a function with a wrong value; None if it is traced."""
    try:

        @T.prim_func
        def kernel(X: T.Tensor((32, 32), "float32"), Y: T.Tensor((32, 32), "float32")):
            with T.Kernel(1, threads=32) as _:
                a, b = T.alloc_shared((32, 32), "float32"), T.alloc_shared((32, 32), "float32")
                call(function, wrong, value, (a, b, X[0, 0]))
    except TileError as problem:
        return problem
    return None


@pytest.mark.parametrize("name", FUNCTIONS)
def test_wrong_arguments(name):
    function = getattr(T, name)
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            continue
        for what, value in WRONG.items():
            problem = refusal(function, parameter.name, value)  # raises what is no error of an author
            if problem is not None:
                assert __file__ in str(problem), (what, problem)
            elif str(parameter.annotation) in ("bool", "int", "str", "Scalar"):
                fits = {"bool": (), "int": (), "str": ("a text",), "Scalar": ("a fraction",)}
                is_default = value is parameter.default
                assert is_default or what in fits[str(parameter.annotation)] or parameter.name in ANYTHING, (
                    f"T.{name} takes {what} for {parameter.name}: {parameter.annotation}"
                )


@pytest.mark.parametrize("name", FUNCTIONS)
def test_misspelt_keyword(name):
    """A keyword that no function has, of each function that has none of any name."""
    function = getattr(T, name)
    if any(p.kind is p.VAR_KEYWORD for p in inspect.signature(function).parameters.values()):
        pytest.skip("it takes keywords of any name")

    with pytest.raises(TileError) as told:

        @T.prim_func
        def kernel(X: T.Tensor((32, 32), "float32")):
            with T.Kernel(1, threads=32) as _:
                function(misspelt=1)

    assert told.value.code == "unknown_keyword" and "misspelt" in str(told.value) and __file__ in str(told.value)
