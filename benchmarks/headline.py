# SPDX-License-Identifier: Apache-2.0
"""Time the cases of README's table on one GPU: `python -m benchmarks.headline [--folder F] [--seconds S]`.

First all processes make their problems ready side by side, so that compilers use all cores. Then the groups are timed
one after another. Results go to the files that `benchmarks.chart` reads; old ones are replaced.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.chart import GROUPS, KERNELS, MODELS, RESULTS, Group

SLOW_RIVALS = {"TileOPs"}  # they take most of a minute to compile a shape


def command(group: Group, seconds: float, only: Sequence[str] = ()) -> list[str]:
    """Return the command that times a group, or those of its cases whose names contain one of `only`."""
    module, names, rivals = group.family or "models", ",".join(only or group.prefixes), ",".join(group.rivals)
    limits = ["--only", names, "--rivals", rivals, "--seconds", f"{seconds:.0f}"]
    return [sys.executable, "-m", f"benchmarks.{module}", *limits]


def warm(groups: Sequence[Group], seconds: float) -> None:
    """Make all problems ready once, in processes side by side; what they compile stays in caches on disk."""
    parts = [
        (group, only)
        for group in groups
        for only in ([(name,) for name in group.prefixes] if SLOW_RIVALS & {*group.rivals} else [group.prefixes])
    ]
    running = [
        subprocess.Popen(command(group, seconds, only), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for group, only in parts
    ]
    end = time.monotonic() + seconds
    for process in running:
        try:
            process.wait(max(0.1, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=RESULTS)
    parser.add_argument("--seconds", type=float, default=600.0, help="time for kernels and models together, about")
    options = parser.parse_args(given)
    for name in (KERNELS, MODELS):
        (options.folder / name).unlink(missing_ok=True)
    end = time.monotonic() + options.seconds
    warm([group for group in GROUPS if group.family], 0.15 * options.seconds)
    for group in sorted(GROUPS, key=lambda group: not group.family):  # models last: they may take all that is left
        left = end - time.monotonic()
        print(f"# {group.title}: {left:.0f} s left", flush=True)
        limit = 0.1 * options.seconds if group.family else max(1.0, left)
        file = options.folder / (KERNELS if group.family else MODELS)
        subprocess.run([*command(group, limit), "--json", str(file)], check=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
