"""The benchmark of loss curves: its phantoms, what counts as within the seeds, and that it runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bench import phantoms
from bench.phantoms import Trained, rows_of


def test_phantoms_are_ellipsoids_of_two_kinds_and_the_same_every_time() -> None:
    volumes, labels = phantoms.phantoms(3, 16, torch.Generator().manual_seed(1))
    again, _ = phantoms.phantoms(3, 16, torch.Generator().manual_seed(1))
    assert torch.equal(volumes, again) and volumes.shape == (3, 1, 16, 16, 16)
    assert set(labels.unique().tolist()) == {0, 1, 2}
    means = [float(volumes.squeeze(1)[labels == kind].mean()) for kind in range(3)]
    assert all(abs(mean - kind) < 0.2 for kind, mean in enumerate(means))


@pytest.mark.parametrize(("shift", "within"), [(0.05, True), (0.3, False)])
def test_the_means_may_differ_by_what_the_seeds_differ_by(shift: float, within: bool) -> None:
    def run(loss: float) -> Trained:
        return Trained([loss] * 20, 0.0, {}, "")

    rows = rows_of([run(1.0), run(1.2)], [run(1.0 + shift), run(1.2 + shift)])
    assert [row["within"] for row in rows] == [within] * phantoms.TENTHS
    assert rows[0]["seeds_spread"] == pytest.approx(0.2) and rows[0]["difference"] == pytest.approx(shift)


def test_a_quick_run_holds_the_budgets_weights_bit_by_bit(tmp_path: Path) -> None:
    assert phantoms.main(["--quick", "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.iterdir()
    result = json.loads(path.read_text())
    assert result["losses"]["budget"] == result["losses"]["plain"]
    assert result["inverted"] == "6 of 6 norms inverted"
