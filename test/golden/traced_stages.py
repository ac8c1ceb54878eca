# SPDX-License-Identifier: Apache-2.0
"""What a GPU's passes make of a program, one by one, and that the printed text of each says the same program."""

import linecache
from dataclasses import replace

import torch_tile.language as T
from torch_tile.ir.idmap import IdMap
from torch_tile.ir.node import Rewriter, alike
from torch_tile.ir.verify import verify
from torch_tile.lowering import cuda_passes
from torch_tile.lowering.common.simplify import simplify_program


def stages(program, build):
    """Each pass that changed the program, by name, and what it made, which is well formed."""
    for step, stage in cuda_passes(build):
        new = step(program)
        verify(new, stage)
        if new is not program:
            yield step.__name__, new
        program = new


def trace(text):
    """The program that printed text says."""
    name = f"<traced back {len(linecache.cache)}>"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    scope = {"T": T}
    exec(compile(text, name, "exec"), scope)
    return next(f.program for f in scope.values() if isinstance(f, T.PrimFunc))


class _Unsaid(Rewriter):
    """Forget the bounds of variables' values, which the text does not say and `simplify_program` uses."""

    def __init__(self):
        self.found = IdMap()

    def visit_Buffer(self, buffer):
        if buffer.below and buffer not in self.found:
            self.found[buffer] = replace(buffer, below=0)
        return self.found.get(buffer, buffer)

    def visit_Alloc(self, node):
        return replace(self.children(node), buffer=self.visit_Buffer(node.buffer))


def traces_back(step, program):
    """Assert that the text of what a pass made is traced to the same program."""
    text = repr(program)
    back = trace(text)  # tracing computes with literals at once
    assert alike(simplify_program(back), simplify_program(_Unsaid()(program))), f"after {step}:\n{text}\n{back}"
