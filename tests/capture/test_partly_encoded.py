"""A step put together from two is the one that is traced: equal in every op and byte, whatever is encoded."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from itertools import chain as joined
from itertools import combinations

import pytest

from shoal.capture.captured import Captured
from shoal.capture.encode_activations import encoded, offers
from shoal.capture.partly_encoded import PartlyEncoded
from shoal.core.lossy import LossyOptions
from shoal.core.step import Op, StepGraph
from tests.capture.test_encode_activations import MODELS
from tests.joint_graphs import NETWORKS, captured_step

LOSSY = {
    "as given": LossyOptions("dynamic_tree", 2048),
    "nothing exempt": LossyOptions("dynamic_tree", 2048, exempt=frozenset()),
}
_MOST_SETS = 12


@cache
def step_of(name: str) -> Captured:
    return captured_step((MODELS | NETWORKS)[name]())


def timed(graph: StepGraph) -> StepGraph:
    """Other costs for every op signature."""

    def cost(op: Op) -> Op:
        drawn = random.Random(op.signature)
        return replace(op, seconds=drawn.random(), workspace_bytes=drawn.randrange(1 << 12))

    return replace(graph, ops=tuple(map(cost, graph.ops)))


def sets(names: list[str]) -> list[tuple[str, ...]]:
    """Subsets: all of them where there are few."""
    every = list(joined.from_iterable(combinations(names, size) for size in range(len(names) + 1)))
    return every if len(every) <= _MOST_SETS else random.Random(0).sample(every, _MOST_SETS)


@pytest.mark.parametrize("name", [*MODELS, *NETWORKS])
@pytest.mark.parametrize("lossy", LOSSY)
def test_every_set_gives_the_step_that_is_traced(name: str, lossy: str) -> None:
    captured = step_of(name)
    names = [offer.storage for offer in offers(captured, LOSSY[lossy])]
    if not names:
        pytest.skip("nothing of it may be encoded")
    parts = PartlyEncoded.of(timed(captured.graph), timed(encoded(captured, names, LOSSY[lossy]).graph))
    assert parts is not None
    for chosen in sets(names):
        assert parts.step(chosen) == timed(encoded(captured, chosen, LOSSY[lossy]).graph), chosen


def test_steps_that_differ_otherwise_are_not_put_together() -> None:
    captured = step_of("chain")
    names = [offer.storage for offer in offers(captured, LOSSY["as given"])]
    exact, everything = captured.graph, encoded(captured, names, LOSSY["as given"]).graph
    slower = replace(exact, ops=(replace(exact.ops[0], seconds=1.0), *exact.ops[1:]))
    larger = replace(exact, storages=(replace(exact.storages[0], nbytes=1), *exact.storages[1:]))
    assert PartlyEncoded.of(exact, everything) is not None
    assert PartlyEncoded.of(slower, everything) is None and PartlyEncoded.of(larger, everything) is None


def test_where_an_op_reads_two_of_them_nothing_is_put_together() -> None:
    """An op whose reads change with two storages is in neither step as it is where one of them is encoded."""
    captured = step_of("chain")
    names = [offer.storage for offer in offers(captured, LOSSY["as given"])]
    exact, everything = captured.graph, encoded(captured, names, LOSSY["as given"]).graph
    first, second, *_ = (exact.storage_called[name].id for name in names)
    reader = next(op for op in exact.ops if op.phase == "backward" and first in op.reads)
    both = replace(reader, reads=(*reader.reads, second))
    assert second not in reader.reads
    assert (
        PartlyEncoded.of(replace(exact, ops=(*exact.ops[: both.id], both, *exact.ops[both.id + 1 :])), everything)
        is None
    )
