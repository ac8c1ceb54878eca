# SPDX-License-Identifier: Apache-2.0
"""The language of epilogues: what happens to products before they are stored (`gemm`), or to scores (`attention`).

Decides what a text means: `parse` (strict) and `evaluate` in torch. A kernel author walks `Epilogue.statements` to
print tile expressions; `canonicalize.canonical` makes equal programs equal text; autodiff.py has
derivatives.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch_tile.kernels.epilogue.functions import FUNCTIONS, bind

if TYPE_CHECKING:
    import torch

Operand = str | float
"""An earlier name, `accI`, `xI`, `iI`, or a literal."""

ARITY = {name: function.arity for name, function in FUNCTIONS.items()}
"""Number of operands of every function. Comparisons give 1.0 or 0.0; `where(c, a, b)` is `a` if `c != 0` else `b`;
`min` and `max` give NaN if an operand is NaN."""

ACTIVATIONS = ("none", "relu", "gelu", "gelu_tanh", "silu")

_STATEMENT = re.compile(r"([A-Za-z_]\w*)=([a-z_][a-z0-9_]*)\(([^()]*)\)")
_NAME = re.compile(r"[A-Za-z_]\w*")
_INPUT = re.compile(r"(acc|x|i)(0|[1-9]\d*)")
_INPUTS = {"acc": "products", "x": "auxiliary operands", "i": "indices"}
_LITERAL = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?|[+-]?(inf|nan)")


@dataclass(frozen=True)
class Statement:
    """One statement `name = function(*operands)`."""

    name: str
    function: str
    operands: tuple[Operand, ...]

    def __str__(self) -> str:
        return f"{self.name}={self.function}({','.join(map(format_operand, self.operands))})"


@dataclass(frozen=True)
class Epilogue:
    """A straight-line program over products `acc0..`, auxiliary operands `x0..` and indices `i0..` of an element of the
    result. Every name is set once.
    """

    statements: tuple[Statement, ...]
    result: str

    def __str__(self) -> str:
        return ";".join([*map(str, self.statements), f"ret {self.result}"])

    def inputs(self, prefix: str) -> set[int]:
        """Return the numbers of the products ("acc"), operands ("x") or indices ("i") that the program reads."""
        names = [self.result, *(o for s in self.statements for o in s.operands if isinstance(o, str))]
        matches = (_INPUT.fullmatch(name) for name in names)
        return {int(m[2]) for m in matches if m and m[1] == prefix}


_PROGRAM = re.compile(r"(?:\w+=\w+\([^()]*\);)*ret \w+")


def in_words(description: str) -> str:
    """Replace the programs in a description by the functions that follow each other, as "add x0, relu"."""
    return _PROGRAM.sub(lambda found: _functions(parse(found[0])), description)


def _functions(program: Epilogue) -> str:
    """Return the functions of a program in order, with operands other than the value before and the first product."""
    words, before = [], "acc0"
    for statement in program.statements:
        others = [format_operand(each) for each in statement.operands if each not in (before, "acc0")]
        words.append(" ".join([statement.function, *others]))
        before = statement.name
    return ", ".join(words) or "nothing behind it"


def format_operand(operand: Operand) -> str:
    """Write an operand as text. Literals take the shortest form that reads back as the same float64."""
    return operand if isinstance(operand, str) else repr(operand)


@functools.lru_cache(maxsize=4096)
def parse(
    text: str,
    num_products: int | None = None,
    num_aux: int | None = None,
    num_indices: int | None = None,
    argument: str = "epilogue",
) -> Epilogue:
    """Read an epilogue text; with counts given, also check that it reads no `accI`, `xI` or `iI` beyond them.

    `argument` is what errors call the text.

    Raises:
        ValueError: naming the statement and what is wrong with it.
    """
    *statements, last = text.split(";") if text else ["ret acc0"]
    known: set[str] = set()
    limits = {"acc": num_products, "x": num_aux, "i": num_indices}

    def operand(token: str, where: str) -> Operand:
        """Read one operand: a known name, an input or a literal."""
        if token in known:
            return token
        if match := _INPUT.fullmatch(token):
            limit = limits[match[1]]
            if limit is not None and int(match[2]) >= limit:
                what = _INPUTS[match[1]]
                raise ValueError(f"{argument}: {where!r} reads {token!r}, but the number of {what} is {limit}")
            return token
        if _LITERAL.fullmatch(token):
            return float(token)
        raise ValueError(
            f"{argument}: {where!r} reads {token!r}, which is no earlier name, no acc0.., x0.. or i0.., and no number"
        )

    parsed = []
    for line in statements:
        match = _STATEMENT.fullmatch(line)
        if match is None:
            raise ValueError(f"{argument}: {line!r} is not a statement of the form 'name=function(operand,...)'")
        name, function, operands = match[1], match[2], match[3].split(",") if match[3] else []
        if function not in ARITY:
            raise ValueError(f"{argument}: {line!r} calls {function!r}; known functions are {', '.join(sorted(ARITY))}")
        if len(operands) != ARITY[function]:
            raise ValueError(
                f"{argument}: {line!r} gives {function!r} {len(operands)} operands; it takes {ARITY[function]}"
            )
        if name in known or _INPUT.fullmatch(name) or name in ("inf", "nan"):
            raise ValueError(f"{argument}: {line!r} sets {name!r}, which is taken; every name is set once")
        parsed.append(Statement(name, function, tuple(operand(token, line) for token in operands)))
        known.add(name)

    result = last.removeprefix("ret ")
    if result == last or not _NAME.fullmatch(result) or not isinstance(operand(result, last), str):
        raise ValueError(
            f"{argument}: the last statement must be 'ret NAME', got {last!r}; write 'v=relu(acc0);ret v' for relu"
        )
    return Epilogue(tuple(parsed), result)


@functools.lru_cache(maxsize=256)
def of_layer(activation: str, bias: bool, residual: bool) -> str:
    """Return the text of `activation(acc0 + bias) + residual`. The auxiliary operands come in this order."""
    statements, value, aux = [], "acc0", 0
    if bias:
        statements.append(f"v0=add({value},x0)")
        value, aux = "v0", 1
    if activation != "none":
        statements.append(f"v1={activation}({value})")
        value = "v1"
    if residual:
        statements.append(f"v2=add({value},x{aux})")
        value = "v2"
    return ";".join([*statements, f"ret {value}"])


ADDED = "v0=add(acc0,x0);ret v0"
"""The text of an epilogue that adds an operand to the product."""


def soft_cap(cap: float) -> str:
    """Return the text of `cap * tanh(acc0 / cap)` (Gemma 2, arXiv:2408.00118)."""
    return f"v0=div(acc0,{float(cap)!r});v1=tanh(v0);v2=mul(v1,{float(cap)!r});ret v2"


@functools.cache
def torch_functions() -> dict[str, Callable[..., torch.Tensor]]:
    """Return the torch function of each name, for tensors of one floating dtype."""
    import torch

    return {name: bind(function.torch, torch) for name, function in FUNCTIONS.items()}


class Values:
    """The values of a program's names, each computed when first asked for.

    `inputs` maps `acc0..`, `x0..` and `i0..` to tensors of one floating dtype, or to functions that make them; literals
    become 0-d tensors of `like`'s dtype and device.
    """

    def __init__(
        self, epilogue: Epilogue, inputs: Mapping[str, torch.Tensor | Callable[[], torch.Tensor]], like: torch.Tensor
    ) -> None:
        self._statements = {s.name: s for s in epilogue.statements}
        self._inputs = inputs
        self._like = like
        self._cache: dict[Operand, torch.Tensor] = {}

    def __call__(self, operand: Operand) -> torch.Tensor:
        """Compute the value of a name or literal."""
        import torch

        if isinstance(operand, float):
            return self._like.new_full((), operand)
        if operand not in self._cache:
            if statement := self._statements.get(operand):
                value = torch_functions()[statement.function](*map(self, statement.operands))
            else:
                source = self._inputs[operand]
                value = source if isinstance(source, torch.Tensor) else source()
            self._cache[operand] = value
        return self._cache[operand]


def evaluate(text: str, products: Sequence[torch.Tensor], aux: Sequence[torch.Tensor]) -> torch.Tensor:
    """Apply an epilogue to `products` (`[..., M, N]`) and `aux`, broadcastable to them and of their dtype."""
    inputs = {f"acc{i}": p for i, p in enumerate(products)} | {f"x{i}": x for i, x in enumerate(aux)}
    epilogue = parse(text, len(products), len(aux), 0)
    return Values(epilogue, inputs, products[0])(epilogue.result).expand_as(products[0])
