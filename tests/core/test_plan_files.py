"""A plan file with anything whatever in it is a plan that holds to every rule, or a PlanError in one line."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.core.plan import Plan
from shoal.core.residence import Offload, Residence
from shoal.core.schedule import schedule
from shoal.core.validate import check_runs
from shoal.errors import PlanError
from shoal.planners.just_in_time import just_in_time
from tests.engine.compile.wrong_values import is_readable
from tests.engine.lossy_steps import chain, plan_encoding_everything
from tests.raising import raising
from tests.random_steps import SLOW_LINK, conv_bn_relu_chain

WRONG_TEXTS = (
    "null",
    "true",
    "-1",
    "7",
    "1.5",
    "1e999",
    "-Infinity",
    "NaN",
    "9223372036854775807",
    "1" + "0" * 400,
    "1" + "0" * 5000,
    '""',
    '"x"',
    '"keep"',
    r'"\ud800"',
    "[]",
    "[1]",
    '["x"]',
    "{}",
    '{"x": 1}',
    "[" * 100_000,
)
HOLE = "a value to be replaced"


def _recomputing_and_offloading() -> Plan:
    graph = replace(conv_bn_relu_chain(2), link=SLOW_LINK)
    kept = [s.id for s in graph.storages if s.name.startswith("conv") and s.kind == "activation"]
    made: dict[str, Residence] = dict(just_in_time(graph, kept))
    leaves = graph.storages[kept[0]]
    readers = graph.readers[leaves.id]
    last = max(reader for reader in readers if reader < graph.n_forward)
    first = min(reader for reader in readers if reader >= graph.n_forward)
    first = min(first, *(graph.op_called[r.before[0]].id for r in made.values() if getattr(r, "before", ())))
    made[leaves.name] = Offload(graph.ops[last].name, graph.ops[first].name)
    return Plan(graph, made, "by hand", "test", 9000, lower_bound_seconds=0.25)


def _encoding() -> Plan:
    return plan_encoding_everything(chain(3, 4, 4), torch.zeros(1, 3, 8, 8), "linear", seed=3)


@pytest.fixture(scope="module", params=[_recomputing_and_offloading, _encoding], ids=["exact", "encoding"])
def plan(request: pytest.FixtureRequest) -> Plan:
    made: Plan = request.param()
    return made


def _load(path: Path, content: bytes | str) -> bool:
    """Whether a file of this content is read; then everything that a plan tells and does must work."""
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    try:
        plan = Plan.load(path)
    except PlanError as error:
        assert is_readable(error), str(error)[:500]
        assert str(path) in str(error)
        return False
    for graph, residences in ((plan.graph, plan.residences), (plan.exact_step, {})):
        peak = check_runs(graph, residences, schedule(graph, residences), plan.budget_bytes if residences else 0)
        assert peak <= plan.budget_bytes or not plan.budget_bytes or not residences
    assert plan.explain()
    assert plan.added_seconds == plan.predicted_seconds - plan.plain_seconds
    plan.save(path)
    assert Plan.load(path) == plan
    return True


def _paths(value: Any, here: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place of a JSON value, of lists the first, second and last element only."""
    yield here
    if isinstance(value, dict):
        for key in value:
            yield from _paths(value[key], (*here, key))
    elif isinstance(value, list):
        for place in sorted({0, 1, len(value) - 1} & set(range(len(value)))):
            yield from _paths(value[place], (*here, place))


def _with_hole(whole: Any, path: tuple[Any, ...]) -> str:
    """The JSON with a mark at this place."""
    copy = json.loads(json.dumps(whole))
    if not path:
        return json.dumps(HOLE)
    at = copy
    for step in path[:-1]:
        at = at[step]
    at[path[-1]] = HOLE
    return json.dumps(copy)


def _saved(plan: Plan, path: Path) -> Any:
    return json.loads(plan.save(path).read_text())


def test_what_was_saved_is_read(plan: Plan, tmp_path: Path) -> None:
    assert _load(tmp_path / "p.json", plan.save(tmp_path / "p.json").read_bytes())


def test_the_error_of_a_storage_with_nan_is_read_as_nan(tmp_path: Path) -> None:
    plan = _encoding()
    name = plan.encoded[0].name
    loaded = Plan.load(replace(plan, errors={name: math.nan}).save(tmp_path / "p.json"))
    assert math.isnan(loaded.errors[name])


def test_a_file_cut_at_any_hundredth_is_refused(plan: Plan, tmp_path: Path) -> None:
    content = plan.save(tmp_path / "p.json").read_bytes().rstrip()
    for share in range(100):
        assert not _load(tmp_path / "p.json", content[: len(content) * share // 100])


def test_a_file_with_flipped_bits_is_a_plan_or_refused(plan: Plan, tmp_path: Path) -> None:
    content = plan.save(tmp_path / "p.json").read_bytes()
    draw = random.Random(0)
    for _ in range(150):
        damaged = bytearray(content)
        for _ in range(draw.choice((1, 1, 3))):
            damaged[draw.randrange(len(damaged))] ^= 1 << draw.randrange(8)
        _load(tmp_path / "p.json", bytes(damaged))


@pytest.mark.slow
def test_a_file_that_lacks_a_key_is_a_plan_or_refused(plan: Plan, tmp_path: Path) -> None:
    whole = _saved(plan, tmp_path / "p.json")
    for path in _paths(whole):
        if path and isinstance(path[-1], str):
            copy = json.loads(json.dumps(whole))
            at = copy
            for step in path[:-1]:
                at = at[step]
            del at[path[-1]]
            _load(tmp_path / "p.json", json.dumps(copy))


@pytest.mark.slow
def test_a_file_with_a_wrong_value_anywhere_is_a_plan_or_refused(plan: Plan, tmp_path: Path) -> None:
    whole = _saved(plan, tmp_path / "p.json")
    draw = random.Random(1)
    refused = tried = 0
    for path in _paths(whole):
        texts = _with_hole(whole, path)
        for wrong in draw.sample(WRONG_TEXTS, 3):
            tried += 1
            refused += not _load(tmp_path / "p.json", texts.replace(json.dumps(HOLE), wrong))
    assert refused > tried // 2


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"\x00" * 99, b"[" * 10**6, b'{"a":' * 10**5, b"", b"1" * 5000])
def test_what_is_no_json_is_refused(content: bytes, tmp_path: Path) -> None:
    assert not _load(tmp_path / "p.json", content)


def test_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError):
        Plan.load(tmp_path)


def test_a_plan_over_its_own_budget_is_refused(plan: Plan, tmp_path: Path) -> None:
    path = replace(plan, budget_bytes=plan.predicted_peak_bytes - 1).save(tmp_path / "p.json")
    with raising(PlanError, plan.predicted_peak_bytes - 1):
        Plan.load(path)


def test_a_file_of_version_4_has_ops_without_launches(tmp_path: Path) -> None:
    plan = _recomputing_and_offloading()
    value = json.loads(plan.save(tmp_path / "plan.json").read_text())
    assert value["version"] == 5
    for op in value["step"]["ops"]:
        assert op.pop("launch_seconds") == 0.0
    (tmp_path / "earlier.json").write_text(json.dumps({**value, "version": 4}))
    assert Plan.load(tmp_path / "earlier.json") == plan


def test_launches_are_in_the_file(tmp_path: Path) -> None:
    plan = _recomputing_and_offloading()
    launched = replace(plan.graph, ops=tuple(replace(op, launch_seconds=0.25) for op in plan.graph.ops))
    loaded = Plan.load(replace(plan, graph=launched).save(tmp_path / "plan.json"))
    assert loaded.graph == launched
    assert loaded.timeline.launch_wait_seconds > 0
