"""Transfers of one graph's storages that other graphs of the iteration start and end."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator

import pytest
import torch

from shoal.errors import TransferError
from shoal.memory.limit import memory_limit
from shoal.offload.links.open_link import OpenLink, open_link
from shoal.offload.transfers import RunningTransfers, Transfers
from tests.offload.transfers.steps import PAGE, fetch, needs_compiler, offload

ELEMS = 1 << 20


class TwoGraphs:
    """The second graph does what it can for the first one, and offloads nothing."""

    def __init__(self, link: OpenLink) -> None:
        self.place = 0
        self.running = RunningTransfers(lambda: self.place)
        self.first = Transfers(link, [8, 4 * ELEMS], running=self.running, names=["small", "x"])
        self.second = Transfers(link, [], running=self.running)

    def begin(self) -> tuple[torch.Tensor, torch.Tensor]:
        """An iteration, and the receipts of both graphs."""
        self.running.begin()
        self.place = 0
        first = self.first.begin()
        self.place = 1
        return first, self.second.begin()


@pytest.fixture
def graphs() -> Iterator[TwoGraphs]:
    link = open_link("cpu")
    yield TwoGraphs(link)
    link.close()


def numbers() -> torch.Tensor:
    return torch.arange(float(ELEMS))


@needs_compiler
def test_another_graph_ends_the_copy_to_the_host_and_starts_the_one_back(graphs: TwoGraphs) -> None:
    first, second = graphs.begin()
    with memory_limit(None) as meter:
        graphs.first.start_offload(first, 1, numbers())
        assert meter.live_bytes == 4 * ELEMS  # until its copy has ended
        graphs.second.finish_offload_of(second, -1, "x")
        assert meter.live_bytes == 0
        graphs.second.start_fetch_of(second, -1, "x")
        assert meter.live_bytes == 4 * ELEMS
        x = fetch(graphs.first, first, 1)
        assert meter.live_bytes == 4 * ELEMS  # nothing was allocated for it again
        assert torch.equal(x, numbers())
        del x
        assert meter.live_bytes == 0


@needs_compiler
@pytest.mark.parametrize("fetched", [False, True])
def test_what_the_other_graph_does_not_do_is_done_by_the_first(graphs: TwoGraphs, fetched: bool) -> None:
    first, second = graphs.begin()
    with memory_limit(None) as meter:
        graphs.first.start_offload(first, 1, numbers())
        if fetched:
            graphs.second.start_fetch_of(second, -1, "x")
        x = fetch(graphs.first, first, 1)
        assert meter.live_bytes == 4 * ELEMS  # the one that left is not there as well
        assert torch.equal(x, numbers())


@needs_compiler
def test_a_second_backward_pass_starts_its_copies_itself(graphs: TwoGraphs) -> None:
    first, second = graphs.begin()
    offload(graphs.first, first, 1, numbers())
    graphs.second.start_fetch_of(second, -1, "x")
    assert torch.equal(fetch(graphs.first, first, 1), numbers())
    with memory_limit(None) as meter:
        graphs.second.start_fetch_of(second, -1, "x")
        assert meter.live_bytes == 0
        assert torch.equal(fetch(graphs.first, first, 1), numbers())


@needs_compiler
@pytest.mark.parametrize("ends", ["iteration", "graph", "link"])
def test_what_was_fetched_and_not_needed_is_freed(graphs: TwoGraphs, ends: str) -> None:
    first, second = graphs.begin()
    with memory_limit(None) as meter:
        offload(graphs.first, first, 1, numbers())
        graphs.second.start_fetch_of(second, -1, "x")
        if ends == "iteration":
            graphs.begin()
        elif ends == "graph":
            del first
        else:
            graphs.first.close()
        end = time.monotonic() + 60  # a thread that copies frees what it has as soon as that is safe
        while meter.live_bytes and time.monotonic() < end:
            gc.collect()
            time.sleep(0.01)
        assert meter.live_bytes == 0
    if ends == "iteration":
        assert torch.equal(fetch(graphs.first, first, 1), numbers())


def test_a_graph_does_nothing_for_one_that_has_not_run_as_planned(graphs: TwoGraphs) -> None:
    _, old = graphs.begin()
    first, second = graphs.begin()
    offload(graphs.first, first, 0, torch.ones(2))
    for receipt, distance, name in ((old, -1, "small"), (second, 1, "small"), (second, -1, "other"), (second, -1, "x")):
        graphs.second.finish_offload_of(receipt, distance, name)
        graphs.second.start_fetch_of(receipt, distance, name)
    with pytest.raises(TransferError):
        graphs.first.finish_fetch(first, 0)  # nothing has begun it
    assert fetch(graphs.first, first, 0).tolist() == [1, 1]
    graphs.first.close()
    graphs.second.start_fetch_of(second, -1, "small")
    graphs.second.close()
    graphs.second.start_fetch_of(second, -1, "small")


def test_a_graph_that_offloads_nothing_takes_no_memory_of_the_host(graphs: TwoGraphs) -> None:
    pool = graphs.first._link.pool
    receipts = graphs.begin()
    assert graphs.second.host_bytes == 0
    assert (pool.leased, pool.held_bytes) == (1, PAGE + 4 * ELEMS)
    del receipts
    graphs.second.close()
    assert pool.held_bytes == PAGE + 4 * ELEMS
