"""Host bytes are made once, used again by every step, kept within their budget and given back."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from shoal.errors import TransferError
from shoal.memory.limit import memory_limit
from shoal.offload.links.open_link import open_link
from shoal.offload.transfers import RunningTransfers, Transfers
from tests.offload.links.slabs import RehearsedHost, open_files, our_threads
from tests.offload.transfers.steps import PAGE, needs_compiler, step_on
from tests.raising import raising


@needs_compiler
def test_torchs_bytes_are_free_once_the_offload_is_finished() -> None:
    transfers = Transfers(open_link("cpu"), [4000, 8000])
    with memory_limit(None) as w:
        before = w.live_bytes
        receipt = transfers.begin()
        assert w.peak_bytes == before, "neither receipt nor slab are torch's"
        x, y = torch.ones(1000), torch.ones(2000)
        transfers.start_offload(receipt, 0, x)
        transfers.start_offload(receipt, 1, y)
        del x, y
        transfers.finish_offload(receipt, 1)
        assert w.live_bytes - before <= 4000
        transfers.finish_offload(receipt, 0)
        assert w.live_bytes == before
        fetched = transfers.start_fetch(receipt, 0)
        assert w.live_bytes - before == 4000
        transfers.finish_fetch(receipt, 0)
        assert fetched.sum() == 1000
        del fetched
        assert w.live_bytes == before


def test_no_step_after_the_first_makes_a_slab() -> None:
    host = RehearsedHost()
    link = host.link()
    step = step_on(link)
    assert host.made == 1, "it is made with the transfers, not with the first step"
    for _ in range(5):
        assert step.is_right()
        assert link.pool.leased == 0
    assert host.made == 1
    assert link.pool.held_bytes == 4 * PAGE


def test_graphs_of_one_iteration_have_slabs_no_larger_than_they_need() -> None:
    host = RehearsedHost()
    link = host.link(4 * PAGE)
    small, large = (Transfers(link, [pages * PAGE], running=RunningTransfers(lambda: 0)) for pages in (1, 3))
    for _ in range(2):
        receipts = small.begin(), large.begin()
        assert link.pool.held_bytes == 4 * PAGE
        del receipts


def test_two_forwards_before_two_backwards_have_a_slab_each() -> None:
    host = RehearsedHost()
    link = host.link()
    step = step_on(link)
    for _ in range(3):
        x, y = (torch.randn(300, requires_grad=True) for _ in range(2))
        loss = step.forward(x) + step.forward(y)
        assert link.pool.leased == 2
        loss.backward()
        assert torch.equal(x.grad, step.expected(x)) and torch.equal(y.grad, step.expected(y))  # type: ignore[arg-type]
        del loss
        assert link.pool.leased == 0
    assert host.made == 2


def test_a_second_forward_over_the_host_budget_is_refused_and_the_first_goes_on() -> None:
    link = RehearsedHost().link(budget_bytes=7 * PAGE)
    step = step_on(link)
    x = torch.randn(300, requires_grad=True)
    loss = step.forward(x)
    with raising(TransferError, "16.00 KiB", "28.00 KiB"):
        step.forward(x)
    loss.backward()
    assert torch.equal(x.grad, step.expected(x))  # type: ignore[arg-type]
    del loss
    assert step.is_right()


def test_a_slab_over_the_host_budget_is_refused_when_the_step_is_planned() -> None:
    link = RehearsedHost().link(budget_bytes=3 * PAGE)
    with raising(TransferError, "16.00 KiB", "12.00 KiB"):
        step_on(link)
    assert link.pool.held_bytes == 0
    assert step_on(link, slots=3).is_right()


def test_steps_of_two_shapes_share_the_larger_slab() -> None:
    host = RehearsedHost()
    link = host.link()
    small, large = step_on(link, 2), step_on(link, 5)
    for _ in range(2):
        assert large.is_right() and small.is_right()
    assert link.pool.held_bytes == 5 * PAGE
    large.transfers.close()
    assert small.is_right()
    small.transfers.close()
    assert link.pool.held_bytes == 0


def test_closing_is_for_good_and_twice_is_once() -> None:
    host = RehearsedHost()
    link = host.link()
    step = step_on(link)
    loss = step.forward(torch.randn(300, requires_grad=True))
    step.transfers.close()
    step.transfers.close()
    with pytest.raises(TransferError):
        loss.backward()
    with pytest.raises(TransferError):
        step.forward(torch.randn(300, requires_grad=True))
    del loss
    gc.collect()
    assert link.pool.held_bytes == 0


def test_a_closed_link_is_said_to_be_closed() -> None:
    link = open_link("cpu")
    step = step_on(link)
    link.close()
    for _ in range(2):
        with pytest.raises(TransferError):
            step.forward(torch.randn(300, requires_grad=True))


def test_what_is_forgotten_is_gone(tmp_path: Path) -> None:
    step = step_on(open_link("cpu", tmp_path))
    assert step.is_right()
    assert (len(our_threads()), open_files(tmp_path)) == (2, 1)
    del step
    gc.collect()
    assert (len(our_threads()), open_files(tmp_path)) == (0, 0)
