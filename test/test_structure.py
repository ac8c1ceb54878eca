# SPDX-License-Identifier: Apache-2.0
"""The shape of the tree: import direction, import circles, mirrored test paths, size limits, headers, docstrings.

Each rule is a generator of complaints over a checkout; it is run on this one, where it must find nothing, and on small
made-up trees, where it must find what was planted.
"""

import ast
import functools
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "torch_tile"

# Lowest first; a module may import its own layer's package and any layer above it in this list, not its siblings.
# "torch_tile" is the package's own __init__, which may import everything, lazily where that is heavy.
LAYERS = [
    {"diagnostics.catalog"},
    {"diagnostics"},
    {"hardware"},
    {"compiler.context", "ir"},
    {"intrinsics", "options", "tolerance"},
    {"tileop", "compiler.binding", "compiler.sources"},
    {"language", "lowering", "codegen", "simulator", "runtime", "torch_transforms"},
    {"compiler", "profiler", "user_op"},
    {"kernel", "testing", "math", "env", "transform"},
    {"jit", "utils"},
    {"autotuner", "engine", "contrib"},
    {"carver"},
    {PACKAGE},
    {"kernels", "cuda"},
    {"ops"},
    {"inductor", "nn"},
    {"integrations"},
    {"tools", "compat"},
    {"__main__"},
]
RANK = {name: rank for rank, layer in enumerate(LAYERS) for name in layer}
# Types of higher layers that a layer may name, as callers hand their objects down to it.
HANDED_DOWN = {
    ("profiler", "kernel"),
    ("user_op", "kernel"),
    ("runtime", "jit"),
    ("runtime", "kernel"),
}
WITH_TORCH = {name for name, rank in RANK.items() if rank >= RANK["kernels"]} | {
    PACKAGE,
    "simulator",
    "torch_transforms",
}

# Tests that mirror no module, and why.
NOT_MIRRORED = {
    "test_structure.py": "is about the whole tree",
    "test_readme.py": "runs the examples of README.md",
    "test_rounding.py": "shows that the bounds of rounding.py hold errors, and little more",
    "test_main.py": "tests torch_tile/__main__.py, whose underscores a test name would only repeat",
    "test_mistaken_commands.py": "tries edits of command lines of torch_tile/__main__.py",
    "test_emulate.py": "tests emulate.py beside it, which runs the text of kernels for GPUs on the host",
    "test_sample.py": "tests which tests of the suite conftest.py draws for a session",
    "diagnostics/test_mistakes.py": "tries the edits of programs that mistakes.py beside it makes",
    "diagnostics/test_mistaken_calls.py": "tries the edits of calls that edited_calls.py makes",
    "lowering/sync/test_branch_barriers.py": "tests insert_barriers.py where only some threads of a block pass",
    "simulator/test_mutation.py": "tests mutation.py beside it, which takes orders out of kernels",
    "benchmarks": "tests benchmarks/, file for file",
    "csrc": "tests the headers of csrc/, name for name",
    "lowering/test_changed_tiles.py": "is about tiles that bulk_loads and split_warps hand over together",
    "lowering/test_passes.py": "holds docs/architecture.md to the passes of lowering/__init__.py",
    "tilelang_kernels": "kernels in TileLang's styles, run as they are",
    "cubins": "compiles every kernel of the library for every chip",
    "examples": "runs examples/",
    "integrations/test_mxfp4.py": "runs a whole model of gpt-oss, through replacement and experts",
    "docs": "tests docs/build_pages.py",
    "release": "tests .ci/release.py",
    "inductor/test_metamorphic.py": "compares compiled models with each other, through all stages",
    "fuzz": "random programs through the interpreter and the CPU target",
    "device": "runs on a GPU, through all layers",
    "errors": "one kernel that must fail for each entry of catalog.py",
    "golden": "printed kernels at every stage",
    "faults": "classes of faults that were mended, one file each, on every target",
    "ops/test_on_gpu.py": "runs every operator on a GPU",
    "ops/test_arguments.py": "is about every tensor argument of every operator",
    "ops/test_odd_forms.py": "is about odd forms of the tensors of every operator",
    "papers": "the kernels of the papers, as printed there",
    "models": "whole models through several layers",
    "kernels/test_typical_sizes.py": "is about the cuts of all families",
}

WORDS = 20  # of a sentence, at most
LOADS_ALL_OF = {"ops.all_families": "ops.families"}  # modules that import all modules of a package, by their names

MAX_FILE, MAX_FUNCTION = 900, 80  # kernels may be longer: they are read as one piece
COMMENT = {".py": "#", ".sh": "#", ".h": "//", ".cpp": "//", ".cu": "//", ".cuh": "//"}


@functools.cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def sources(root: Path) -> Iterator[tuple[Path, str]]:
    """Python files of the package and their layer's name."""
    for path in sorted((root / PACKAGE).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        layer = layer_of(".".join(parts).removesuffix(".__init__"), root)
        yield path, layer or PACKAGE


def code_files(root: Path) -> Iterator[Path]:
    for folder in (PACKAGE, "test", "csrc", "benchmarks", "examples", "docs", ".ci"):
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in COMMENT or path == root / ".ci/run":
                yield path


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def imports(node: ast.AST, into_functions: bool = True) -> Iterator[ast.Import | ast.ImportFrom]:
    """Import statements that run (those for type checkers do not), in source order."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child
        elif is_type_checking(child):
            yield from (i for part in child.orelse for i in imports(ast.Module([part], []), into_functions))
        elif into_functions or not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from imports(child, into_functions)


def imported(statement: ast.Import | ast.ImportFrom, path: Path, root: Path) -> Iterator[str]:
    """Dotted names of what a statement imports, relative ones resolved; `from a import b` gives a.b."""
    if isinstance(statement, ast.Import):
        yield from (alias.name for alias in statement.names)
        return
    base = statement.module or ""
    if statement.level:
        package = path.parent.relative_to(root).parts
        above = package[: len(package) - statement.level + 1]
        base = ".".join((*above, base) if base else above)
    yield from (f"{base}.{alias.name}" for alias in statement.names)


def layer_of(dotted: str, root: Path) -> str | None:
    """The layer that a dotted name lies in: None outside the package, the package itself for names of its __init__."""
    parts = dotted.split(".")
    if parts[0] != PACKAGE:
        return None
    folder = root / PACKAGE
    if ".".join(parts[1:3]) in RANK:  # a module that lies in another layer than the rest of its package
        return ".".join(parts[1:3])
    if len(parts) > 1 and ((folder / parts[1]).is_dir() or (folder / f"{parts[1]}.py").is_file()):
        return parts[1]
    return PACKAGE


def import_direction(root: Path) -> Iterator[str]:
    for path, layer in sources(root):
        where = path.relative_to(root)
        if layer not in RANK:
            yield f"{where}: `{layer}` is in no layer; place it in LAYERS and in docs/architecture.md"
            continue
        if layer == PACKAGE:
            continue
        for statement in imports(parse(path)):
            for other in {layer_of(name, root) for name in imported(statement, path, root)}:
                if other is None or other == layer or other not in RANK:
                    continue
                if RANK[other] >= RANK[layer]:
                    yield f"{where}:{statement.lineno}: `{layer}` may not import `{other}`"


def type_direction(root: Path) -> Iterator[str]:
    """Types, too, are named of lower layers only, but for objects that are handed down."""
    for path, layer in sources(root):
        if layer == PACKAGE or layer not in RANK:
            continue
        for block in filter(is_type_checking, ast.walk(parse(path))):
            for statement in (s for s in block.body if isinstance(s, ast.Import | ast.ImportFrom)):
                for other in {layer_of(name, root) for name in imported(statement, path, root)}:
                    if other is None or other == layer or other not in RANK or (layer, other) in HANDED_DOWN:
                        continue
                    if RANK[other] >= RANK[layer]:
                        where = f"{path.relative_to(root)}:{statement.lineno}"
                        yield f"{where}: `{layer}` may not name types of `{other}`"


def modules(root: Path) -> dict[str, Path]:
    """Path of each module by its name inside the package; packages by their folder's, the package itself as ""."""
    found = {}
    for path in sorted((root / PACKAGE).rglob("*.py")):
        parts = path.relative_to(root / PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def import_edges(root: Path, into_functions: bool) -> dict[str, set[str]]:
    """What each module imports of the package: of `from a.b import c`, both a.b and, if it is a module, a.b.c.

    The package's own __init__ does not count, as it runs before any module. Nor does a package that is only on the way.
    """
    known = modules(root)
    edges: dict[str, set[str]] = {name: set() for name in known}
    for name, path in known.items():
        for statement in imports(parse(path), into_functions):
            found = set(imported(statement, path, root))
            if isinstance(statement, ast.ImportFrom):
                found |= {dotted.rpartition(".")[0] for dotted in found}
            found |= {f"{PACKAGE}.{each}" for each in known if each.rpartition(".")[0] == LOADS_ALL_OF.get(name)}
            for dotted in found:
                if dotted.split(".")[0] != PACKAGE:
                    continue
                inside = dotted.partition(".")[2]
                while inside and inside not in known:
                    inside = inside.rpartition(".")[0]
                if inside not in ("", name):
                    edges[name].add(inside)
    return edges


def circles(edges: dict[str, set[str]]) -> list[list[str]]:
    """Strongly connected components of more than one module, by Tarjan's algorithm."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in sorted(edges[name]):
            if other not in index:
                visit(other)
            if other in stack:
                low[name] = min(low[name], low[other])
        if low[name] == index[name]:
            part = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(part) > 1:
                found.append(sorted(part))

    for name in sorted(edges):
        if name not in index:
            visit(name)
    return found


def import_circles(root: Path) -> Iterator[str]:
    """No module reaches itself by imports, those inside functions included."""
    at_import = circles(import_edges(root, into_functions=False))
    for circle in at_import:
        yield f"modules import each other: {', '.join(circle)}"
    for circle in circles(import_edges(root, into_functions=True)):
        if circle not in at_import:
            yield f"modules import each other, some inside functions: {', '.join(circle)}"


LIGHT = (
    "ops",
    "kernels.attention.args",
    "kernels.attention.arguments",
    "kernels.conv.args",
    "kernels.gemm.args",
    "kernels.linear_attention.args",
    "kernels.loss.args",
    "kernels.mla.args",
    "kernels.moe.args",
    "kernels.norm.args",
    "kernels.ssm.args",
    "runtime.cache",
    "runtime.launch_plan",
    "torch_transforms",
    "diagnostics.arguments",
    "diagnostics.spelling",
    "diagnostics.variables",
    "inductor.entry_point",
    "inductor.codegen.artifacts",
)


def _is_light(name: str) -> bool:
    """Return whether `import torch_tile` may load a module: one of LIGHT, a part of one, or a package around one."""
    return any(f"{name}.".startswith(f"{each}.") or each.startswith(f"{name}.") for each in LIGHT)


def light_import(root: Path) -> Iterator[str]:
    """`import torch_tile` loads the declarations of operators, but no kernel and no part of the compiler."""
    edges = import_edges(root, into_functions=False)
    came_from, waiting = {"": ""}, [""]
    for name in waiting:  # grows meanwhile
        parts = name.split(".")
        packages = {".".join(parts[:n]) for n in range(1, len(parts))} & edges.keys()
        for other in sorted((edges.get(name, set()) | packages) - came_from.keys()):
            came_from[other] = name
            waiting.append(other)
            if not _is_light(other) and (not name or _is_light(name)):
                yield f"`import torch_tile` imports {other}, by way of {name}: import it in a function"


def capability_numbers(root: Path) -> Iterator[str]:
    """Only the hardware module compares a capability with numbers, or finds something by one."""
    for path, layer in sources(root):
        if layer == "hardware":
            continue
        for node in ast.walk(parse(path)):
            parts: list[ast.AST] = []
            if isinstance(node, ast.Compare):
                parts = [node.left, *node.comparators]
                number = any(isinstance(n, ast.Constant) and type(n.value) is int for p in parts for n in ast.walk(p))
                found = number and any("capability" in ast.unparse(part) for part in parts)
            elif isinstance(node, ast.Subscript):
                found = "capability" in ast.unparse(node.slice)
            else:
                called = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get"
                found = called and any("capability" in ast.unparse(arg) for arg in node.args[:1])
            if found:
                yield f"{path.relative_to(root)}:{node.lineno}: ask `Target` for a feature, `has_...`, or a limit"


def hardware_limits(root: Path) -> Iterator[str]:
    """Numbers that are the hardware's have a name there: no other module gives them one of its own."""
    own = re.compile(r"WARP(_?GROUP|_SIZE)?|SHARED_(LIMIT|MEMORY)|REGISTERS|PER_THREAD|GRID_LIMITS|MOST_THREADS")
    for path, layer in sources(root):
        for node in parse(path).body if layer != "hardware" else ():
            if isinstance(node, ast.Assign) and any(isinstance(n, ast.Constant) for n in numbers_in(node.value)):
                names = [n.id for target in node.targets for n in ast.walk(target) if isinstance(n, ast.Name)]
                for name in filter(own.fullmatch, names):
                    yield f"{path.relative_to(root)}:{node.lineno}: `{name}` is the hardware's: import it from there"


def numbers_in(value: ast.AST) -> list[ast.AST]:
    """A number, or those of a tuple."""
    parts = value.elts if isinstance(value, ast.Tuple) else [value]
    return [part for part in parts if isinstance(part, ast.Constant) and type(part.value) is int]


def visitors(root: Path) -> Iterator[str]:
    """Nodes find their methods by one convention, `visit_For`, through `Visitor.method_of`."""
    for path, _ in sources(root):
        for node in ast.walk(parse(path)):
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            if (
                isinstance(node, ast.Call)
                and called == "getattr"
                and re.search(r"type\(\w+\)\.__name__", ast.unparse(node.args[1]))
            ):
                yield f"{path.relative_to(root)}:{node.lineno}: derive from `Visitor` and ask `method_of`"
            if isinstance(node, ast.ClassDef):
                for each in node.body:
                    if isinstance(each, ast.FunctionDef) and each.name[0].isupper():
                        yield f"{path.relative_to(root)}:{each.lineno}: name it visit_{each.name}"


def identities(root: Path) -> Iterator[str]:
    """Only IdMap and IdSet take identities, and keep their keys alive."""
    for path, _ in sources(root):
        if path != root / PACKAGE / "ir/idmap.py":
            for node in ast.walk(parse(path)):
                if isinstance(node, ast.Name) and node.id == "id":
                    where = f"{path.relative_to(root)}:{node.lineno}"
                    yield f"{where}: takes an identity by `id`: a node is a key itself, for other objects use IdMap"


def mocks(root: Path) -> Iterator[str]:
    """The package replaces nothing of itself with mocks."""
    for path, _ in sources(root):
        for statement in imports(parse(path)):
            if any(name.startswith("unittest") for name in imported(statement, path, root)):
                yield f"{path.relative_to(root)}:{statement.lineno}: the package may not import unittest"


def torch_at_import(root: Path) -> Iterator[str]:
    for path, layer in sources(root):
        if layer in WITH_TORCH:
            continue
        for statement in imports(parse(path), into_functions=False):
            if any(name.split(".")[0] == "torch" for name in imported(statement, path, root)):
                where = f"{path.relative_to(root)}:{statement.lineno}"
                yield f"{where}: import torch inside the function that needs it, or under TYPE_CHECKING"


def mirrored_tests(root: Path) -> Iterator[str]:
    for path in sorted((root / "test").rglob("test_*.py")):
        inside = path.relative_to(root / "test")
        if inside.parts[0] in NOT_MIRRORED or inside.as_posix() in NOT_MIRRORED:
            continue
        folder = root / PACKAGE / inside.parent
        words = inside.stem.removeprefix("test_").split("_")
        modules = ["_".join(words[:n]) for n in range(len(words), 0, -1)]  # test_layout_text.py: an aspect of layout.py
        if not any((folder / f"{m}.py").is_file() or (folder / m).is_dir() for m in modules):
            source = (folder / f"{modules[0]}.py").relative_to(root)
            yield f"test/{inside}: there is no {source}; rename it, or say why not in NOT_MIRRORED"


def file_sizes(root: Path) -> Iterator[str]:
    for path in code_files(root):
        lines = len(path.read_text().splitlines())
        if lines > MAX_FILE:
            yield f"{path.relative_to(root)}: {lines} lines, the limit is {MAX_FILE}"


def decorators(node: ast.AST) -> set[str]:
    """The last names of all decorators of functions in a piece of code: `jit` of `@torch_tile.jit(strict=True)`."""
    functions = [n for n in ast.walk(node) if isinstance(n, ast.FunctionDef)]
    return {re.split(r"\W", ast.unparse(d).partition("(")[0])[-1] for n in functions for d in n.decorator_list}


def is_kernel(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether a function is traced, or holds one that is."""
    return bool(decorators(node) & {"jit", "library_jit", "prim_func", "macro"})


def library_kernels(root: Path) -> Iterator[str]:
    """Kernels of the library keep what their tilings were measured with."""
    for path, layer in sources(root):
        if layer == "kernels" and "jit" in decorators(parse(path)):
            yield f"{path.relative_to(root)}: decorate kernels of the library with `library_jit`"


def function_sizes(root: Path) -> Iterator[str]:
    for path in code_files(root):
        if path.suffix != ".py" or path.is_relative_to(root / "test/papers"):  # which are as their papers print them
            continue
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > MAX_FUNCTION and not is_kernel(node):
                    where = f"{path.relative_to(root)}:{node.lineno}"
                    yield f"{where}: `{node.name}` has {lines} lines, the limit is {MAX_FUNCTION}"


def headers(root: Path) -> Iterator[str]:
    for path in code_files(root):
        lines = path.read_text().splitlines()
        first = next((line for line in lines if not line.startswith("#!")), "")
        wanted = f"{COMMENT.get(path.suffix, '#')} SPDX-License-Identifier: Apache-2.0"
        if first != wanted:
            yield f"{path.relative_to(root)}: should begin with `{wanted}`"


def module_docstrings(root: Path) -> Iterator[str]:
    """Tests may do without: their path says which module they are about."""
    for path in code_files(root):
        if path.suffix != ".py" or path.is_relative_to(root / "test"):
            continue
        if parse(path).body and not ast.get_docstring(parse(path)):
            yield f"{path.relative_to(root)}: has no module docstring"


def silent_errors(root: Path) -> Iterator[str]:
    """`raise ValueError` or `raise ValueError()` say nothing. Re-raising in a handler and abstract methods are fine."""
    for path, _ in sources(root):
        for node in ast.walk(parse(path)):
            raised = node.exc if isinstance(node, ast.Raise) else None
            name = raised.func if isinstance(raised, ast.Call) and not (raised.args or raised.keywords) else raised
            if (
                isinstance(name, ast.Name)
                and name.id != "NotImplementedError"
                and re.search(r"(Error|Exception|Exit)$", name.id)
            ):
                yield f"{path.relative_to(root)}:{node.lineno}: {name.id} is raised without a message"


OLD_WORDS = re.compile(r"(?:^|_)(fade|faded|copiers?|crews?|spilt|turned|turns?|under_way)(?:_|$)")


def plain_words(root: Path) -> Iterator[str]:
    """Identifiers use the words of the glossary in CONTRIBUTING.md, not those that it replaced."""
    for path, _ in sources(root):
        for node in ast.walk(parse(path)):
            names = [getattr(node, "name", None), getattr(node, "id", None), getattr(node, "arg", None)]
            for name in (n for n in names if isinstance(n, str)):
                if found := OLD_WORDS.search(name):
                    line = getattr(node, "lineno", 0)
                    yield f"{path.relative_to(root)}:{line}: `{name}`: another word for {found[1]}, see the glossary"


# A name, an article, a question word, or a noun in the plural: no verb ends in a single s.
NO_VERB = re.compile(
    r"`|(The|An?|All|Each|Any|One|From|Where|Wh[a-z]+|How|Everything|[\w-]*[^\Ws]s)\b(?!-)|[\w-]+'|C\+\+|T\."
)


def opening_verbs(root: Path) -> Iterator[str]:
    """Docstrings of functions open with what they do, not with the thing that they return."""
    for path, _ in sources(root):
        for node in ast.walk(parse(path)):
            text = ast.get_docstring(node) if isinstance(node, ast.FunctionDef) else None
            if text and not node.name.startswith("__") and NO_VERB.match(text):
                first = text.splitlines()[0]
                yield f"{path.relative_to(root)}:{node.lineno}: `{node.name}` opens with no verb: {first}"


def sentence_lengths(root: Path) -> Iterator[str]:
    """Sentences of docstrings, comments and documents have at most WORDS words; text in backticks counts as one."""
    texts = [(path, [*docstrings(parse(path)), *comments(path.read_text())]) for path, _ in sources(root)]
    texts += [(path, [(1, in_markdown(path.read_text()))]) for path in documents(root)]
    for path, found in texts:
        for line, prose in found:
            for sentence in sentences(prose):
                if (count := len(re.findall(r"\S*\w\S*", sentence))) > WORDS:
                    yield f"{path.relative_to(root)}:{line}: a sentence of {count} words: {sentence[:60]}..."


def documents(root: Path) -> Iterator[Path]:
    """The documents for users and developers; the log of tries is notes."""
    for path in [root / "README.md", root / "CONTRIBUTING.md", *sorted((root / "docs").rglob("*.md"))]:
        if path.exists() and path.name != "perf-log.md":
            yield path


def in_markdown(text: str) -> str:
    """The prose of a document: without code, headings, addresses of links and marks of bold text."""
    text = re.sub(r"```.*?```|^#[^\n]*$", "\n\n", text, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text.replace("**", ""))


def docstrings(module: ast.Module) -> Iterator[tuple[int, str]]:
    """The docstrings of a module, each with the line of what it describes."""
    for node in ast.walk(module):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (text := ast.get_docstring(node)):
            yield getattr(node, "lineno", 1), text


def comments(text: str) -> Iterator[tuple[int, str]]:
    """The comments that have lines of their own, neighbouring lines joined."""
    for found in re.finditer(r"(?:^ *# .*\n)+", text, re.MULTILINE):
        yield text.count("\n", 0, found.start()) + 1, re.sub(r"^ *# ", "", found[0], flags=re.MULTILINE)


def sentences(prose: str) -> Iterator[str]:
    """The sentences of a text. Colons and semicolons end one; diagrams and tables have none."""
    for paragraph in re.split(r"\n\s*\n|\n(?=\s*(?:[-*|]|\d+\.|[\w, ]{1,40}:\s))", prose):
        if "|" not in (plain := re.sub(r"``?[^`]+``?", "CODE", " ".join(paragraph.split()))):
            yield from re.split(r"(?<=[.!?:;])\s+", plain)


RULES = [
    import_direction,
    type_direction,
    import_circles,
    light_import,
    mocks,
    library_kernels,
    identities,
    visitors,
    capability_numbers,
    hardware_limits,
    torch_at_import,
    mirrored_tests,
    file_sizes,
    function_sizes,
    headers,
    module_docstrings,
    silent_errors,
    plain_words,
    opening_verbs,
    sentence_lengths,
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_this_tree(rule: Callable[[Path], Iterator[str]]) -> None:
    found = list(rule(ROOT))
    assert not found, "\n" + "\n".join(found)


HEAD = '# SPDX-License-Identifier: Apache-2.0\n"""What it is."""\n'


def tree(tmp_path: Path, files: dict[str, str]) -> Path:
    """A made-up checkout; Python files get the header and the docstring."""
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(HEAD + text if name.endswith(".py") else text)
    return tmp_path


CLEAN = {
    "torch_tile/__init__.py": "from torch_tile import ops\n",
    "torch_tile/ir/a.py": "from ..diagnostics import x\nfrom . import b\nimport numpy\n",
    "torch_tile/ir/b.py": "if TYPE_CHECKING:\n    import torch\n    from ..diagnostics import x\n",
    "torch_tile/runtime/a.py": "if TYPE_CHECKING:\n    from .. import jit\n",
    "torch_tile/diagnostics/__init__.py": "x = 1\n",
    "torch_tile/diagnostics/errors.py": "x = 1\n",
    "torch_tile/jit.py": "from torch_tile.ir import a\ndef f():\n    import torch\n    raise ValueError('no')\n",
    "torch_tile/ops/__init__.py": "import torch\n",
    "test/ir/test_a.py": "",
    "test/ir/test_a_in_part.py": "",
    "test/runtime/test_a.py": "",
    "torch_tile/kernels/long.py": "@T.prim_func\ndef f():\n" + "    pass\n" * 80,
    "test/test_structure.py": "",
    "csrc/a.h": "// SPDX-License-Identifier: Apache-2.0\n",
}

PLANTED = [
    (import_direction, {"torch_tile/ir/c.py": "from ..jit import f\n"}, "ir/c.py:3: `ir` may not import `jit`"),
    (import_direction, {"torch_tile/ir/c.py": "from .. import jit\n"}, "`ir` may not import `jit`"),
    (import_direction, {"torch_tile/ir/c.py": "import torch_tile.ops.x\n"}, "`ir` may not import `ops`"),
    (import_direction, {"torch_tile/ir/c.py": "def f():\n    import torch_tile\n"}, "`ir` may not import `torch_tile`"),
    (
        import_direction,
        {"torch_tile/codegen/c.py": "from ..runtime import f\n", "torch_tile/runtime/a.py": ""},
        "`codegen` may not import `runtime`",
    ),
    (
        import_direction,
        {"torch_tile/ir/c.py": "if TYPE_CHECKING:\n    pass\nelse:\n    from .. import jit\n"},
        "`ir` may not import `jit`",
    ),
    (
        type_direction,
        {"torch_tile/ir/c.py": "if TYPE_CHECKING:\n    from ..jit import f\n"},
        "ir/c.py:4: `ir` may not name types of `jit`",
    ),
    (import_direction, {"torch_tile/new/a.py": ""}, "`new` is in no layer"),
    (
        light_import,
        {
            "torch_tile/ops/x.py": "from ..language import y\n",
            "torch_tile/ops/__init__.py": "from . import x\n",
            "torch_tile/language/y.py": "",
        },
        "`import torch_tile` imports language.y, by way of ops.x",
    ),
    (
        import_circles,
        {"torch_tile/ir/b.py": "from torch_tile.ir import a\n"},
        "modules import each other: ir.a, ir.b",
    ),
    (
        import_circles,
        {"torch_tile/ir/b.py": "def f():\n    from torch_tile.ir.a import x\n"},
        "some inside functions: ir.a, ir.b",
    ),
    (
        import_circles,
        {
            "torch_tile/ir/c.py": "from .d import x\n",
            "torch_tile/ir/d.py": "from . import e\n",
            "torch_tile/ir/e.py": "import torch_tile.ir.c\n",
        },
        "ir.c, ir.d, ir.e",
    ),
    (
        import_circles,
        {
            "torch_tile/ops/__init__.py": "from torch_tile.ops.x import y\n",
            "torch_tile/ops/x.py": "from torch_tile.ops import z\n",
            "torch_tile/ops/z.py": "",
        },
        "modules import each other: ops, ops.x",
    ),
    (
        capability_numbers,
        {"torch_tile/jit.py": "def f(t):\n    return t.capability >= 90\n"},
        "jit.py:4: ask `Target`",
    ),
    (
        capability_numbers,
        {"torch_tile/ops/a.py": "import torch\nx = torch.cuda.get_device_capability() == (9, 0)\n"},
        "ops/a.py:4: ask `Target`",
    ),
    (capability_numbers, {"torch_tile/jit.py": "def f(t):\n    return {90: 1}.get(t.capability)\n"}, "ask `Target`"),
    (capability_numbers, {"torch_tile/jit.py": "def f(t):\n    return {90: 1}[t.capability]\n"}, "ask `Target`"),
    (hardware_limits, {"torch_tile/jit.py": "WARP, X = 32, 1\n"}, "jit.py:3: `WARP` is the hardware's"),
    (
        visitors,
        {"torch_tile/jit.py": "def f(self, n):\n    return getattr(self, '_' + type(n).__name__)(n)\n"},
        "jit.py:4: derive from `Visitor`",
    ),
    (visitors, {"torch_tile/jit.py": "class A:\n    def For(self, n):\n        return n\n"}, "name it visit_For"),
    (identities, {"torch_tile/jit.py": "def f(n):\n    return {id(n): 1}\n"}, "takes an identity by `id`"),
    (
        library_kernels,
        {"torch_tile/kernels/a.py": "@torch_tile.jit(strict=True)\ndef f():\n    pass\n"},
        "kernels/a.py: decorate kernels",
    ),
    (mocks, {"torch_tile/jit.py": "from unittest.mock import patch\n"}, "jit.py:3: the package may not import"),
    (torch_at_import, {"torch_tile/ir/c.py": "import torch.fx\n"}, "ir/c.py:3: import torch inside"),
    (
        torch_at_import,
        {"torch_tile/jit.py": "try:\n    from torch import x\nfinally:\n    x = 1\n"},
        "jit.py:4",
    ),
    (mirrored_tests, {"test/ir/test_c.py": ""}, "there is no torch_tile/ir/c.py"),
    (file_sizes, {"test/test_long.py": "\n" * 899}, "test_long.py: 901 lines"),
    (file_sizes, {"csrc/long.h": "\n" * 901}, "csrc/long.h: 901 lines"),
    (mirrored_tests, {"test/ir/test_c_a.py": ""}, "there is no torch_tile/ir/c_a.py"),
    (function_sizes, {"torch_tile/jit.py": "def f():\n" + "    pass\n" * 80}, "jit.py:3: `f` has 81 lines"),
    (headers, {"csrc/b.h": "#pragma once\n"}, "csrc/b.h: should begin with `// SPDX"),
    (headers, {".ci/run": "#!/bin/bash\nset -e\n"}, ".ci/run: should begin with `# SPDX"),
    (
        silent_errors,
        {"torch_tile/jit.py": "def f():\n    raise ValueError\n"},
        "jit.py:4: ValueError is raised",
    ),
    (silent_errors, {"torch_tile/jit.py": "def f():\n    raise TypeError()\n"}, "TypeError is raised without"),
    (plain_words, {"torch_tile/jit.py": "row_fade = 1\n"}, "jit.py:3: `row_fade`: another word for fade"),
    (opening_verbs, {"torch_tile/jit.py": "def f():\n    'The size.'\n"}, "`f` opens with no verb: The size."),
    (opening_verbs, {"torch_tile/jit.py": "def f():\n    'Bytes of it.'\n"}, "`f` opens with no verb: Bytes of it."),
    (
        sentence_lengths,
        {"torch_tile/jit.py": f"# {'word ' * 10}\n# {'word ' * 11}\n"},
        "jit.py:3: a sentence of 21 words",
    ),
    (
        sentence_lengths,
        {"docs/a.md": f"# {'title ' * 30}\n```\n{'code ' * 30}\n```\n1. {'word ' * 21}\n"},
        "docs/a.md:1: a",
    ),
    (
        sentence_lengths,
        {"torch_tile/jit.py": f'def f():\n    """{"word " * 12}`a b c`\n    {"word " * 8}."""\n'},
        "jit.py:3: a sentence of 21 words",
    ),
]


@pytest.mark.parametrize(("rule", "files", "expected"), PLANTED)
def test_finds_what_is_planted(rule, files, expected, tmp_path: Path) -> None:
    found = list(rule(tree(tmp_path, {**CLEAN, **files})))
    assert len(found) == 1 and expected in found[0], found


def test_finds_a_missing_docstring(tmp_path: Path) -> None:
    root = tree(tmp_path, CLEAN)
    (root / "torch_tile/jit.py").write_text("# SPDX-License-Identifier: Apache-2.0\nx = 1\n")
    assert list(module_docstrings(root)) == ["torch_tile/jit.py: has no module docstring"]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_accepts_a_clean_tree(rule: Callable[[Path], Iterator[str]], tmp_path: Path) -> None:
    assert list(rule(tree(tmp_path, CLEAN))) == []
