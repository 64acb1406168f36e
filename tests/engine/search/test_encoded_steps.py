"""Steps with sets of storages encoded: two are traced, whatever is asked for, and each has the costs of its ops."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shoal.capture.captured import Captured
from shoal.capture.encode_activations import encoded
from shoal.core.step import StepGraph
from shoal.engine.search.encoded_steps import EncodedSteps
from shoal.errors import PlanError
from shoal.planners.estimates import least_peak_bytes
from shoal.planners.infeasible import fewest_bytes
from tests.engine.search.test_choose_encoded import LOSSY, costs, step


def test_two_steps_are_traced_and_the_others_have_the_same_costs_and_need_the_same_bytes() -> None:
    traced: list[Captured] = []

    def timed(captured: Captured) -> StepGraph:
        traced.append(captured)
        return replace(costs(0.2)(captured), static_bytes=1 << 10)

    steps = EncodedSteps({"": step()}, LOSSY, lambda graphs: timed(graphs[""]))
    names = [offer.storage for offer in steps.offers]
    assert len(names) > 3
    for chosen in [*([name] for name in names), names[1:], names[:1] + names[3:], names, []]:
        found = steps.graph(chosen)
        alone = timed(encoded(step(), chosen, LOSSY)) if chosen else timed(step())
        traced.pop()
        assert found == alone
        assert fewest_bytes(found) == fewest_bytes(alone) and least_peak_bytes(found) == least_peak_bytes(alone)
    assert len(traced) == 2
    assert steps.traced(names[1:])[""].graph.fingerprint == steps.graph(names[1:]).fingerprint
    assert steps.traced([])[""] is step()


def test_what_is_not_offered_is_traced_or_refused() -> None:
    steps = EncodedSteps({"": step()}, LOSSY, lambda graphs: costs(0.2)(graphs[""]))
    with pytest.raises(PlanError):
        steps.graph(["nowhere"])
