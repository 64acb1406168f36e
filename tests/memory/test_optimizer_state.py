"""The state of an optimizer is counted to the byte before its first step as after it, also only by its name."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn

from shoal.errors import InputError
from shoal.lowlevel import allocations
from shoal.memory.optimizer_state import (
    NAMES,
    NamedOptimizer,
    declared_optimizer,
    optimizer_state_bytes,
    reject_copy,
    state_tensors,
    step_scratch_bytes,
)
from shoal.memory.storage_bytes import distinct_bytes
from tests.memory.test_static_memory import network, take_step
from tests.raising import raising

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


# What a script would write for each name.
BY_NAME: dict[str, Callable[[Parameters], torch.optim.Optimizer]] = {
    "adadelta": torch.optim.Adadelta,
    "adagrad": torch.optim.Adagrad,
    "adam": torch.optim.Adam,
    "adam-amsgrad": lambda p: torch.optim.Adam(p, amsgrad=True),
    "adamax": torch.optim.Adamax,
    "adamw": torch.optim.AdamW,
    "adamw-amsgrad": lambda p: torch.optim.AdamW(p, amsgrad=True),
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "rmsprop": torch.optim.RMSprop,
    "rmsprop-centered": lambda p: torch.optim.RMSprop(p, centered=True),
    "rmsprop-momentum": lambda p: torch.optim.RMSprop(p, momentum=0.5),
    "rprop": torch.optim.Rprop,
    "sgd": torch.optim.SGD,
    "sgd-momentum": lambda p: torch.optim.SGD(p, momentum=0.5),
}


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


class CountingInItsGroups(torch.optim.Optimizer):
    """Has its step in a tensor of each group, as timm's LAMB does."""

    def __init__(self, params: Parameters, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group.setdefault("step", torch.zeros(())).add_(1)
            for parameter in group["params"]:
                parameter.sub_(parameter.grad, alpha=group["lr"])


def test_asking_changes_nothing_that_a_group_holds() -> None:
    model = network()
    optimizer = CountingInItsGroups(model.parameters())
    take_step(model, optimizer)
    assert optimizer_state_bytes(optimizer) == 0
    step_scratch_bytes(optimizer, "cpu")
    assert [float(group["step"]) for group in optimizer.param_groups] == [1]


def test_asking_changes_neither_the_generator_nor_the_gradients() -> None:
    model = network()
    optimizer = torch.optim.Adam(model.parameters())
    state = torch.get_rng_state()
    optimizer_state_bytes(optimizer)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("name", NAMES)
def test_a_name_counts_what_that_optimizer_holds_after_a_step(name: str) -> None:
    model = network()
    model[3].bias.requires_grad_(False)
    foretold = NamedOptimizer(name).state_bytes(model.parameters())
    optimizer = BY_NAME[name](p for p in model.parameters() if p.requires_grad)
    take_step(model, optimizer)
    assert foretold == held_bytes(optimizer)


@pytest.mark.parametrize("options", [{"fused": True}, {"capturable": True}, {"foreach": True}, {}])
def test_steps_are_counted_where_the_options_put_them(options: dict[str, Any]) -> None:
    with torch.device("meta"):  # stands for any device that is not the CPU
        model = nn.Linear(10, 10)
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.param_groups[0].update(options)
    moments, counters = 2 * (400 + 40), 2 * 4
    assert optimizer_state_bytes(optimizer) == moments + (
        counters if options in ({"fused": True}, {"capturable": True}) else 0
    )


@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_what_a_step_allocates_and_frees_is_told_as_it_is(name: str, foreach: bool) -> None:
    model = network()
    optimizer = BY_NAME[name](model.parameters())
    optimizer.param_groups[0]["foreach"] = foreach
    told_bytes = step_scratch_bytes(optimizer, "cpu")
    take_step(model, optimizer)
    _, changes = allocations.record(optimizer.step)
    small_bytes = 16  # a step's number
    assert 0 <= allocations.peak_bytes(changes) - max(0, sum(changes)) - told_bytes <= small_bytes
    named = NamedOptimizer(name).made_for(model.parameters())
    assert named is not None and step_scratch_bytes(named, "cuda" if foreach else "cpu") == told_bytes


def test_a_fused_step_takes_nothing_beside_its_state() -> None:
    assert step_scratch_bytes(torch.optim.AdamW(network().parameters(), fused=True), "cuda") == 0


def test_a_name_is_read_as_it_may_be_written() -> None:
    assert declared_optimizer("AdamW") == declared_optimizer(" adamw ") == NamedOptimizer("adamw")
    assert declared_optimizer("SGD_momentum") == NamedOptimizer("sgd-momentum")
    made = torch.optim.SGD(network().parameters())
    assert declared_optimizer(made) is made and declared_optimizer(None) is None


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("adamv", "optimizer='adamv'"),
        ("lbfgs", "optimizer='lbfgs'"),
        (7, "torch.optim.Optimizer"),
    ],
)
def test_what_is_no_optimizer_is_refused(given: Any, said: str) -> None:
    with raising(InputError, said):
        declared_optimizer(given)


@pytest.mark.parametrize(("given", "close"), [("adamv", "'adam"), ("nonsense", "'adamw'"), ("x" * 300, "'adamw'")])
def test_the_first_line_says_which_name_to_type(given: str, close: str) -> None:
    with pytest.raises(InputError) as refused:
        declared_optimizer(given)
    assert close in refused.value.message and "sgd-momentum" in refused.value.details["names"]


def test_a_copy_is_refused_and_everything_else_is_not() -> None:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    with raising(InputError, "AdamW", "optimizer='adamw'"):
        reject_copy(copy.deepcopy({"optimizer": optimizer})["optimizer"], model.parameters())
    with raising(InputError, "optimizer='rmsprop-centered'"):
        reject_copy(torch.optim.RMSprop(network().parameters(), centered=True), model.parameters())
    with raising(InputError, "model.parameters()"):
        reject_copy(torch.optim.ASGD(network().parameters()), model.parameters())
    for known in (optimizer, torch.optim.SGD([model[3].bias]), NamedOptimizer("adam"), None):
        reject_copy(known, model.parameters())
    reject_copy(torch.optim.SGD(nn.Linear(3, 3).parameters()), model.parameters())  # of a model in addition to this one
    reject_copy(torch.optim.SGD(network().double().parameters()), model.parameters())  # masters
    reject_copy(optimizer, [])


class WithHistory(torch.optim.Optimizer):
    """Keeps the gradients of its last three steps in a list, as Shampoo and L-BFGS keep matrices and vectors."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            past = self.state[parameter].setdefault("past", [])
            past.append(parameter.grad.clone())
            del past[:-3]


def test_tensors_in_lists_of_the_state_count() -> None:
    model = network()
    optimizer = WithHistory(model.parameters())
    parameter_bytes = sum(p.nbytes for p in model.parameters())
    for steps in (1, 2, 3, 3):
        take_step(model, optimizer)
        assert optimizer_state_bytes(optimizer) == steps * parameter_bytes
        assert distinct_bytes(state_tensors(optimizer)) == steps * parameter_bytes


@pytest.mark.parametrize("line_search", [None, "strong_wolfe"])
def test_lbfgs_counts_with_its_history_full_and_what_it_holds_while_it_calls_the_closure(
    line_search: str | None,
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 1))
    optimizer = torch.optim.LBFGS(model.parameters(), 0.1, history_size=3, line_search_fn=line_search)
    batch, parameter_bytes = torch.randn(30, 20), sum(p.nbytes for p in model.parameters())
    foretold = optimizer_state_bytes(optimizer)
    in_closure = []

    def closure() -> torch.Tensor:
        vectors = [t for t in gc.get_objects() if type(t) is torch.Tensor and t.nbytes == parameter_bytes]
        in_closure.append(distinct_bytes(vectors))
        optimizer.zero_grad()
        loss = (model(batch) - batch[:, :1].sin()).square().mean()
        loss.backward()
        return loss

    for _ in range(20):
        optimizer.step(closure)
    assert distinct_bytes(state_tensors(optimizer)) > 8 * parameter_bytes
    assert max(in_closure) > 9 * parameter_bytes
    assert 0 < foretold - max(in_closure) <= (3 if line_search is None else 5) * parameter_bytes
    assert optimizer_state_bytes(optimizer) == foretold
