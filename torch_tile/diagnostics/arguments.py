# SPDX-License-Identifier: Apache-2.0
"""Check the arguments of public functions by their signatures and annotations, and name the one that does not fit.

Functions of users that ours call get a note on their errors, which says how they are called.
"""

from __future__ import annotations

import enum
import functools
import inspect
import itertools
import re
import sys
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, ParamSpec, TypeAlias, TypeVar

from torch_tile.diagnostics.spelling import instead_of

if TYPE_CHECKING:
    import torch

P = ParamSpec("P")
R = TypeVar("R")

Kind: TypeAlias = tuple[Callable[[Any], bool], str]
"""What an annotation means: whether a value fits, and what is expected."""

# Tensors have all of these methods.
_NUMBERS: dict[object, Kind] = {
    bool: (
        lambda x: type(x).__name__ in ("bool", "bool_", "SymBool") or (type(x) is int and x in (0, 1)),
        "True or False",
    ),
    int: (
        lambda x: hasattr(x, "__index__") and not hasattr(x, "dim") and type(x).__name__ not in ("bool", "bool_"),
        "an integer",
    ),
    float: (lambda x: hasattr(x, "__float__") and not hasattr(x, "dim"), "a number"),
    str: (lambda x: isinstance(x, str), "a text"),
    type(None): (lambda x: x is None, "None"),
}  # fmt: skip


def _bounded_integer(least: int) -> Kind:
    """Return the check of integers of at least `least`, and its description."""
    is_integer = _NUMBERS[int][0]
    return lambda x: is_integer(x) and not (isinstance(x, int) and x < least), f"an integer of at least {least}"


_FLOATS: Kind = (
    lambda x: type(x).__name__ == "dtype" and bool(getattr(x, "is_floating_point", False)),
    "a torch.dtype of floats",
)
_SIZE = _bounded_integer(0)
Size: TypeAlias = Annotated[int, _SIZE]
"""How many there are of something: features, pages."""
Window: TypeAlias = Annotated[int, (lambda x: x is False or _SIZE[0](x), _SIZE[1])]
"""A size where False, as 0, means that there is none."""
Count: TypeAlias = Annotated[int, _bounded_integer(1)]
"""The same of what others are divided by, as heads."""
FloatDtype: TypeAlias = Annotated["torch.dtype", _FLOATS]
"""The dtype of parameters."""


def names_parameters(function: Callable[P, R]) -> Callable[P, R]:
    """Check all arguments of a function that is called seldom; its TypeError names the one that does not fit."""
    from torch.compiler import is_dynamo_compiling  # not before: `import torch_tile` needs none of it

    @functools.wraps(function)
    def call(*args: P.args, **named: P.kwargs) -> R:
        if not is_dynamo_compiling() and (problem := misfit(function, args, named)):  # Dynamo traces no signatures
            raise problem
        return function(*args, **named)

    return call


def explains_misfits(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function that is called often: check numbers and texts first, explain the rest after a failure."""

    from torch.compiler import is_dynamo_compiling  # not before: `import torch_tile` needs none of it

    def check(args: tuple[Any, ...], named: dict[str, Any]) -> None:
        if is_dynamo_compiling():  # which does not trace signatures
            return
        names, options = _options(function)
        for name, value in refused(names, options, args, named):
            if is_one_number(value) and any(kind in (_NUMBERS[int], _NUMBERS[float]) for kind in options[name]):
                continue  # torch's functions take it, too
            raise misfit(called, args, named) or TypeError(f"{name} is {shown(value)}")

    called = function if hasattr(function, OWNER) else renames()(function)
    return explained(called, lambda: called, check)


def explained(
    function: Callable[P, R],
    described: Callable[[], Callable[..., Any]],
    check: Callable[[tuple[Any, ...], dict[str, Any]], None] | None = None,
    remark: Callable[[tuple[Any, ...], dict[str, Any]], str] | None = None,
) -> Callable[P, R]:
    """Wrap a function: a failed call names the argument that does not fit the signature of `described()`.

    The function's own error stays if it is a TileError, or if all arguments fit; `remark` may add a note to it. `check`
    raises before the call; Dynamo traces it with the function, and nothing else.
    """
    from torch.compiler import is_dynamo_compiling  # not before: `import torch_tile` needs none of it

    @functools.wraps(function)
    def call(*args: P.args, **named: P.kwargs) -> R:
        if check is not None:
            check(args, named)
        if is_dynamo_compiling():
            return function(*args, **named)
        try:
            return function(*args, **named)
        except Exception as failed:
            problem = None if hasattr(failed, "diagnostics") else misfit(described(), args, named)
            if problem is None:
                if function.__name__ == "forward":  # an operator's error names the operator's arguments
                    failed.add_note(_layer_call(args, named))
                if remark is not None and (note := remark(args, named)):
                    failed.add_note(note)
                raise
            raise problem from failed  # maybe of another cause: torch takes some values that annotations do not name

    return call


OWNER = "__tile_owner__"
"""The attribute of a function that `renames` decorates: how its errors name it."""
_RENAMING: set[str] = set()
"""These names."""


def renames(owner: str = "", **names: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function that calls operators, or such functions: their errors name `owner`, and its arguments.

    `explains_misfits` does so for functions that call their arguments as the operator does.

    names: what an operator calls an argument, and what the function calls it. A name of one letter is an argument's at
    the beginning, behind "as" and before an apostrophe. owner: the function's name, if it is another than its own.
    """
    from torch.compiler import is_dynamo_compiling  # not before: `import torch_tile` needs none of it

    def place(name: str) -> str:
        letters = re.escape(name)
        return rf"\b{letters}(?!\w)" if len(name) > 1 else rf"(?:^|(?<=\bas )){letters}\b|\b{letters}(?=')"

    longest_first = "|".join(map(place, sorted(names, key=len, reverse=True))) or "(?!)"
    places = re.compile(rf"({longest_first})('s\b|'(?!\w))?")

    def renamed(at: re.Match[str]) -> str:
        """Return the function's name for an argument of the operator, with an apostrophe where that has one."""
        own = names[at[1]]
        return own if at[2] is None else own + ("'" if own.endswith("s") else "'s")

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        name = owner or function.__qualname__.removesuffix(".forward")
        _RENAMING.add(name)

        @functools.wraps(function)
        def call(*args: P.args, **named: P.kwargs) -> R:
            if is_dynamo_compiling():
                return function(*args, **named)
            try:
                return function(*args, **named)
            except (RuntimeError, TypeError, ValueError, IndexError) as problem:
                called, _, said = str(problem).partition(": ")
                if not called.startswith("tile.") and called not in _RENAMING - {name}:
                    raise
                told = type(problem)(f"{name}: {places.sub(renamed, said)}")
                for note in getattr(problem, "__notes__", ()):
                    told.add_note(places.sub(renamed, note))
                raise told from None

        setattr(call, OWNER, name)
        return call

    return decorate


def is_one_number(value: object) -> bool:
    """Return whether a value is a tensor that stands for a number: no dimensions, no gradient, no truth value."""
    return (
        hasattr(value, "data_ptr")
        and value.dim() == 0  # type: ignore[attr-defined]
        and not value.requires_grad  # type: ignore[attr-defined]
        and not str(value.dtype).endswith("bool")  # type: ignore[attr-defined]
    )


def _layer_call(args: tuple[Any, ...], named: dict[str, Any]) -> str:
    """Return the call of a layer, `args[0]`, as errors name it: what it is, and the tensors that it got."""
    given = [*(_tensor(value) for value in args[1:]), *(f"{name}={_tensor(value)}" for name, value in named.items())]
    layer = str(args[0]).split("\n")[0].rstrip("(")
    return f"in the call of the layer {layer} with {', '.join(given)}"


def _tensor(value: object) -> str:
    """Return a value as messages show it, a tensor by its dtype, shape and device."""
    if not hasattr(value, "data_ptr"):
        return shown(value)
    return f"{value.dtype} {list(value.shape)} on {value.device}"  # type: ignore[attr-defined]


@functools.cache
def _options(function: Callable[..., object]) -> tuple[list[str], dict[str, list[Kind]]]:
    """Return `declared` of a function, with numbers and texts alone."""
    names, kinds = declared(function)
    plain = [*_NUMBERS.values(), Window.__metadata__[0], Size.__metadata__[0]]  # type: ignore[attr-defined]
    return names, {name: kind for name, kind in kinds.items() if all(one in plain for one in kind)}


def declared(
    function: Callable[..., object], kinds: Callable[[inspect.Parameter], list[Kind]] | None = None
) -> tuple[list[str], dict[str, list[Kind]]]:
    """Return the names of a function's positional parameters, and what those of all parameters take that tell it.

    kinds: what a parameter takes, [] where nothing tells; by default what its annotation says.
    """
    given = inspect.signature(function).parameters.values()
    known = kinds or (lambda p: kinds_of(p.annotation, function))
    told = {p.name: known(p) for p in given if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    placed = itertools.takewhile(lambda p: p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD), given)
    return [p.name for p in placed], {name: kind for name, kind in told.items() if kind}


def refused(
    names: Sequence[str], kinds: dict[str, list[Kind]], args: tuple[Any, ...], named: dict[str, Any]
) -> Iterator[tuple[str, Any]]:
    """Yield the arguments of a call that do not fit, by name; `names` and `kinds` are those of `declared`."""
    for name, value in (*zip(names, args, strict=False), *named.items()) if kinds else ():
        if name in kinds and not any(fits(value) for fits, _ in kinds[name]):
            yield name, value


def can_take(function: object, count: int) -> bool:
    """Return whether a function can be called with `count` positional arguments, as far as its signature tells."""
    if not callable(function):
        return False
    try:
        inspect.signature(function).bind(*[None] * count)
    except TypeError:
        return False
    except ValueError:  # it has no signature
        return True
    return True


@contextmanager
def calls_back(how: str) -> Iterator[None]:
    """Add a note to errors of a user's function: how ours call it."""
    try:
        yield
    except Exception as problem:
        problem.add_note(how)
        raise


def misfit(function: Callable[..., object], args: tuple[Any, ...], named: dict[str, Any]) -> TypeError | None:
    """Build the error for the first argument that a signature or its annotation refuses; None if all fit."""
    signature = inspect.signature(function)
    named_as = getattr(function, OWNER, function.__qualname__.removesuffix(".__init__"))
    owner = str(named_as).rpartition("<locals>.")[2]
    unbound: TypeError | None = None
    try:
        bound = signature.bind(*args, **named)
    except TypeError as problem:
        own = [p for p in signature.parameters.values() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
        known = [p.name for p in own if p.name not in ("self", "cls") and not p.name.startswith("_")]
        unknown = next((name for name in named if name not in known), "")
        why = f"got an unexpected keyword argument '{unknown}'" if unknown else str(problem)
        if "too many positional" in why:
            named_only = [p.name for p in own if p.kind is p.KEYWORD_ONLY]
            why += f"; give {named_only[0]} and what follows by name" if named_only else ""
        unbound = TypeError(f"{owner}() {why}{instead_of(unknown, known)}; its parameters are {', '.join(known)}")
        try:
            bound = signature.bind_partial(*args, **named)
        except TypeError:
            return unbound
    for name, value in bound.arguments.items():
        parameter = signature.parameters[name]
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if "sparse" in str(getattr(value, "layout", "")):
            return TypeError(f"{owner}: {name} has layout {value.layout}; expected torch.strided: {name}.to_dense()")
        kinds = kinds_of(parameter.annotation, function)
        if kinds and not any(fits(value) for fits, _ in kinds):
            wanted = " or ".join(dict.fromkeys(text for _, text in kinds))
            if wanted.startswith("a tensor") and function.__name__ == "__init__" and hasattr(args[0], "from_linear"):
                wanted += f": {owner}.from_linear(nn.Linear(...)) makes it"
            elif hasattr(value, "data_ptr") and function.__name__ == "__init__":
                wanted += f": tensors are given to the layer's call, {owner}(...)(x)"
            elif hasattr(value, "data_ptr") and sum(value is each for each in args) > 1:
                wanted += ": the call takes this tensor once"
            elif wanted.startswith("a pair") and hasattr(value, "data_ptr"):
                wanted += f": put both into one tuple, {name}=(first, second)"
            elif near := _misplaced(function, name, args):
                wanted += near
            elif wanted.startswith("a text") and callable(value):
                wanted += f": its name, as {getattr(value, '__name__', type(value).__name__).lower()!r}"
            elif "None" in wanted and isinstance(value, tuple) and all(hasattr(n, "__index__") for n in value):
                wanted += ": leave it out, sizes are read from the tensors"
            elif wanted.startswith(("a tensor", "a function")):
                wanted += _remedy(name, value, wanted)
            return TypeError(f"{owner}: {name} is {shown(value)}; expected {wanted}")
    return unbound


def _misplaced(function: Callable[..., object], name: str, args: tuple[Any, ...]) -> str:
    """Return what to write if the arguments from `name` on fit the parameters one place before or behind theirs."""
    names, kinds = declared(function)
    place = names.index(name) if name in names else len(args)
    rest = args[place:]

    def all_fit(values: tuple[Any, ...], at: int) -> bool:
        """Return whether there are values, and all fit parameters that say what they take, from place `at` on."""
        taken = names[at : at + len(values)]
        known = len(taken) == len(values) > 0 and all(each in kinds for each in taken)
        return known and not any(refused(taken, kinds, values, {}))

    if all_fit(rest[1:], place) and not all_fit(rest[1:], place + 1):
        return ": leave it out, what is given behind it fits"
    is_none = any(fits(None) for fits, _ in kinds[name])
    if all_fit(rest, place + 1):
        missing = f"give None for {name}" if is_none else f"{name} is missing"
        return f": {missing}, as {shown(rest[0])} fits {names[place + 1]}"
    if is_none and len(rest) == 1 and isinstance(rest[0], int | float | str):
        fitting = (n for n in kinds if n not in names[: place + 1] and not any(refused([n], kinds, rest, {})))
        return next((f": give it by name, {n}={shown(rest[0])}" for n in fitting), "")
    return ""


def kinds_of(annotation: object, function: Callable[..., Any]) -> list[Kind]:
    """Return what an annotation of a function's allows; [] if that is anything, or cannot be told."""
    if isinstance(annotation, str):
        try:
            known = inspect.unwrap(function).__globals__
            annotation = eval(annotation, known, {"torch": sys.modules.get("torch")})  # many import it in functions
        except (NameError, AttributeError):  # imported for type checkers only
            return []
    is_union = isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union
    parts = typing.get_args(annotation) if is_union else (annotation,)
    found: list[Kind] = []
    for part in parts:
        origin = typing.get_origin(part) or part
        if hasattr(part, "__metadata__"):
            found.append(part.__metadata__[0])
        elif part in _NUMBERS:
            found.append(_NUMBERS[part])
        elif getattr(part, "__name__", "") == "SymInt":
            found.append(_NUMBERS[int])
        elif origin is Callable:
            found.append((callable, "a function"))
        elif origin is tuple and len(typing.get_args(part)) == 2 and Ellipsis not in typing.get_args(part):
            found.append((functools.partial(_is_one, tuple), "a pair, " + _pair(part, function)))
        elif origin in (Sequence, Iterable, list):
            found.append(_list_of(typing.get_args(part), function))
        elif isinstance(origin, type) and origin not in (object, Any, inspect.Parameter.empty):
            found.append((functools.partial(_is_one, origin), _class(origin)))
        else:
            return []
    return found


def _list_of(element: tuple[object, ...], function: Callable[..., Any]) -> Kind:
    """Return what an annotation of a sequence allows: no tensor, which is not taken for its rows."""
    kinds = kinds_of(element[0], function) if len(element) == 1 else []

    def fits(value: object) -> bool:
        if isinstance(value, list | tuple):
            return not kinds or all(any(fit(each) for fit, _ in kinds) for each in value)
        return hasattr(value, "__iter__") and not isinstance(value, str | dict) and not hasattr(value, "data_ptr")

    return fits, "a list of " + _plural_of_expectation(kinds[0][1]) if len(kinds) == 1 else "a list"


def _pair(annotation: object, function: Callable[..., Any]) -> str:
    """Return what the two elements of a tuple are, as "(a tensor, a tensor)"."""
    texts = [" or ".join(text for _, text in kinds_of(each, function)) for each in typing.get_args(annotation)]
    return f"({', '.join(text or 'any' for text in texts)})"


def _plural_of_expectation(text: str) -> str:
    """Return the plural of an expectation: "integers of at least 0" of "an integer of at least 0"."""
    what, of, bound = text.removeprefix("an ").removeprefix("a ").partition(" of ")
    return f"{what}s{of}{bound}" if text.startswith(("a ", "an ")) else text


def _is_one(kind: type, value: object) -> bool:
    """Return whether a value is of a class, which comes first so that `partial` can set it."""
    return isinstance(value, kind)


def _class(kind: type) -> str:
    """Return a class as messages name it."""
    if issubclass(kind, enum.Enum):
        return f"one of {', '.join(f'{kind.__name__}.{each}' for each in kind.__members__)}"
    if kind.__name__ in ("Mapping", "dict"):
        return "a dict"
    if kind.__name__ == "Tensor":
        return "a tensor"
    name = f"torch.{kind.__name__}" if kind.__module__ == "torch" else kind.__name__
    name = f"nn.{name}" if kind.__module__.startswith("torch.nn.modules") else name
    return f"{'an' if name[0] in 'AEIOUaeioun' and name[0] != 'u' else 'a'} {name}"


def shown(value: object) -> str:
    """Return a value as messages show it: numbers and texts themselves, else the type."""
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)[:60]
    if type(value).__name__ == "dtype":
        return str(value)
    return f"the class {value.__name__}" if isinstance(value, type) else f"of type {type(value).__name__}"


def _remedy(name: str, value: object, wanted: str) -> str:
    """Return what makes a tensor, or a function, of a value."""
    kind = type(value).__name__
    if wanted.startswith("a function"):
        return ": lambda: f(x)" if kind == "Tensor" else ""
    if hasattr(value, "weight"):
        return f": {name}.weight"
    if isinstance(value, list | tuple) and value and all(hasattr(part, "data_ptr") for part in value):
        return f": {name}[0], or torch.stack({name})"
    return {"ndarray": f": torch.from_numpy({name})", "NoneType": ""}.get(kind, f": torch.tensor({name})")
