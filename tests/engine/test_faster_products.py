"""Of the products that may be padded those are that take no longer so, and a plan keeps the choice it was made with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import fx

from shoal.capture import aligned_rows, padded_products
from shoal.capture.aligned_rows import with_aligned_rows
from shoal.capture.captured import Captured
from shoal.cost.profile import Costs
from shoal.engine import faster_products
from shoal.engine.faster_products import in_faster_products
from tests.capture.test_padded_products import Head, classes_second
from tests.joint_graphs import captured_step


@pytest.fixture
def head(monkeypatch: pytest.MonkeyPatch) -> Captured:
    monkeypatch.setattr(aligned_rows, "_ON", ("cpu",))
    monkeypatch.setattr(aligned_rows, "_LEAST_BYTES", 0)
    monkeypatch.setattr(padded_products, "_ON", ("cpu",))
    monkeypatch.setattr(padded_products, "_LEAST_FLOPS", 0)
    monkeypatch.setattr(padded_products, "_FLOPS_OF_A_BYTE", 0)
    return with_aligned_rows(captured_step(Head(997, then=classes_second), torch.randn(2, 8, 16, requires_grad=True)))


def products(step: Captured) -> list[str]:
    return [op.name for op in step.graph.ops if op.name.startswith("mm")]


TAKEN = {"mm": 3.0, "mm_padded": 1.0, "mm_1": 1.0, "mm_1_padded": 1.0, "mm_2": 1.0, "mm_2_padded": 2.0}


@pytest.mark.parametrize(
    ("copy_seconds", "expected"),
    [(2.0, ["mm_padded", "mm_1_padded", "mm_2"]), (2.1, ["mm", "mm_1_padded", "mm_2"])],
)
def test_what_is_slower_padded_stays_plain(
    head: Captured, monkeypatch: pytest.MonkeyPatch, copy_seconds: float, expected: list[str]
) -> None:
    """The weight's copy is the first product's."""

    def measured(nodes: Mapping[str, fx.Node], **_: Any) -> Costs:
        copies = {node.name: copy_seconds for node in nodes.values() if "pad_nd" in node.name}
        assert len(copies) == 1
        taken = TAKEN | copies
        assert {node.name for node in nodes.values()} == set(taken)
        return Costs({key: taken[node.name] for key, node in nodes.items()}, {})

    monkeypatch.setattr(faster_products, "profile", measured)
    assert products(head) == ["mm", "mm_1", "mm_2"]
    assert products(in_faster_products(head)) == expected


def test_what_cannot_be_timed_stays_plain(head: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faster_products, "profile", lambda nodes, **_: Costs({}, {}))
    assert in_faster_products(head).graph == head.graph


def test_a_plan_keeps_its_products(head: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    class Made:
        def __init__(self, captured_graph: Any) -> None:
            self.captured_graph = captured_graph

    def never(*_: Any, **__: Any) -> Costs:
        raise AssertionError("nothing is measured")

    monkeypatch.setattr(faster_products, "profile", never)
    some = padded_products.with_padded_products(head, {"mm_1"}).captured
    for step in (head, some):
        plan: Any = Made(step.graph)
        assert in_faster_products(head, plan).graph == step.graph


def test_a_step_without_such_products_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(padded_products, "_ON", ("cpu",))
    step = captured_step(Head(997), torch.randn(2, 8, 16, requires_grad=True))  # few operations
    monkeypatch.setattr(faster_products, "profile", lambda *_, **__: 1 / 0)
    assert in_faster_products(step) is step
