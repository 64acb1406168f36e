"""The arena's benchmark runs, and its contenders train alike."""

from __future__ import annotations

import gc
import json
import shutil
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from bench import arena
from bench.cpu_arena.arena import Arena
from bench.frame import WrongResult
from bench.processes import malloc_environment
from shoal.memory.cpu_allocator import use_caching_allocator
from tests.bench.small import put_in_place


class Here:
    """A worker without a process of its own."""

    def __init__(self, answers: str, environment: Mapping[str, str]) -> None:
        module, _, name = answers.partition(":")
        answer = getattr(import_module(module), name)
        self._answer = answer() if isinstance(answer, type) else answer

    def ask(self, question: Any) -> Any:
        return json.loads(json.dumps(self._answer(json.loads(json.dumps(question)), print)))

    def __enter__(self) -> Here:
        return self

    def __exit__(self, *_: object) -> None:
        gc.enable()


@pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="an arena needs a C++ compiler")
def test_every_contender_is_timed_and_the_arena_departs_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    put_in_place(monkeypatch)
    monkeypatch.setattr(arena, "Worker", Here)
    monkeypatch.delitem(arena.TUNABLES, arena.TUNED)  # of malloc with a setting, see `bench.batchnorm`
    monkeypatch.delitem(arena.TUNABLES, arena.HUGE)
    monkeypatch.setattr(arena, "SHARE", 1.0)
    use_caching_allocator()  # beneath the arena
    with Arena() as opened:
        monkeypatch.setattr(arena, "Arena", lambda: opened)
        assert arena.main(["--quick", "--networks", "mobilenet_v2", "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("arena_*.json")
    (result,) = json.loads(path.read_text())["networks"]
    assert set(result["rows"]) == {arena.DEFAULT, arena.CACHING, arena.ARENA, arena.INSIDE, arena.INSIDE_CACHING}
    assert all(len(row["seconds"]) == 1 and row["seconds"][0] > 0 for row in result["rows"].values())
    assert result["arena"]["departures"] == 0
    assert result["arena"]["replayed_steps"] >= 1
    assert "Losses equal bit for bit" in capsys.readouterr().out


def test_a_loss_that_differs_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def differ(*_: object, **__: object) -> None:
        raise WrongResult("vgg16_bn, step 3: the losses differ")

    monkeypatch.setattr(arena, "measure_network", differ)
    assert arena.main(["--quick", "--out", str(tmp_path)]) == 1
    assert capsys.readouterr().err == "bench.arena: vgg16_bn, step 3: the losses differ\n"


def test_no_setting_of_malloc_reaches_a_contender_but_its_own() -> None:
    inherited = {"MALLOC_ARENA_MAX": "1", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=2", "HOME": "/"}
    assert malloc_environment("", 1, inherited).keys() == {"HOME", "OMP_NUM_THREADS", "BENCH_CPU_ALLOCATOR"}
    assert malloc_environment("glibc.malloc.mmap_max=0", 1, inherited)["GLIBC_TUNABLES"] == "glibc.malloc.mmap_max=0"


def test_an_unknown_network_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert arena.main(["--networks", "resnet5", "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("bench.arena: --networks resnet5: give some of")
