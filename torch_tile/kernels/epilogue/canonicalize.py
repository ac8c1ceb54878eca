# SPDX-License-Identifier: Apache-2.0
"""Canonical form of epilogue texts, so that equal programs share a kernel and written-out activations become one call.

Assumes a text that `epilogue.parse` accepts. Afterwards: no dead, repeated or trivial statement; statements and the
operands of commutative functions in one order; names `v0..`. Values agree up to rounding (and the sign of a zero).
"""

from __future__ import annotations

import functools
import hashlib
import math

from torch_tile.kernels.epilogue.functions import FUNCTIONS
from torch_tile.kernels.epilogue.program import Epilogue, Operand, Statement, format_operand, parse

COMMUTATIVE = frozenset(name for name, row in FUNCTIONS.items() if row.commutative)

# Sums of products: the sorted atoms of a product (a node twice for its square), and its coefficient.
Polynomial = dict[tuple[int, ...], float]
_MAX_TERMS = 6
_MAX_DEGREE = 8
_ARITHMETIC = frozenset(("add", "sub", "mul", "neg", "square", "div", "pow"))

# Activations that people write out in many ways; `Function.written` has what is always written alike. Gate function ->
# (activation, the gate's argument as {power of x: coefficient}, coefficient of x * gate, coefficient of x).
# silu = x sigmoid(x), gelu = x/2 + x/2 erf(x / sqrt 2), and so on.
_SLOPE = math.sqrt(2 / math.pi)
_GATES: dict[str, tuple[str, dict[int, float], float, float]] = {
    "sigmoid": ("silu", {1: 1.0}, 1.0, 0.0),
    "erf": ("gelu", {1: math.sqrt(0.5)}, 0.5, 0.5),
    "tanh": ("gelu_tanh", {1: _SLOPE, 3: _SLOPE * 0.044715}, 0.5, 0.5),
}


@functools.lru_cache(maxsize=4096)
def canonical(text: str) -> str:
    """Return the canonical text of an epilogue. Texts that differ in names, order, repetition or dead statements give
    one text.

    Raises:
        ValueError: as `epilogue.parse`.
    """
    epilogue = parse(text)
    graph = _Graph()
    nodes: dict[Operand, int] = {}

    def node(operand: Operand) -> int:
        """Return the node of an operand: a named value, or a leaf."""
        if isinstance(operand, str) and operand in nodes:
            return nodes[operand]
        return graph.leaf(operand)

    for statement in epilogue.statements:
        nodes[statement.name] = graph.make(statement.function, *map(node, statement.operands))
    return str(graph.program(node(epilogue.result)))


class _Graph:
    """Value-numbered nodes: an index stands for an expression, and equal expressions have equal indices."""

    def __init__(self) -> None:
        self._nodes: list[tuple[str, tuple[int, ...]]] = []
        self._index: dict[tuple[str, tuple[int, ...]], int] = {}
        self._leaves: dict[int, Operand] = {}
        self._orders: list[tuple[int, float, str]] = []
        self._polynomials: dict[tuple[int, int], Polynomial] = {}

    def leaf(self, operand: Operand) -> int:
        """Return the node of an input or literal."""
        index = self._intern(f"leaf {format_operand(operand)}", ())
        if index not in self._leaves:
            self._leaves[index] = operand
            if isinstance(operand, float):
                self._orders[index] = (3, 0.0 if math.isnan(operand) else operand, repr(operand))
            else:
                prefix = operand.rstrip("0123456789")
                self._orders[index] = (0 if prefix == "acc" else 1, int(operand[len(prefix) :]), prefix)
        return index

    def make(self, function: str, *operands: int) -> int:
        """Return the simplified node of `function(*operands)`."""
        simpler = self._simplify(function, operands)
        if simpler is not None and simpler != self._index.get((function, operands)):
            return simpler
        return self._intern(function, operands)

    def _intern(self, function: str, operands: tuple[int, ...]) -> int:
        """Return the index of an expression, and add a node if it is new."""
        if function in COMMUTATIVE:
            operands = tuple(sorted(operands, key=lambda i: self._orders[i]))
        key = (function, operands)
        if key not in self._index:
            self._index[key] = len(self._nodes)
            self._nodes.append(key)
            digest = hashlib.sha256(f"{function}{[self._orders[i] for i in operands]}".encode()).hexdigest()
            self._orders.append((2, 0.0, digest))
        return self._index[key]

    def _literal(self, index: int) -> float | None:
        """Return the number of a leaf, None for other nodes."""
        value = self._leaves.get(index)
        return value if isinstance(value, float) else None

    def _simplify(self, function: str, operands: tuple[int, ...]) -> int | None:
        """Return an equal, simpler node if a rule knows one. It is never a literal, which is no epilogue's result."""
        if all(self._literal(i) is not None for i in operands):
            return None
        found = self._identity(function, operands)
        if found is None and function in ("mul", "add"):
            found = self._activation(self._intern(function, operands))
        if found is None and function in _written():
            found = self._call_of(self._intern(function, operands))
        return None if found is None or self._literal(found) is not None else found

    def _identity(self, function: str, operands: tuple[int, ...]) -> int | None:
        """Simplify one function: neutral elements, small powers, double negation, `1 / (1 + exp(-x))`, relu."""
        if function in COMMUTATIVE:
            operands = tuple(sorted(operands, key=lambda i: self._orders[i]))  # literals last
        a, b = operands[0], self._literal(operands[-1])
        match function, b:
            case ("mul" | "div" | "pow", 1.0) | ("add" | "sub", 0.0):
                return a
            case ("mul" | "div", -1.0):
                return self.make("neg", a)
            case "pow", 2.0:
                return self.make("square", a)
            case "pow", 0.5:
                return self.make("sqrt", a)
            case "pow", -1.0:
                return self.make("reciprocal", a)
            case "pow", -0.5:
                return self.make("rsqrt", a)
            case "max", 0.0:
                return self.make("relu", a)
        if function == "mul" and operands[0] == operands[1]:
            return self.make("square", a)
        if function == "neg" and self._nodes[a][0] == "neg":
            return self._nodes[a][1][0]
        if function == "div" and self._literal(a) == 1.0:
            return self.make("reciprocal", operands[1])
        if function == "reciprocal":
            match self._nodes[a]:
                case "sqrt", (inner,):
                    return self.make("rsqrt", inner)
            return self._sigmoid_below(a)
        if function == "div" and (sigmoid := self._sigmoid_below(operands[1])) is not None:
            return self.make("mul", a, sigmoid)
        return None

    def _sigmoid_below(self, denominator: int) -> int | None:
        """Return the node `sigmoid(x)` if the denominator is `1 + exp(-x)`."""
        terms = dict(self._polynomial(denominator))
        if terms.pop((), None) != 1.0 or len(terms) != 1:
            return None
        (atoms, coefficient), *_ = terms.items()
        if coefficient != 1.0 or len(atoms) != 1 or self._nodes[atoms[0]][0] != "exp":
            return None
        return self.make("sigmoid", self.make("neg", self._nodes[atoms[0]][1][0]))

    def _polynomial(self, index: int, opaque: int = -1) -> Polynomial:
        """Return the node as a sum of products of atoms. `opaque` ones, and no small polynomials, are one atom."""
        if (index, opaque) not in self._polynomials:
            self._polynomials[index, opaque] = self._expand(index, opaque)
        return self._polynomials[index, opaque]

    def _expand(self, index: int, opaque: int) -> Polynomial:
        """Expand a node into a polynomial of atoms."""
        atom: Polynomial = {(index,): 1.0}
        if (literal := self._literal(index)) is not None:
            return {(): literal}
        function, operands = self._nodes[index]
        if index == opaque or function not in _ARITHMETIC:
            return atom
        if function in ("div", "pow"):
            # Only by a literal, and only to the third power.
            exponent = self._literal(operands[1])
            if not exponent or (function == "pow" and exponent != 3.0):
                return atom
            first = self._polynomial(operands[0], opaque)
            terms: list[Polynomial] = [first, {(): 1 / exponent}] if function == "div" else [first] * 3
        else:
            terms = [self._polynomial(i, opaque) for i in operands] * (2 if function == "square" else 1)
        if function in ("neg", "sub"):
            terms[-1] = {atoms: -c for atoms, c in terms[-1].items()}
        result = functools.reduce(_sum if function in ("add", "sub") else _product, terms)
        small = len(result) <= _MAX_TERMS and all(len(atoms) <= _MAX_DEGREE for atoms in result)
        return result if small else atom

    def _arithmetic_below(self, index: int) -> list[int]:
        """Return the node and its operands, down to the first nodes that are not sums or products, without literals."""
        found = [index]
        for i in found:
            if self._nodes[i][0] in _ARITHMETIC:
                found += [o for o in self._nodes[i][1] if o not in found and self._literal(o) is None]
        return found

    def _activation(self, index: int) -> int | None:
        """Return the node of silu, gelu or gelu_tanh that equals this node, or None."""
        for gate in self._arithmetic_below(index):
            function, operands = self._nodes[gate]
            if function not in _GATES:
                continue
            name, argument, factor, constant = _GATES[function]
            for x in self._arithmetic_below(operands[0]):
                wanted = {tuple(sorted((x, gate))): factor} | ({(x,): constant} if constant else {})
                inner = {(x,) * power: c for power, c in argument.items()}
                if _close(self._polynomial(operands[0], x), inner) and _close(self._polynomial(index, x), wanted):
                    return self.make(name, x)
        return None

    def _call_of(self, index: int) -> int | None:
        """Return the call of a function whose written-out form this node has, or None."""
        for name, program in _written()[self._nodes[index][0]]:
            found: dict[str, int] = {}
            if self._is(index, program.result, {s.name: s for s in program.statements}, found):
                others = (found.get(f"x{n}") for n in range(FUNCTIONS[name].arity - 1))
                return self.make(name, found["acc0"], *(self.leaf(1.0) if x is None else x for x in others))
        return None

    def _is(self, index: int, wanted: Operand, statements: dict[str, Statement], found: dict[str, int]) -> bool:
        """Return whether a node computes `wanted` of the statements. Inputs match any node; `found` records which."""
        if isinstance(wanted, float):
            literal = self._literal(index)
            return literal is not None and math.isclose(literal, wanted, rel_tol=1e-6)
        if wanted not in statements:
            return found.setdefault(wanted, index) == index
        statement, (function, operands) = statements[wanted], self._nodes[index]
        for order in (operands, operands[::-1]) if function in COMMUTATIVE else (operands,):
            trial = dict(found)
            if function == statement.function and all(
                self._is(i, o, statements, trial) for i, o in zip(order, statement.operands, strict=True)
            ):
                found.update(trial)
                return True
        return False

    def program(self, result: int) -> Epilogue:
        """Return the nodes that `result` needs as statements, operands first."""
        statements: list[Statement] = []
        names: dict[int, Operand] = dict(self._leaves)

        def emit(index: int) -> Operand:
            """Emit a node's statement after its operands; return its name."""
            if index not in names:
                function, operands = self._nodes[index]
                values = tuple(map(emit, operands))
                names[index] = f"v{len(statements)}"
                statements.append(Statement(f"v{len(statements)}", function, values))
            return names[index]

        name = emit(result)
        return Epilogue(tuple(statements), str(name))


@functools.cache
def _written() -> dict[str, list[tuple[str, Epilogue]]]:
    """Return the written-out forms and names of functions, by the function that gives the form's result."""
    forms: dict[str, list[tuple[str, Epilogue]]] = {}
    for name, row in FUNCTIONS.items():
        for program in map(parse, row.written):
            last = next(s for s in program.statements if s.name == program.result)
            forms.setdefault(last.function, []).append((name, program))
    return forms


def _sum(a: Polynomial, b: Polynomial) -> Polynomial:
    """Add two linear combinations of atoms."""
    return {atoms: a.get(atoms, 0.0) + b.get(atoms, 0.0) for atoms in {**a, **b}}


def _product(a: Polynomial, b: Polynomial) -> Polynomial:
    """Multiply two polynomials."""
    result: Polynomial = {}
    for left, c in a.items():
        for right, d in b.items():
            atoms = tuple(sorted(left + right))
            result[atoms] = result.get(atoms, 0.0) + c * d
    return result


def _close(got: Polynomial, wanted: Polynomial) -> bool:
    """Return whether polynomials are equal up to rounding of constants to seven digits or to float32."""
    return got.keys() == wanted.keys() and all(math.isclose(got[k], wanted[k], rel_tol=1e-6) for k in got)
