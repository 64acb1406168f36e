"""The HMMS benchmark: its calibration gives the paper's three shares, and its figures come from checked plans."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import hmms
from shoal.planners.papers.hmms import theoretical_limit


@pytest.mark.slow
@pytest.mark.parametrize("network", list(hmms.OFFLOADABLE_PERCENT))
def test_one_calibrated_number_gives_every_share_of_figure_1(network: str) -> None:
    graph = hmms.captured(network, hmms.BATCH, hmms.IMAGE)
    assert graph.link is not None
    assert 100 * theoretical_limit(graph, graph.link) == pytest.approx(hmms.OFFLOADABLE_PERCENT[network], abs=1.5)


def test_plans_are_checked_and_hmms_loses_less_than_layerwise() -> None:
    graph = hmms.captured("resnet18", hmms.QUICK_BATCH, hmms.QUICK_IMAGE)
    (row,) = hmms.figure_1({"resnet18": (graph, graph)})
    assert row["simulated_percent"] == row["shoal_percent"]
    losses = [hmms.loss_percent(hmms.planned(graph, planner)) for planner in ("keep_all", "hmms", "layerwise")]
    assert losses == sorted(losses) and losses[0] == 0


def test_a_folder_that_cannot_be_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert hmms.main(["--quick", "--out", str(tmp_path / "file")]) == 2
    assert capsys.readouterr().err.startswith("bench.hmms: ")
