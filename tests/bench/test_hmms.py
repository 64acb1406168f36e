"""The HMMS benchmark: its calibration gives the paper's three shares, and its figures come from checked plans."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from bench import hmms
from examples.planners.hmms import theoretical_limit
from shoal.core.hardware import Link
from tests.random_steps import resnet_like


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


def test_the_curves_of_figure_1_end_at_the_limit() -> None:
    graph = resnet_like()
    link = Link("link", 1000.0, 1e12, 0.0, 0)
    rows = hmms.cumulative_bytes(graph, link)
    assert [name for name, _, _ in rows] == [op.name for op in graph.ops[: graph.n_forward]]
    assert all(a[1] <= b[1] and a[2] <= b[2] for a, b in pairwise(rows))
    _, generated_bytes, carried_bytes = rows[-1]
    assert min(1.0, carried_bytes / generated_bytes) == pytest.approx(theoretical_limit(graph, link))
