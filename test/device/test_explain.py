# SPDX-License-Identifier: Apache-2.0
"""`explain` on a GPU: times, the share of a known peak, and the schedules of the kernels that ran."""

import pytest
import torch
from torch import nn

from torch_tile.inductor.report.explain import explain
from torch_tile.inductor.select.roofline import peak_of

pytestmark = pytest.mark.cuda


@pytest.fixture
def report_of():
    # Of 1000, such that no contest's outcome is known before (cost_rules.py).
    model = nn.Sequential(nn.RMSNorm(1000), nn.Linear(1000, 4096), nn.GELU(), nn.Linear(4096, 1000))
    model.to("cuda", torch.bfloat16)
    x = torch.randn(2048, 1000, device="cuda", dtype=torch.bfloat16)

    def run(select):
        with torch.no_grad():
            return explain(model, x, select=select)

    return run


def test_schedules_of_what_ran(report_of):
    report = report_of("tile")
    assert len(report.replaced()) == 3, report
    page = report.html()
    for row in report.rows:
        assert row.kernels, row
        for kernel in row.kernels:
            notes = " ".join(note.became for note in kernel.schedule.remarks)
            assert "registers" in notes and "bytes of shared memory" in notes
            assert f"schedule of {kernel.__name__} for {kernel.target}" in page
    if torch.cuda.get_device_capability() == (9, 0):
        (row,) = (r for r in report.rows if "gelu" in r.what)
        assert any("wgmma" in note.became for kernel in row.kernels for note in kernel.schedule.remarks), page


def test_times_and_the_share_of_the_peak(report_of):
    report = report_of("fastest")
    timed = [row for row in report.rows if row.times is not None]
    assert timed and all(row.times.tile > 0 and row.times.inductor > 0 for row in timed), report
    peak = peak_of(torch.device("cuda"))
    page = report.html()
    assert torch.cuda.get_device_name() in page and "subgraphs were timed" in page
    for row in timed:
        if peak is not None and row.cost is not None and row.cost.flops:  # caches may beat the memory, not the units
            assert 0 < peak.seconds(row.cost) * 1e6 < min(row.times.tile, row.times.inductor), row
            assert "share of the roofline: at least" in page
