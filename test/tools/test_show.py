# SPDX-License-Identifier: Apache-2.0
import pytest

from torch_tile.__main__ import main

KERNEL = """
import torch_tile.language as T

@T.prim_func
def product(A: T.Tensor((64, 64), "float16"), B: T.Tensor((64, 64), "float16"), C: T.Tensor((64, 64), "float32")):
    with T.Kernel(1, threads=128) as _:
        a, b = T.alloc_shared((64, 64), "float16"), T.alloc_shared((64, 64), "float16")
        plain = T.alloc_shared((32, 32), "float32")
        c = T.alloc_fragment((64, 64), "float32")
        T.annotate_layout({plain: T.make_linear_layout(plain)})
        T.copy(A, a)
        T.copy(B, b)
        T.gemm(a, b, c, clear_accum=True)
        T.copy(c, C)
        T.clear(plain)
        for i, j in T.Parallel(32, 32, loop_layout=lambda i, j: (i, j)):
            C[i, j] += plain[i, j]
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "kernel.py"
    path.write_text(KERNEL)
    return path


def test_show(file, tmp_path, capsys):
    pictures = tmp_path / "pictures"
    arguments = ["show", str(file), "--target", "cuda:sm_80", "--stage", "infer_layouts", "--pictures", str(pictures)]
    assert main([*arguments, "--format", "png", "--format", "txt"]) == 0
    text = capsys.readouterr().out
    rows = {line.split()[0]: line for line in text.splitlines() if line.split()[1:2] in (["shared"], ["fragment"])}
    assert "^(3,3,3)" in rows["a"] and " 8       1  " in rows["a"]
    assert " 32      " not in rows["c"] and "mma.sync accumulator (line 13)" in rows["c"]
    # eight threads together read 16 bytes each of different rows, which are 128 bytes apart: one bank
    assert rows["plain"].split()[-5:] == ["32", "8", "annotated", "(line", "8)"]
    assert "# after infer_layouts" in text and "# after flatten" not in text and "T0 r0" in text
    assert sorted(p.name for p in pictures.iterdir()) == [
        f"product_{name}.{kind}" for name in ("a", "b", "c", "plain") for kind in ("png", "txt")
    ]
    assert len((pictures / "product_c.txt").read_text().splitlines()) == 64


def test_files_without_kernels(tmp_path, capsys):
    (tmp_path / "empty.py").write_text("x = 1\n")
    for name in ("empty.py", "misuse.py"):
        with pytest.raises(SystemExit):
            main(["show", str(tmp_path / name)])
    assert "no T.prim_func" in capsys.readouterr().err
