# SPDX-License-Identifier: Apache-2.0
"""Run `python -m torch_tile COMMAND`: demo, bench, explain, show, tune, doctor, env."""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch_tile
from torch_tile.diagnostics.spelling import did_you_mean, nearest
from torch_tile.tools import Mistake

EXAMPLE = "def make(): return Net(), (torch.randn(2, 8),)"


def _parser() -> argparse.ArgumentParser:
    """Describe the commands and their options."""
    parser = _Parser(prog="python -m torch_tile", description="Tile kernels for PyTorch.")
    parser.add_argument("--version", action="version", version=f"torch_tile {torch_tile.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=_CommandParser)

    def add(name: str, does: str) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=does, description=f"{does[0].upper()}{does[1:]}.")

    demo = add(
        "demo", 'a Llama by eager torch, Inductor and backend="tile", by turns; on a GPU with layers of real sizes'
    )
    demo.add_argument("--tokens", type=_positive, default=0, help="length of the input (128 on a CPU, 2048 on a GPU)")
    demo.add_argument(
        "--select", choices=("fastest", "tile"), default="fastest", help="the backend's option (default: %(default)s)"
    )
    demo.add_argument(
        "--all", action="store_true", dest="every", help="a small DeepSeek-V3 and latent decoding as well"
    )
    bench = add("bench", "a short table of operators by eager torch, Inductor and this package")
    bench.add_argument("--size", type=_positive, default=0, help="rows, keys and columns (512 on a CPU, 4096 on a GPU)")
    bench.add_argument("--no-inductor", action="store_true", help="leave out Inductor, which compiles for a minute")
    tune = add("tune", "search the configurations of an autotuned kernel on this machine")
    tune.add_argument("kernel", help="FILE.py:NAME or MODULE:NAME of a function with @torch_tile.autotune")
    tune.add_argument("arguments", nargs="*", help="of the kernel function: 1024 float16, or M=1024")
    explain = add("explain", "what the backend finds in a model, and why not more")
    explain.add_argument(
        "model",
        help="llama, deepseek, or FILE.py:NAME or MODULE:NAME of a function that returns (model, arguments) or "
        "(model, arguments, keyword arguments)",
    )
    explain.add_argument("--backward", action="store_true", help="look at the backward as well")
    explain.add_argument(
        "--select",
        choices=("tile", "fastest"),
        default="tile",
        help="fastest: time each subgraph both ways (default: %(default)s)",
    )
    explain.add_argument("--html", default="", metavar="FILE", help="also write the report as a page with sources")
    show = add("show", "schedule, layouts and stages of a file's kernels on a GPU")
    show.add_argument("file", help="a Python file with T.prim_func kernels among its global names")
    show.add_argument("--target", default="cuda:sm_90a", help="what to compile for (default: %(default)s)")
    show.add_argument("--stage", action="append", default=[], metavar="PASS", help="print the kernel after it, or all")
    show.add_argument("--pictures", default="", metavar="FOLDER", help="write pictures of the layouts there")
    show.add_argument("--format", action="append", choices=("svg", "png", "txt"), help="of the pictures (default: svg)")
    doctors = add("doctor", "what is found on this machine")
    doctors.add_argument("--selftest", action="store_true", help="compare a kernel of each family with float64, too")
    add("env", "versions, compilers, GPUs, caches and variables, to paste into a bug report")
    return parser


class _Parser(argparse.ArgumentParser):
    """A parser that names the nearest command or value for one that is not known."""

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Check a value against the choices of its option."""
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as problem:
            problem.message += did_you_mean(str(value), map(str, action.choices or ()))
            raise


class _CommandParser(_Parser):
    """Parse the options of one command; its errors show that command's usage, not the program's."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse, and name the command's own usage and nearest option for an unknown one."""
        found, rest = super().parse_known_args(args, namespace)
        if rest:
            known = [option for action in self._actions for option in action.option_strings]
            near = nearest(rest[0].partition("=")[0].lstrip("-"), [option.lstrip("-") for option in known])
            meant = f"; did you mean --{near}?" if near and rest[0].startswith("-") else self._list_options(known)
            if self.prog.endswith(" tune") and rest[0].startswith("-"):
                meant = f"; give arguments of the kernel as {rest[0].strip('-').partition('=')[0]}=64"
            self.error(f"unrecognized arguments: {' '.join(rest)}{meant}")
        return found, rest

    def _list_options(self, known: Sequence[str]) -> str:
        """Name the command's options, for an argument that is like none of them."""
        own = [option for option in known if option not in ("-h", "--help")]
        return f"; its options are {', '.join(own)}" if own else f"; {self.prog.rpartition(' ')[2]} takes none"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return the exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.command is None:
        parser.print_help(sys.stderr)
        parser.exit(2)
    if options.command == "env":
        from torch_tile.tools.env import describe

        print(describe())
        return 0
    if options.command == "show":
        _check_show(parser, options)
    if options.command == "explain" and options.html:  # said before the model is compiled
        page = Path(options.html).absolute()
        if not page.parent.is_dir():
            parser.error(f"--html {options.html}: there is no such folder")
        if page.is_dir():
            parser.error(f"--html {options.html}: that is a folder; give a file in it")
    if options.command == "doctor":
        from torch_tile.tools.doctor import doctor

        return doctor(options.selftest)
    if options.command == "show":
        from torch_tile.tools.show import show as show_kernels

        try:
            print(
                show_kernels(
                    options.file, options.target, options.stage, options.pictures, tuple(options.format or ("svg",))
                )
            )
        except (Mistake, OSError) as problem:
            parser.error(str(problem))
        return 0
    if options.command == "bench":
        from torch_tile.tools.bench import bench as run_bench

        return run_bench(options.size, not options.no_inductor)
    if options.command == "tune":
        from torch_tile.tools.tune import tune as run_tune

        try:
            print(run_tune(named(options.kernel), options.kernel, options.arguments))
        except Mistake as problem:
            parser.error(str(problem))
        return 0
    if options.command == "demo":
        from torch_tile.tools.demo import demo as run_demo

        return run_demo(options.tokens, options.select, options.every)
    try:
        model, args, kwargs = load(options.model)
    except Mistake as problem:
        parser.error(str(problem))
    report = explain_model(model, args, kwargs, options.backward, options.select)
    print(report)
    if options.html:
        print(f"wrote {report.save(options.html)}")
    return 0


def _check_show(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Exit with an error for a file that is none, and for options of pictures that are not written."""
    file, _, name = options.file.rpartition(":")
    if name and file.endswith(".py"):
        parser.error(f"{options.file}: give the file alone, {file}: all of its kernels are shown")
    if Path(options.file).is_dir():
        parser.error(f"{options.file} is a folder; give a file of Python")
    if not Path(options.file).is_file():
        parser.error(f"there is no file {options.file}")
    if Path(options.file).suffix != ".py":
        parser.error(f"{options.file} is no file of Python; its name must end in .py")
    if options.format and not options.pictures:
        parser.error("--format says how pictures are written; give their folder, too: --pictures FOLDER")
    if options.pictures and Path(options.pictures).is_file():
        parser.error(f"--pictures {options.pictures}: that is a file; give a folder")


def explain_model(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], backward: bool, select: str) -> Any:
    """Return the report on a model; the backward is included only if asked for."""
    import torch

    from torch_tile.inductor.report.explain import explain

    with torch.set_grad_enabled(backward):
        return explain(model, *args, select=select, backward=backward, **kwargs)


def load(target: str) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Load the (model, arguments, keyword arguments) that a command-line name stands for. Raises Mistake."""
    from torch_tile.tools.models import SAMPLES

    if target in SAMPLES:
        import torch

        sample = SAMPLES[target]()
        return sample.model, *sample.arguments(torch.randint(0, sample.vocabulary, (1, 128)))
    where, _, name = target.rpartition(":")
    if not where or not name:
        kinds = " nor ".join((*SAMPLES, "FILE.py:NAME", "MODULE:NAME"))
        meant = _functions_of(target) or did_you_mean(target, SAMPLES)
        raise Mistake(f"{target!r} is neither {kinds}{meant}")
    function = named(target)
    if isinstance(function, type) or hasattr(function, "forward"):
        kind = f"the class {name}" if isinstance(function, type) else f"of type {type(function).__name__}"
        raise Mistake(f"{target} is {kind}; expected a function that returns (model, arguments), as: {EXAMPLE}")
    made = function()
    if not isinstance(made, tuple) or len(made) not in (2, 3):
        raise Mistake(f"{name}() should return (model, arguments) or (model, arguments, keyword arguments)")
    if not isinstance(made[1], tuple | list):
        raise Mistake(f"the arguments that {name}() returns are a {type(made[1]).__name__}; they should be a tuple")
    return made[0], tuple(made[1]), dict(made[2]) if len(made) == 3 else {}


def named(target: str) -> Any:
    """Return the function that FILE.py:NAME or MODULE:NAME stands for. Raises Mistake."""
    where, _, name = target.rpartition(":")
    if not where or not name:
        raise Mistake(f"{target!r} is neither FILE.py:NAME nor MODULE:NAME{_functions_of(target)}")
    if where.endswith(".py") or Path(where).is_file():
        if not where.endswith(".py"):
            raise Mistake(f"{where} is no file of Python; its name must end in .py")
        if not Path(where).is_file():
            raise Mistake(f"there is no file {where}")
        names = vars(_module_of(where))
    elif Path(where).is_dir() and not (Path(where) / "__init__.py").is_file():
        raise Mistake(f"{where} is a folder; give a file in it, {where}/FILE.py:{name}")
    else:
        sys.path.insert(0, "")
        try:
            names = vars(importlib.import_module(where))
        except ModuleNotFoundError as problem:
            if not f"{where}.".startswith(f"{problem.name}."):
                raise  # from inside of the module
            raise Mistake(str(problem)) from problem
    if not callable(names.get(name)):
        functions = [known for known, value in names.items() if callable(value)]
        home = names.get("__name__")
        own = ", ".join(known for known in functions if getattr(names[known], "__module__", None) == home)
        meant = did_you_mean(name, functions) or (f"; its functions are {own}" if own else "; expected one in it")
        raise Mistake(f"{where} has no function {name}{meant}")
    return names[name]


def _functions_of(file: str) -> str:
    """Name the functions of a file that is given without a name; "" if there is none."""
    if not file.endswith(".py") or not Path(file).is_file():
        return ""
    found = [each.name for each in ast.parse(Path(file).read_text()).body if isinstance(each, ast.FunctionDef)]
    return f"; its functions are {', '.join(f'{file}:{name}' for name in found[:8])}" if found else ""


def _module_of(file: str) -> ModuleType:
    """Import a file as a module, under a name by which Dynamo finds its global names again."""
    name = f"__torch_tile_{Path(file).stem}__"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None  # it ends in .py
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _positive(text: str) -> int:
    """Parse a positive integer of the command line."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of at least 1")
    return int(text)


def run() -> int:
    """Run `main` as a process. Its output may go to a pipe that closes early."""
    try:
        status = main()
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python flushes once more at its end
        return 1
    return status


if __name__ == "__main__":
    sys.exit(run())
