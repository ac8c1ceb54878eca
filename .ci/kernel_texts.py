#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes the generated C++ and CUDA text of every kernel of the library, to compare two states of the compiler.

Usage: python .ci/kernel_texts.py OUT.json [--full]
       python .ci/kernel_texts.py --compare BEFORE.json AFTER.json

OUT.json maps "case / target / position" to the SHA-256 of the text, or to the text itself with --full. Numbers of
lines in comments are left out, as they change with any edit above a kernel.
No GPU, NVRTC or host compiler is needed.
"""

import argparse
import hashlib
import importlib
import json
import pathlib
import re
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
TARGETS = ("cpu", "cuda:sm_80", "cuda:sm_90a", "cuda:sm_120a")


def compare(before: pathlib.Path, after: pathlib.Path) -> int:
    """Print the kernels whose texts differ; the number of them."""
    old, new = json.loads(before.read_text()), json.loads(after.read_text())
    differing = [name for name in sorted({*old, *new}) if old.get(name) != new.get(name)]
    for name in differing:
        print("only in one" if name not in old or name not in new else "differs", name)
    print(f"{len(old)} texts before, {len(new)} after, {len(differing)} differ")
    return len(differing)


def texts() -> dict[str, str]:
    """The text of each kernel of the library on each target."""
    compiler = importlib.import_module("torch_tile.jit")
    target_class = type(importlib.import_module("torch_tile").Target("cpu"))
    kernel_class = importlib.import_module("torch_tile.kernel").JITKernel
    library = importlib.import_module("benchmarks.library")

    class TextOnly(kernel_class):
        """A kernel that was printed but not compiled."""

        def __init__(self, program, source, build):
            self.program, self.source, self.build = program, source, build

    module = sys.modules[compiler.compile_cpu.__module__]
    for kind in ("cpu", "cuda"):
        print_source = _source_function(kind)

        def compile_text(program, out_idx, build, print_source=print_source):
            return TextOnly(program, print_source(program, build)[0].text, build)

        setattr(module, f"compile_{kind}", compile_text)

    found = {}
    for case in library.catalogue():
        for name in TARGETS:
            for number, kernel in enumerate(library.compiled(case, target_class.of(name))):
                found[f"{case.name} / {name} / {number}"] = re.sub(r"(\.py):\d+", r"\1", kernel.source)
    return found


def _source_function(kind: str):
    for module in ("torch_tile.compiler.source_cache", "torch_tile.stored"):
        try:
            return getattr(importlib.import_module(module), f"{kind}_source")
        except ModuleNotFoundError:
            continue
    raise SystemExit("the module that prints sources was moved: name it in .ci/kernel_texts.py")


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=pathlib.Path, nargs="?")
    parser.add_argument("--full", action="store_true", help="keep the texts, not their digests")
    parser.add_argument("--compare", type=pathlib.Path, nargs=2, metavar=("BEFORE", "AFTER"))
    options = parser.parse_args()
    if options.compare:
        return 1 if compare(*options.compare) else 0
    if options.output is None:
        parser.error("give OUT.json or --compare")
    found = texts()
    if not options.full:
        found = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in found.items()}
    options.output.write_text(json.dumps(found, indent=0, sort_keys=True))
    print(f"{len(found)} texts")
    return 0


if __name__ == "__main__":
    sys.exit(main())
