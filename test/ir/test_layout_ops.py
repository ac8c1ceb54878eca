# SPDX-License-Identifier: Apache-2.0

import random
import struct
import xml.etree.ElementTree as ET
import zlib

import pytest

from torch_tile.ir.layout import Layout, points, shared_tile
from torch_tile.ir.layout_ops import fit_memory, fit_threads, png_picture, svg_picture, text_picture

ACCUMULATOR = Layout.parse("[2:2r 8:4t | 4:1t 2:1r]")


def test_text():
    lines = text_picture(ACCUMULATOR).splitlines()
    assert lines[0].startswith("T0 r0   T0 r1   T1 r0") and len(lines) == 16
    assert lines[8].split("  ")[0].strip() == "T0 r2"
    assert text_picture(ACCUMULATOR, 2, 2) == "T0 r0  T0 r1  ...\nT4 r0  T4 r1  ...\n..."
    assert text_picture(Layout.parse("[3:1m]")) == "0  1  2"
    assert text_picture(Layout.parse("[2:8m | 4:2m | 2:1m]")).splitlines()[3] == "6  7"
    assert text_picture(Layout.parse("[]")) == "T0 r0"


def test_svg_has_a_cell_per_element():
    tree = ET.fromstring(svg_picture(ACCUMULATOR))
    texts = [node.text for node in tree.iter() if node.tag.endswith("text")]
    indices, labels = texts[: 16 + 8], texts[16 + 8 :]
    assert indices == [*map(str, range(8)), *map(str, range(16))]
    assert len(labels) == 2 * 16 * 8 and labels[6:8] == ["T1", "r1"] and labels[-2:] == ["T31", "r3"]
    boxes = [node for node in tree.iter() if node.tag.endswith("rect")]
    assert len(boxes) == 16 * 8 + 1 and tree.get("viewBox") == "-34 -34 306 578"


def pixels(png):
    """Width, height and rows of an RGB image, checksums verified."""
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    at, chunks = 8, {}
    while at < len(png):
        (size,) = struct.unpack(">I", png[at : at + 4])
        kind, data = png[at + 4 : at + 8], png[at + 8 : at + 8 + size]
        assert struct.unpack(">I", png[at + 8 + size : at + 12 + size])[0] == zlib.crc32(kind + data)
        chunks[kind], at = data, at + 12 + size
    width, height = struct.unpack(">II", chunks[b"IHDR"][:8])
    raw = zlib.decompress(chunks[b"IDAT"])
    step = 3 * width + 1
    assert len(raw) == height * step and set(raw[::step]) == {0}
    return width, height, [raw[k * step + 1 : (k + 1) * step] for k in range(height)]


def test_png_colours_are_those_of_places(seed):
    cell = random.choice([5, 12])
    width, height, rows = pixels(png_picture(shared_tile((16, 64), 16), 16, cell))
    assert (width, height) == (64 * cell, 16 * cell)

    def colour(i, j):
        return rows[i * cell][3 * j * cell : 3 * j * cell + 3]

    for i, c in random.choices([(i, c) for i in range(16) for c in range(8)], k=20):
        assert colour(i, 8 * c) == colour(0, 8 * (c ^ (i % 8)))  # the same bank
    assert len({colour(i, 0) for i in range(8)}) == 8
    assert pixels(png_picture(ACCUMULATOR))[:2] == (8 * 12, 16 * 12)


P = Layout.parse


@pytest.mark.parametrize("shape", [(8, 64), (3, 16, 64), (24, 32), (64, 16), (16, 192)])
def test_operand_tiles_are_found_again(shape):
    tile = shared_tile(shape, 16)
    assert tile.swizzle is not None
    found = fit_memory(shape, lambda *p: tile.apply(p)["m"])
    assert [found.apply(p) for p in points(shape)] == [tile.apply(p) for p in points(shape)]


def test_digits_of_threads_and_registers():
    layout = P("[3:2r 8:4t | 4:1t 2:1r] x[2:32t]")
    found = fit_threads(layout.shape, lambda i, j, k: layout.apply((i, j))["t"] + 32 * k,
                        lambda i, j: layout.apply((i, j))["r"], 2)  # fmt: skip
    assert found == layout
    counted = fit_threads((4, 6), lambda i, j: i, None)
    assert counted == P("[4:1t | 6:1r]")


def test_a_replica_is_a_thread():
    assert fit_threads((4,), lambda i, k: i + (4 if k else 0) * (1 if i else 2), lambda i: 0, 2) is None
