# SPDX-License-Identifier: Apache-2.0
"""Kernels that are in no file: cells of a notebook, lines of a prompt, generated text."""

import code
import linecache
from pathlib import Path

import pytest
import torch

import torch_tile
import torch_tile.language as T
from torch_tile.diagnostics.errors import TileError

CELL = """
@torch_tile.jit
def scale(A, block=64):
    N = T.const("N")
    A: T.Tensor((N,), "float32")
    B = T.empty((N,), "float32")
    with T.Kernel(T.ceildiv(N, block), threads=64) as bx:
        for i in T.Parallel(block):
            B[bx * block + i] = A[bx * block + i] * 2
    return B
"""
PRIM = """
@T.prim_func
def scale(A: T.Tensor((100,), "float32"), B: T.Tensor((100,), "float32")):
    with T.Kernel(1, threads=64) as _:
        for i in T.Parallel(100):
            B[i] = A[i] * 2
"""


class Prompt:
    """Runs cells as IPython and the prompt of Python 3.13 do: each is compiled under a name that linecache knows."""

    def __init__(self) -> None:
        self.names = {"torch_tile": torch_tile, "T": T, "torch": torch}
        self.count = 0

    def run(self, text: str) -> dict:
        name, self.count = f"<python-input-{self.count}-{id(self)}>", self.count + 1
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
        exec(compile(text, name, "exec"), self.names)
        return self.names


@pytest.fixture
def prompt() -> Prompt:
    return Prompt()


@pytest.mark.parametrize("before", ["", "\n\nx = 1\n", "if True:\n    y = 2\n"])
def test_a_cell_is_a_source(prompt: Prompt, before: str) -> None:
    x = torch.randn(int(torch.randint(1, 300, ())))
    torch.testing.assert_close(prompt.run(before + CELL)["scale"](x), x * 2)


def test_a_cell_run_again_after_an_edit_is_another_kernel(prompt: Prompt) -> None:
    x = torch.randn(100)
    old = prompt.run(CELL)["scale"]
    new = prompt.run(CELL.replace("* 2", "* 3"))["scale"]
    for _ in range(2):
        torch.testing.assert_close(old(x), x * 2)
        torch.testing.assert_close(new(x), x * 3)


def test_an_edit_of_shapes_alone_is_another_kernel(prompt: Prompt) -> None:
    """Annotations of local names are no part of a code object, so that the codes of both cells are equal."""
    prompt.run(CELL)["scale"](torch.randn(10))
    found = prompt.run(CELL.replace('(N,), "float32")\n    B', '(N,), "float64")\n    B'))["scale"]
    with pytest.raises(Exception, match="float64"):
        found(torch.randn(10))


def test_kernels_of_a_cell_may_use_names_of_other_cells(prompt: Prompt) -> None:
    prompt.run("factor = 5\n@T.macro\ndef times(x):\n    return x * factor\n")
    x = torch.randn(70)
    torch.testing.assert_close(
        prompt.run(CELL.replace("A[bx * block + i] * 2", "times(A[bx * block + i])"))["scale"](x), x * 5
    )


def test_an_error_shows_the_line_of_its_cell(prompt: Prompt) -> None:
    names = prompt.run("\n" + CELL.replace("* 2", "* missing"))
    with pytest.raises(TileError) as caught:
        names["scale"](torch.randn(10))
    span = caught.value.diagnostics[0].span
    assert span is not None and span.line == 10 and "python-input-0" in span.file
    assert "A[bx * block + i] * missing" in str(caught.value)


def test_a_kernel_of_a_cell_is_shown(prompt: Prompt) -> None:
    kernel = prompt.run(PRIM)["scale"]
    page = torch_tile.show(kernel)
    assert "scale for cuda:sm_90a" in page.html() and "<iframe" in page._repr_html_()
    assert "B[i] = A[i] * 2" in str(torch_tile.compile(kernel, target="cpu").profile())


def test_generated_text_has_no_source_until_linecache_knows_it() -> None:
    names: dict = {"torch_tile": torch_tile, "T": T}
    with pytest.raises(TileError, match=r"source of `scale` cannot be read[\s\S]*linecache.cache"):
        exec(CELL, names)
    linecache.cache["<generated>"] = (len(CELL), None, CELL.splitlines(keepends=True), "<generated>")
    exec(compile(CELL, "<generated>", "exec"), names)
    x = torch.randn(33)
    torch.testing.assert_close(names["scale"](x), x * 2)


def test_a_prompt_without_sources_says_so(capsys: pytest.CaptureFixture) -> None:
    """The prompt of Python 3.11 and 3.12 keeps no text."""
    console = code.InteractiveConsole({"torch_tile": torch_tile, "T": T, "torch": torch}, filename="<stdin>")
    for line in [*CELL.strip().splitlines(), "", "found = scale(torch.ones(3))", "print(found.tolist())"]:
        console.push(line)
    seen = capsys.readouterr()
    assert "[2.0, 2.0, 2.0]" in seen.out or "define the kernel in a file or a notebook cell" in seen.err


def test_ipython(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    shell_type = pytest.importorskip("IPython.core.interactiveshell").InteractiveShell
    shell = shell_type()
    shell.run_cell("import torch, torch_tile\nimport torch_tile.language as T").raise_error()
    for factor in (2, 3):
        shell.run_cell(CELL.replace("* 2", f"* {factor}")).raise_error()
        result = shell.run_cell("scale(torch.ones(5)).tolist()")
        result.raise_error()
        assert result.result == [factor] * 5
