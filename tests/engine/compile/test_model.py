"""A compiled model is the model it was: its names, weights, hooks, copies and lifetime."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

import shoal
from tests.engine.compile.compiled import ROOMY, compiled
from tests.engine.training_laws import (
    assert_same_training,
    blocks,
    costs_that_do_not_matter,
    differences,
    images,
    mean_square,
    same_bits,
    train,
)


def test_hooks_run_as_in_the_plain_model() -> None:
    net = nn.Sequential(*blocks(3, 8, 8), nn.Dropout(0.3))
    net[0].register_forward_hook(lambda module, arguments, output: output * 2)
    net[1].register_forward_pre_hook(lambda module, arguments: (arguments[0] + 1,))
    net.register_forward_hook(lambda module, arguments, output: output.clamp(max=3))
    net[0][0].weight.register_hook(lambda gradient: 3 * gradient)
    without = copy.deepcopy(net)
    without._forward_hooks.clear()
    batches = images(3, 4, 3, 8, 8)
    trained = assert_same_training(net, batches)
    assert not same_bits(trained[1][0].weight, without[1][0].weight)


def test_parameter_hooks_see_every_gradient() -> None:
    def sums(model: nn.Module) -> list[float]:
        seen: list[float] = []
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.sum().item()))
        train(model, images(2, 4, 3, 8, 8))
        return sorted(seen)

    net = nn.Sequential(*blocks(3, 8, 8))
    planned = compiled(net)
    with costs_that_do_not_matter():
        assert sums(planned) == sums(net)


def test_the_model_comes_back_with_the_names_it_had() -> None:
    net = nn.Sequential(*blocks(3, 8, 8))
    names, parameters = list(net.state_dict()), list(net.parameters())
    same = shoal.compile(net, budget=ROOMY)
    assert same is net
    assert type(net) is nn.Sequential
    assert list(net.state_dict()) == names
    assert all(a is b for a, b in zip(net.parameters(), parameters, strict=True))


def test_weights_loaded_after_compiling_are_those_that_train() -> None:
    net, other, batches = nn.Sequential(*blocks(3, 8, 8)), nn.Sequential(*blocks(3, 8, 8)), images(3, 4, 3, 8, 8)
    planned = compiled(net)
    with costs_that_do_not_matter():
        train(planned, batches)
        planned.load_state_dict(other.state_dict(), strict=True)
        assert not differences(train(planned, batches), train(other, batches))


def test_a_deep_copy_trains_alike_and_leaves_its_original_alone() -> None:
    net, batches = nn.Sequential(*blocks(3, 8, 8), nn.Dropout(0.3)), images(2, 4, 3, 8, 8)
    planned = compiled(net)
    with costs_that_do_not_matter():
        train(planned, batches)
        train(net, batches)
        weights = {name: tensor.clone() for name, tensor in planned.state_dict().items()}
        twin = copy.deepcopy(planned)
        expected = train(net, batches)
        assert not differences(train(twin, batches), expected)
        assert not differences(planned.state_dict(), weights)
        assert not differences(train(planned, batches), expected)


def test_saved_and_resumed_midway_ends_where_an_uninterrupted_plain_run_ends(tmp_path: Path) -> None:
    def steps(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Sequence[torch.Tensor]) -> None:
        for batch in batches:
            optimizer.zero_grad()
            mean_square(model(batch)).backward()
            optimizer.step()

    def adam(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters())

    net, batches = nn.Sequential(*blocks(3, 8, 8), nn.Dropout(0.3)), images(4, 4, 3, 8, 8)
    first, second, path = (
        compiled(net),
        compiled(nn.Sequential(*blocks(3, 8, 8), nn.Dropout(0.3))),
        tmp_path / "half.pt",
    )
    torch.manual_seed(5)
    steps(net, adam(net), batches)
    with costs_that_do_not_matter():
        torch.manual_seed(5)
        optimizer = adam(first)
        steps(first, optimizer, batches[:2])
        torch.save((first.state_dict(), optimizer.state_dict(), torch.get_rng_state()), path)
        weights, state, generator = torch.load(path)
        second.load_state_dict(weights)
        optimizer = adam(second)
        optimizer.load_state_dict(state)
        torch.set_rng_state(generator)
        steps(second, optimizer, batches[2:])
    assert not differences(second.state_dict(), net.state_dict())


def test_compiling_again_replaces_the_budget() -> None:
    net, batches = nn.Sequential(*blocks(3, 8, 8)), images(2, 4, 3, 8, 8)
    planned = compiled(net)
    with costs_that_do_not_matter():
        train(planned, batches)
        train(net, batches)
        shoal.compile(planned, budget="2TiB", options=shoal.Options(planner="keep_all"))
        assert planned.shoal.plans == ()
        assert not differences(train(planned, batches), train(net, batches))
    assert planned.shoal.budget_bytes == 2 * 2**40
    assert not planned.shoal.plan.recomputed


def test_a_compiled_model_is_freed_with_its_last_reference() -> None:
    net = compiled(nn.Sequential(*blocks(3, 8, 8)))
    with costs_that_do_not_matter():
        train(net, images(2, 4, 3, 8, 8))
    gone = weakref.ref(net)
    del net
    gc.collect()
    assert gone() is None
