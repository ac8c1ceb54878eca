# SPDX-License-Identifier: Apache-2.0
"""T.create_tma_descriptor and T.tma_load: bulk copies with numbers for all."""

import pytest
import torch

import torch_tile
import torch_tile.language as T
from torch_tile.diagnostics.errors import TileError

ROWS, COLUMNS = 64, 136


def described(A, box=(32, 16), type_=7, **changed):
    """The descriptor of a float32 tensor (ROWS, COLUMNS), with a box of (columns, rows) and what is `changed`."""
    numbers = {
        "sizes": (COLUMNS, ROWS), "strides": (4, 4 * COLUMNS), "box": box, "steps": (1, 1), "rest": (0, 0, 2, 0),
        **changed,
    }  # fmt: skip
    return T.create_tma_descriptor(type_, 2, A, *(n for part in numbers.values() for n in part))


def test_boxes_come_where_the_numbers_say():
    """Two boxes, of which one reaches beyond the tensor, for one mbarrier, whose bytes the author counts."""

    @T.prim_func
    def kernel(A: T.Tensor((ROWS, COLUMNS), "float32"), B: T.Tensor((2, 16, 32), "float32")):
        with T.Kernel(1, threads=128):
            tile = T.alloc_shared((2, 16, 32), "float32")
            T.create_list_of_mbarrier(1)
            boxes = described(A.data)
            if T.get_thread_binding(0) == 0:
                T.mbarrier_expect_tx(T.get_mbarrier(0), 2 * 16 * 32 * 4)
                T.tma_load(boxes, T.get_mbarrier(0), tile[0, 0, 0], 64, 24, 0)
                T.tma_load(boxes, T.get_mbarrier(0), T.access_ptr(tile[1, 0, 0], "w", 16 * 32), 120, 56)
                T.mbarrier_arrive(0)
            T.mbarrier_wait_parity(0, 0)
            T.copy(tile, B)

    a, b = torch.randn(ROWS, COLUMNS), torch.full((2, 16, 32), torch.nan)
    compiled = torch_tile.compile(kernel, target="cuda:sm_90a")
    assert compiled.source.count("tma_load") == 2 and compiled.source.count("mbarrier_expect") == 1
    findings = compiled.interpret(a, b)
    assert not findings, findings.report()
    wide = torch.nn.functional.pad(a, (0, 32, 0, 32))
    assert torch.equal(b, torch.stack([wide[24:40, 64:96], wide[56:72, 120:152]]))


@pytest.mark.parametrize("layout", [None, "swizzled"])
def test_a_swizzle_needs_a_layout(layout):
    def build():
        @T.prim_func
        def kernel(A: T.Tensor((ROWS, COLUMNS), "float32"), B: T.Tensor((16, 32), "float32")):
            with T.Kernel(1, threads=128):
                tile = T.alloc_shared((16, 32), "float32")
                if layout:
                    T.annotate_layout({tile: T.make_swizzled_layout(tile)})
                ready = T.alloc_barrier(1)
                boxes = described(A, rest=(0, 3, 0, 0))
                if T.get_thread_binding(0) == 0:
                    T.mbarrier_expect_tx(ready[0], 16 * 32 * 4)
                    T.tma_load(boxes, ready[0], tile, 32, 16)
                    T.mbarrier_arrive(ready[0])
                T.mbarrier_wait_parity(ready[0], 0)
                T.copy(tile, B)

        return kernel

    if layout is None:
        with pytest.raises(TileError, match="swizzle"):
            build()
        return
    a, b = torch.randn(ROWS, COLUMNS), torch.zeros(16, 32)
    findings = torch_tile.compile(build(), target="cuda:sm_90a").interpret(a, b)
    assert not findings, findings.report()
    assert torch.equal(b, a[16:32, 32:64])


@pytest.mark.parametrize(
    ("use", "name"),
    [
        (lambda A, tile, bar: described(A, type_=6), "data_type"),
        (lambda A, tile, bar: described(tile), "global_address"),
        (lambda A, tile, bar: described(A, sizes=(ROWS, COLUMNS)), "numbers"),
        (lambda A, tile, bar: described(A, strides=(4, 4 * ROWS)), "numbers"),
        (lambda A, tile, bar: described(A, box=(512, 1)), "numbers"),
        (lambda A, tile, bar: described(A, steps=(1, 2)), "numbers"),
        (lambda A, tile, bar: described(A, rest=(1, 0, 0, 0)), "numbers"),
        (lambda A, tile, bar: described(A, rest=(0, 0, 0, 1)), "numbers"),
        (lambda A, tile, bar: described(A, rest=(0, 0, 0)), "rank"),
        (lambda A, tile, bar: T.tma_load(A, bar, tile, 0, 0), "descriptor"),
        (lambda A, tile, bar: T.tma_load(described(A), bar, tile, 0), "coordinates"),
        (lambda A, tile, bar: T.tma_load(described(A), bar, tile, 0, 0, 7), "coordinates"),
        (lambda A, tile, bar: T.tma_load(described(A), bar, A, 0, 0), "smem"),
        (lambda A, tile, bar: T.tma_load(described(A, box=(16, 16)), bar, tile, 0, 0), "smem"),
    ],
)
def test_numbers_that_are_not_the_tensors(use, name):
    with pytest.raises(TileError, match=f"argument `{name}`"):

        @T.prim_func
        def kernel(A: T.Tensor((ROWS, COLUMNS), "float32")):
            with T.Kernel(1, threads=128):
                tile, ready = T.alloc_shared((16, 32), "float32"), T.alloc_barrier(1)
                use(A, tile, ready[0])
