# SPDX-License-Identifier: Apache-2.0
"""Decide each contest of `select="fastest"`: time a replacement against Inductor's code and keep the faster one.

Both sides are cut out of the graph with the same inputs and surroundings (extract.py) and timed (benchmark.py).
Symbolic sizes take the value of the trace. A smaller and a larger size are timed too (`buckets`). This happens if it
needs no compilation or the user wants a thorough search. Outcomes are stored in the process and on disk. Their key
covers both graphs, the machine and our sources. Ranks of torch.distributed share outcomes (`agreed`).
"""

from __future__ import annotations

import contextlib
import contextvars
import datetime
import functools
import hashlib
import json
import math
import os
import pathlib
import platform
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any, cast

import torch
from torch.fx import GraphModule, Node

from torch_tile.compiler.parallel import progress
from torch_tile.inductor import compat
from torch_tile.inductor.graph import flex_backend
from torch_tile.inductor.graph.extract import body_of, rivals, without_views
from torch_tile.inductor.graph.inline import captured, expand
from torch_tile.inductor.graph.nodes import Rewrite, val
from torch_tile.inductor.report.rows import WORTH, Outcome, log
from torch_tile.inductor.select import benchmark
from torch_tile.inductor.select.benchmark import is_called
from torch_tile.inductor.select.real_inputs import order_of_magnitude
from torch_tile.inductor.settings import Settings
from torch_tile.runtime.cache import cache_dir
from torch_tile.runtime.source_digest import source_digest


def compete(rewrite: Rewrite, pairs: Sequence[tuple[Node, Node]], settings: Settings) -> Outcome:
    """Time the new nodes of `pairs` against the old ones."""
    new, old = rivals(pairs, [*rewrite.inputs(), *rewrite.given], rewrite.nodes)
    return decide(*without_views(new, write_out(old)), settings)


def write_out(part: GraphModule) -> GraphModule:
    """Replace the tile operators in a part by their ATen, in place; return the part."""
    for node in list(part.graph.nodes):
        if found := captured(node):
            expand(node, found[1])
    return part


def compete_captured(node: Node, reference: Callable[..., torch.Tensor], settings: Settings) -> Outcome:
    """Time a captured op against the ATen that it stands for."""
    new, old = rivals([(node, node)], list(node.all_input_nodes), ())
    for inner in list(old.graph.nodes):
        if inner.target is node.target:
            expand(inner, reference)
    return decide(*without_views(new, old), settings)


def decide(new: GraphModule, old: GraphModule, settings: Settings, worth: float = WORTH) -> Outcome:
    """Return the stored outcome for this pair of graphs, or measure it. `worth` is explained in `Outcome`."""
    values = [val(n) for n in new.graph.find_nodes(op="placeholder")]
    cheap = settings.thorough or (is_called(new) and is_called(old))
    sizes = buckets(values) if cheap else []
    key = _key(new, old, settings, sizes, worth)
    if key not in _outcomes:
        word = agreed(key, lambda: _text(_load(key) or _measure(new, old, key, settings, sizes, worth)))
        _outcomes[key] = _outcome(word)
    return _outcomes[key]


_outcomes: dict[str, Outcome] = {}

told: contextvars.ContextVar[Callable[[], object]] = contextvars.ContextVar("told", default=lambda: None)
"""Callback after each timed contest; it advances the progress bar."""


@contextlib.contextmanager
def shown() -> Iterator[None]:
    """Show a progress bar that counts the contests inside, if tqdm is installed. Their total number is unknown."""
    with progress(None, "torch_tile: contests with Inductor") as step:
        token = told.set(step)
        try:
            yield
        finally:
            told.reset(token)


def _describe(module: GraphModule) -> str:
    """Return a text that is equal for graphs of equal computation on equal sizes, strides and dtypes."""
    names = {node: f"n{index}" for index, node in enumerate(module.graph.nodes)}
    lines = []
    for node in module.graph.nodes:
        args = torch.fx.node.map_arg((node.args, node.kwargs), cast(Any, lambda n: _Name(names[n])))
        body = body_of(node)
        target = node.target if node.op == "call_function" else "" if body is None else f"({_describe(body)})"
        facts = f"{_facts(val(node))}{order_of_magnitude(node)}" if node.op == "placeholder" else ""
        lines.append(f"{names[node]}={node.op} {target} {args} {facts}")
    return "\n".join(lines)


class _Name:
    """Printed name of a node: its position in the graph."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return self.name


def _facts(value: Any) -> str:
    """Return dtype, device, sizes and strides of a value as text."""
    if isinstance(value, torch.Tensor):
        sizes, strides = map(_hints, (value.shape, value.stride()))
        return f"{value.dtype} {value.device} {sizes} {strides}"
    return str(compat.size_hint(value))


def _hints(sizes: Sequence[Any]) -> tuple[int, ...]:
    """Return sizes as numbers: of symbols, the values that the graph is compiled with."""
    return tuple(compat.size_hint(s) for s in sizes)


def _key(
    new: GraphModule, old: GraphModule, settings: Settings, sizes: Sequence[compat.Sizes], worth: float = WORTH
) -> str:
    """Return the digest under which the outcome of a contest is stored."""
    facts = (
        _machine(),
        str(torch.get_num_threads()),
        source_digest(),
        torch.__version__,
        repr(settings),
        repr(list(map(_sizes_text, sizes))),
        repr(worth),
        repr(flex_backend.may_use_flash(flex_backend.flex_calls(old.graph))),
    )
    text = "\0".join((_describe(new), _describe(old), *facts))
    return hashlib.sha256(text.encode()).hexdigest()


@functools.cache
def _machine() -> str:
    """Return the names of the CPU and GPU."""
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    cpu = next((line for line in lines if line.startswith("model name")), platform.processor())
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    return f"{cpu} {gpu}"


def _file(key: str) -> pathlib.Path:
    """Return the path of a stored outcome."""
    return cache_dir() / "select" / f"{key}.json"


def _load(key: str) -> Outcome | None:
    """Read a stored outcome; None if there is none."""
    try:
        return _outcome(_file(key).read_text())
    except (OSError, ValueError, KeyError, TypeError):
        return None  # not there, or not ours: measure again


def _text(outcome: Outcome) -> str:
    """Write an outcome as JSON."""
    return json.dumps(asdict(outcome))


def _outcome(text: str) -> Outcome:
    """Parse the text that `_text` made. Raises ValueError, KeyError or TypeError for any other text."""
    data = json.loads(text)
    others = tuple((str(name), float(tile), float(inductor)) for name, tile, inductor in data.get("others", ()))
    return Outcome(float(data["tile"]), float(data["inductor"]), others, float(data["worth"]), str(data["rival"]))


def _sizes_text(sizes: compat.Sizes) -> str:
    """Format the sizes of symbols for the report: `at s0=4, s1=8`."""
    return "at " + ", ".join(
        f"{symbol}={size}" for symbol, size in sorted(sizes.items(), key=lambda each: str(each[0]))
    )


def _save(key: str, outcome: Outcome) -> None:
    """Write an outcome to disk; only log a failure to write."""
    path = _file(key)
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f"{key[:16]}.", delete=False) as temporary:
            temporary.write(_text(outcome))  # a new file: an existing file or link is never written through
        os.replace(temporary.name, path)
    except OSError as error:
        log.warning("outcome not saved: %s", error)


def _measure(
    new: GraphModule,
    old: GraphModule,
    key: str,
    settings: Settings,
    sizes: Sequence[compat.Sizes] = (),
    worth: float = WORTH,
) -> Outcome:
    """Time both graphs at the traced sizes and at `sizes`; save the outcome."""
    start, options = time.perf_counter(), {"max_autotune": settings.thorough}
    tile, inductor = _first_times(new, old, options)
    others = []
    # A kernel that loses at the traced sizes is not timed at other sizes.
    for each in sizes if Outcome(tile, inductor, worth=worth).tile_wins else ():
        try:
            with compat.at_sizes(each):
                others.append((_sizes_text(each), *benchmark.times(new, old, options)))
        except Exception:
            log.debug("no contest %s", _sizes_text(each), exc_info=True)  # these sizes may break a rule of the model
    outcome = Outcome(tile, inductor, tuple(others), worth, flex_backend.rival_name(flex_backend.flex_calls(old.graph)))
    log.debug("a contest took %.2f s: %s", time.perf_counter() - start, outcome)
    _save(key, outcome)
    told.get()()
    return outcome


def _first_times(new: GraphModule, old: GraphModule, options: dict[str, Any]) -> tuple[float, float]:
    """Time both graphs. Calls of `flex_attention` in `old` get Inductor's FLASH backend where it takes them."""
    calls = flex_backend.flex_calls(old.graph)
    if flex_backend.may_use_flash(calls):
        flex_backend.set_backend(calls, flex_backend.FLASH)
        try:
            return benchmark.times(new, old, options)
        except Exception:
            log.debug("Inductor's FLASH backend does not take this flex_attention", exc_info=True)
            flex_backend.set_backend(calls, flex_backend.OPEN)
    return benchmark.times(new, old, options)


# All ranks use one decision for a subgraph: the first rank to ask decides, the others read its result.
#
# The decision goes through the store of torch.distributed, not through a collective. Ranks may compile different
# graphs, or equal graphs in another order. No rank may wait for a decision that never comes.

PATIENCE = datetime.timedelta(minutes=2)
"""Longest time that a rank waits for another rank's decision before it decides itself."""


def agreed(key: str, decide: Callable[[], str]) -> str:
    """Return the decision of the first rank that asks for `key`; without other ranks, return `decide()`."""
    store = compat.distributed_store()
    if store is None:
        return decide()
    name = f"torch_tile/{key}"
    try:
        if store.add(f"{name}/asked", 1) > 1:
            store.wait([name], PATIENCE)
            word = str(store.get(name), "utf-8")
            return word or decide()
    except RuntimeError as error:  # of torch.distributed: waited too long, or a store that cannot do this
        log.warning("ranks may choose differently: %s", error)
        return decide()
    word = ""
    try:
        word = decide()
    finally:
        store.set(name, word)  # empty if `decide` failed: then the other ranks decide themselves
    return word


# Further sizes at which a subgraph with symbolic shapes is timed, besides the sizes of the trace.

APART = 8
"""Factor in elements between the traced problem and the smaller or larger one."""
MOST_BYTES = 1 << 30
"""Most bytes of all inputs; larger problems are not timed."""


def buckets(values: Iterable[Any]) -> list[compat.Sizes]:
    """Return a smaller and a larger choice of all symbols in input shapes: powers of two within their ranges."""
    values = list(values)
    symbols = compat.symbols_of(values)
    if not symbols:
        return []
    factor = max(2, round(APART ** (1 / len(symbols))))
    hints = {symbol: hint for symbol, (hint, _, _) in symbols.items()}
    small = {s: max(low, 2, _power_of_two(hint // factor)) for s, (hint, low, _) in symbols.items()}
    large = {s: min(high, _power_of_two(hint * factor)) for s, (hint, _, high) in symbols.items()}
    small = {s: min(small[s], hints[s]) for s in symbols}
    large = {s: max(large[s], hints[s]) for s in symbols}
    return [each for each in (small, large) if each != hints and _bytes(values, each) <= MOST_BYTES]


def _power_of_two(size: int) -> int:
    """Return the largest power of two that is not above `size`."""
    return 1 << max(0, size.bit_length() - 1)


def _bytes(values: Iterable[Any], sizes: compat.Sizes) -> int:
    """Count the bytes of tensors at these sizes."""
    with compat.at_sizes(sizes):
        return sum(
            math.prod(map(compat.size_hint, v.shape)) * v.dtype.itemsize for v in values if isinstance(v, torch.Tensor)
        )
