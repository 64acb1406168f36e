"""What stays in use all step is counted to the byte, before the optimizer's first step as after it, and held weakly."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from shoal.core.step import StepGraph, Storage
from shoal.memory.static_memory import StaticMemory, distinct_bytes, optimizer_state_bytes

EMPTY = StepGraph("empty", (), ())
Parameters = Iterable[Any]
OPTIMIZERS: dict[str, Callable[[Parameters], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, 0.1),
    "momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "Nesterov": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=1e-4),
    "Adam": lambda p: torch.optim.Adam(p),
    "AMSGrad": lambda p: torch.optim.AdamW(p, amsgrad=True, foreach=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, momentum=0.1, centered=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p),
    "Adadelta": lambda p: torch.optim.Adadelta(p),
    "NAdam": lambda p: torch.optim.NAdam(p),
    "Rprop": lambda p: torch.optim.Rprop(p),
}
# How many copies of its parameters each keeps, from its paper.
COPIES = {"SGD": 0, "momentum": 1, "Nesterov": 1, "Adam": 2, "AMSGrad": 3, "RMSprop": 3, "Adadelta": 2}


def network() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 36, 5))


def take_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(2, 3, 8, 8)).sum().backward()
    optimizer.step()


def held_bytes(optimizer: torch.optim.Optimizer) -> int:
    return distinct_bytes(v for state in optimizer.state.values() for v in state.values() if torch.is_tensor(v))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_state_of_an_optimizer_counts_before_its_first_step_as_after_it(name: str) -> None:
    model = network()
    optimizer = OPTIMIZERS[name](model.parameters())
    before = [p.detach().clone() for p in model.parameters()]
    foretold = optimizer_state_bytes(optimizer)
    assert all(map(torch.equal, before, model.parameters()))
    take_step(model, optimizer)
    assert foretold == held_bytes(optimizer) == optimizer_state_bytes(optimizer)
    if name in COPIES:
        numbers_per_parameter = 4 * len(list(model.parameters()))  # in which some count their steps
        assert 0 <= foretold - COPIES[name] * sum(p.nbytes for p in model.parameters()) <= 2 * numbers_per_parameter


@pytest.mark.parametrize("name", ["momentum", "Adam"])
def test_groups_frozen_parameters_and_late_ones_count_what_they_will_have(name: str) -> None:
    model = network()
    model[0].requires_grad_(False)
    optimizer = OPTIMIZERS[name]([{"params": model[0].parameters()}, {"params": model[3].parameters(), "lr": 0.5}])
    foretold = optimizer_state_bytes(optimizer)
    take_step(model, optimizer)
    assert foretold == held_bytes(optimizer)
    optimizer.add_param_group({"params": model[1].parameters()})
    foretold = optimizer_state_bytes(optimizer)
    take_step(model, optimizer)
    assert foretold == held_bytes(optimizer)


def test_an_optimizer_of_no_known_making_counts_one_copy_of_its_parameters() -> None:
    class Peculiar(torch.optim.Optimizer):
        def __init__(self, params: Any, *, must_be_given: int) -> None:
            super().__init__(params, {})

        def step(self, closure: Any = None) -> None:
            return None

    model = network()
    optimizer = Peculiar(model.parameters(), must_be_given=1)
    assert optimizer_state_bytes(optimizer) == sum(p.nbytes for p in model.parameters())


def test_asking_changes_neither_the_generator_nor_the_gradients() -> None:
    model = network()
    optimizer = torch.optim.Adam(model.parameters())
    state = torch.get_rng_state()
    optimizer_state_bytes(optimizer)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None for p in model.parameters())


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 50)), max_size=8))
def test_tensors_of_one_block_count_once_and_whole(parts: list[tuple[int, int]]) -> None:
    blocks = [torch.empty(100, dtype=torch.uint8, device="meta" if place % 2 else "cpu") for place in range(4)]
    tensors = [blocks[block][start:].view(-1) for block, start in parts]
    assert distinct_bytes(tensors) == 100 * len({block for block, _ in parts})
    assert distinct_bytes([]) == 0


def step_with(*storages: tuple[str, int]) -> StepGraph:
    made = [
        Storage(place, f"s{place}", nbytes, kind, "", (nbytes,), "uint8")  # type: ignore[arg-type]
        for place, (kind, nbytes) in enumerate(storages)
    ]
    return replace(EMPTY, storages=tuple(made))


def test_beside_the_step_is_what_of_the_model_the_step_does_not_hold() -> None:
    model = network()
    own = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    assert StaticMemory(model).bytes_beside(EMPTY) == own
    partly = step_with(("parameter", 300), ("buffer", 40), ("input", 7), ("activation", 9), ("constant", 5))
    assert StaticMemory(model).bytes_beside(partly) == own - 340
    assert StaticMemory(model).bytes_beside(step_with(("parameter", 2 * own))) == 0


def test_gradients_that_are_there_and_the_optimizers_state_count_beside_the_step() -> None:
    model = network()
    whole = step_with(("parameter", distinct_bytes([*model.parameters(), *model.buffers()])))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.5)
    parameter_bytes = distinct_bytes(model.parameters())
    assert StaticMemory(model, optimizer).bytes_beside(whole) == parameter_bytes
    take_step(model, optimizer)
    assert StaticMemory(model, optimizer).bytes_beside(whole) == 2 * parameter_bytes
    assert StaticMemory(model).bytes_beside(whole) == parameter_bytes
    assert StaticMemory(optimizer=optimizer).bytes_beside(whole) == parameter_bytes
    optimizer.zero_grad()
    assert StaticMemory(model, optimizer).bytes_beside(whole) == parameter_bytes
    assert StaticMemory().bytes_beside(whole) == 0


def test_shared_parameters_count_once() -> None:
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
    model[1].weight = model[0].weight
    assert StaticMemory(model).bytes_beside(EMPTY) == 4 * (25 + 5 + 5)


def test_the_tensors_in_use_are_those_of_model_gradients_and_optimizer() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.5)
    static = StaticMemory(model, optimizer)
    own = distinct_bytes([*model.parameters(), *model.buffers()])
    assert distinct_bytes(static.tensors()) == own
    take_step(model, optimizer)
    assert distinct_bytes(static.tensors()) == own + 2 * distinct_bytes(model.parameters())


def test_neither_model_nor_optimizer_is_kept_alive() -> None:
    model = copy.deepcopy(network())
    optimizer = torch.optim.Adam(model.parameters())
    static = StaticMemory(model, optimizer)
    gone = weakref.ref(model), weakref.ref(optimizer)
    del model, optimizer
    gc.collect()
    assert [reference() for reference in gone] == [None, None]
    assert static.tensors() == []
    assert static.bytes_beside(step_with(("parameter", 5))) == 0
