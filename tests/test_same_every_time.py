"""A run of the suite depends neither on chance nor on what ran before it, the home folder or a busy machine."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

from shoal.core.files import cache_dir
from shoal.cost import profile as profiling
from shoal.cost.measure import measure
from shoal.cost.measure_links import measure_links
from shoal.cost.profile import profile
from shoal.graph.op_counts import signature
from tests import made_up_machine

USUAL = settings.get_profile("usual")


def drawn() -> list[tuple[int, float, float]]:
    """What a law is tried with: its own draws and PyTorch's."""
    seen = []

    @settings(USUAL, max_examples=100)
    @given(st.integers(), st.floats(allow_nan=False))
    def law(integer: int, number: float) -> None:
        seen.append((integer, number, torch.rand(()).item()))

    law()
    return seen


def test_a_law_draws_the_same_whatever_else_was_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = drawn()
    (tmp_path / "imported_meanwhile.py").write_text(f"NUMBERS = {list(range(1000, 3000))}")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("imported_meanwhile")
    assert drawn() == first and len(set(first)) > 50


def test_an_example_does_not_depend_on_those_before_it() -> None:
    assert len({of_pytorch for _, _, of_pytorch in drawn()}) == 1


@pytest.mark.parametrize("name", ["usual", "fresh", "thorough"])
def test_no_profile_minds_a_busy_machine_or_what_failed_before(name: str) -> None:
    profile = settings.get_profile(name)
    assert profile.deadline is None and profile.database is None
    assert profile.derandomize == (name == "usual")


def test_the_cache_is_this_runs_own(tmp_path_factory: pytest.TempPathFactory) -> None:
    assert cache_dir().is_relative_to(tmp_path_factory.getbasetemp())


def test_times_and_rates_are_the_same_on_every_machine(tmp_path: Path) -> None:
    graph = make_fx(torch.relu, tracing_mode="fake")(torch.ones(1000)).graph
    nodes = {signature(node): node for node in graph.nodes if node.op == "call_function"}
    (seconds,) = profile(nodes, cache=False).seconds.values()
    assert seconds == pytest.approx(2e-6 + 8000 / 1e10, rel=1e-12)
    assert measure("cpu", cache=False) == made_up_machine.HERE
    assert measure_links("cpu", folder=tmp_path, cache=False)[1].to_host_bytes_per_second == 1e9


@pytest.mark.usefixtures("real_machine")
def test_what_measures_is_tested_on_the_real_machine() -> None:
    assert profiling._begin is not made_up_machine._timing


def test_and_afterwards_the_made_up_machine_is_back() -> None:
    assert profiling._begin is made_up_machine._timing
