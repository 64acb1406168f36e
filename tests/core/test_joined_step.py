"""Parts joined into one step: what crosses is one storage and stays, what was measured comes out again."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.core.hardware import Link
from shoal.core.joined_step import (
    HELD,
    Interval,
    Part,
    Pass,
    crossing,
    eager_use,
    grown,
    in_order_of_shares,
    joined_residences,
    joined_step,
    residences_of,
    share_of,
    with_arguments,
    with_eager_use,
    with_held,
)
from shoal.core.order import op_names, reordered
from shoal.core.plan import Plan
from shoal.core.residence import Encode, Offload, Recompute, Residence
from shoal.core.shares import Share
from shoal.core.simulate import simulate
from shoal.core.step import RETURNS, STRETCH, Op, StepGraph, Storage, StorageKind
from shoal.core.validate_plan import check_plan, check_step
from shoal.planners.just_in_time import just_in_time
from shoal.planners.recompute_choice import recompute_choice
from tests.random_steps import any_order, joined_steps

X, WEIGHT, HIDDEN, Y, TANGENT, OF_HIDDEN, OF_X, OF_WEIGHT = range(8)
FORWARD_AND_BACK: tuple[Pass, ...] = ((0, "forward"), (1, "forward"), (1, "backward"), (0, "backward"))


def layer_of_two_ops(nbytes: int, weight_bytes: int = 7) -> StepGraph:
    """x → hidden → y, where the backward pass reads x, hidden and the weight."""
    kinds: list[tuple[str, int, StorageKind]] = [
        ("x", nbytes, "input"),
        ("weight", weight_bytes, "parameter"),
        ("hidden", nbytes, "activation"),
        ("y", nbytes, "output"),
        ("tangent", nbytes, "tangent"),
        ("of_hidden", nbytes, "activation_gradient"),
        ("of_x", nbytes, "gradient"),
        ("of_weight", weight_bytes, "gradient"),
    ]
    storages = [
        Storage(i, name, size, kind, "", (size,), "uint8", (name,)) for i, (name, size, kind) in enumerate(kinds)
    ]
    ops = [
        Op(0, "first", "first", "forward", "", (X, WEIGHT), (HIDDEN,), seconds=1.0, workspace_bytes=3),
        Op(1, "second", "second", "forward", "", (HIDDEN,), (Y,), seconds=1.0),
        Op(2, "loss", "loss", "loss", "", (Y,), (TANGENT,)),
        Op(3, "second_back", "second_back", "backward", "", (TANGENT, HIDDEN), (OF_HIDDEN,), seconds=1.0),
        Op(4, "first_back", "first_back", "backward", "", (OF_HIDDEN, X, WEIGHT), (OF_X, OF_WEIGHT), seconds=1.0),
    ]
    return StepGraph("layer", tuple(ops), tuple(storages))


def two_layers(nbytes: int = 100) -> StepGraph:
    first = Part(layer_of_two_ops(nbytes), {Y}, {TANGENT: (1, OF_X)})
    second = Part(layer_of_two_ops(nbytes), {Y}, {X: (0, Y)}, handed_on={OF_X})
    return joined_step("two layers", [first, second], FORWARD_AND_BACK)


def test_it_is_a_step_that_makes_sense() -> None:
    step = two_layers()
    check_step(step)
    assert [op.name for op in step.ops if op.phase == "forward"] == [
        "eager0",
        "part0.first",
        "part0.second",
        "part0.forward.returns",
        "eager1",
        "part1.first",
        "part1.second",
        "part1.forward.returns",
    ]
    assert [op.name for op in step.ops if op.phase == "backward"] == [
        "part1.second_back",
        "part1.first_back",
        "part1.backward.returns",
        "eager3",
        "part0.second_back",
        "part0.first_back",
        "part0.backward.returns",
    ]


def test_what_crosses_is_one_storage_which_is_kept() -> None:
    step = two_layers()
    assert [s.name for s in crossing(step)] == ["part0.y", "part1.y"]
    assert "part1.x" not in step.storage_called
    choice = recompute_choice(step)
    assert {step.storages[s].name for s in choice.candidates} == {"part0.hidden", "part1.hidden"}


def test_everything_kept_takes_what_both_layers_as_one_network_take() -> None:
    # In use when the loss is known: x, two weights, two hidden, y of both; then the gradient of y comes.
    moments = {moment.op: moment for moment in simulate(two_layers(100), {}).moments}
    assert moments["loss"].total_bytes == 100 + 2 * 7 + 2 * 100 + 100 + 100
    # part0.x, its hidden, the gradient of its y, and of hidden; both weights and the gradient of the second one
    assert moments["part0.second_back"].total_bytes == 4 * 100 + 2 * 7 + 7


def test_a_gradient_that_a_part_hands_on_dies_with_the_part_that_reads_it() -> None:
    step = two_layers(100)
    assert step.storage_called["part1.of_x"].kind == "activation_gradient"
    assert step.storage_called["part0.of_x"].kind == "gradient"
    readers = [step.ops[op].name for op in step.readers[step.storage_called["part1.of_x"].id]]
    assert readers == ["part1.backward.returns", "part0.second_back"]


def test_a_result_that_the_loop_holds_stays_until_the_step_ends() -> None:
    first = Part(layer_of_two_ops(100), {Y}, {TANGENT: (1, OF_X)}, held_results={Y})
    second = Part(layer_of_two_ops(100), {Y}, {X: (0, Y)}, handed_on={OF_X})
    step = joined_step("held", [first, second], FORWARD_AND_BACK)
    check_step(step)
    held, not_held = simulate(step, {}).moments[-1], simulate(two_layers(100), {}).moments[-1]
    assert step.storage_called["part0.y"].kind == "output"
    assert held.total_bytes == not_held.total_bytes + 100


def test_a_new_value_of_an_input_that_the_backward_pass_reads_is_not_recomputed() -> None:
    """As an in-place ReLU at the beginning of a part leaves it: the part has to return the value."""
    graph = layer_of_two_ops(100)
    ops = (replace(op, reads=(*op.reads, Y)) if op.name == "second_back" else op for op in graph.ops)
    saved = replace(graph, ops=tuple(ops))
    (step, other) = (joined_step("m", [Part(one, set())], [(0, "forward"), (0, "backward")]) for one in (saved, graph))
    assert {s.name: s.kind for s in step.storages}["part0.y"] == "crossing"
    assert {s.name: s.kind for s in other.storages}["part0.y"] == "activation"


def test_a_gradient_of_a_result_that_autograd_lets_go_dies_with_its_last_reader() -> None:
    def reader_of_tangent(held: Collection[int]) -> str:
        part = Part(layer_of_two_ops(100), {Y}, held_tangents=held)
        step = joined_step("one", [part], [(0, "forward"), (0, "backward")])
        return step.ops[step.readers[step.storage_called["part0.tangent"].id][-1]].name

    assert reader_of_tangent({TANGENT}) == "part0.backward.returns"
    assert reader_of_tangent(()) == "part0.second_back"


def test_a_weight_of_two_parts_is_counted_once_and_their_gradients_are_added_up() -> None:
    first = Part(layer_of_two_ops(100), {Y}, {TANGENT: (1, OF_X)}, handed_on={OF_WEIGHT})
    second = Part(layer_of_two_ops(100), {Y}, {X: (0, Y), WEIGHT: (0, WEIGHT)}, handed_on={OF_X})
    step = joined_step("tied", [first, second], FORWARD_AND_BACK)
    check_step(step)
    assert step.resident_bytes == 100 + 7
    assert [s.name for s in step.storages if s.kind == "gradient"] == ["part0.of_x", "part1.of_weight"]


def test_arguments_that_no_part_is_given_are_there_all_step() -> None:
    step = with_arguments(two_layers(100), 30)
    check_step(step)
    assert step.resident_bytes == two_layers(100).resident_bytes + 30
    assert with_arguments(step, 0) is step


def test_what_eager_code_makes_begins_in_its_stretch() -> None:
    first = Part(layer_of_two_ops(100), {Y})
    second = Part(layer_of_two_ops(100), {Y}, fresh={X}, handed_on={OF_X})
    step = joined_step("eager between", [first, second], FORWARD_AND_BACK)
    check_step(step)
    made = step.storage_called["part1.x"]
    assert made.kind == "crossing"
    assert step.ops[step.producer[made.id]].name == "eager1"
    assert step.ops[step.producer[step.storage_called["part0.tangent"].id]].name == "eager3"


def test_a_part_that_does_not_go_back_has_no_backward_ops() -> None:
    first = Part(layer_of_two_ops(100), {Y})
    second = Part(layer_of_two_ops(100), {Y}, {X: (0, Y)})
    step = joined_step("one back", [first, second], [(0, "forward"), (1, "forward"), (0, "backward")])
    check_step(step)
    assert not any(op.name.startswith("part1.") for op in step.ops if op.phase == "backward")


@given(st.lists(st.tuples(st.integers(0, 500), st.integers(0, 500)), min_size=8, max_size=9), st.booleans())
def test_what_was_measured_is_what_the_step_takes(measured: list[tuple[int, int]], nothing_is_kept: bool) -> None:
    """Eager code takes at least what the model says is in use: what is measured lies above it."""
    bare = two_layers(100)
    residences = just_in_time(bare, ()) if nothing_is_kept else {}
    in_use = {m.op: m.total_bytes for m in simulate(bare, residences).moments if m.phase != "recompute"}
    stretches = [op.name for op in bare.ops if op.target in (STRETCH, "loss")]
    intervals = []
    in_use["eager4"] = in_use[bare.ops[-1].name]  # of eager code after the last pass, where that was measured
    stretches += ["eager4"] * (len(measured) - 8)
    for place, (more, peak) in enumerate(measured):
        least = in_use[stretches[place // 2]]
        intervals.append(Interval(least + more + peak, least + more))
    step = with_eager_use(bare, eager_use(bare, residences, intervals))
    check_step(step)
    check_plan(step, residences)
    found = {m.op: m.total_bytes for m in simulate(step, residences).moments if m.phase != "recompute"}
    assert [found[name] for name in stretches] == [interval.peak_bytes for interval in intervals[::2]]
    for name, interval, op in zip(
        stretches[:4],
        intervals[:8:2],
        ("part0.first", "part1.first", "part1.second_back", "part0.second_back"),
        strict=True,
    ):
        assert found[op] - in_use[op] == interval.end_bytes - in_use[name]


@given(st.integers(1, 4), st.integers(0, 300))
def test_what_eager_code_takes_grows_with_what_it_is_given(growth: int, more: int) -> None:
    small, large = two_layers(100), two_layers(100 * growth)
    least = {m.op: m.total_bytes for m in simulate(small, {}).moments}
    stretches = [op.name for op in small.ops if op.target in (STRETCH, "loss")]
    intervals = [Interval(least[name] + 2 * more, least[name] + more) for name in stretches for _ in range(2)]
    step = grown(with_eager_use(small, eager_use(small, {}, intervals)), large)
    check_step(step)
    held, taken = step.storage_called.get("eager0_holds"), next(op for op in step.ops if op.name == "eager0")
    assert (held.nbytes if held else 0) == taken.workspace_bytes == growth * more
    assert [s.nbytes for s in step.storages if s.name in large.storage_called] == [s.nbytes for s in large.storages]


def test_what_the_loop_holds_is_in_use_until_the_loss_is_known() -> None:
    before = {m.op: m.total_bytes for m in simulate(two_layers(), {}).moments}
    after = {m.op: m.total_bytes for m in simulate(with_held(two_layers(), 50), {}).moments}
    more = {name: after[name] - before[name] for name in before}
    backward = {op.name for op in two_layers().ops if op.phase == "backward"}
    assert {more[name] for name in backward} == {0}
    assert {more[name] for name in before.keys() - backward} == {50}
    assert with_held(two_layers(), 50).storage_called[HELD].nbytes == 50


def test_residences_are_shared_out_and_joined_again() -> None:
    step = two_layers()
    residences = just_in_time(step, ())
    shares = [residences_of(part, step, residences) for part in (0, 1)]
    assert all(share["hidden"] == Recompute(("second_back",)) for share in shares)
    assert joined_residences(shares) == residences


@given(joined_steps(), st.integers(0, 999), st.booleans())
def test_shares_say_in_which_order_and_under_which_residences_the_joined_step_runs(
    step: StepGraph, seed: int, keeps: bool
) -> None:
    ordered = reordered(step, any_order(step, seed))
    kept = range(len(step.storages)) if keeps else ()
    plan = Plan(ordered, just_in_time(ordered, kept), "mine", captured_order=op_names(step))
    n_parts = sum(op.target == RETURNS and op.phase == "forward" for op in step.ops)
    shares = [share_of(part, plan) for part in range(n_parts)]
    assert in_order_of_shares(step, shares) == ordered
    check_plan(ordered, joined_residences(share.residences for share in shares))
    assert all(not share.order for share in shares) == (op_names(ordered) == op_names(step))
    captured = Plan(step, {}, "mine", captured_order=op_names(step))
    assert [share_of(part, captured) for part in range(n_parts)] == [Share()] * n_parts


def test_a_part_s_own_step_has_its_ops_in_the_order_of_its_share() -> None:
    own = layer_of_two_ops(100)
    share = Share(order=("second", "first", "first_back", "second_back"))
    assert op_names(share.in_order(own)) == ("second", "first", "loss", "first_back", "second_back")
    assert Share().in_order(own) is own


def test_a_recomputation_before_an_op_of_another_part_happens_in_the_part_s_own_backward_pass() -> None:
    early = {"part0.hidden": Recompute(("part1.first_back",))}
    share = residences_of(0, two_layers(), early)
    assert share == {"hidden": Recompute(("second_back",))}
    check_plan(two_layers(), joined_residences([share, {}]))


def away(free_after: str, fetch_before: str) -> dict[str, Residence]:
    return {"part0.hidden": Offload(free_after, fetch_before)}


def test_a_part_starts_and_ends_the_transfers_of_another_one_that_its_ops_are_named_for() -> None:
    residences = away("part1.first", "part1.first_back")
    shares = [residences_of(part, two_layers(), residences) for part in (0, 1)]
    assert shares[0] == {"hidden": Offload("part+1.first", "part+1.first_back")}
    assert shares[1] == {"part-1.hidden": Offload("first", "first_back")}
    assert joined_residences(shares) == residences
    apart = [residences_of(part, two_layers(), residences, apart=True) for part in (0, 1)]
    assert apart == [{"hidden": Offload("second", "second_back")}, {}]


@pytest.mark.parametrize(
    ("asked", "done"),
    [
        (("eager1", "eager3"), ("part0.second", "part0.second_back")),
        (("part1.forward.returns", "part1.backward.returns"), ("part1.forward.returns", "part1.backward.returns")),
        (("part0.forward.returns", "part0.second_back"), ("part0.second", "part0.second_back")),
    ],
)
def test_no_transfer_begins_or_ends_in_eager_code(asked: tuple[str, str], done: tuple[str, str]) -> None:
    """It leaves the device by then, and returns to it no earlier, so that no more memory is in use."""
    step = replace(two_layers(), link=Link("", 100.0, 100.0, 0.0))
    joined = joined_residences(residences_of(part, step, away(*asked)) for part in (0, 1))
    assert joined == away(*done)
    check_plan(step, joined)
    before, after = (simulate(step, one).peak_bytes for one in (away(*asked), joined))
    assert after <= before


def test_what_waits_encoded_waits_in_its_own_part() -> None:
    exact = Recompute(("part1.first_back",))
    share = residences_of(0, two_layers(), {"part0.hidden": Encode("linear", 0, None, "part0.hidden_encoded", exact)})
    assert share == {"hidden": Encode("linear", 0, None, "hidden_encoded", Recompute(("second_back",)))}
    joined = joined_residences([share, {}])["part0.hidden"]
    assert joined == Encode("linear", 0, None, "part0.hidden_encoded", Recompute(("part0.second_back",)))
