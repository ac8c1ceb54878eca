# SPDX-License-Identifier: Apache-2.0
"""Make mistakes in calls by program: edits of each argument of a valid call, and what is wrong with the answer."""

import inspect
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from torch_tile.ops import eager

# Edits that no call means: an answer is due. Other sizes, dtypes and ranks may give a valid call.
NEVER_VALID = {"missing", "misspelt", "unknown", "extra", "None", "type", "choice"}
NEED = (
    r"expected|may be|may hold|must|did you mean|missing|unexpected keyword|needs|one of|takes|give |write |"
    "does not broadcast|too many|shorter|no taps|holds|leave"
)


class Edit(NamedTuple):
    """One edit: the argument ("" for the call's own), the kind, what was put there, and the call's arguments."""

    name: str
    kind: str
    what: str
    args: tuple[Any, ...]
    named: dict[str, Any]


def launch_nothing(monkeypatch) -> None:
    """Let operators check their arguments and give zeros: no kernel is compiled."""

    def zeros(*args: Any, out: Any) -> None:
        for each in out if isinstance(out, tuple) else (out,):
            each.zero_()

    eager.forget()
    monkeypatch.setattr(eager.Eager, "into", property(lambda self: zeros))


def signature_of(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Return the parameters of a function, a class or a layer."""
    target = type(function).forward if isinstance(function, torch.nn.Module) else function
    own = dict(inspect.signature(target).parameters)
    own.pop("self", None)
    return own


def edits_of(function: Callable[..., Any], given: dict[str, Any]) -> Iterator[Edit]:
    """Make each edit of a valid call by name."""
    parameters = signature_of(function)
    for name, value in given.items():
        rest = {key: x for key, x in given.items() if key != name}
        parameter = parameters.get(name)
        if parameter is not None and parameter.default is inspect.Parameter.empty:
            yield Edit(name, "missing", "", (), rest)
        yield Edit(name, "misspelt", misspelt(name), (), {**rest, misspelt(name): value})
        is_optional = parameter is None or "None" in str(parameter.annotation)
        for kind, what, bad in edits(name, value):
            if not (kind == "None" and is_optional):
                yield Edit(name, kind, what, (), {**given, name: bad})
    if all(p.kind is not p.VAR_KEYWORD for p in parameters.values()):
        yield Edit("unknown_name", "unknown", "", (), {**given, "unknown_name": 1})
    places = [p.name for p in parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    if all(p.kind is not p.VAR_POSITIONAL for p in parameters.values()) and list(given)[: len(places)] == places:
        args = tuple(given[name] for name in places)
        yield Edit("", "extra", "", (*args, 1), {name: x for name, x in given.items() if name not in places})


def misspelt(name: str) -> str:
    """Leave out a letter in the middle."""
    at = len(name) // 2
    return name[:at] + name[at + 1 :] if len(name) > 3 else name + "x"


def edits(name: str, value: Any) -> Iterator[tuple[str, str, Any]]:
    """Yield what may be put for a value by mistake: the kind, a text and the value."""
    yield "None", "None", None
    if isinstance(value, torch.Tensor):
        yield from edits_of_tensor(value)
    elif isinstance(value, bool):
        yield from (("type", repr(x), x) for x in ("yes", 2, [True], 0.5))
    elif isinstance(value, int):
        yield from (("type", str(x), x) for x in ("3", 2.5, [1.5], torch.ones(2), True))
        yield "number", "-1", -1
        yield "number", "0", 0
    elif isinstance(value, float):
        yield from (("type", str(x), x) for x in ("0.1", [1.0], torch.ones(2)))
    elif isinstance(value, str):
        yield from (("type", str(x), x) for x in (["a"], torch.ones(2)))
        yield "choice", "misspelt", value + "x"
    elif isinstance(value, torch.dtype):
        yield from (("type", str(x), x) for x in ("float16", 3, float))
    elif isinstance(value, torch.nn.Module):
        yield from (("type", str(x)[:20], x) for x in (3, "a text", torch.ones(2), type(value)))
    elif isinstance(value, dict):
        yield from (("type", str(x), x) for x in (3, "a text", [*value]))
        for key, each in value.items():
            rest = {name: x for name, x in value.items() if name != key}
            yield "misspelt", f"[{key}]", {**rest, misspelt(key): each}
            for kind, what, bad in edits(key, each):
                if kind != "None":
                    yield kind, f"[{key}] {what}", {**rest, key: bad}
    elif isinstance(value, list | tuple):
        yield from (("type", str(x), x) for x in (3, "a text", torch.ones(2, 2)))
        for at, each in enumerate(value):
            for kind, what, bad in edits(name, each):
                yield kind, f"[{at}] {what}", type(value)([*value[:at], bad, *value[at + 1 :]])
    elif callable(value):
        yield from (("type", str(x), x) for x in (3, "a text", [len]))


def edits_of_tensor(value: torch.Tensor) -> Iterator[tuple[str, str, Any]]:
    """Yield other types, dtypes, devices, ranks and sizes of a tensor."""
    plain = value.detach()
    whole = plain if plain.itemsize > 1 else plain.float()
    yield from (("type", type(x).__name__, x) for x in ("a text", 1.5, [value], torch.nn.Linear(2, 2), np.ones(2)))
    others = (torch.int64, torch.complex64) if value.is_floating_point() else (torch.float32,)
    yield from (("dtype", str(dtype), plain.float().to(dtype)) for dtype in others)
    yield "device", "meta", value.to("meta")
    yield "sparse", "sparse", whole.float().to_sparse()
    yield "rank", "[None]", value[None]
    for dim, size in enumerate(value.shape):
        if dim == 0 and size:
            yield "rank", "[0]", value[0]
        if size > 1:
            yield "size", f"dimension {dim} less 1", value.narrow(dim, 0, size - 1)
        yield "size", f"dimension {dim} doubled", value.repeat_interleave(2, dim)
        yield "size", f"dimension {dim} empty", value.narrow(dim, 0, 0)


def fault_of(function: Callable[..., Any], edit: Edit) -> str:
    """Make an edited call; return what is wrong with the answer, "" if nothing is."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            function(*edit.args, **edit.named)
        except AssertionError:  # of a comparison, whose tensors differ
            return ""
        except Exception as problem:
            text = "\n".join([str(problem), *getattr(problem, "__notes__", [])])
        else:
            among = sum(isinstance(x, torch.Tensor) for x in edit.named.values())
            is_wrong = edit.kind in NEVER_VALID or (
                edit.kind == "device" and among > 1 and not isinstance(function, type)
            )
            return "is silent" if is_wrong and not told else ""
    if text.startswith("tile."):  # the caller wrote a layer's or a function's name
        return f"names an operator: {text}"
    names = {edit.name, *signature_of(function)} - {""} if edit.kind != "unknown" else {edit.name}
    names |= {key for value in edit.named.values() if isinstance(value, dict) for key in value}
    if edit.kind != "extra" and not any(re.search(rf"\b{re.escape(name)}\b", text) for name in names):
        return f"names no argument: {text}"
    return "" if re.search(NEED, text) else f"says not what is needed: {text}"
