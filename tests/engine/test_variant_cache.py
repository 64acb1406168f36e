"""The variant of a step that an earlier run chose is traced only; nothing in the cache but time can be lost."""

from __future__ import annotations

import json
import logging
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn

import shoal
from shoal.engine import choose_variant, variant_cache
from shoal.engine.step_planning import CompiledVariant
from tests.engine.search.test_best_variant import FUSED, batches, normalised, share_of_plain, step
from tests.engine.test_choose_variant import traces  # noqa: F401  # a fixture
from tests.scratch import needs_little_scratch


@pytest.fixture(autouse=True)
def candidates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path))
    monkeypatch.setattr(choose_variant, "_WORTH_SECONDS", 0.0)
    return tmp_path / "variants"


@cache
def plain_bytes() -> int:
    return share_of_plain(normalised, 1.0)


def compiled(share: float = 0.9) -> nn.Module:
    torch._dynamo.reset()
    return shoal.compile(normalised(), budget=int(share * plain_bytes()), allow="recompute, fuse")


@pytest.mark.slow
@needs_little_scratch
def test_a_later_run_traces_the_chosen_variant_alone_and_trains_as_the_first(traces: list[str]) -> None:  # noqa: F811
    first, later = compiled(), compiled()
    step(first, *batches(1))
    assert traces == ["compiled", "priced"]
    step(later, *batches(1))
    assert traces[2:] == ["compiled"]
    assert all(map(torch.equal, gradients(first), gradients(later)))
    assert later.shoal.plan.variant == FUSED
    assert later.shoal.plan.candidates == first.shoal.plan.candidates
    assert later.shoal.plan.plain_peak_bytes == pytest.approx(plain_bytes(), rel=0.02)  # as this loop holds it
    assert later.shoal.plan.residences == first.shoal.plan.residences


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.slow
def test_another_step_is_searched_for_itself(traces: list[str]) -> None:  # noqa: F811
    step(compiled(), *batches(1))
    for change in ("budget", "frozen", "hook"):
        traces.clear()
        model = compiled(0.85 if change == "budget" else 0.9)
        if change == "frozen":
            next(model.parameters()).requires_grad_(False)
        if change == "hook":  # what it computes is in the graph
            next(model.children()).register_forward_hook(lambda module, given, result: result * 2)
        step(model, *batches(1))
        assert "priced" in traces, change


@pytest.mark.slow
@needs_little_scratch
def test_a_damaged_file_costs_only_time(
    traces: list[str],  # noqa: F811
    candidates: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    step(compiled(), *batches(1))
    (file,) = candidates.iterdir()
    text = file.read_text()
    value = json.loads(text)
    value["variant"]["pieces"] = [{"op": "no such op", "dim": 0, "count": 2}]
    for damaged, said in (
        (text[: len(text) // 2], "ignored the cached variant"),
        (json.dumps(value), "does not fit any more"),
    ):
        file.write_text(damaged)
        traces.clear()
        caplog.clear()
        model = compiled()
        with caplog.at_level(logging.DEBUG, logger="shoal"):
            step(model, *batches(1))
        assert "priced" in traces and model.shoal.plan.variant == FUSED
        assert said in caplog.text
        assert file.read_text() == text


def test_without_a_folder_to_write_nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "file"))
    variant_cache.remember("0123", CompiledVariant(FUSED))
    assert variant_cache.recall("0123") is None and variant_cache.recall("") is None
