# SPDX-License-Identifier: Apache-2.0
"""Draw docs/speed.svg and print README's tables from committed results: `python -m benchmarks.chart`.

`python -m benchmarks.headline` writes the results on one GPU.

For each case the best rival of its run counts. A bar shows the median of a group's cases, a tick its worst case.
The chart is plain SVG text, so a test can compare the committed file with what the results say.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from statistics import median
from typing import NamedTuple

from benchmarks.models import Line
from benchmarks.problem import Result
from benchmarks.report import read

ROOT = Path(__file__).resolve().parents[1]
RESULTS, CHART = ROOT / "benchmarks" / "results", ROOT / "docs" / "speed.svg"
KERNELS, MODELS = "headline_kernels.jsonl", "headline_models.jsonl"
CPU = "cpu_two_threads_2026-11-24.txt"
CPU_LINE, CPU_RIVAL = re.compile(r"^(\w+ .+?)\s{2,}([\d.]+)\s{2,}(.*)$"), re.compile(r"\btorch ([\d.]+)")
CPU_FAMILIES = {
    "gemm": "Linears and products", "grouped": "Mixtures of experts", "attention": "Attention", "rms_norm": "RMS norm",
    "layer_norm": "Layer norm", "softmax": "Softmax",
}  # fmt: skip

WIDTH, ROW, LEFT, SCALE = 760, 34, 250, 200  # pixels; SCALE is the length of the ratio 1
LONGEST = 2.2  # the ratio at which a bar is cut off


class Group(NamedTuple):
    """One bar: its title, the family and the rivals that count, and how the names of its cases begin.

    The group of `family` "" has the models.
    """

    title: str
    family: str
    rivals: tuple[str, ...]
    prefixes: tuple[str, ...] = ("",)


FORWARD = (
    "b1 s512 h32 d128 causal", "b1 s512 h32 d128 full", "b1 s1024 h32 d128 causal", "b1 s1024 h32 d128 full",
    "b1 s4096 h32 d128 causal", "b1 s16384 h32 d128 causal", "b2 s8192 h32 d128 causal", "b2 s8192 h32 d128 full",
    "b2 s8192 h32 d64 causal", "b2 s4096 h64/8 d128 causal", "b1 s4096 h128 d192/128 causal",
)  # fmt: skip
BACKWARD = (
    "b1 s4096 h32 d128 causal", "b2 s8192 h32 d128 causal", "b1 s8192 h32 d128 full", "b2 s4096 h32/8 d128 causal",
    "b2 s8192 h32 d64 causal", "b2 s4096 h16 d192/128 causal",
)  # fmt: skip
OF_MODELS = (
    "llama 1x4096", "llama 8x512", "qwen3 1x4096", "mistral 1x8192", "gemma 1x4096", "gpt2", "bert 16x512", "vit 64",
    "whisper", "dit block", "encoder layer", "mixtral", "deepseek 1x4096", "llama training 2x4096", "swiglu 4096",
)  # fmt: skip
GROUPS = (
    Group("Models under torch.compile", "", ("Inductor", "max-autotune"), OF_MODELS),
    Group("Matrix products M0 to M7", "gemm", ("cuBLAS",), ("gemm M",)),
    Group("Products of float8", "scaled_gemm", ("torch", "torch-fast", "cuBLAS-one-scale"),
          ("scaled rows", "scaled one", "scaled blocks")),
    Group("Weights of 4 bits", "dequant", ("cuBLAS", "Humming", "bitsandbytes"), ("dequant int4 g128", "dequant nf4")),
    Group("Attention", "attention", ("cuDNN", "FA4", "TileOPs"), tuple(f"attention {s} bf16" for s in FORWARD)),
    Group("Gradients of attention", "attention_backward", ("cuDNN", "FA4", "TileOPs"),
          tuple(f"gradients {s} bf16" for s in BACKWARD)),
    Group("Decoding, grouped heads", "serving", ("cuDNN", "FA2"), ("decode dense", "decode pages")),
    Group("MLA decoding", "mla", ("tilelang",)),
    Group("Mamba-2 and delta rule", "scan", ("mamba-ssm", "fla")),
    Group("Cross-entropy", "loss", ("quack", "Inductor")),
    Group("Norms", "norm", ("Inductor",)),
)  # fmt: skip


def ratios(group: Group, folder: Path = RESULTS) -> dict[str, float]:
    """The best rival's time over ours for each case of a group; above 1 we are faster."""
    found: dict[str, float] = {}
    for result in _models(folder) if not group.family else _kernels(folder):
        rivals = [result.ratio(name) for name in group.rivals if name in result.times]
        own = (isinstance(result, Line) or result.family == group.family) and result.name.startswith(group.prefixes)
        if own and rivals and "tile" in result.times:
            found[result.name] = min(rivals)
    return found


def _kernels(folder: Path) -> list[Result]:
    """The results of kernels. Raises ValueError if they are of more than one device."""
    ((_, results),) = read([folder / KERNELS])
    return [result for result in results if result.status == "ok"]


def _models(folder: Path) -> list[Line]:
    """The results of models that were timed against all rivals."""
    lines = (json.loads(text) for text in (folder / MODELS).read_text().splitlines())
    return [Line.of_line(line) for line in lines if "times" in line and len(line["times"]) == 3]


def device(folder: Path = RESULTS) -> str:
    """The GPU of the results."""
    ((head, _),) = read([folder / KERNELS])
    return str(head["device"])


def table(groups: Sequence[Group] = GROUPS, folder: Path = RESULTS) -> Iterator[str]:
    """A Markdown table of medians and worst cases."""
    yield "| workload | cases | best of | median | worst |"
    yield "|---|---|---|---|---|"
    for group in groups:
        values = ratios(group, folder).values()
        numbers = f"{median(values):.2f} | {min(values):.2f}"
        yield f"| {group.title} | {len(values)} | {', '.join(group.rivals)} | {numbers} |"


def cpu_table(folder: Path = RESULTS) -> Iterator[str]:
    """A Markdown table of the CPU against torch, for problems of which torch's kernel takes at least 100 us.

    Shorter ones measure the call. A problem's ratio is the median of its runs.
    """
    runs: dict[str, dict[str, list[float]]] = {}
    for line in (folder / CPU).read_text().splitlines():
        name, rival = CPU_LINE.match(line), CPU_RIVAL.search(line)
        if name and rival and float(rival[1]) >= 100:
            runs.setdefault(name[1].split()[0], {}).setdefault(name[1], []).append(float(rival[1]) / float(name[2]))
    yield "| workload | cases | rival | median | worst |"
    yield "|---|---|---|---|---|"
    for family, title in CPU_FAMILIES.items():
        values = [median(ratios) for ratios in runs.get(family, {}).values()]
        if values:
            yield f"| {title} | {len(values)} | torch | {median(values):.2f} | {min(values):.2f} |"


def svg(groups: Sequence[Group] = GROUPS, folder: Path = RESULTS) -> str:
    """The bar chart; the line at 1 is the best rival."""
    height = ROW * len(groups) + 70
    one = LEFT + SCALE
    title = f"Speed relative to the best rival of each case, {escape(device(folder))}"
    lines = [
        "<!-- SPDX-License-Identifier: Apache-2.0 -->",
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="10" y="20" font-size="14">{title}</text>',
    ]
    for row, group in enumerate(groups):
        values = ratios(group, folder).values()
        middle, worst, y = median(values), min(values), 36 + ROW * row
        colour = "#2b7a4b" if middle >= 1 else "#b5533c"
        end, worst_x = LEFT + SCALE * min(middle, LONGEST), LEFT + SCALE * min(worst, LONGEST)
        lines += [
            f'<text x="10" y="{y + 11}">{escape(group.title)}</text>',
            f'<text x="10" y="{y + 24}" fill="#666" font-size="10">'
            f"{escape(', '.join(group.rivals))}; {len(values)} cases</text>",
            f'<rect x="{LEFT}" y="{y + 4}" width="{end - LEFT:.1f}" height="18" fill="{colour}"/>',
            f'<line x1="{worst_x:.1f}" y1="{y}" x2="{worst_x:.1f}" y2="{y + 26}" stroke="black" stroke-width="2"/>',
            f'<text x="{max(end, one) + 8:.1f}" y="{y + 17}">{middle:.2f} (worst {worst:.2f})</text>',
        ]
    foot = 36 + ROW * len(groups)
    lines += [
        f'<line x1="{one}" y1="30" x2="{one}" y2="{foot}" stroke="#666" stroke-dasharray="4 3"/>',
        f'<text x="{one}" y="{foot + 12}" text-anchor="middle" fill="#666">1.0 = best rival</text>',
        f'<text x="10" y="{foot + 28}" fill="#666" font-size="10">'
        f"Bar: median, cut off at {LONGEST}. Tick: worst case. Right of the dashed line torch_tile is faster.</text>",
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    CHART.write_text(svg())
    print("\n".join([*table(), "", *cpu_table()]))
