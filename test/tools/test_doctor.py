# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

from torch_tile.tools import doctor, selftest


def test_this_machine(capsys) -> None:
    assert doctor.doctor() == 0
    out = capsys.readouterr().out
    for name, _, needed in doctor.CHECKS:
        line = next(line for line in out.splitlines() if name in line)
        assert line.startswith("[ok  ]") or not needed
    assert out.endswith("everything needed is there\n")


def test_a_missing_compiler_and_folder_are_said(capsys, monkeypatch, tmp_path) -> None:
    def broken() -> str:
        raise RuntimeError("no compiler here")

    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TORCH_TILE_CACHE_DIR", str(tmp_path / "file"))  # not a folder
    checks = [("compiler", broken, True), ("cache", doctor.check_cache, True), ("extra", broken, False)]
    monkeypatch.setattr(doctor, "CHECKS", checks)
    assert doctor.doctor() == 1
    out = capsys.readouterr().out
    assert "[FAIL] compiler       no compiler here" in out
    assert "[FAIL] cache          FileExistsError" in out
    assert "[none] extra" in out and "2 of the needed things failed" in out


@pytest.mark.parametrize(
    ("version", "good"), [("2.10.1", False), ("2.11.0+cu130", True), ("2.15.3", True), ("2.16.0", False)]
)
def test_range_of_torch(version: str, good: bool, monkeypatch) -> None:
    monkeypatch.setattr("torch.__version__", version)
    if good:
        assert version in doctor.check_torch()
    else:
        with pytest.raises(RuntimeError, match="torch_tile supports"):
            doctor.check_torch()


def test_unregistered_backend(monkeypatch) -> None:
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [])
    with pytest.raises(RuntimeError, match="install the package"):
        doctor.check_backend()


def test_gpu_parts_that_need_no_gpu() -> None:
    """CI installs NVRTC and has a compiler, so both must be found there."""
    assert "compiled" in doctor.check_nvrtc() and "sm_" in doctor.check_nvrtc()
    assert doctor.check_launcher().endswith(".so")


def test_selftest_compares_with_float64(capsys, monkeypatch) -> None:
    monkeypatch.setattr(doctor, "CHECKS", [("torch", doctor.check_torch, True)])
    assert doctor.doctor(selftest=True) == 0
    lines = capsys.readouterr().out.splitlines()
    for name in selftest.CHECKS:
        assert any(line.startswith(f"[ok  ] {name} cpu") for line in lines), lines


def test_selftest_tells_of_wrong_numbers(capsys, monkeypatch) -> None:
    monkeypatch.setattr(doctor, "CHECKS", [])
    monkeypatch.setattr(selftest, "CHECKS", {"rows": selftest.check_rows})
    monkeypatch.setitem(selftest.TOLERANCES, torch.float32, 0.0)
    assert doctor.doctor(selftest=True) == 1
    assert "[FAIL] rows cpu       AssertionError: norms in torch.float32 is off by" in capsys.readouterr().out
