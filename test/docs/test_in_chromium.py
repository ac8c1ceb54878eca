# SPDX-License-Identifier: Apache-2.0
"""Our pages in a headless Chromium, where one is installed: their structure, and that a screenshot shows it.

A script that the test adds writes the boxes of all headings, cells and pictures into the page. The screenshot must have
ink in each of them and none beside the page, and boxes of one kind must not lie on each other.
"""

import json
import re
import shutil
import struct
import subprocess
import zlib
from html import escape, unescape
from pathlib import Path

import numpy as np
import pytest
import torch

import torch_tile
import torch_tile.language as T

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
WIDTH, HEIGHT = 1000, 1400
PROBE = """<script>
const parts = [...document.querySelectorAll("h1, h2, th, td, summary, .tile, section, svg, pre")];
const boxes = parts.filter(e => e.checkVisibility()).map(e => {
  const b = e.getBoundingClientRect();
  const words = e.textContent.trim().slice(0, 40);
  return [e.tagName.toLowerCase(), b.left, b.top, b.width, b.height, words];
});
const found = {width: document.documentElement.scrollWidth, boxes: boxes};
document.body.append(Object.assign(document.createElement("textarea"), {textContent: JSON.stringify(found)}));
</script></body>"""

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")


def chromium(page: Path, *options: str) -> str:
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--window-size={WIDTH},{HEIGHT}"]
    profile = f"--user-data-dir={page.parent / 'profile'}"
    command = [str(CHROMIUM), *flags, profile, *options, page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout


def pixels(path: Path) -> torch.Tensor:
    """The rows of a PNG of 8 bits a channel, [height, width, channels]."""
    data, at, kept = path.read_bytes(), 8, b""
    width, height, bits, kind = struct.unpack(">IIBB", data[16:26])
    assert bits == 8 and kind in (2, 6)
    while at < len(data):
        size, name = struct.unpack(">I4s", data[at : at + 8])
        kept += data[at + 8 : at + 8 + size] if name == b"IDAT" else b""
        at += size + 12
    channels = 3 if kind == 2 else 4
    lines = np.frombuffer(zlib.decompress(kept), np.uint8).reshape(height, 1 + width * channels)
    above = np.zeros((width, channels), np.uint8)
    rows = []
    for form, line in zip(lines[:, 0], lines[:, 1:].reshape(height, width, channels), strict=True):
        if form == 1:  # differences to the left
            above = np.cumsum(line, 0, dtype=np.uint8)
        elif form == 2:  # to the row above
            above = line + above
        else:
            above = line if form == 0 else row_of(int(form), line, above)
        rows.append(above)
    return torch.from_numpy(np.stack(rows))


def row_of(form: int, line: np.ndarray, above: np.ndarray) -> np.ndarray:
    """A row of PNG's filters 3, the mean of left and above, and 4, the nearest of left, above and corner."""
    given, up = line.tolist(), above.tolist()
    row, left, corner = [], [0] * line.shape[1], [0] * line.shape[1]
    for pixel, over in zip(given, up, strict=True):
        pairs = zip(pixel, left, over, corner, strict=True)
        guess = (lambda a, b, c: (a + b) // 2) if form == 3 else paeth
        left = [(x + guess(a, b, c)) & 255 for x, a, b, c in pairs]
        corner = over
        row.append(left)
    return np.array(row, np.uint8)


def paeth(left: int, above: int, corner: int) -> int:
    """The neighbour that is nearest to left + above - corner."""
    at = left + above - corner
    return min((left, above, corner), key=lambda each: abs(at - each))


def fits_a_telephone(page: Path) -> None:
    """Check that nothing but what scrolls by itself is wider than 400 pixels. Chromium's own windows are wider."""
    frame = page.with_name("frame.html")
    inside = escape(page.read_text().replace("</body>", PROBE.replace("document.body.append", "send")))
    send = "parent.document.body.append"
    frame.write_text(f'<body><iframe width="400" height="900" srcdoc="{inside.replace("send", send)}"></iframe></body>')
    text = re.search(r"<textarea>(.*?)</textarea>", chromium(frame, "--dump-dom"), re.DOTALL)
    assert text is not None
    assert json.loads(unescape(text[1]))["width"] <= 400, "the page is wider than a telephone"


def check(page: Path, wanted: dict[str, int]) -> None:
    """Compare a page with the numbers of its parts, and a screenshot with the places of these."""
    fits_a_telephone(page)
    probed = page.with_name("probed.html")
    probed.write_text(page.read_text().replace("</body>", PROBE))
    text = re.search(r"<textarea>(.*?)</textarea>", chromium(probed, "--dump-dom"), re.DOTALL)
    assert text is not None
    found = json.loads(unescape(text[1]))
    assert found["width"] <= WIDTH, "the page is wider than its window"
    boxes = found["boxes"]
    counts = {kind: sum(box[0] == kind for box in boxes) for kind in wanted}
    assert counts == wanted
    for kind in ("h1", "h2", "td", "svg", "section"):
        same = [box for box in boxes if box[0] == kind]
        for n, (_, x, y, w, h, words) in enumerate(same):
            for _, x2, y2, w2, h2, others in same[n + 1 :]:
                apart = x + w <= x2 + 1 or x2 + w2 <= x + 1 or y + h <= y2 + 1 or y2 + h2 <= y + 1
                assert apart, f"{kind}: {words!r} lies on {others!r}"
    shot = page.with_name("shot.png")
    chromium(page, f"--screenshot={shot}")
    image = pixels(shot)[..., :3].int()
    ink = (image - image[0, 0]).abs().amax(-1) > 40
    assert not ink[:, :8].any() and not ink[:, -8:].any(), "something lies at the edge of the page"
    for kind, x, y, w, h, words in boxes:
        if y + h < HEIGHT and (words or kind == "svg"):
            assert ink[int(y) : int(y + h) + 1, int(x) : int(x + w) + 1].any(), f"nothing is seen of {kind} {words!r}"


def test_explain(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.GroupNorm(4, 64)).eval()
    with torch.no_grad():
        report = torch_tile.explain(model, torch.randn(8, 32))
    page = report.save(tmp_path / "explain.html")
    check(page, {"h1": 1, "th": 5, "section": 2, "td": 10})


def test_show(tmp_path: Path) -> None:
    @T.prim_func
    def product(A: T.Tensor((64, 64), "float16"), B: T.Tensor((64, 64), "float16"), C: T.Tensor((64, 64), "float32")):
        with T.Kernel(1, threads=128) as _:
            a, b = T.alloc_shared((64, 64), "float16"), T.alloc_shared((64, 64), "float16")
            c = T.alloc_fragment((64, 64), "float32")
            T.copy(A, a)
            T.copy(B, b)
            T.gemm(a, b, c, clear_accum=True)
            T.copy(c, C)

    page = torch_tile.show(product)
    path = page.save(tmp_path / "kernel.html")
    notes = len(page.kernel.schedule.rows)
    check(path, {"h1": 1, "h2": 5, "th": 3, "td": 3 * notes, "summary": 4, "svg": 3})
