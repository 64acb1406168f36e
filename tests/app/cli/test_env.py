"""`shoal env` names what a report of a fault needs, and never fails."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from shoal.app.cli import app
from shoal.app.cli.env import environment
from shoal.core.version import __version__


def test_lines_to_paste_into_an_issue() -> None:
    done = CliRunner().invoke(app, ["env"])
    assert done.exit_code == 0 and done.stderr == "", done.output
    for named in (__version__, torch.__version__, "cpu", "native", "folder", "SHOAL_KERNELS"):
        assert named in done.stdout


def test_as_json() -> None:
    found = json.loads(CliRunner().invoke(app, ["env", "--json"]).stdout)
    assert list(found) == ["versions", "devices", "kernels", "cache", "settings"]
    assert found["versions"]["torch"] == torch.__version__


def test_files_of_the_cache_are_counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "plans").mkdir()
    (tmp_path / "plans" / "one.json").write_bytes(b"x" * 1024)
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path))
    assert environment()["cache"] == {"folder": str(tmp_path), "plans": "1 files, 1.000 KiB"}


def test_what_is_wrong_is_named_in_its_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "file"))
    monkeypatch.setenv("SHOAL_KERNELS", "fast")
    found = environment()
    assert "cannot write the cache" in found["cache"]["folder"]
    assert "SHOAL_KERNELS" in found["kernels"]["SHOAL_KERNELS"] and "fast" in found["kernels"]["SHOAL_KERNELS"]


def test_settings_are_those_of_shoal_torch_and_openmp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_BUDGET", "2GiB")
    monkeypatch.setenv("MY_TOKEN", "secret")
    found = environment()["settings"]
    assert found["SHOAL_BUDGET"] == "2GiB" and "MY_TOKEN" not in found
