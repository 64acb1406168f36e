"""A folder or a FIFO under the name of a cached file costs only time: nothing waits for it, and nothing fails."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from shoal.cost import measurement_cache
from shoal.engine import plan_cache, variant_cache
from shoal.engine.step_planning import UNMODIFIED
from shoal.planners.keep_all import keep_all
from tests.random_steps import HARDWARE, resnet_like

CPU = torch.device("cpu")
STEP = resnet_like((1, 1))
BUDGET_BYTES = int(0.8 * keep_all(STEP, HARDWARE, 0).predicted_peak_bytes)


def measured() -> object:
    known = measurement_cache.recall("costs", CPU, ["op"])
    measurement_cache.remember("costs", CPU, {"op": [1.0]})
    return known or {"op": [1.0]}


def planned() -> object:
    return plan_cache.remembered("joint")(STEP, HARDWARE, BUDGET_BYTES).residences


def chosen() -> object:
    known = variant_cache.recall("0123")
    variant_cache.remember("0123", UNMODIFIED)
    return known or UNMODIFIED


@pytest.mark.timeout(120)  # to read a FIFO waits for a writer
@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo], ids=["folder", "FIFO"])
@pytest.mark.parametrize(("use", "folder"), [(measured, "costs"), (planned, "plans"), (chosen, "variants")])
def test_what_is_no_file_is_not_read(
    use: Callable[[], object],
    folder: str,
    make: Callable[[Path], object],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path))
    monkeypatch.setattr(plan_cache, "_WORTH_SECONDS", 0.0)
    first = use()
    (path,) = (tmp_path / folder).iterdir()
    path.unlink()
    make(path)
    assert use() == first == use()


def test_what_was_measured_on_another_processor_of_the_same_name_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path))
    measurement_cache.remember("workspaces", CPU, {"convolution": 4096})
    assert measurement_cache.recall("workspaces", CPU, ["convolution"]) == {"convolution": 4096}
    with monkeypatch.context() as lowered:
        lowered.setenv("ONEDNN_MAX_CPU_ISA", "another")
        assert measurement_cache.recall("workspaces", CPU, ["convolution"]) == {}
    monkeypatch.setattr(measurement_cache, "vector_flags", lambda: ("avx2", "amx_tile"))
    assert measurement_cache.recall("workspaces", CPU, ["convolution"]) == {}
