# SPDX-License-Identifier: Apache-2.0
"""A random program as a tree of lines: traced, given arguments, compared between engines, shrunk where they differ."""

import time
from dataclasses import dataclass, field

import torch

import torch_tile.language as T

WHOLE = "whole"  # small whole numbers, whose sums are exact
# Relative, absolute below 1.
TOLERANCE = {"float32": 1e-5, "float16": 2e-2, "bfloat16": 0.1, "float8": 1.5, WHOLE: 2e-3}
SHRINKING_SECONDS = 90


class Choices:
    """Draws of a generator of programs, by its `random`; `count` is how many names it has made."""

    def pick(self, *options):
        return self.random.choice(options)

    def chance(self, share):
        return self.random.random() < share

    def fresh(self, base):
        """A new name."""
        self.count += 1
        return f"{base}{self.count}"


@dataclass
class Line:
    """A statement, its body if it has one, and the branch after it."""

    text: str
    body: list["Line"] | None = None
    otherwise: list["Line"] | None = None

    def render(self, depth):
        lines = ["    " * depth + part for part in self.text.split("\n")]
        for head, body in ((None, self.body), ("else:", self.otherwise)):
            if body is not None:
                lines += ["    " * depth + head] if head else []
                lines += [x for line in body for x in line.render(depth + 1)] or ["    " * (depth + 1) + "pass"]
        return lines


@dataclass
class Source:
    """A generated program. `tensors` are (name, shape, dtype, is it an input)."""

    name: str
    family: str
    header: list
    body: list
    tensors: list = field(default_factory=list)

    def text(self):
        return "\n".join([*self.header, *[x for line in self.body for x in line.render(2)]]) + "\n"


def traced(text, name, folder):
    """The program that a text says."""
    path = folder / f"{name}.py"
    path.write_text(text)
    space = {"T": T}
    exec(compile(text, str(path), "exec"), space)
    return space[name].program


def arguments(source, seed):
    """Random tensors of a program's parameters."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _, shape, dtype, _ in source.tensors:
        to = getattr(torch, dtype)
        if to.is_floating_point:
            x = torch.randn(shape, generator=generator, dtype=torch.float64).clamp(-2, 2)
            x = x.round() if source.family == WHOLE else x
        else:
            low, high = {"int32": (-20, 100), "int64": (-20, 100), "int16": (-20, 100)}.get(dtype, (0, 200))
            x = torch.randint(low, 2 if dtype == "bool" else high, shape, generator=generator)
        made.append(x.to(to))
    return [*made, seed % 7]


def disagreement(source, got, wanted, names=("compiled", "interpreted")):
    """Where the tensors of two engines differ; empty if nowhere."""
    for (name, *_), x, y in zip(source.tensors, got, wanted, strict=False):
        exact = not x.dtype.is_floating_point
        tolerance = 0 if exact else TOLERANCE[source.family]
        a, b = x.double(), y.double()
        bad = ~((a - b).abs() <= tolerance * b.abs().clamp(min=1.0)) & (a != b) & ~(a.isnan() & b.isnan())
        if bad.any():
            place = bad.nonzero()[0].tolist()
            values = f"{names[0]} {a[tuple(place)]:.6g}, {names[1]} {b[tuple(place)]:.6g}"
            return f"{name}{place}: {values}, {int(bad.sum())} differ"
    return ""


def shrunk(source, fails, seconds=SHRINKING_SECONDS):
    """The program's text with every statement dropped that the failure does not need; `fails()` looks at `source`."""
    deadline = time.monotonic() + seconds

    def reduce_block(block):
        for index in reversed(range(len(block))):
            if time.monotonic() > deadline:
                return
            line = block.pop(index)
            if fails():
                continue
            block.insert(index, line)
            if line.otherwise is not None:
                kept, line.otherwise = line.otherwise, None
                if not fails():
                    line.otherwise = kept
                    reduce_block(kept)
            if line.body:
                reduce_block(line.body)

    reduce_block(source.body)
    return source.text()
