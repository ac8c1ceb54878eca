# SPDX-License-Identifier: Apache-2.0
import pytest

from torch_tile.__main__ import main
from torch_tile.tools import Mistake, tune

KERNEL = """
import torch_tile
import torch_tile.language as T

CONFIGS = [{"block": 32}, {"block": 64}]


@torch_tile.autotune(configs=CONFIGS, warmup=0, rep=1)
@torch_tile.jit(out_idx=[-1])
def lazy(n, dtype="float32", block=32):
    @T.prim_func
    def main(X: T.Tensor((n,), dtype), Y: T.Tensor((n,), dtype)):
        with T.Kernel(T.ceildiv(n, block), threads=32) as bx:
            for i in T.Parallel(block):
                Y[bx * block + i] = X[bx * block + i] * 2

    return main


@torch_tile.autotune(configs=CONFIGS, warmup=0, rep=1)
@torch_tile.jit
def eager(X, block=32):
    N = T.const("N")
    X: T.Tensor((N,), "float32")
    Y = T.empty((N,), "float32")
    with T.Kernel(T.ceildiv(N, block), threads=32) as bx:
        for i in T.Parallel(block):
            Y[bx * block + i] = X[bx * block + i] * 2
    return Y


def plain(n):
    return n
"""


@pytest.mark.parametrize("words", [["lazy", "100", "float16"], ["lazy", "n=100"], ["eager", "N=100"]])
def test_a_table_of_what_was_tried(words, capsys, tmp_path) -> None:
    (tmp_path / "kernel.py").write_text(KERNEL)
    assert main(["tune", f"{tmp_path / 'kernel.py'}:{words[0]}", *words[1:]]) == 0
    out = capsys.readouterr().out
    assert "32" in out and "64" in out and "best: {'block': " in out


def test_mistakes(capsys, tmp_path) -> None:
    (tmp_path / "kernel.py").write_text(KERNEL)
    for name, words, said in (
        ("plain", ["1"], "@torch_tile.autotune"), ("lazy", ["rows=3"], "rows"), ("nothing", [], "has no function"),
        ("lazy", ["n=3", "4"], "give it a name"),
    ):  # fmt: skip
        with pytest.raises(SystemExit):
            main(["tune", f"{tmp_path / 'kernel.py'}:{name}", *words])
        assert said in capsys.readouterr().err


def test_arguments() -> None:
    assert tune.arguments(["4", "float16", "x=[1, 2]", "flag=True"]) == ([4, "float16"], {"x": [1, 2], "flag": True})
    with pytest.raises(Mistake):
        tune.arguments(["x=1", "2"])
