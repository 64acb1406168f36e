"""Where data sets are looked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples import data


def test_the_variable_decides(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SHOAL_DATA", str(tmp_path))
    assert data.data_dir() == tmp_path


def test_else_the_shared_folder_beside_the_working_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("SHOAL_DATA", raising=False)
    (tmp_path / "shared" / "data").mkdir(parents=True)
    (tmp_path / "project").mkdir()
    monkeypatch.chdir(tmp_path / "project")
    assert data.data_dir().resolve() == tmp_path / "shared" / "data"
