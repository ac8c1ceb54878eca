# SPDX-License-Identifier: Apache-2.0
"""Draw docs/speed.svg from committed results: `python -m benchmarks.chart`.

For each case the best rival of its run counts. A bar shows the median of a group's cases, a tick its worst case.
The chart is plain SVG text, so a test can compare the committed file with what the results say.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from statistics import median
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
RESULTS, CHART = ROOT / "benchmarks" / "results", ROOT / "docs" / "speed.svg"
KERNEL = re.compile(r"^(\w+ .+?)\s{2,}([\d.]+)\s{2,}(.*)$")
RIVAL = re.compile(r"([\w-]+)(?: [\d.]+,)? x([\d.]+)")
MODEL = re.compile(r"^(\w.*?)\s{2,}(?=Inductor)")
TORCH = re.compile(r"\btorch ([\d.]+)")
BACKEND = re.compile(r"(Inductor|max-autotune|tile)\s+([\d.]+)")

WIDTH, ROW, LEFT, SCALE = 760, 34, 250, 200  # pixels; SCALE is the length of the ratio 1


class Group(NamedTuple):
    """One bar: its title, its rivals' names, files of `benchmarks/results/`, and how the names of its cases begin."""

    title: str
    rivals: str
    files: tuple[str, ...]
    prefix: str


ATTENTION, RIVALS = "h200_attention_rivals_2026-11-25.txt", "h200_rivals_2026-11-22.txt"
CPU = "cpu_two_threads_2026-11-24.txt"
CPU_FAMILIES = {
    "gemm": "Linears and products", "grouped": "Mixtures of experts", "attention": "Attention", "rms_norm": "RMS norm",
    "layer_norm": "Layer norm", "softmax": "Softmax",
}  # fmt: skip
MODELS = "h200_clusters_2026-11-22.txt", "h200_quant_2026-11-22.txt"
GROUPS = (
    Group("Models under torch.compile", "Inductor, max-autotune", MODELS, ""),
    Group("Matrix products M0 to M7", "cuBLAS, TileLang", (RIVALS,), "gemm"),
    Group("Attention", "cuDNN, FA3, FA4, TileLang", (ATTENTION,), "attention"),
    Group("Gradients of attention", "cuDNN, FA3, FA4", (ATTENTION,), "backward"),
    Group("Decoding, grouped heads", "cuDNN", (RIVALS,), "decode"),
    Group("MLA decoding", "TileLang", (RIVALS,), "mla"),
)


def kernel_ratios(text: str, prefix: str) -> Iterator[tuple[str, float]]:
    """The name and the best rival's time over ours of each kernel line whose name begins with `prefix`."""
    for line in text.splitlines():
        found = KERNEL.match(line)
        rivals = RIVAL.findall(found[3]) if found and found[1].split()[0] == prefix else []
        if found and rivals:
            yield found[1], min(float(ratio) for _, ratio in rivals)


def model_ratios(text: str) -> Iterator[tuple[str, float]]:
    """The name and the best rival's time over ours of each model that was timed against max-autotune, too."""
    for line in text.splitlines():
        name = MODEL.match(line)
        times: dict[str, float] = {}
        for backend, milliseconds in BACKEND.findall(line):
            times.setdefault(backend, float(milliseconds))
        if name and len(times) == 3:
            yield name[1], min(times["Inductor"], times["max-autotune"]) / times["tile"]


def ratios(group: Group, folder: Path = RESULTS) -> dict[str, float]:
    """The best rival's time over ours for each case of a group; above 1 we are faster."""
    found: dict[str, float] = {}
    for file in group.files:
        text = (folder / file).read_text()
        found.update(kernel_ratios(text, group.prefix) if group.prefix else model_ratios(text))
    return found


def table(groups: Sequence[Group] = GROUPS, folder: Path = RESULTS) -> Iterator[str]:
    """A Markdown table of medians and worst cases."""
    yield "| workload | cases | best of | median | worst |"
    yield "|---|---|---|---|---|"
    for group in groups:
        values = ratios(group, folder).values()
        numbers = f"{median(values):.2f} | {min(values):.2f}"
        yield f"| {group.title} | {len(values)} | {group.rivals} | {numbers} |"


def cpu_table(folder: Path = RESULTS) -> Iterator[str]:
    """A Markdown table of the CPU against torch, for problems of which torch's kernel takes at least 100 us.

    Shorter ones measure the call. A problem's ratio is the median of its runs.
    """
    runs: dict[str, dict[str, list[float]]] = {}
    for line in (folder / CPU).read_text().splitlines():
        name, rival = KERNEL.match(line), TORCH.search(line)
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
    lines = [
        "<!-- SPDX-License-Identifier: Apache-2.0 -->",
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        '<text x="10" y="20" font-size="14">Speed relative to the best rival of each case, NVIDIA H200</text>',
    ]
    for row, group in enumerate(groups):
        values = ratios(group, folder).values()
        middle, worst, y = median(values), min(values), 36 + ROW * row
        colour = "#2b7a4b" if middle >= 1 else "#b5533c"
        worst_x = LEFT + SCALE * worst
        lines += [
            f'<text x="10" y="{y + 11}">{escape(group.title)}</text>',
            f'<text x="10" y="{y + 24}" fill="#666" font-size="10">{escape(group.rivals)}; {len(values)} cases</text>',
            f'<rect x="{LEFT}" y="{y + 4}" width="{SCALE * middle:.1f}" height="18" fill="{colour}"/>',
            f'<line x1="{worst_x:.1f}" y1="{y}" x2="{worst_x:.1f}" y2="{y + 26}" stroke="black" stroke-width="2"/>',
            f'<text x="{max(LEFT + SCALE * middle, one) + 8:.1f}" y="{y + 17}">{middle:.2f} (worst {worst:.2f})</text>',
        ]
    foot = 36 + ROW * len(groups)
    lines += [
        f'<line x1="{one}" y1="30" x2="{one}" y2="{foot}" stroke="#666" stroke-dasharray="4 3"/>',
        f'<text x="{one}" y="{foot + 12}" text-anchor="middle" fill="#666">1.0 = best rival</text>',
        f'<text x="10" y="{foot + 28}" fill="#666" font-size="10">'
        "Bar: median. Tick: worst case. Right of the dashed line torch_tile is faster.</text>",
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    CHART.write_text(svg())
    print("\n".join([*table(), "", *cpu_table()]))
