# SPDX-License-Identifier: Apache-2.0
"""Pictures of layouts: a grid with one cell per element, as text, SVG or PNG.

A cell of a register layout says thread and register, and threads have colours; a cell of a memory layout says the
offset, and the 32 banks have colours. Dimensions before the last two are at index 0.
"""

from __future__ import annotations

import colorsys
import struct
import zlib
from collections.abc import Callable

from torch_tile.ir.banks import BANKS, WORD
from torch_tile.ir.layout import Layout

Color = tuple[int, int, int]


def text_picture(layout: Layout, rows: int = 16, columns: int = 16) -> str:
    """The first rows and columns as text; `...` stands for the others."""
    height, width = _size(layout)
    cells = [[_label(layout, i, j) for j in range(min(width, columns))] for i in range(min(height, rows))]
    size = max(len(c) for row in cells for c in row)
    lines = ["  ".join(c.ljust(size) for c in row).rstrip() + ("  ..." if width > columns else "") for row in cells]
    return "\n".join([*lines, *(["..."] if height > rows else [])])


def svg_picture(layout: Layout, bits: int = 32, cell: int = 34) -> str:
    """The whole grid as an SVG document; `bits` of an element tell the bank of a memory layout."""
    height, width = _size(layout)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width * cell}" height="{height * cell}" '
        'font-family="monospace" font-size="9" text-anchor="middle">',
        f"<title>{layout}</title>",
    ]
    for i in range(height):
        for j in range(width):
            red, green, blue = _color(layout, i, j, bits)
            x, y = j * cell, i * cell
            parts.append(
                f'<rect x="{x}" y="{y}" width="{cell}" height="{cell}" fill="rgb({red},{green},{blue})" '
                f'stroke="white"/><text x="{x + cell // 2}" y="{y + cell // 2 + 3}">{_label(layout, i, j)}</text>'
            )
    return "\n".join([*parts, "</svg>", ""])


def png_picture(layout: Layout, bits: int = 32, cell: int = 12) -> bytes:
    """The whole grid as a PNG image, a coloured square per element."""
    height, width = _size(layout)
    border = bytes((255, 255, 255))
    rows = []
    for i in range(height):
        line = b"\0" + b"".join(bytes(_color(layout, i, j, bits)) * (cell - 1) + border for j in range(width))
        rows += [line] * (cell - 1) + [b"\0" + border * (cell * width)]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        _chunk(kind, data)
        for kind, data in (
            (b"IHDR", struct.pack(">IIBBBBB", width * cell, height * cell, 8, 2, 0, 0, 0)),
            (b"IDAT", zlib.compress(b"".join(rows), 9)),
            (b"IEND", b""),
        )
    )


FORMATS: dict[str, Callable[[Layout, int], bytes]] = {
    "txt": lambda layout, bits: (text_picture(layout, *_size(layout)) + "\n").encode(),
    "svg": lambda layout, bits: svg_picture(layout, bits).encode(),
    "png": png_picture,
}


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def _size(layout: Layout) -> tuple[int, int]:
    shape = (1, 1, *layout.shape)
    return shape[-2], shape[-1]


def _place(layout: Layout, i: int, j: int) -> dict[str, int]:
    return layout.apply((*(0,) * (layout.rank - 2), i, j)[-layout.rank :] if layout.rank else ())


def _label(layout: Layout, i: int, j: int) -> str:
    place = _place(layout, i, j)
    return str(place["m"]) if layout.digits("m") else f"T{place['t']} r{place['r']}"


def _color(layout: Layout, i: int, j: int, bits: int) -> Color:
    """Neighbouring numbers get different hues; registers of one thread get darker."""
    place = _place(layout, i, j)
    if layout.digits("m"):
        hue, light = place["m"] * bits // (8 * WORD) % BANKS / BANKS, 0.8
    else:
        hue, light = place["t"] * 0.618034 % 1, 0.85 - 0.35 * place["r"] / layout.extent("r")
    return tuple(int(255 * c) for c in colorsys.hls_to_rgb(hue, light, 0.7))  # type: ignore[return-value]
