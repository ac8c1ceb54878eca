# SPDX-License-Identifier: Apache-2.0
import os

from torch_tile.runtime import source_digest

PARTS = ("compiler", "ir", "lowering")


def tree(root, **files):
    """A package with one file in each folder that counts, and headers; the path of the module itself."""
    for folder in (".", "runtime", "csrc", "other", *PARTS):
        (root / folder).mkdir(parents=True, exist_ok=True)
        name = "a.h" if folder == "csrc" else "a.py"
        (root / folder / name).write_text(files.get(folder, "1"))
    return root


def digest(monkeypatch, root, *parts):
    monkeypatch.setattr(source_digest, "__file__", str(root / "runtime" / "source_digest.py"))
    monkeypatch.setattr(source_digest, "csrc_dir", lambda: root / "csrc")
    return source_digest.source_digest.__wrapped__(*parts)


def test_files_are_told_apart_by_what_is_in_them(tmp_path, monkeypatch):
    one = tree(tmp_path / "one")
    first = digest(monkeypatch, one, *PARTS)
    assert digest(monkeypatch, one, *PARTS) == first == digest(monkeypatch, tree(tmp_path / "two"), *PARTS)
    (one / "b.txt").write_text("not a source")
    os.utime(one / "a.py", ns=(1, 1))
    assert digest(monkeypatch, tree(one, other="2", csrc="2"), *PARTS) == first
    for folder in PARTS:
        assert digest(monkeypatch, tree(tmp_path / folder, **{folder: "2"}), *PARTS) != first
    assert digest(monkeypatch, tree(one, lowering="2"), *PARTS) != first  # in place, of the same size
    (one / "lowering" / "b.py").write_text("")
    assert digest(monkeypatch, one, *PARTS) != digest(monkeypatch, tree(tmp_path / "four", lowering="2"), *PARTS)


def test_without_parts_every_folder_and_header_counts(tmp_path, monkeypatch):
    first = digest(monkeypatch, tree(tmp_path / "one"))
    for folder in (".", "csrc", "other", *PARTS):
        assert digest(monkeypatch, tree(tmp_path / f"in {folder}x", **{folder: "2"})) != first
    assert digest(monkeypatch, tree(tmp_path / "one")) == first
