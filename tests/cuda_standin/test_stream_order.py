"""The order of a step's copies and kernels on CUDA, as the events of its streams give it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import shoal
from shoal.cost import measure_links
from tests import made_up_machine
from tests.engine.training_laws import blocks, costs_that_do_not_matter, offload_by_chance
from tests.stream_order import Access, Entry, races, recorded_on_cuda, without_each_wait


def planned() -> Callable[[], None]:
    """A step whose storages are offloaded, each at some place of its own."""
    net = nn.Sequential(*blocks(3, 8, 8, 8, 8)).cuda()
    batch = torch.empty(4, 3, 8, 8, device="cuda")
    model = shoal.compile(
        net, budget="70GiB", offload_to="host", options=shoal.Options(planner=offload_by_chance(1, 0.0, 0.0))
    )
    return lambda: model(batch).sum().backward()


def eager() -> Callable[[], None]:
    """A step in eager mode that offloads what autograd saves."""
    net = nn.Sequential(*(nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.Sigmoid()) for _ in range(4))).cuda()
    batch = torch.empty(4, 8, 8, 8, device="cuda")

    def step() -> None:
        with shoal.offload_activations(min_bytes=1):
            loss = net(batch * 2).sum()
        loss.backward()

    return step


def recorded(kind: Callable[[], Callable[[], None]]) -> list[Entry]:
    """Two steps of the kind, with at least five storages offloaded in each."""
    with costs_that_do_not_matter(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure_links, "_cuda_copies", lambda device: (made_up_machine.SLAB,))
        step = kind()
        for _ in range(3):  # the first steps of a plan are metered
            step()
        with recorded_on_cuda() as entries:
            for _ in range(2):
                step()
    copies = [entry for entry in entries if isinstance(entry, Access) and entry.stream != 0 and not entry.writes]
    assert len(copies) >= 2 * 2 * 5
    return entries


@pytest.mark.parametrize("kind", [planned, eager], ids=["planned", "eager"])
def test_no_access_races_with_a_copy(kind: Callable[[], Callable[[], None]]) -> None:
    assert races(recorded(kind)) == []


def test_without_any_one_wait_of_a_planned_step_some_access_races() -> None:
    assert [wait for wait, left in without_each_wait(recorded(planned)) if not races(left)] == []
