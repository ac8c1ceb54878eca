# SPDX-License-Identifier: Apache-2.0
import importlib.util
import re
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

import pytest

import torch_tile
from torch_tile import language, nn, ops
from torch_tile.inductor.settings import FAMILIES

pytestmark = pytest.mark.every_sample  # facts about the sources

ROOT = Path(__file__).resolve().parents[2]
_spec = importlib.util.spec_from_file_location("build_pages", ROOT / "docs/build_pages.py")
pages = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(pages)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site")
    pages.write(out)
    return out / "pages"


def without_entry(names: Iterable[str], folder: Path) -> list[str]:
    """The names of the language that have no entry on a page, or no row in the index."""
    text = {page.name: page.read_text() for page in folder.glob("*.md")}
    every = "\n".join(text.values())
    return [name for name in names if f'<a id="T.{name}"></a>' not in every or f"[`T.{name}`](" not in text["index.md"]]


def test_every_public_name_has_an_entry(site: Path) -> None:
    """An entry with a description; names of the language also stand in the index.

    Names come from `__all__` and, as this leaves out CUDA's and Python's spellings, from the list of TileLang's names.
    """
    listed = re.findall(r"\b\w+(?<!__)\b", (ROOT / "test/language/tilelang_names.txt").read_text())
    names = set(language.__all__) | {name for name in listed if name in vars(language) and name != "Any"}
    names = {name for name in names if not isinstance(getattr(language, name), ModuleType)}
    assert len(names) > 400 and {"gemm", "__exp", "__ldg", "abs", "float4_e2m1fn", "ptx_cp_async"} <= names
    assert names <= pages.public_names(language).keys()
    folder = site / "docs/reference/language"
    assert not without_entry(names, folder)
    assert not [name for name in names if not pages.summary(getattr(language, name))]
    assert without_entry(["gemm", "gem", "__gemm"], folder) == ["gem", "__gemm"]
    for module, page in ((ops, "operators"), (nn, "layers"), (torch_tile, "package")):
        text = (site / f"docs/reference/{page}.md").read_text()
        wanted = [n for n in module.__all__ if not n.startswith("__") and n != "ops"]
        assert not [name for name in wanted if f'<a id="{module.__name__}.{name}"></a>' not in text]
    for name in ("packing.pack_fields", "packing.from_gptq", "serving.paged_attention", "autotuner.AutoTuner",
                 "profiler.do_bench", "compat.install"):  # fmt: skip
        assert f'.{name}"></a>' in (site / f"docs/reference/{name.partition('.')[0]}.md").read_text()


def test_links_lead_somewhere(site: Path) -> None:
    assert not list(pages.broken_links(sorted(site.rglob("*.md"))))


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# One head\n[a](page.md#one-head) [b](https://x) `[c](no.md)` [d](no.md) [e](#two)\n")
    found = list(pages.broken_links([page]))
    assert len(found) == 2 and "no.md is not there" in found[0] and "#two" in found[1]


def test_lists_and_tables_begin_behind_blank_lines(site: Path) -> None:
    text = (
        "# Head\na list:\n- one\n  more\n- two\n\nNumbers 500 and\n600. End:\n| a |\n|---|\n| b |\n```\nx\n- y\n```\n"
    )
    want = text.replace("list:\n", "list:\n\n").replace("End:\n", "End:\n\n")
    assert pages.spaced(text) == want == pages.spaced(want)
    for page in site.rglob("*.md"):
        text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        assert not re.search(r"\n(?!\|)[^\n]+\n\|", text), page
        assert not re.search(r"(?<=\n\n)(?![-*|] |\d+\. )[^\n]+\n(- |1\. )", text), page


def test_pages_are_all_in_the_navigation_or_linked(site: Path) -> None:
    config = (site.parent / "mkdocs.yml").read_text()
    named = set(re.findall(r": (\S+\.md)$", config, re.MULTILINE))
    assert all((site / page).is_file() for page in named)
    guides = {f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md")}
    assert guides <= named and "font: false" in config


def test_the_options_list_every_family() -> None:
    table = (ROOT / "docs/backend-options.md").read_text().partition("| family |")[2].partition("\n\n")[0]
    assert re.findall(r"^\| `([a-z_]+)` \|", table, re.MULTILINE) == list(FAMILIES)


def test_a_tutorial_is_its_file(site: Path) -> None:
    """The code blocks of a page, put together, are the file without its prose."""
    for name in pages.ORDER:
        source = (ROOT / f"examples/tutorials/{name}.py").read_text()
        code = re.findall(r"^```python\n(.*?)^```$", (site / f"examples/tutorials/{name}.md").read_text(), re.M | re.S)
        kept = {line for block in code for line in block.splitlines() if line}
        body = source[source.index('"""', source.index('"""') + 3) + 3 :]
        assert not [line for line in body.splitlines() if line and not line.startswith("#") and line not in kept]


def test_the_gallery_names_every_example() -> None:
    written = (ROOT / "examples/README.md").read_text()
    outputs = re.findall(r"^```\n(.+?)\n```$", written, re.MULTILINE | re.DOTALL)
    assert len(outputs) == len(pages.examples()) >= 24
    shown = iter(outputs)
    assert written == pages.gallery(lambda path: next(shown))


def test_markdown_of_docstrings() -> None:
    doc = "First.\n\nArgs:\n    a: one\n        thing.\n    b: two.\n\nReturns:\n    `[B]`."
    assert pages.markdown(doc) == "First.\n\n**Args**\n\n- `a`: one thing.\n- `b`: two.\n\n**Returns**\n\n- `[B]`."
