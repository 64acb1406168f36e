"""One link for all plans of a model, opened when a plan offloads, and closed with what it moved."""

from __future__ import annotations

import pytest
import torch

from shoal.core.plan import Plan
from shoal.core.residence import Offload
from shoal.core.shares import OtherTransfers
from shoal.engine import open_transfers
from shoal.engine.open_transfers import OpenTransfers
from shoal.offload.policy import Offloading
from tests.random_steps import conv_bn_relu_chain, legal_offloads

CPU = torch.device("cpu")


def offloading_plan() -> Plan:
    graph = conv_bn_relu_chain(3, 64)
    saved = sorted(graph.saved)
    residences = {
        name: Offload(ends[0].name, starts[-1].name)
        for name, ends, starts in list(legal_offloads(graph, {}, saved))[:1]
    }
    return Plan(graph, residences, "some", "cpu", 0)


def test_nothing_is_opened_for_a_plan_that_offloads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_transfers, "open_link", lambda *_: pytest.fail("no link is needed"))
    graph = conv_bn_relu_chain(3)
    assert OpenTransfers(Offloading("host", 1 << 20)).of(Plan(graph, {}, "none", "cpu", 0), CPU) is None
    assert OpenTransfers(None).of(offloading_plan(), CPU) is None


def test_a_graph_that_offloads_nothing_has_transfers_if_it_serves_others() -> None:
    graph = conv_bn_relu_chain(3)
    transfers = OpenTransfers(Offloading("host", 1 << 20))
    others = OtherTransfers(fetches={graph.ops[-1].name: ((-1, "x"),)})
    found = transfers.of(Plan(graph, {}, "none", "cpu", 0), CPU, others=others)
    assert found is not None and found.host_bytes == 0
    transfers.close()


def test_plans_share_one_link_until_it_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = []
    real = open_transfers.open_link
    monkeypatch.setattr(open_transfers, "open_link", lambda *given: opened.append(real(*given)) or opened[-1])
    transfers = OpenTransfers(Offloading("host", 1 << 20))
    plan = offloading_plan()
    first, second = transfers.of(plan, CPU), transfers.of(plan, CPU)
    assert first is not None and second is not None and first is not second and len(opened) == 1
    transfers.close()
    assert transfers.of(plan, CPU) is not None and len(opened) == 2
    transfers.close()
