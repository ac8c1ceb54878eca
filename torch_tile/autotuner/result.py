# SPDX-License-Identifier: Apache-2.0
"""What a tuning run found: the best configuration, and a table of all that were tried. Kept on disk as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch_tile.kernel import JITKernel

Config = Mapping[str, Any]


@dataclass(frozen=True)
class Try:
    """One configuration: measured ms (None if it was not), ms by the model, and why it is out ("" if it finished)."""

    config: Config
    latency: float | None = None
    estimate: float | None = None
    note: str = ""


@dataclass(frozen=True, repr=False)
class AutotuneResult:
    """The best `config`, its `latency` in ms (None if nothing was measured), `kernel` (None for eager kernels), and all
    `tries` in the order given. `ref_latency` is that of ref_prog, if there is one. Prints as a table.
    """

    name: str
    best: int
    tries: tuple[Try, ...]
    ref_latency: float | None = None
    kernel: JITKernel | None = None

    @property
    def config(self) -> Config:
        """The best configuration."""
        return self.tries[self.best].config

    @property
    def latency(self) -> float | None:
        """Milliseconds of the best configuration."""
        return self.tries[self.best].latency

    def __repr__(self) -> str:
        return "\n".join([f"{self.name}: {len(self.tries)} configurations", *table(self.tries, self.best)])


def table(tries: Sequence[Try], best: int | None = None) -> list[str]:
    """Lines that show measured time, the model's, the configuration and the note; fastest first."""
    order = sorted(range(len(tries)), key=lambda i: (i != best, tries[i].note != "", tries[i].latency or float("inf")))
    lines = ["        ms   model ms  configuration"]
    for number in order:
        each = tries[number]
        note = "  <- best" if number == best else f"  ({each.note})" if each.note else ""
        lines.append(f"{_number(each.latency)} {_number(each.estimate)}  {show(each.config)}{note}")
    return lines


def show(config: Config) -> str:
    """A configuration as its author would pass it."""
    return ", ".join(f"{name}={value!r}" for name, value in config.items()) or "(defaults)"


def _number(milliseconds: float | None) -> str:
    return f"{'-':>10}" if milliseconds is None else f"{milliseconds:10.4f}"


def to_json(result: AutotuneResult) -> str:
    """The text of a file. Configurations stand there for readers only: they are found again by their order."""
    tries = [
        {"config": show(each.config), "latency": each.latency, "estimate": each.estimate, "note": each.note}
        for each in result.tries
    ]
    found = {"name": result.name, "best": result.best, "ref_latency": result.ref_latency, "tries": tries}
    return json.dumps(found, indent=1)


def from_json(text: str, configs: Sequence[Config]) -> AutotuneResult:
    """What `to_json` wrote about these configurations."""
    found = json.loads(text)
    tries = tuple(
        Try(config, each["latency"], each["estimate"], each["note"])
        for config, each in zip(configs, found["tries"], strict=True)
    )
    return AutotuneResult(found["name"], found["best"], tries, found["ref_latency"])
