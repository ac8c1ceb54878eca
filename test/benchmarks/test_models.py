# SPDX-License-Identifier: Apache-2.0
"""The table of models: what counts as short, and that every case is described."""

import sys

import pytest
import torch

from benchmarks import model_cases
from benchmarks.model_cases import delta_layer, in_float64
from benchmarks.models import Line, draw, main, shown
from benchmarks.timer import Timing


def line(ours, theirs, asked=1.1, errors=None, less=None, **more):
    times = {"Inductor": Timing(theirs, theirs, theirs, 5), "tile": Timing(ours, ours, ours, 5)}
    times |= {name.replace("_", "-"): Timing(t, t, t, 5) for name, t in more.items()}
    made = Line("case", {"Inductor": asked}, times, {}, errors or {})
    if less is not None:  # GiB of Inductor's peak that ours does not take
        made.peaks, made.spared = {"Inductor": 8 * 2**30, "tile": int((8 - less) * 2**30)}, 2.0
    return made


@pytest.mark.parametrize(
    ("found", "good"),
    [
        (line(1.0, 1.2), True),
        (line(1.0, 1.0), False),
        (line(1.0, 1.2, errors={"Inductor": 1e-3, "tile": 1.1e-3}), True),
        (line(1.0, 1.2, errors={"Inductor": 1e-3, "tile": 1.3e-3}), False),
        (line(1.0, 1.2, less=2.1), True),
        (line(1.0, 1.2, less=1.9), False),
        (line(1.0, 1.2, max_autotune=0.9), False),
        (line(1.0, 1.2, max_autotune=0.96), True),
        (Line("case", {"Inductor": 1.0}), False),
    ],
)
def test_what_is_good(found, good):
    assert found.good is good
    assert ("SHORT" in shown(found)) is (not good and "tile" in found.times)


def test_names_are_different_and_listed(capsys):
    names = [case.name for case in model_cases.cases()]
    assert len(set(names)) == len(names) > 10
    assert main(["--list", "--only", "swiglu"]) == 0
    assert capsys.readouterr().out.split("\n")[:2] == ["swiglu 64", "swiglu 4096"]


def test_float64_has_the_same_values():
    layer = torch.nn.Linear(4, 3).bfloat16()
    call, (x, count), kwargs = model_cases.in_float64(
        (layer, (torch.randn(2, 4).bfloat16(), torch.tensor(3)), {"n": 1})
    )
    assert call.weight.dtype == x.dtype == torch.float64 and count.dtype == torch.int64 and kwargs == {"n": 1}
    assert layer.weight.dtype == torch.bfloat16 and torch.equal(call.weight, layer.weight.double())


@pytest.mark.parametrize(
    ("make", "shapes", "out"),
    [
        (lambda: model_cases.SwiGLU(8, 12), [(3, 8)], (3, 8)),
        (lambda: model_cases.GeluMLP(8, 12), [(3, 8)], (3, 8)),
        (lambda: model_cases.EinsumAttention(8, 2), [(2, 5, 8)], (2, 5, 8)),
        (lambda: model_cases.DiTBlock(8, 2), [(2, 5, 8), (2, 8)], (2, 5, 8)),
        (lambda: model_cases.VideoBlock(8), [(1, 2, 3, 4, 8)], (1, 2, 3, 4, 8)),
        (lambda: model_cases.UNetAttention(32, 2), [(2, 32, 4, 4)], (2, 32, 4, 4)),
        (model_cases.LatentAttention, [(2, 4, 512), (2, 4, 64), (2, 7, 512), (2, 7, 64)], (2, 4, 512)),
    ],
)
def test_pieces_run_on_the_cpu(make, shapes, out):
    assert make()(*map(torch.randn, shapes)).shape == out


def test_plot(tmp_path):
    pytest.importorskip("matplotlib")
    draw([line(1.0, 1.2), line(1.0, 1.1, eager=2.0)], tmp_path / "models.svg")
    assert (tmp_path / "models.svg").stat().st_size > 1000


def test_memory_is_shown():
    out = shown(line(1.0, 1.2, less=1.5))
    assert "GiB 8.00/6.50 (asked 2 less)" in out and "SHORT" in out


def test_a_delta_layer_runs_in_float64_where_kernels_for_it_are_installed(tmp_path, monkeypatch):
    """As they refuse float64, transformers must not find them."""
    modeling = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    for package, names in {"fla": "chunk_gated_delta_rule", "causal_conv1d": "causal_conv1d_fn"}.items():
        path = tmp_path / package / "ops" / "gated_delta_rule"
        path.mkdir(parents=True)
        for folder in (path.parents[1], path.parents[0], path):
            (folder / "__init__.py").write_text(f"def {names}(*given, **named):\n    raise TypeError\n")
        monkeypatch.delitem(sys.modules, package, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys.modules[modeling.__package__], "modeling_qwen3_next", modeling)  # as it is afterwards
    monkeypatch.delitem(sys.modules, modeling.__name__)
    heads = {f"linear_num_{which}_heads": 2 for which in ("key", "value")}
    layer = delta_layer(hidden_size=32, linear_key_head_dim=8, linear_value_head_dim=8, **heads)
    x = torch.randn(1, 20, 32, dtype=torch.float64)
    assert in_float64((layer, (x,), {}))[0](x).dtype == torch.float64
