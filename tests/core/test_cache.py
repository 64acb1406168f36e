"""The folder of what is costly to make again."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.core.cache import cache_dir
from shoal.errors import InputError


def test_the_variable_decides_and_the_folder_is_made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "deep" / "cache"))
    assert cache_dir() == tmp_path / "deep" / "cache"
    assert cache_dir().is_dir() and not list(cache_dir().iterdir())


def test_else_it_lies_in_the_home_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("SHOAL_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_dir() == tmp_path / ".cache" / "shoal"


def test_an_earlier_cache_is_found_whatever_the_platform_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("SHOAL_CACHE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "elsewhere"))
    assert cache_dir() == tmp_path / "elsewhere" / "shoal"
    (tmp_path / ".cache" / "shoal").mkdir(parents=True)
    assert cache_dir() == tmp_path / ".cache" / "shoal"


@pytest.mark.parametrize("place", ["file", "file/below", "/proc/shoal-cache"])
def test_a_folder_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / place))
    with pytest.raises(
        InputError, match=r"cannot write the cache SHOAL_CACHE=.*; set SHOAL_CACHE to a writable"
    ) as caught:
        cache_dir()
    assert "\n" not in str(caught.value)
