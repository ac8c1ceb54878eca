# SPDX-License-Identifier: Apache-2.0
"""Write the pages of the site: `python docs/build_pages.py`, then `mkdocs build -f build/docs/mkdocs.yml`.

Pages keep the places that their files have in the repository, so links hold on both sides. Three kinds are made here:
the pages of examples from the files themselves, the reference from signatures and docstrings, and examples/README.md,
with the output of each example, by `python docs/build_pages.py --gallery`, which runs all of them.
"""

from __future__ import annotations

import argparse
import ast
import enum
import importlib
import inspect
import os
import re
import shutil
import subprocess
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"
FOLDERS = {
    "tutorials": "Read in this order, or take what you need.",
    "kernels": "Popular kernels, each as short as it can be and checked against torch.",
    "models": "Whole models through the backend and the layers.",
    "serving": "Latent attention over pages, as servers keep them.",
}
MODULES = {
    "nn.packing": "Packed weights", "integrations.serving": "Serving", "autotuner": "Autotuner",
    "profiler": "Profiler", "compat": "TileLang's files",
}  # fmt: skip
ORDER = (
    "vector_add", "softmax", "gemm_epilogue", "attention", "mla_decode", "quantised_linear", "kernel_with_gradient",
    "find_a_race", "tune_and_measure", "from_triton", "from_tilelang",
)  # fmt: skip
TOP = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "CODE_OF_CONDUCT.md")
LINK = re.compile(r"\]\(([^)\s#]*)(#[^)\s]*)?\)")
CODE = re.compile(r"^```.*?^```|`[^`\n]+`", re.MULTILINE | re.DOTALL)


# Examples


def examples() -> list[Path]:
    """All example files, tutorials in their order first."""
    found = [path for folder in FOLDERS for path in sorted((EXAMPLES / folder).glob("*.py"))]
    return sorted(found, key=lambda p: (list(FOLDERS).index(p.parent.name), *_place(p.stem)))


def _place(name: str) -> tuple[int, str]:
    return (ORDER.index(name) if name in ORDER else len(ORDER)), name


def headline(path: Path) -> tuple[str, str]:
    """The title and the rest of an example's first sentence."""
    first = (ast.get_docstring(ast.parse(path.read_text())) or "").split("\n")[0]
    title, colon, rest = first.partition(": ")
    return (title, rest) if colon else (path.stem.replace("_", " ").capitalize(), first)


def example_page(path: Path) -> str:
    """An example as a page: its docstring, then its cells. A cell begins with `# %%` and comments, which are prose."""
    text = path.read_text()
    tree = ast.parse(text)
    title, first = headline(path)
    rest = (ast.get_docstring(tree) or "").partition("\n")[2].strip()
    lines = text.splitlines()[tree.body[0].end_lineno or 0 :]
    first = first[:1].upper() + first[1:]
    parts = [f"# {title}", first, rest, f"`python {path.relative_to(ROOT).as_posix()}` runs this page on a CPU."]
    for cell in "\n".join(lines).split("\n# %%\n"):
        prose, code = _split(cell.strip("\n").splitlines())
        parts += ["\n".join(prose), _fenced("\n".join(code).strip("\n"))]
    return "\n\n".join(part for part in parts if part) + "\n"


def _split(lines: list[str]) -> tuple[list[str], list[str]]:
    count = next((n for n, line in enumerate(lines) if not line.startswith("#")), len(lines))
    if count == len(lines) or lines[count].strip():  # a comment that belongs to the code below it
        return [], lines
    return [line.removeprefix("#").removeprefix(" ") for line in lines[:count]], lines[count:]


def _fenced(code: str, language: str = "python") -> str:
    return f"```{language}\n{code}\n```" if code else ""


def gallery(output: Callable[[Path], str]) -> str:
    """The text of examples/README.md, with what `output` says of each example."""
    parts = [
        "<!-- SPDX-License-Identifier: Apache-2.0 -->\n# Examples",
        "Every file runs on a CPU, `python examples/kernels/fft.py`, and checks itself against torch.\n"
        "`python docs/build_pages.py --gallery` writes this page, outputs included.",
    ]
    for folder, about in FOLDERS.items():
        parts.append(f"## {folder.capitalize()}\n\n{about}")
        for path in examples():
            if path.parent.name == folder:
                title, line = headline(path)
                link = path.relative_to(EXAMPLES).as_posix()
                text = f"### [{title}]({link})\n\n{line[:1].upper()}{line[1:]}"
                parts.append(f"{text}\n\n{_fenced(output(path), '')}".strip())
    return "\n\n".join(parts) + "\n"


def last_lines(path: Path, most: int = 8) -> str:
    """Run an example and return the end of what it prints."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RuntimeError(f"{path} fails:\n{done.stderr}")
    lines = [line.replace(f"{ROOT}/", "")[:140].rstrip() for line in done.stdout.splitlines()]
    return "\n".join(lines[-most:])


# Reference


def public_names(module: types.ModuleType) -> dict[str, Any]:
    """The names of a module that a user may take from it, with what they stand for."""
    found = {}
    for name in sorted(dir(module), key=str.lower):
        value = getattr(module, name)
        imported = getattr(value, "__module__", "") in ("typing", "__future__")
        is_fast_math = name.startswith("__") and not name.endswith("__")  # T.__exp: CUDA's spelling, for users, too
        is_public = is_fast_math or not name.startswith("_")
        if is_public and not imported and not isinstance(value, types.ModuleType):
            found[name] = value
    return found


def used_in() -> dict[str, list[Path]]:
    """The examples that use each name of the language."""
    found: dict[str, list[Path]] = {}
    for path in examples():
        for name in sorted(set(re.findall(r"\bT\.(\w+)", path.read_text()))):
            found.setdefault(name, []).append(path)
    return found


def language_pages() -> dict[str, str]:
    """One page for each part of the language, and `index.md`, which lists all names."""
    from torch_tile import language
    from torch_tile.ir.dtype import DType

    names, seen = public_names(language), used_in()
    dtypes = {name: value for name, value in names.items() if isinstance(value, DType)}
    parts: dict[str, dict[str, Any]] = {}
    for name, value in names.items():
        if name not in dtypes:
            parts.setdefault(_part_of(name, value), {})[name] = value
    pages = {"dtypes.md": _dtype_page(dtypes)}
    where = dict.fromkeys(dtypes, "dtypes.md")
    for part, members in sorted(parts.items()):
        page = f"{part}.md"
        about = _ABOUT.get(part) or (import_module(_MODULES.get(part, f"torch_tile.language.{part}")).__doc__ or "")
        title = _TITLES.get(part, part.replace("_", " ").capitalize())
        entries = [entry("T", n, value, seen.get(n, ()), _aliases(n, value, members)) for n, value in members.items()]
        pages[page] = "\n\n".join([f"# {title}", about.strip(), *entries]) + "\n"
        where.update(dict.fromkeys(members, page))
    table = [f"| [`T.{name}`]({where[name]}#{anchor('T', name)}) | {summary(names[name])} |" for name in names]
    head = "# The language, name by name\n\n`import torch_tile.language as T`.\n"
    head += "Shapes, dtypes and errors stand at each name. "
    head += "[Writing kernels](../../writing-kernels.md) explains how they work together.\n\n"
    head += (
        "By part: " + " · ".join(f"[{pages[page].split(chr(10))[0][2:]}]({page})" for page in sorted(pages)) + "\n\n"
    )
    head += "| name | what it does |\n|---|---|\n"
    pages["index.md"] = head + "\n".join(table) + "\n"
    return pages


_MODULES = {"types": "torch_tile.language.values"}
_ABOUT = {"tile_ops": "Operations on whole tiles: all threads of a block do them together."}
_TITLES = {
    "tile_ops": "Operations on tiles",
    "tma_by_hand": "TMA by hand",
    "types": "Types",
    "asynchronous": "Barriers, warps and products in flight",
}


def _part_of(name: str, value: Any) -> str:
    module = str(getattr(value, "__module__", ""))
    if name == "gemm" or module in ("torch_tile.language.calls", "torch_tile.language", "torch_tile.tileop.gemm.op"):
        return "tile_ops"  # copy, gemm, reduce_max, ...: recorded from their classes
    if module in ("torch_tile.language.values", "torch_tile.ir.expr", "torch_tile.ir.dtype"):
        return "types"
    return module.rpartition(".")[2]


def _aliases(name: str, value: Any, members: dict[str, Any]) -> list[str]:
    return [other for other, same in members.items() if same is value and other != name]


def _dtype_page(dtypes: dict[str, Any]) -> str:
    rows = [
        f'| <a id="{anchor("T", name)}"></a>`T.{name}` | {value.bits} | `{value}` | {_of_torch(value)} |'
        for name, value in dtypes.items()
    ]
    head = "# Dtypes\n\nEach is the string of its name, equals torch's dtype, and casts when it is called: "
    head += "`T.float16(x)`. Functions take all three forms.\n\n| name | bits | means | torch's |\n|---|---|---|---|\n"
    return head + "\n".join(rows) + "\n"


def _of_torch(dtype: Any) -> str:
    try:
        return f"`{dtype.as_torch()}`"
    except (ValueError, KeyError, AttributeError):
        return "none"


def anchor(prefix: str, name: str) -> str:
    """The anchor of a name's entry, which keeps capitals apart."""
    return f"{prefix}.{name}"


def entry(prefix: str, name: str, value: Any, seen: Iterable[Path] = (), also: Iterable[str] = ()) -> str:
    """The entry of one public name: signature, docstring, other names, examples."""
    short = f"{prefix}.{name}" if prefix == "T" else name  # in the table of contents, which is narrow
    title = f'## {prefix}.{name} {{ data-toc-label="{short}" }}'
    call = wrapped(f"{prefix}.{name}{signature(value)}")
    text = [f'<a id="{anchor(prefix, name)}"></a>\n\n{title}', _fenced(call)]
    text.append(markdown(inspect.getdoc(value) or ""))
    methods = _methods(value)
    if methods:
        text.append("\n".join(f"- `.{method}{signature(what)}`: {summary(what)}" for method, what in methods.items()))
    if isinstance(value, type) and issubclass(value, enum.Enum):
        text.append("Values: " + ", ".join(f"`{each.name}`" for each in value))
    if also:
        text.append("Also called " + ", ".join(f"`{prefix}.{other}`" for other in also) + ".")
    shown = list(seen)[:3]
    if shown:
        links = (f"[{headline(p)[0]}](../../../{p.relative_to(ROOT).with_suffix('.md').as_posix()})" for p in shown)
        text.append(f"Used in: {', '.join(links)}.")
    return "\n\n".join(part for part in text if part)


def _methods(value: Any) -> dict[str, Any]:
    if not isinstance(value, type) or not value.__module__.startswith("torch_tile"):
        return {}
    return {n: f for n, f in vars(value).items() if isinstance(f, types.FunctionType) and not n.startswith("_")}


def signature(value: Any) -> str:
    """The parameters as text; empty for what is not called. Text annotations lose their quotes."""
    if not callable(value) or (isinstance(value, type) and issubclass(value, enum.Enum)):
        return ""
    try:
        found = inspect.signature(value)
    except (ValueError, TypeError):
        return "(...)"
    text = str(found).replace("(self, ", "(").replace("(self)", "()")
    text = re.sub(r"collections\.abc\.|torch\.(?=Tensor)| \| torch\.SymInt", "", text)
    text = re.sub(r"Optional\[([\w.\[\]]+)\](?=[,)\] ])", r"\1 | None", text)
    return re.sub(r"((?:: |-> ))'([^']*)'", r"\1\2", re.sub(r"<(\w+\.\w+): [^>]*>", r"\1", text))


def wrapped(call: str, width: int = 80) -> str:
    """A call as text, with a line for each parameter where it is wider than a page."""
    name, bracket, rest = call.partition("(")
    if len(call) <= width or not bracket:
        return call
    parts, depth = [""], 0
    for place, each in enumerate(rest):
        depth += (each in "([{") - (each in ")]}")
        if depth < 0:  # the bracket that closes the call
            listed = "".join(f"    {part.strip()},\n" for part in parts)
            return f"{name}(\n{listed}{rest[place:]}"
        if each == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += each
    return call


def summary(value: Any) -> str:
    """The first paragraph of a docstring on one line, fit for a table."""
    first = (inspect.getdoc(value) or "").split("\n\n")[0]
    return " ".join(first.split()).replace("|", "\\|")


def markdown(doc: str) -> str:
    """A docstring as Markdown: sections such as `Args:` become lists."""
    out: list[str] = []
    for block in doc.split("\n\n"):
        first, _, rest = block.partition("\n")
        if re.fullmatch(r"(Args|Returns|Raises|Attributes|Yields):", first.strip()):
            items = re.split(r"\n(?=    \S)", "\n" + rest)[1:] if rest.startswith("    ") else [rest]
            listed = "\n".join(f"- {_item(each)}" for each in items if each.strip())
            out.append(f"**{first.strip()[:-1]}**\n\n{listed}")
        else:
            out.append(inspect.cleandoc(block) if block.startswith(" ") else block)
    return "\n\n".join(out)


def _item(text: str) -> str:
    text = " ".join(text.split())
    name, colon, rest = text.partition(": ")
    return f"`{name}`: {rest}" if colon and re.fullmatch(r"[\w*.]+", name) else text


def module_page(title: str, prefix: str, names: dict[str, Any]) -> str:
    """A page with an entry for each name."""
    return "\n\n".join([f"# {title}", *(entry(prefix, name, value) for name, value in names.items())]) + "\n"


def errors_page() -> str:
    """All codes of errors, with their messages and fixes."""
    from torch_tile.diagnostics.catalog import CATALOGUE

    def cell(text: str) -> str:
        return text.replace("|", "\\|").replace("<", "&lt;").replace("`", "")

    rows = [f"| `{code}` | {cell(message)} | {cell(fix)} |" for code, (message, fix) in CATALOGUE.items()]
    head = "# Errors\n\n`TileError.code` is one of these. Words in braces are filled in.\n\n"
    head += "| code | message | fix |\n|---|---|---|\n"
    return head + "\n".join(rows) + "\n"


def reference_pages() -> dict[str, str]:
    """All pages of the reference by their path under docs/reference."""
    import torch_tile
    from torch_tile import nn, ops

    pages = {f"language/{name}": text for name, text in language_pages().items()}
    pages["operators.md"] = module_page("Operators", "torch_tile.ops", {n: getattr(ops, n) for n in ops.__all__})
    pages["layers.md"] = module_page("Layers", "torch_tile.nn", {n: getattr(nn, n) for n in nn.__all__})
    top = {n: getattr(torch_tile, n) for n in torch_tile.__all__ if not n.startswith("__") and n != "ops"}
    pages["package.md"] = module_page("The package", "torch_tile", top)
    for name, title in MODULES.items():
        module = importlib.import_module(f"torch_tile.{name}")
        own = {n: x for n, x in vars(module).items() if n[0] != "_" and getattr(x, "__module__", "") == module.__name__}
        own = {n: getattr(module, n) for n in module.__all__} if hasattr(module, "__all__") else own
        functions = {n: x for n, x in own.items() if callable(x)}
        pages[f"{name.rpartition('.')[2]}.md"] = module_page(title, module.__name__, functions)
    pages["errors.md"] = errors_page()
    return pages


# The site


def write(out: Path) -> list[Path]:
    """Write all pages and mkdocs.yml below `out`; return the pages."""
    shutil.rmtree(out, ignore_errors=True)
    pages = out / "pages"
    for name in TOP:
        _put(pages / name, (ROOT / name).read_text())
    for path in sorted((ROOT / "docs").rglob("*")):
        if path.suffix in (".md", ".svg", ".png"):
            _put(pages / path.relative_to(ROOT), path.read_bytes())
    results = sorted((ROOT / "benchmarks/results").rglob("*.txt"))
    for path in results:
        _put(pages / path.relative_to(ROOT), path.read_bytes())
    listed = [f"- [{path.name}]({path.relative_to(ROOT / 'benchmarks/results').as_posix()})" for path in results]
    _put(pages / "benchmarks/results/index.md", "\n".join(["# Results as they were measured", "", *listed, ""]))
    text = (
        (ROOT / "docs/benchmarks.md").read_text().replace("(../benchmarks/results)", "(../benchmarks/results/index.md)")
    )
    _put(pages / "docs/benchmarks.md", text)
    for path in examples():
        _put(pages / path.relative_to(ROOT).with_suffix(".md"), example_page(path))
    _put(pages / "examples/README.md", re.sub(r"\.py\)", ".md)", (EXAMPLES / "README.md").read_text()))
    for name, text in reference_pages().items():
        _put(pages / "docs/reference" / name, text)
    for _, target in NAV:
        if isinstance(target, str):  # a page without others beside it: the column of links is the page's
            _put(pages / target, f"---\nhide: [navigation]\n---\n{(pages / target).read_text()}")
    _put(pages / "style.css", STYLE)
    (out / "mkdocs.yml").write_text(config(pages))
    return sorted(pages.rglob("*.md"))


def _put(path: Path, content: str | bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = content.decode() if isinstance(content, bytes) else content
    path.write_text(spaced(text) if path.suffix == ".md" else text)


def spaced(text: str) -> str:
    """Put a blank line before each list and table that follows a line of text.

    GitHub needs none there; without one the site shows the list or table as text.
    """
    made: list[str] = []
    in_code, block = False, ""  # the first line since the last blank one, or a heading
    for line in text.split("\n"):
        if line.startswith("```"):
            in_code = not in_code
        begun = BEGINS.match(line)
        if not in_code and begun and block and not block.startswith(begun[0][0]) and not ITEM.match(block):
            made.append("")
            block = line
        block = line.strip() and (line if line.startswith("#") else block or line)
        made.append(line)
    return "\n".join(made)


BEGINS = re.compile(r"\||[-*] |1\. ")
ITEM = re.compile(r"[-*] |\d+\. ")


NAV: list[tuple[str, str | list[tuple[str, str]]]] = [
    ("Overview", "README.md"),
    ("Getting started", "docs/getting-started.md"),
    ("Tutorials", [(n, f"examples/tutorials/{n}.md") for n in ORDER]),
    ("Gallery", "examples/README.md"),
    ("Guide", [
        ("Writing kernels", "docs/writing-kernels.md"), ("NVIDIA GPUs", "docs/gpus.md"),
        ("PyTorch", "docs/torch-integration.md"), ("Backend options", "docs/backend-options.md"),
        ("Reading explain", "docs/explain.md"), ("Serving", "docs/serving.md"), ("Targets", "docs/targets.md"),
        ("FAQ", "docs/faq.md"),
    ]),
    ("Reference", [
        ("Language", "docs/reference/language/index.md"), ("Operators", "docs/reference/operators.md"),
        ("Layers", "docs/reference/layers.md"), ("Package", "docs/reference/package.md"),
        *((title, f"docs/reference/{name.rpartition('.')[2]}.md") for name, title in MODULES.items()),
        ("Errors", "docs/reference/errors.md"),
    ]),
    ("Internals", [
        ("Architecture", "docs/architecture.md"), ("Benchmarks", "docs/benchmarks.md"),
        ("Performance log", "docs/perf-log.md"), ("Contributing", "CONTRIBUTING.md"),
    ]),
    ("Project", [
        ("Security", "SECURITY.md"), ("Compatibility", "docs/compatibility.md"),
        ("Forms of TileLang", "docs/tilelang-forms.md"), ("Changelog", "CHANGELOG.md"),
        ("Code of conduct", "CODE_OF_CONDUCT.md"),
    ]),
]  # fmt: skip


def _language_nav(pages: Path, index: str) -> list[str]:
    """The entry of the language, which opens to its parts."""
    lines = ["      - Language:", f"          - {index}"]
    for page in sorted((pages / index).parent.glob("*.md")):
        if page.name != "index.md":
            title = page.read_text().split("\n")[0].removeprefix("# ")
            lines.append(f'          - "{title}": {page.relative_to(pages).as_posix()}')
    return lines


STYLE = """/* wide enough for lines of code of 100 characters, beside both columns of links */
.md-grid { max-width: 78rem; }
/* names of operators fit a narrow window */
@media (max-width: 30em) { .md-typeset h2 { font-size: 1.1em; } }
"""


def config(pages: Path) -> str:
    """The configuration of mkdocs: nothing is fetched when a page is viewed, neither fonts nor scripts."""
    nav = []
    for title, target in NAV:
        if isinstance(target, str):
            nav.append(f"  - {title}: {target}")
        else:
            nav.append(f"  - {title}:")
            for name, path in target:
                shown = (
                    headline(ROOT / path.replace(".md", ".py"))[0] if path.startswith("examples/tutorials") else name
                )
                nav += [f'      - "{shown}": {path}'] if name != "Language" else _language_nav(pages, path)
    return (
        f"""site_name: torch_tile
docs_dir: {pages}
site_dir: {pages.parent / "site"}
use_directory_urls: false
strict: true
theme:
  name: material
  font: false
  palette:
    - media: "(prefers-color-scheme: light)"
      scheme: default
    - media: "(prefers-color-scheme: dark)"
      scheme: slate
  features: [navigation.indexes, navigation.tabs, navigation.top, toc.follow, content.code.copy]
extra_css: [style.css]
plugins: [search]
markdown_extensions: [admonition, attr_list, md_in_html, tables, toc, pymdownx.highlight, pymdownx.superfences]
validation:
  omitted_files: ignore
  absolute_links: warn
  unrecognized_links: warn
  anchors: info
nav:
"""
        + "\n".join(nav)
        + "\n"
    )


def broken_links(pages: Iterable[Path]) -> Iterator[str]:
    """Links of pages to files or anchors that are not there. Links to the network are not followed."""
    for page in pages:
        for target, fragment in LINK.findall(CODE.sub("", page.read_text())):
            if re.match(r"[a-z]+:", target):
                continue
            goal = (page.parent / target).resolve() if target else page
            if not goal.exists():
                yield f"{page}: {target} is not there"
            elif fragment and goal.suffix == ".md" and fragment[1:] not in anchors(goal):
                yield f"{page}: {target}{fragment}: there is no such heading"


def anchors(page: Path) -> set[str]:
    """The anchors of a page: of its headings, and those that it sets itself."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    heads = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    slugs = {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", head).strip().lower()) for head in heads}
    return slugs | set(re.findall(r'<a id="([^"]+)"', text))


def main() -> int:
    """Write the pages; fail where a link leads nowhere."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "build/docs", help="default: %(default)s")
    parser.add_argument("--gallery", action="store_true", help="run all examples and write examples/README.md first")
    options = parser.parse_args()
    if options.gallery:
        (EXAMPLES / "README.md").write_text(gallery(last_lines))
    pages = write(options.out.absolute())
    broken = list(broken_links(pages))
    print("\n".join([*broken, f"{len(pages)} pages, {len(broken)} broken links"]))
    return 1 if broken else 0


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
