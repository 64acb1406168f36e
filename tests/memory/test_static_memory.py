"""What stays in use all step is counted to the byte, and held weakly."""

from __future__ import annotations

import copy
import gc
import weakref
from dataclasses import replace

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from shoal.core.step import StepGraph, Storage
from shoal.memory.optimizer_state import NamedOptimizer
from shoal.memory.static_memory import StaticMemory
from shoal.memory.storage_bytes import distinct_bytes

EMPTY = StepGraph("empty", (), ())


def network() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 36, 5))


def take_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(2, 3, 8, 8)).sum().backward()
    optimizer.step()


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


def test_an_optimizer_by_name_counts_until_the_one_that_trains_steps() -> None:
    model = network()
    frozen, bias = model[0].weight.requires_grad_(False), model[3].bias
    parameter_bytes = distinct_bytes(model.parameters()) - frozen.nbytes
    static = StaticMemory(model, NamedOptimizer("sgd-momentum"))
    assert static.has_optimizer and static.state_bytes() == parameter_bytes
    half = torch.optim.SGD([bias], 0.1)
    assert static.trains(half) and static.stepped(half) == "'sgd-momentum' was declared, and SGD has stepped"
    assert static.state_bytes() == parameter_bytes - bias.nbytes
    rest = torch.optim.SGD([p for p in model.parameters() if p is not bias], 0.1, momentum=0.9)
    static.stepped(rest)
    assert static.state_bytes() == parameter_bytes - bias.nbytes


def test_without_a_model_the_parameters_of_the_step_say_whose_optimizer_it_is() -> None:
    model, other = network(), network()
    static = StaticMemory(optimizer=NamedOptimizer("adam"), parameters=model.parameters())
    assert static.state_bytes() == NamedOptimizer("adam").state_bytes(model.parameters())
    assert static.trains(torch.optim.SGD(model.parameters())) and not static.trains(torch.optim.SGD(other.parameters()))
    del model
    gc.collect()
    assert static.state_bytes() == 0


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


def test_models_that_share_a_part_or_an_optimizer_count_it_once() -> None:
    one, other, third = network(), network(), network()
    other[3] = one[3]
    optimizer = torch.optim.SGD([*one.parameters(), *other[:3].parameters()], 0.1, momentum=0.9)
    static = StaticMemory(one, optimizer)
    static.add(other, optimizer)
    static.add(third, NamedOptimizer("sgd"))
    tensors = [t for model in (one, other, third) for t in (*model.parameters(), *model.buffers())]
    assert distinct_bytes(static.lasting_tensors()) == distinct_bytes(tensors)
    trained_bytes = distinct_bytes(p for model in (one, other) for p in model.parameters())
    assert static.state_bytes() == trained_bytes and static.state_there_bytes() == 0
    for model in (one, other):
        model(torch.randn(2, 3, 8, 8)).sum().backward()
    optimizer.step()
    assert static.state_there_bytes() == static.state_bytes() == trained_bytes
    assert distinct_bytes(static.state_of(one.parameters())) == distinct_bytes(one.parameters())


def test_names_of_optimizers_belong_to_their_models() -> None:
    one, other = network(), network()
    static = StaticMemory(one, NamedOptimizer("sgd-momentum"))
    static.add(other, NamedOptimizer("adam"))
    own = distinct_bytes(one.parameters())
    assert static.state_bytes() == own + NamedOptimizer("adam").state_bytes(other.parameters())
    stepped = torch.optim.SGD(other.parameters(), 0.1)
    assert static.stepped(stepped) == "'adam' was declared, and SGD has stepped"
    assert static.state_bytes() == own
