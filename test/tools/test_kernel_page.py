# SPDX-License-Identifier: Apache-2.0
import re

import pytest

import torch_tile
import torch_tile.language as T
from torch_tile.diagnostics.errors import TileError


@T.prim_func
def product(A: T.Tensor((64, 96), "float16"), B: T.Tensor((96, 64), "float16"), C: T.Tensor((64, 64), "float32")):
    with T.Kernel(1, threads=128) as _:
        a, b = T.alloc_shared((64, 32), "float16"), T.alloc_shared((32, 64), "float16")
        c = T.alloc_fragment((64, 64), "float32")
        T.clear(c)
        for k in T.Pipelined(3, num_stages=2):
            T.copy(A[0, k * 32], a)
            T.copy(B[k * 32, 0], b)
            T.gemm(a, b, c)
        T.copy(c, C)


@pytest.mark.parametrize("target", ["cuda:sm_80", "cuda:sm_90a"])
def test_the_page_tells_what_the_compiler_decided(target: str, tmp_path) -> None:
    page = torch_tile.show(product, target)
    text = page.html()
    assert str(page) == str(page.kernel.schedule) and f"product for {target}" in text
    for note in page.kernel.schedule.remarks:
        assert note.op in text
    for name, scope in (("a", "shared"), ("b", "shared"), ("c", "fragment")):
        assert f"<code>{name}</code>, {scope}" in text
    # both tiles are there twice, 2 x 4096 bytes, and no two tiles of a row overlap
    places = re.findall(r"<title>(\w+) float16 (\d+) B, from byte (\d+)", text)
    assert [(name, size) for name, size, _ in places] == [("a", "8192"), ("b", "8192")]
    assert {int(first) for *_, first in places} == {0, 8192}
    assert "operations a byte, limited by memory" in text
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")
    assert "&lt;!doctype html&gt;" in page._repr_html_() and page.save(tmp_path / "k.html").read_text() == text


def test_tiles_that_share_bytes_lie_below_each_other() -> None:
    @T.prim_func
    def twice(A: T.Tensor((4096,), "float32"), B: T.Tensor((4096,), "float32")):
        with T.Kernel(1, threads=128) as _:
            first, second = T.alloc_shared((4096,), "float32"), T.alloc_shared((4096,), "float32")
            total = T.alloc_fragment((4096,), "float32")
            T.copy(A, first)
            T.copy(first, total)
            T.copy(total, second)
            T.copy(second, B)

    text = torch_tile.show(twice, "cuda:sm_80").html()
    assert re.findall(r"(\w+) float32 16384 B, from byte (\d+)", text) == [("first", "0"), ("second", "0")]
    assert re.findall(r'<rect x="0.0" y="(\d+)"', text) == ["0", "40"]


def test_what_cannot_be_shown() -> None:
    page = torch_tile.show(torch_tile.compile(product, target="cpu"))
    assert str(page.kernel.target) == "cuda:sm_90a"
    with pytest.raises(TileError, match="show: argument `kernel` is function"):
        torch_tile.show(lambda x: x)
    with pytest.raises(TileError, match="show: argument `target` is 'cpu'"):
        torch_tile.show(product, "cpu")
    with pytest.raises(TileError, match=r"show: argument `path` ends in '.png'"):
        page.save("kernel.png")
