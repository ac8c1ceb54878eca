# SPDX-License-Identifier: Apache-2.0
"""The page of a report: complete, well formed, self-contained, and nothing in it that the user could inject."""

import re
from html.parser import HTMLParser

import pytest
import torch
from torch import nn

import torch_tile
import torch_tile.language as T
from torch_tile.inductor.graph.nodes import Frame
from torch_tile.inductor.report import html as page_module
from torch_tile.inductor.report.explain import explain
from torch_tile.inductor.report.rows import KEPT, MISSED, REPLACED, Report, Row
from torch_tile.inductor.select.decide import Outcome
from torch_tile.inductor.select.roofline import PEAKS, Cost

VOID = {"meta", "br", "hr", "img", "link"}


class Checker(HTMLParser):
    """Fails at a tag that is closed by another one, and keeps the text."""

    def __init__(self):
        super().__init__()
        self.open, self.text, self.tags = [], [], []

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.text.append(data)


def read(html):
    checker = Checker()
    checker.feed(html)
    assert not checker.open
    assert not {tag for tag, _ in checker.tags} & {"script", "link", "img", "iframe"}
    assert not re.search(r"https?:|@import|url\(", html)
    return " ".join("".join(checker.text).split()), checker.tags


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(16, 32)

    def forward(self, x):
        return self.up(x).relu()  # a <line> & its "neighbours"


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x):
        x = torch.cat([block(x) for block in self.blocks])[None, None]
        capped = torch.cumsum(x @ x.mT, -1)
        return torch.softmax(capped, -1) @ x


def test_a_model_as_a_page():
    with torch.no_grad():
        report = explain(Model(), torch.randn(5, 16))
    text, tags = read(report.html("my <model>"))
    assert "my <model>" in text
    assert 'return self.up(x).relu() # a <line> & its "neighbours"' in text
    assert "in blocks.0.up and 2 moreblocks.1.up, blocks.2.up" in text
    assert "called from" in text and "for block in self.blocks" in text and "explain.py" not in text
    assert "Not matched: the scores come from aten.cumsum" in text
    assert "To make it match:" in text and "capped = torch.cumsum(x @ x.mT, -1)" in text
    assert "kernel gemm for cpu" in text
    assert "share of the roofline: unknown (no known peak" in text
    assert "Nothing was timed" in text
    assert {a["href"][1:] for tag, a in tags if tag == "a"} == {a["id"] for tag, a in tags if tag == "section"}


def test_times_are_drawn_to_scale_and_summed():
    rows = [
        Row("gemm", REPLACED, "tile.gemm", "a", times=Outcome(10.0, 40.0)),
        Row("gemm", KEPT, "tile.gemm", "b", times=Outcome(30.0, 20.0)),
    ]
    text, tags = read(Report(rows).html())
    widths = [a["style"] for tag, a in tags if a.get("class", "").endswith("-bar")]
    assert widths == ["width:25.0%", "width:100.0%", "width:100.0%", "width:66.7%"]
    assert "2 subgraphs were timed, one by one: 60.0 us by Inductor alone, 30.0 us by the faster of both." in text
    assert "operations and bytes: unknown" in text


def test_equal_rows_share_an_entry():
    rows = [Row("gemm", REPLACED, "tile.gemm", f"m.{i}", module=f"m.{i}") for i in range(3)]
    text, tags = read(Report([*rows, Row("gemm", MISSED, "mm", "x", "odd")]).html())
    assert sum(tag == "section" for tag, _ in tags) == 2
    assert "m.0 and 2 more" in text and "m.1, m.2" in text


@pytest.mark.parametrize("field", ["what", "where", "reason", "fix", "module", "graph", "family", "status"])
def test_everything_is_escaped(field):
    evil = "<script>alert('1')</script>&"
    given = {"family": "gemm", "status": MISSED, "what": "mm", "where": "x", "reason": "r", "fix": "f"} | {field: evil}
    text, _ = read(Report([Row(**given)]).html())
    assert field in ("status", "reason", "fix") or evil in text


def test_frames_are_escaped(tmp_path):
    path = tmp_path / "<b>.py"
    path.write_text("x = '</pre><script>'\n")
    frame = Frame(str(path), 1, "<lambda>")
    text, _ = read(Report([Row("gemm", MISSED, "mm", "x", frames=(frame, frame), cause=Frame(str(path), 9))]).html())
    assert "x = '</pre><script>'" in text and "in <lambda>" in text


def test_share_of_a_known_peak(monkeypatch):
    cost = Cost(2 * 8192**3, 3 * 2 * 8192**2, torch.bfloat16)
    row = Row("gemm", REPLACED, "tile.gemm", "x", times=Outcome(1500.0, 2000.0), cost=cost)
    monkeypatch.setattr(page_module, "peak_of", lambda device: PEAKS["NVIDIA H200"])
    text, _ = read(Report([row]).html())
    assert "1.1 TFLOP in products, 403 MB moved at least (bfloat16)" in text
    assert "share of the roofline: at least 74 % (at best 1111.3 us, by arithmetic)" in text
    cached = Row("gemm", REPLACED, "tile.gemm", "x", times=Outcome(1000.0, 2000.0), cost=cost)
    assert "at least 111 % (at best 1111.3 us, by arithmetic; what is read" in read(Report([cached]).html())[0]
    untimed = Row("gemm", REPLACED, "tile.gemm", "x", cost=cost)
    assert "unknown (not timed; at best 1111.3 us, by arithmetic)" in read(Report([untimed]).html())[0]


def test_the_schedule_of_a_gpu_kernel():
    @T.prim_func
    def double(x: T.Tensor((256,), "float32"), out: T.Tensor((256,), "float32")):
        with T.Kernel(1, threads=64) as _:
            tile = T.alloc_fragment((256,), "float32")
            T.copy(x, tile)
            for i in T.Parallel(256):
                tile[i] = tile[i] * 2.0
            T.copy(tile, out)

    kernel = torch_tile.compile(double, target="cuda:sm_90a")
    text, _ = read(Report([Row("gemm", REPLACED, "tile.gemm", "x", kernels=[kernel, kernel])]).html())
    assert text.count("schedule of double for") == 1
    for note in kernel.schedule.remarks:
        assert " ".join(note.became.split()) in text
    assert "registers" in text and "bytes of shared memory" in text


def test_why_what_was_not_timed_is_kept():
    text, _ = read(Report([Row("gemm", KEPT, "tile.gemm", "x", "a plain product")]).html())
    assert "Left to Inductor: a plain product." in text


def test_nothing_found():
    assert "0 replaced" in read(Report().html())[0]
