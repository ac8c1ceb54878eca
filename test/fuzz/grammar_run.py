# SPDX-License-Identifier: Apache-2.0
"""Run random programs of grammar.py and compare each with the reference.

python test/fuzz/grammar_run.py --count 20000 --seed 0 --stop 5

A program runs tile by tile and on the executors of one turn, which its seed chooses (TURNS): a third of the time of all
executors, and over many programs the same faults. The run stops at the `--stop`-th fault or after `--seconds`, prints
how many programs ran and the shrunk programs of the faults. `--ways all` takes every executor for every program,
`--ways cpu,text` those alone, and `--gpu` a GPU as well: processes take turns at the GPUs there are. A program that
hangs, crashes or eats the memory is a fault with its seed, and the others go on. One core runs about 8 programs a
second. `--tiles` takes the programs of tiles.py instead, of which a core runs one a second.
"""

import argparse
import collections
import contextlib
import ctypes
import functools
import gc
import itertools
import math
import os
import re
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch

import torch_tile
import torch_tile.language as T
from torch_tile.codegen.cpu import ENTRY, emit_cpu
from torch_tile.codegen.cuda import emit_cuda
from torch_tile.compiler.context import Build
from torch_tile.diagnostics.errors import InternalError, TileError
from torch_tile.hardware import Target
from torch_tile.ir.stmt import dimensions
from torch_tile.lowering import cuda_passes, lower
from torch_tile.runtime.cuda_launch import CudaLauncher
from torch_tile.runtime.host_compiler import compile_shared
from torch_tile.runtime.launch import Launcher
from torch_tile.runtime.nvrtc import compile_cubin
from torch_tile.simulator.interpret import interpret
from torch_tile.simulator.tile.interpreter import evaluate

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
from emulate import EmulatedLauncher, build as build_texts
from fuzz_lines import shrunk
from grammar import generated
from grammar_processes import COMPILING, Limits, Lost, NoWatch, in_processes
from ptx import accesses, stale
from tiles import generated as generated_tiles

WAYS = ("tiles", "cpu", "sm_80", "sm_90a", "text")
# Where the GPU matters: "text" is that for sm_80.
TILE_WAYS = (*WAYS, "sm_120a", "text_sm_90a")
# "unoptimised" is the CPU's text by a quick compiler, "keys" compiles a program for numbers that compare equal, "ptx"
# looks for accesses that NVRTC drops.
OTHER_WAYS = ("unoptimised", "keys", "ptx")
# The executors of one program; the text shares the simulator's lowering, and "keys" skips most programs.
TURNS = (("tiles", "cpu", "keys"), ("tiles", "sm_80", "text"), ("tiles", "sm_90a"))
TILE_TURNS = (("cpu", "sm_90a", "text_sm_90a"), ("tiles", "sm_80", "sm_120a", "text"))
RARE_TURN, RARE_TURNS = ("tiles", "ptx"), 32  # one program of so many: NVRTC takes as long as all else
EQUAL = (0.0, -0.0)
UNOPTIMISED = '#pragma GCC optimize("O0")\n'  # takes g++ a quarter of the time
PER_UNIT = 20  # programs in one compiled file
SHRINKING_SECONDS = 60  # of a run's end
PER_PART = PER_UNIT * len(TURNS)  # programs that a process takes at once
# What an author is told to write otherwise: the grammar does not know where.
REFUSED = {
    "nested_too_deep", "layout_conflict", "divergent_hazard", "leaves_tile", "shared_memory", "out_of_bounds",
    "non_affine_region", "narrow_type",
}  # fmt: skip


@dataclass
class Outcome:
    """How a program went on an executor: "same", "refused", or what is wrong, with a text."""

    seed: int
    way: str
    kind: str
    text: str = ""

    @property
    def is_fault(self):
        return self.kind not in ("same", "refused")


def traced(program, path):
    """The T.prim_func of a program."""
    path.write_text(program.text())
    space = {"T": T, "given": program.given}
    exec(compile(program.text(), str(path), "exec"), space)
    return space[program.name]


def disagreement(program, got, wanted):
    """Where tensors differ from the reference's; empty if nowhere. Bits count, except those of NaN."""
    for tensor, x, y in zip(program.tensors, got, wanted, strict=False):
        bits = {"float32": torch.int32, "uint64": torch.int64, "uint32": torch.int32, "uint16": torch.int16}
        bits["float4_e2m1fn"] = torch.uint8
        a, b = (z.view(bits.get(tensor.dtype, z.dtype)) for z in (x, y))
        bad = a != b
        if tensor.dtype == "float32":
            bad &= ~(x.isnan() & y.isnan())
        if bad.any():
            place = tuple(bad.nonzero()[0].tolist())
            return f"{tensor.name}{list(place)}: {x[place].item()}, not {y[place].item()}; {int(bad.sum())} differ"
    return ""


class Case:
    """A program with what its executors need, made once."""

    def __init__(self, program, folder):
        self.program, self.path = program, Path(folder) / f"{program.name}.py"
        self.function = traced(program, self.path)
        self.traced = self.function.program
        self.wanted = program.arguments()
        program.expected(self.wanted)

    @functools.cache  # noqa: B019
    def flat(self, arch):
        build = Build(Target.of(arch))
        return lower(self.traced, cuda_passes(build)), build

    @functools.cache  # noqa: B019
    def text(self, arch):
        flat, build = self.flat(arch)
        return emit_cuda(flat, build, self.traced)

    @functools.cache  # noqa: B019
    def cpu(self):
        return emit_cpu(lower(self.traced), dimensions(self.traced))


def on_tiles(case):
    args = case.program.arguments()
    evaluate(case.traced, *args)
    return disagreement(case.program, args, case.wanted)


def on_threads(arch, case):
    args = case.program.arguments()
    findings = interpret(case.flat(arch)[0], case.traced, args)
    found = disagreement(case.program, args, case.wanted)
    return found or (findings.report() if findings else "")


def on_cpu(case, entry):
    args = case.program.arguments()
    Launcher(case.traced, entry, case.cpu().asserts)(*args)
    return disagreement(case.program, args, case.wanted)


def on_text(case, library, arch):
    args = case.program.arguments()
    EmulatedLauncher(case.traced, case.text(arch), seed=case.program.seed, library=library)(*args)
    return disagreement(case.program, args, case.wanted)


def on_keys(case):
    """A kernel for each number, made by one function, whose kernels are kept by their arguments."""
    program = case.program
    if "given" not in program.text():
        return ""
    text = "\n    ".join(["def make(given):", *program.text().splitlines(), f"return {program.name}"])
    path = case.path.with_name(f"{program.name}_keys.py")
    path.write_text(text)
    space = {"T": T}
    exec(compile(text, str(path), "exec"), space)
    make = torch_tile.jit(target="cpu")(space["make"])
    for given in EQUAL:
        args, wanted = program.arguments(), program.arguments()
        replace(program, given=given).expected(wanted)
        make(given)(*args)
        if found := disagreement(program, args, wanted):
            return f"given {given}: {found}"
    return ""


def on_ptx(case):
    """Loads of global memory that are there only where no pointer to written memory is restricted."""
    text = case.text("sm_80").text
    loads = [sum(part.count("ld") for part in accesses(t, "cuda:sm_80")) for t in (text, unrestricted(text))]
    if loads[0] < loads[1]:
        return f"{loads[1] - loads[0]} loads of {loads[1]} were dropped"
    found = stale(text, "cuda:sm_80")
    return f"{len(found)} loads of written memory go through the cache of constants" if found else ""


def unrestricted(text):
    """A text whose pointers to written memory are not restricted."""
    return re.sub(r"(?<!const )(\b\w+\*) __restrict__", r"\1", text)


def on_gpu(case, cubin):
    args = case.program.arguments()
    there = [a.cuda() if isinstance(a, torch.Tensor) else a for a in args]
    CudaLauncher(case.traced, case.text("cuda"), cubin, Target.of("cuda"))(*there)
    return disagreement(case.program, [a.cpu() for a in there[: len(case.program.tensors)]], case.wanted)


RUNS = {"tiles": on_tiles, "keys": on_keys, "ptx": on_ptx}
# What is compiled in units, for which architecture a CUDA text is made; the GPU's own for "gpu".
IN_UNITS = {"cpu": None, "unoptimised": None, "text": "sm_80", "text_sm_90a": "sm_90a", "gpu": "cuda"}


def outcome(case, way, run, watch):
    """Run one program on one executor."""
    watch.at(case.program.seed, way)
    try:
        found = run()
    except Exception as error:
        return failed(case.program, way, error)
    if case.program.refusal and way != "keys":  # which skips programs
        return Outcome(case.program.seed, way, f"no error {case.program.refusal}")
    return Outcome(case.program.seed, way, "values" if found else "same", found)


def failed(program, way, error):
    seed, text = program.seed, f"{type(error).__name__}: {str(error).strip()[:1500]}"
    if program.refusal and getattr(error, "code", "") == program.refusal:
        return Outcome(seed, way, "same")
    if isinstance(error, TileError) and not isinstance(error, InternalError):
        return Outcome(seed, way, "refused" if error.code in REFUSED else f"error {error.code}", text)
    return Outcome(seed, way, type(error).__name__, text)


def joined(texts):
    """Texts of programs as one, which includes each header once."""
    heads = dict.fromkeys(line for text in texts for line in re.findall(r"^#include .*$", text, re.MULTILINE))
    return "\n".join([*heads, *(re.sub(r"^#include .*\n", "", text, flags=re.MULTILINE) for text in texts)])


def apart(n, text):
    """The CPU text of one of several programs, with names and options of its own."""
    return f"#pragma GCC push_options\nnamespace p{n} {{\n{text}}}\n#pragma GCC pop_options\n"


def cpu_entries(cases, optimised):
    texts = [case.cpu().text.replace(ENTRY, f"{ENTRY}_{n}") for n, case in enumerate(cases)]
    text = joined([apart(n, text) for n, text in enumerate(texts)])
    library = ctypes.CDLL(str(compile_shared(text if optimised else UNOPTIMISED + text)))
    for n, _ in enumerate(cases):
        entry = library[f"{ENTRY}_{n}"]
        entry.restype, entry.argtypes = ctypes.c_int64, (ctypes.c_void_p, ctypes.c_void_p)
        yield entry


def compiled(cases, way, watch):
    """Programs that share a compiled library, in units; one that does not compile is looked for by itself."""
    ready, outcomes = [], []
    for case in cases:
        watch.at(case.program.seed, way)
        try:
            case.text(IN_UNITS[way]) if IN_UNITS[way] else case.cpu()
            ready.append(case)
        except Exception as error:
            outcomes.append(failed(case.program, way, error))
    for start in range(0, len(ready), PER_UNIT):
        outcomes += unit(ready[start : start + PER_UNIT], way, watch)
    return outcomes


def unit(cases, way, watch):
    try:
        watch.at(cases[0].program.seed, way + COMPILING)
        if IN_UNITS[way] is None:
            pairs = list(zip(cases, cpu_entries(cases, way == "cpu"), strict=True))
            return [outcome(c, way, functools.partial(on_cpu, c, entry), watch) for c, entry in pairs]
        if way == "gpu":
            cubin = compile_cubin(joined([case.text("cuda").text for case in cases]), Target.of("cuda")).data
            return [outcome(c, way, functools.partial(on_gpu, c, cubin), watch) for c in cases]
        library = build_texts([case.text(IN_UNITS[way]) for case in cases])
        return [outcome(c, way, functools.partial(on_text, c, library, IN_UNITS[way]), watch) for c in cases]
    except Exception as error:
        if len(cases) == 1:
            return [failed(cases[0].program, way, error)]
        return [found for case in cases for found in unit([case], way, watch)]


def outcomes(programs, ways, folder, watch=NoWatch()):  # noqa: B008
    """How each program goes on each executor; `watch` is told which is run."""
    cases, found = [], []
    for program in programs:
        watch.at(program.seed, "trace")
        try:
            cases.append(Case(program, folder))
        except Exception as error:
            found.append(failed(program, "trace", error))
    for way in ways:
        if way in IN_UNITS:
            found += compiled(cases, way, watch)
        else:
            run = RUNS.get(way) or functools.partial(on_threads, way)
            found += [outcome(case, way, functools.partial(run, case), watch) for case in cases]
    return found


def smallest(seed, way, kind, folder, make=generated):
    """The program of a seed, shrunk as long as it fails in the same way."""
    program = make(seed)

    def fails():
        with contextlib.suppress(Exception):
            return any(o.kind == kind and o.is_fault for o in outcomes([program], [way], folder))
        return False

    shrunk(program, fails, SHRINKING_SECONDS - 15)
    return program


def turn_of(seed, make=generated):
    """The executors that a seed chooses."""
    if make is generated_tiles:
        return TILE_TURNS[seed % len(TILE_TURNS)]
    return RARE_TURN if seed % RARE_TURNS == RARE_TURNS - 1 else TURNS[seed % len(TURNS)]


def part(seeds, watch, ways, make=generated):
    """How the programs of some seeds go, in a process that keeps no file. Without `ways`, seeds choose executors."""
    torch.set_num_threads(1)
    gc.collect()
    gc.disable()  # a third of the time goes into looking over the nodes of programs
    folder = tempfile.mkdtemp(prefix="grammar_")
    try:
        turns = collections.defaultdict(list)
        for seed in seeds:
            watch.at(seed, "generate")
            turns[tuple(ways) or turn_of(seed, make)].append(make(seed))
        found = [o for turn, programs in turns.items() for o in outcomes(programs, turn, folder, watch)]
        return next(filter(None, map(lost_gpu, found)), found)
    finally:
        gc.enable()
        shutil.rmtree(folder, ignore_errors=True)


def lost_gpu(found):
    """The program after which the GPU refuses all others of its process, if this is it."""
    if found.way != "gpu" or not found.is_fault:
        return None
    try:
        torch.cuda.synchronize()
    except (RuntimeError, AssertionError):
        return Lost(found.seed, found.way, found.kind, found.text)
    return None


def shrunk_text(numbers, watch, faults, make):
    """The shrunk program of one of the faults."""
    fault = faults[numbers[0]]
    watch.at(numbers[0], "shrink")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        return smallest(fault.seed, fault.way, fault.kind, folder, make).text()


def print_faults(faults, processes, deadline, make):
    """Print each fault with its program, shrunk unless it would take its process with it again."""
    texts = [make(fault.seed).text() for fault in faults]
    parts = [[n] for n, fault in enumerate(faults) if isinstance(fault, Outcome)]
    run, limits = functools.partial(shrunk_text, faults=faults, make=make), Limits(2 * SHRINKING_SECONDS)
    devices = torch.cuda.device_count() if any(fault.way == "gpu" for fault in faults) else 0
    for numbers, text, lost in in_processes(parts, run, processes, limits, deadline, devices):
        texts[numbers[0]] = text if lost is None else texts[numbers[0]]
    for fault, text in zip(faults, texts, strict=True):
        print(f"\n# seed {fault.seed} {fault.way} {fault.kind}: {fault.text[:600]}\n{text}", flush=True)


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--ways", default="", help="executors for each program, or all; by default its seed chooses")
    parser.add_argument("--tiles", action="store_true", help="run programs of tiles.py")
    parser.add_argument("--gpu", action="store_true", help="run on a GPU, too")
    parser.add_argument("--stop", type=int, default=5, help="how many faults end the run; they are shrunk and printed")
    parser.add_argument("--seconds", type=float, default=math.inf, help="after which no program is run any more")
    parser.add_argument("--hang", type=float, default=60, help="seconds after which a program on an executor hangs")
    return parser.parse_args()


def main():
    given = arguments()
    make, every = (generated_tiles, TILE_WAYS) if given.tiles else (generated, WAYS)
    ways = list(every) if given.ways == "all" else [w for w in given.ways.split(",") if w]
    ways = list(dict.fromkeys([*(ways or every), "gpu"])) if given.gpu else ways
    counts, faults, begin, done = collections.Counter(), [], time.time(), set()
    seeds = range(given.seed, given.seed + given.count)
    size = max(12, min(PER_PART, given.count // (4 * given.processes)))
    parts = [seeds[i : i + size] for i in range(0, len(seeds), size)]
    run, limits = functools.partial(part, ways=ways, make=make), Limits(given.hang, max(240, given.hang))
    devices = torch.cuda.device_count() if "gpu" in ways else 0
    for ran, found, lost in in_processes(parts, run, given.processes, limits, begin + given.seconds, devices):
        done.update(ran)
        for o in [lost] if lost else found:
            is_fault = o is lost or o.is_fault
            counts[o.way, "fault" if is_fault else o.kind] += 1
            if is_fault:
                faults.append(o)
                print(f"seed {o.seed} {o.way} {o.kind}: {o.text[:300]}", flush=True)
        took = time.time() - begin
        speed = f"{took:.0f} s, {len(done) / took:.1f} a second"
        print(f"-- {len(done)} programs, {len(faults)} faults, {speed}", flush=True)
        if len(faults) >= given.stop:
            break
    left = [s for s in seeds if s not in done]
    print(f"ran {len(done)} of {len(seeds)} programs from seed {given.seed}; left: {spans(left) or 'none'}")
    for (way, kind), n in sorted(counts.items()):
        print(f"{way:8} {kind:8} {n}")
    print_faults(faults[: given.stop], given.processes, time.time() + SHRINKING_SECONDS, make)
    return bool(faults)


def spans(numbers):
    """Numbers as their spans: 1-3, 7."""
    groups = itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])
    found = [[n for _, n in group] for _, group in groups]
    return ", ".join(f"{g[0]}-{g[-1]}" if len(g) > 1 else str(g[0]) for g in found)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # without waiting for a process that hangs on a GPU
