# SPDX-License-Identifier: Apache-2.0
import random
import struct
import xml.etree.ElementTree as ET
import zlib

from torch_tile.ir.layout import Layout, shared_tile
from torch_tile.ir.layout_picture import png_picture, svg_picture, text_picture

ACCUMULATOR = Layout.parse("[2:2r 8:4t | 4:1t 2:1r]")


def test_text():
    lines = ACCUMULATOR.picture().splitlines()
    assert lines[0].startswith("T0 r0   T0 r1   T1 r0") and len(lines) == 16
    assert lines[8].split("  ")[0].strip() == "T0 r2"
    assert text_picture(ACCUMULATOR, 2, 2) == "T0 r0  T0 r1  ...\nT4 r0  T4 r1  ...\n..."
    assert text_picture(Layout.parse("[3:1m]")) == "0  1  2"
    assert text_picture(Layout.parse("[2:8m | 4:2m | 2:1m]")).splitlines()[3] == "6  7"
    assert text_picture(Layout.parse("[]")) == "T0 r0"


def test_svg_has_a_cell_per_element():
    tree = ET.fromstring(svg_picture(ACCUMULATOR))
    texts = [node.text for node in tree.iter() if node.tag.endswith("text")]
    assert len(texts) == 16 * 8 and texts[3] == "T1 r1" and texts[-1] == "T31 r3"


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
