"""Sizes that vary from call to call: how far a step is planned, and what its storages take, by brute force."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import sympy
import torch
from torch import fx, nn
from torch.utils._sympy.functions import FloorDiv

from shoal.capture.capture_step import InputPlaces, joint_step
from shoal.capture.captured import Captured
from shoal.capture.varying_sizes import (
    Shape,
    SizesSeen,
    bytes_at,
    declared,
    leave_out,
    make_static,
    names_of,
    restrict,
    shape_of,
    varying,
)
from shoal.errors import CaptureError
from shoal.graph.symbolic_sizes import call_sizes, is_size, largest_at

H, W = sympy.symbols("h w", positive=True, integer=True)


@pytest.mark.parametrize(
    "nbytes",
    [
        4 * H * W,
        1024 * (FloorDiv(H - 1, 4) + 1) * (FloorDiv(W - 1, 4) + 1),
        4 * FloorDiv(H * W, 3) + 8,
        H**2 - H + 100,
        4 * H * (W - H) + 10000,  # largest in the middle
        12 * W * FloorDiv(H, 2) - 4 * W,
    ],
    ids=str,
)
def test_a_storage_is_largest_where_brute_force_finds_it(nbytes: Any) -> None:
    spans = {symbol: span for symbol, span in {H: (2, 31), W: (3, 20)}.items() if symbol in nbytes.free_symbols}
    every = itertools.product(*(range(least, most + 1) for least, most in spans.values()))
    most = max(int(nbytes.xreplace(dict(zip(spans, numbers, strict=True)))) for numbers in every)
    assert int(nbytes.xreplace(largest_at(nbytes, spans))) == most


def test_a_size_whose_largest_cannot_be_told_is_refused() -> None:
    with pytest.raises(CaptureError):
        largest_at(4 * H * (W - H), {H: (2, 1000), W: (2, 1000)})


def told(seen: SizesSeen, **sizes: int) -> None:
    seen.note(frozenset(sizes.items()))


def test_a_size_that_grew_is_planned_for_twice_as_many_elements_else_for_the_largest_seen() -> None:
    seen = SizesSeen()
    told(seen, length=120)
    assert seen.bounds({H: "length"}, {H: 57}) == [{H: 120}]
    assert seen.bounds({H: "length"}, {H: 150}) == [{H: 300}, {H: 180}, {H: 150}]  # multiples of 30


def test_two_sizes_that_grew_share_the_growth_and_stay_multiples_of_what_was_seen() -> None:
    seen = SizesSeen()
    told(seen, height=128, width=96)
    assert seen.bounds({H: "height", W: "width"}, {H: 160, W: 160}) == [
        {H: 224, W: 224},  # 160 * sqrt(2) is 226
        {H: 160, W: 160},  # 160 * sqrt(1.3) is 182, less than 192
    ]


def test_up_to_three_shapes_that_grow_are_captured_with_numbers_where_that_gives_them_other_forms() -> None:
    seen, plain = SizesSeen(has_variants=True), SizesSeen()

    def captured(**sizes: int) -> None:
        for one in (seen, plain):
            one.note(frozenset(sizes.items()))
            one.note_captured(frozenset(sizes.items()))

    def deserves(one: SizesSeen, **sizes: int) -> bool:
        return one.deserves_numbers(frozenset(sizes.items()))

    captured(batch=2, width=8)
    assert deserves(seen, batch=3, width=8) and not deserves(plain, batch=3, width=8)
    assert not deserves(seen, batch=3, width=7) and not deserves(seen, batch=2, width=8)
    seen.wander = True
    assert not deserves(seen, batch=3, width=8)
    seen.wander = False
    captured(batch=3, width=8)
    assert not deserves(seen, batch=3, width=8) and deserves(seen, batch=3, width=9)
    captured(batch=3, width=9)
    assert not deserves(seen, batch=4, width=9)


def test_sizes_that_wander_are_planned_for_more_than_the_largest_seen_without_having_grown() -> None:
    seen = SizesSeen(wander=True)
    told(seen, w=101)
    assert seen.bounds({W: "w"}, {W: 90}) == [{W: 202}, {W: 131}, {W: 101}]


def test_a_size_is_another_where_every_one_noted_under_its_name_differs() -> None:
    seen = SizesSeen()
    assert not seen.is_another(frozenset({("w", 4)}))
    told(seen, w=4)
    assert seen.is_another(frozenset({("w", 5)})) and not seen.is_another(frozenset({("w", 4), ("h", 5)}))


def test_a_plan_that_does_not_fit_says_how_far_the_next_may_reach() -> None:
    seen, names = SizesSeen(), {W: "w"}
    told(seen, w=101)
    told(seen, w=200)
    seen.refuse(1.25)  # at twice the largest
    assert seen.bounds(names, {W: 50})[0] == {W: int(200 * 2 / 1.25 * 0.98)}  # whatever the next call is
    told(seen, w=50)
    assert seen.bounds(names, {W: 60}) == [{W: 200}]
    seen.refuse(1.01)
    assert seen.bounds(names, {W: 50}) == [{W: 200}] and not seen.fixed
    seen.refuse(1.01)
    assert "no plan fits" in seen.fixed


def test_a_growing_sequence_is_planned_for_a_few_times() -> None:
    seen, most, plans = SizesSeen(), 0, 0
    for length in range(10, 1000):
        if length > most:
            most, plans = seen.bounds({H: "length"}, {H: length})[0][H], plans + 1
            told(seen, length=length)
    assert plans <= 8


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv1d(3, 4, 3, stride=2, padding=1), nn.Conv1d(4, 2, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(self.one(x).relu())


def in_backend(model: nn.Module, shapes: Sequence[tuple[int, ...]], look: Callable[[fx.GraphModule, Any], None]) -> int:
    """Call the model with inputs of these shapes; `look` is given each graph that Dynamo captures, by their number."""
    graphs = 0

    def backend(gm: fx.GraphModule, inputs: Any) -> Any:
        nonlocal graphs
        graphs += 1
        look(gm, inputs)
        return gm.forward

    call = torch.compile(model, backend=backend, fullgraph=True)
    for shape in shapes:
        call(torch.randn(shape))
    return graphs


def test_the_sizes_of_inputs_that_changed_are_symbols_and_have_names() -> None:
    shapes: list[Shape] = []
    names: list[list[str]] = []

    def look(gm: fx.GraphModule, inputs: Any) -> None:
        shapes.append(shape_of(gm))
        names.append(list(names_of(varying(gm)).values()))

    assert in_backend(Convolution(), [(2, 3, 16), (2, 3, 20), (2, 3, 9)], look) == 2
    assert names == [[], ["x.size()[2]"]]
    assert [dict(shape)["x.size()[2]"] for shape in shapes] == [16, 20]


@pytest.mark.parametrize(
    ("change", "graphs"),
    [
        (lambda gm: None, 2),
        (lambda gm: restrict(varying(gm), dict.fromkeys(varying(gm), 24)), 3),  # 30 is more
        (lambda gm: leave_out(varying(gm), names_of(varying(gm)), [frozenset({("x.size()[2]", 12)})]), 3),
        (make_static, 5),
    ],
    ids=["nothing", "restricted", "one left out", "static"],
)
def test_what_is_asked_of_a_size_guards_its_graph(change: Callable[[fx.GraphModule], None], graphs: int) -> None:
    def look(gm: fx.GraphModule, inputs: Any) -> None:
        if varying(gm):
            change(gm)

    torch._dynamo.reset()
    lengths = (16, 20, 12, 30, 22)
    assert in_backend(Convolution(), [(2, 3, length) for length in lengths], look) == graphs


def test_a_most_that_the_caller_declared_is_found() -> None:
    found = []
    x = torch.randn(2, 3, 16)
    torch._dynamo.mark_dynamic(x, 2, max=64)

    def look(gm: fx.GraphModule, inputs: Any) -> Any:
        found.append(list(declared(gm).values()))
        return gm.forward

    with torch._dynamo.config.patch(allow_ignore_mark_dynamic=True):
        torch.compile(Convolution(), backend=look)(x)
    assert found == [[64]]


def test_storages_take_at_each_size_what_a_step_of_that_size_takes() -> None:
    model, captures = Convolution(), list[Captured]()

    def look(gm: fx.GraphModule, inputs: Any) -> None:
        if sizes := varying(gm):
            restrict(sizes, dict.fromkeys(sizes, 40))
        captures.append(joint_step(gm, inputs, InputPlaces.of(gm), name="net"))

    torch._dynamo.reset()
    in_backend(model, [(2, 3, 16), (2, 3, 20)], look)
    static, symbolic = captures
    inputs = symbolic.joint.graph.find_nodes(op="placeholder")
    (symbol,) = [node.meta["val"].node.expr for node in inputs if is_size(node)]
    at_16 = bytes_at(symbolic, {symbol: 16})
    assert list(at_16.values()) == [s.nbytes for s in static.graph.storages]
    at_most = {s.name: s.nbytes for s in symbolic.graph.storages}
    for length in range(3, 41):
        assert all(nbytes <= at_most[name] for name, nbytes in bytes_at(symbolic, {symbol: length}).items())
    assert bytes_at(symbolic, {symbol: 40}) == at_most
    assert call_sizes(static.joint.graph)([0] * 20) == ()
