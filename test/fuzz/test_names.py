# SPDX-License-Identifier: Apache-2.0
"""Names in random nests of device branches and loops mean what they mean in Python, or are refused.

The same text is a kernel and a plain function. TORCH_TILE_FUZZ=1000 runs that many instead of 100,
TORCH_TILE_FUZZ_SEED=n starts from a given seed.
"""

import importlib.util
import os
import random

import pytest
import torch

from torch_tile.diagnostics.errors import TileError
from torch_tile.simulator.tile.interpreter import evaluate

COUNT, FIRST = int(os.environ.get("TORCH_TILE_FUZZ", "100")), int(os.environ.get("TORCH_TILE_FUZZ_SEED", "0"))
NAMES = "xyz"
VALUES = [3.0, -1.0, 0.5, -4.0, 2.0, 0.0, -0.25, 7.0]
KERNEL = """import torch_tile.language as T

def kernel_of(loop):
    @T.prim_func
    def kernel(a: T.Tensor((8,), "float32"), b: T.Tensor((8,), "float32")):
        with T.Kernel(8) as i:
{text}
    return kernel

def plain(loop, a, b, i):
    if True:
        if True:
{text}
"""


class Body:
    """The lines of one body."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        starts = [f"{name} = {self.pick('1.0', '5.0', 'a[i]')}" for name in NAMES if self.random.random() < 0.8]
        self.lines = [" " * 12 + start for start in starts]
        self.block(12, 0, in_loop=False)
        self.lines += [" " * 12 + self.write(name) for name in self.random.sample(NAMES, 2)]

    def pick(self, *items):
        return self.random.choice(items)

    def write(self, name):
        return f"b[i] = b[i] * 2.0 + {name}"

    def value(self):
        number, name = self.random.randint(1, 9), self.pick(*NAMES)
        return self.pick(f"{number}.0", f"{name} + 1.0", f"a[i] * {number}.0", name, f"(1.0, {number}.0)[1]")

    def condition(self):
        number = self.random.randint(-2, 4)
        return self.pick(f"a[i] > {number}.0", f"b[i] > {number}.0", f"{self.pick(*NAMES)} > {number}.0")

    def block(self, indent, depth, in_loop):
        space = " " * indent
        for _ in range(self.random.randint(1, 3)):
            kind = self.random.random()
            if kind < 0.4 or depth == 3:
                self.lines.append(f"{space}{self.pick(*NAMES)} = {self.value()}")
            elif kind < 0.6:
                self.lines.append(space + self.write(self.pick(*NAMES)))
            elif kind < 0.85:
                for branch in (f"if {self.condition()}:", "else:")[: self.pick(1, 2, 2)]:
                    self.lines.append(space + branch)
                    self.block(indent + 4, depth + 1, in_loop)
            elif kind < 0.95 or not in_loop:
                self.lines.append(f"{space}for _ in loop({self.random.randint(1, 3)}):")
                self.block(indent + 4, depth + 1, in_loop=True)
            else:
                self.lines.append(space + self.pick("break", "continue"))
                return


def module_of(path, text):
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("first", range(FIRST, FIRST + COUNT, 20))
def test_names(first, tmp_path):
    import torch_tile.language as T

    accepted = 0
    for seed in range(first, first + 20):
        text = "\n".join(Body(seed).lines)
        module = module_of(tmp_path / f"names_{seed}.py", KERNEL.format(text=text))
        try:
            kernel = module.kernel_of(T.serial)
        except TileError as problem:
            assert problem.code in ("undefined_name", "out_of_scope", "rebound_in_region"), (seed, str(problem))
            continue
        accepted += 1
        found = torch.zeros(8)
        evaluate(kernel, torch.tensor(VALUES), found)
        for i in range(8):
            wanted = [0.0] * 8
            try:
                module.plain(range, VALUES, wanted, i)
            except NameError:  # a name that only some elements bind: nothing is said of them
                continue
            torch.testing.assert_close(found[i].item(), wanted[i], rtol=1e-4, atol=1e-4, msg=f"seed {seed}:\n{text}")
    assert accepted
