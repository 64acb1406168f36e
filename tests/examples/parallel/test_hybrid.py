"""A hybrid network trains as one process with all images does, and what is on every rank stays the same bit for bit."""

from __future__ import annotations

import copy
import os
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from examples.parallel.hybrid import hybrid
from examples.parallel.local_convolution import LocalConv2d
from shoal.errors import InputError, TransferError
from tests.raising import raising
from tests.ranks import meet, run_on_ranks


class SmallAlexNet(nn.Module):
    """The shape of AlexNet, and its names."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Conv2d(4, 6, 3), nn.ReLU()
        )
        self.avgpool = nn.AdaptiveAvgPool2d(2)
        self.classifier = nn.Sequential(
            nn.Dropout(dropout),
            nn.Linear(24, 17),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            nn.Linear(17, 16),
            nn.ReLU(inplace=True),
            nn.Linear(16, 5),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classifier(torch.flatten(self.avgpool(self.features(x)), 1))


def _local() -> nn.Module:
    """The paper's CIFAR-10 network in small: convolutions, two local layers, one linear layer; a log softmax."""
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        LocalConv2d(4, 5, (4, 4), 3, padding=1),
        nn.ReLU(),
        LocalConv2d(5, 3, (4, 4), 3),
        nn.Flatten(),
        nn.Linear(12, 5),
        nn.LogSoftmax(1),
    )


NETWORKS = {"alexnet": SmallAlexNet, "local": _local}


def _network(name: str) -> nn.Module:
    torch.manual_seed(5)
    return NETWORKS[name]()


def _images(rows: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 3, 8, 8, generator=draw), torch.randint(0, 5, (rows,), generator=draw)


def _own(rows: list[int], seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's part of a batch."""
    x, y = _images(sum(rows), seed)
    rank = dist.get_rank()
    return x.split(rows)[rank], y.split(rows)[rank]


def _gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    from torch.distributed.tensor import DTensor

    return {
        name: one.grad.full_tensor() if isinstance(one.grad, DTensor) else one.grad
        for name, one in model.named_parameters()
        if one.grad is not None
    }


def _one_step(name: str, rows: list[int], codec: str | None) -> dict[str, Any]:
    model = hybrid(_network(name), codec, gradient_codec=None, timeout_seconds=200)
    x, y = _own(rows)
    out = model(x)
    F.cross_entropy(out, y).backward()
    found = {"out": out.detach(), **_gradients(model)}
    model.close()
    return found


def _one_process(model: nn.Module, rows: list[int]) -> dict[str, torch.Tensor]:
    """What DistributedDataParallel would give: the mean over ranks of each rank's mean loss."""
    x, y = _images(sum(rows))
    out = model(x.to(next(model.parameters()).dtype))
    parts = zip(out.split(rows), y.split(rows), strict=True)
    (sum(F.cross_entropy(*part) for part in parts) / len(rows)).backward()  # type: ignore[union-attr]
    return {"out": out.detach(), **_gradients(model)}


@pytest.mark.parametrize(
    ("name", "rows"), [("alexnet", [6, 6]), ("alexnet", [4, 1, 5]), ("local", [3, 4]), ("local", [2, 2, 2])]
)
def test_without_a_codec_it_is_one_process_with_all_images(name: str, rows: list[int]) -> None:
    results = run_on_ranks(_one_step, len(rows), name, rows, None)

    model = _network(name)
    single = _one_process(copy.deepcopy(model), rows)
    exact = _one_process(model.double(), rows)
    found = {**results[0], "out": torch.cat([of_rank["out"] for of_rank in results])}
    assert found.keys() == exact.keys()
    for key, value in exact.items():
        error, plain = (found[key] - value).abs().max(), (single[key] - value).abs().max()
        assert error <= plain + 2.0**-21 * value.abs().max(), key


def _step_by_round(name: str, rows: list[int], by_sub_batch: bool) -> dict[str, Any]:
    model = hybrid(_network(name), None, gradient_codec=None, timeout_seconds=200)
    x, y = _own(rows)
    dense = torch.optim.SGD(model.parameter_groups()[1]["params"], lr=0.1) if by_sub_batch else None
    loss = model.step(x, y, dense_optimizer=dense)
    found = {"loss": loss, **_gradients(model)}
    if by_sub_batch:
        found |= {f"new {name}": value for name, value in model.full_state_dict().items()}
    model.close()
    return found


@pytest.mark.parametrize(("name", "rows"), [("alexnet", [5, 2, 4]), ("local", [3, 4])])
def test_round_by_round_gives_the_gradients_of_one_process(name: str, rows: list[int]) -> None:
    results = run_on_ranks(_step_by_round, len(rows), name, rows, False)

    model = _network(name)
    single, exact = _one_process(copy.deepcopy(model), rows), _one_process(model.double(), rows)
    for key, value in exact.items():
        if key != "out":
            error, plain = (results[0][key] - value).abs().max(), (single[key] - value).abs().max()
            assert error <= plain + 2.0**-21 * value.abs().max(), key
    for of_rank, out, y in zip(results, exact["out"].split(rows), _images(sum(rows))[1].split(rows), strict=True):
        torch.testing.assert_close(of_rank["loss"].double(), F.cross_entropy(out, y))


def test_dense_layers_may_be_updated_after_each_sub_batch() -> None:
    results = run_on_ranks(_step_by_round, 2, "alexnet", [4, 6], True)

    model = _network("alexnet").double()
    assert isinstance(model, SmallAlexNet)
    x, y = _images(10)
    h = model.avgpool(model.features(x.double())).flatten(1)
    dense = torch.optim.SGD(model.classifier.parameters(), lr=0.1)
    of_h = torch.zeros_like(h)
    for parts in ([slice(0, 2), slice(4, 7)], [slice(2, 4), slice(7, 10)]):  # half of each rank's rows
        leaf = h.detach().requires_grad_()
        losses = [F.cross_entropy(model.classifier(leaf[rows]), y[rows]) for rows in parts]
        (sum(losses) / 2).backward()  # type: ignore[union-attr]
        assert leaf.grad is not None
        of_h += leaf.grad / 2
        dense.step()
        dense.zero_grad()
    h.backward(of_h)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(results[0][f"new {name}"].double(), value, rtol=1e-5, atol=1e-6)
    for name, value in model.features.named_parameters():
        assert value.grad is not None
        torch.testing.assert_close(results[1][f"features.{name}"].double(), value.grad, rtol=1e-5, atol=1e-6)


def test_one_rank_is_the_plain_network() -> None:
    (found,) = run_on_ranks(_one_step, 1, "alexnet", [6], "dynamic_tree")

    plain = _one_process(_network("alexnet"), [6])
    assert all(torch.equal(found[key], value) for key, value in plain.items())


def test_with_a_codec_gradients_are_near() -> None:
    found = run_on_ranks(_one_step, 2, "alexnet", [8, 8], "dynamic_tree")[0]

    exact = _one_process(_network("alexnet").double(), [8, 8])
    for key, value in exact.items():
        if key != "out":
            assert (found[key] - value).norm() <= 0.1 * value.norm(), key


def _trained(steps: int, codec: str | None, dropout: float, resume_at: int | None) -> dict[str, Any]:
    """Some steps; after each, whether what all ranks have whole is the same on all."""
    torch.manual_seed(5)
    model = hybrid(SmallAlexNet(dropout), codec, gradient_codec=None, timeout_seconds=200)
    optimizer = torch.optim.SGD(model.parameter_groups(), lr=0.1, momentum=0.9)
    same = True
    torch.manual_seed(dist.get_rank())
    for step in range(steps):
        if step == resume_at:
            state = model.full_state_dict(), model.full_optimizer_state(optimizer), torch.get_rng_state()
            model.close()
            torch.manual_seed(99)
            model = hybrid(SmallAlexNet(dropout), codec, gradient_codec=None, timeout_seconds=200)
            optimizer = torch.optim.SGD(model.parameter_groups(), lr=0.1, momentum=0.9)
            model.load_full_state_dict(state[0])
            model.load_full_optimizer_state(optimizer, state[1])
            torch.set_rng_state(state[2])
        optimizer.zero_grad()
        x, y = _own([4] * dist.get_world_size(), seed=step)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        for parameter in model.parameter_groups()[0]["params"]:
            others = [torch.empty_like(parameter) for _ in range(dist.get_world_size())]
            dist.all_gather(others, parameter.detach())
            same = same and all(torch.equal(other, others[0]) for other in others)
    state_dict = model.full_state_dict()
    model.close()
    return {"same": same, "state": state_dict, "traffic": model.traffic.total("activations")}


@pytest.mark.parametrize("ranks", [2, 3])
def test_what_every_rank_has_whole_stays_the_same_after_every_step(ranks: int) -> None:
    results = run_on_ranks(_trained, ranks, 8, "dynamic_tree", 0.5, None)

    assert all(of_rank["same"] for of_rank in results)
    for name, value in results[0]["state"].items():
        assert all(torch.equal(of_rank["state"][name], value) for of_rank in results), name
    plain = SmallAlexNet()
    plain.load_state_dict(results[0]["state"])  # its names and shapes are the plain model's


def test_resumed_training_is_the_uninterrupted_one_bit_for_bit() -> None:
    through = run_on_ranks(_trained, 2, 6, "dynamic_tree", 0.5, None)[0]["state"]
    resumed = run_on_ranks(_trained, 2, 6, "dynamic_tree", 0.5, 3)[0]["state"]

    assert all(torch.equal(resumed[name], value) for name, value in through.items())


def _masks(p: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Which of 4096 ones the dropout between two linear layers kept, in training and in eval mode."""
    model = nn.Sequential(nn.Conv2d(1, 1, 1), nn.Flatten(), nn.Linear(4, 64), nn.Dropout(p), nn.Linear(64, 64))
    with torch.no_grad():
        for place, value in ((0, 0.0), (2, 0.0), (4, 0.0)):
            model[place].weight.fill_(value)
            model[place].bias.fill_(float(place == 2))
        model[4].weight.copy_(torch.eye(64))
    parallel = hybrid(model, None, gradient_codec=None, timeout_seconds=200)
    x = torch.zeros(64, 1, 2, 2)
    found = parallel(x).detach(), parallel(x).detach(), parallel.eval()(x).detach()
    parallel.close()
    return found


def test_each_rank_drops_other_features_of_its_own() -> None:
    masks = run_on_ranks(_masks, 2, 0.25)

    for first, second, in_eval in masks:
        assert torch.equal(in_eval, torch.ones(64, 64))
        for kept in (first, second):
            torch.testing.assert_close(kept.unique(), torch.tensor([0.0, 1 / 0.75]))
            assert abs((kept > 0).float().mean() - 0.75) < 4 * (0.25 * 0.75 / kept.numel()) ** 0.5
        assert not torch.equal(first, second)
        # Both ranks' generators are in the same state, and yet their halves of the features differ.
        assert not torch.equal(first[:, :32], first[:, 32:])
    assert not torch.equal(masks[0][0], masks[1][0])


def _in_eval(rows: list[int]) -> torch.Tensor:
    model = hybrid(_network("alexnet"), None, gradient_codec=None, timeout_seconds=200).eval()
    with torch.no_grad():
        out = model(_own(rows)[0])
    model.close()
    return out


def test_ranks_may_bring_different_numbers_of_images_even_none() -> None:
    rows = [3, 0, 1]
    found = torch.cat(run_on_ranks(_in_eval, 3, rows))

    torch.testing.assert_close(found, _network("alexnet")(_images(4)[0]).detach())


def _overlapped() -> tuple[bool, bool]:
    """Round 0 is not computed before round 1 has arrived, in either direction: without overlap it never would be."""
    model = hybrid(_network("alexnet"), "dynamic_tree", gradient_codec=None, timeout_seconds=200)
    rounds = model._parts[1]
    arrived: dict[str, list[threading.Event]] = {"gather": [], "transpose": []}
    waited: list[bool] = []
    for operation, events in arrived.items():
        events += [threading.Event() for _ in range(4)]
        setattr(rounds.ahead, operation, _announcing(getattr(rounds.ahead, operation), events))
    layers = rounds.layers

    class Waiting:
        def __getattr__(self, name: str) -> Any:
            return getattr(layers, name)

        def __call__(self, *arguments: Any) -> Any:
            y = layers(*arguments)
            if not waited:
                waited.append(arrived["gather"][1].wait(20))
                y.register_hook(lambda grad: waited.append(arrived["transpose"][3].wait(20)))
            return y

    rounds.layers = Waiting()
    x, y = _own([4, 4])
    F.cross_entropy(model(x), y).backward()
    return waited[0], waited[1]


def _announcing(function: Any, events: list[threading.Event]) -> Any:
    calls = iter(events)

    def call(*arguments: Any, **named: Any) -> Any:
        result = function(*arguments, **named)
        next(calls).set()
        return result

    return call


def test_the_next_sub_batch_is_under_way_while_one_is_computed() -> None:
    assert run_on_ranks(_overlapped, 2) == [(True, True)] * 2


def _until_a_rank_dies() -> str | None:
    model = hybrid(_network("alexnet"), "dynamic_tree", gradient_codec=None, timeout_seconds=200)
    for step in range(3):
        x, y = _own([4, 4], seed=step)
        if step == 1:
            meet()
            if dist.get_rank() == 1:
                os._exit(1)
        try:
            F.cross_entropy(model(x), y).backward()
        except TransferError as error:
            return str(error)
    return None


def test_a_killed_rank_is_an_error_on_the_other() -> None:
    message, _ = run_on_ranks(_until_a_rank_dies, 2, may_end=[1])

    assert "rank 1" in message


def _refused() -> str:
    model = hybrid(_network("alexnet"), None, gradient_codec=None, timeout_seconds=200)
    state = model.full_state_dict()
    del state["classifier.1.bias"]
    with raising(InputError, "classifier.1.bias"):
        model.load_full_state_dict(state)
    text = model.explain()
    model.close()
    return text


def test_it_says_what_is_where_and_refuses_another_state_dict() -> None:
    first, _ = run_on_ranks(_refused, 2)

    assert "classifier.1: (17, 24), 9 of its features on rank 0" in first
    assert "data parallel: 334 parameters" in first


def test_a_network_without_a_border_is_refused_before_anything_is_sent() -> None:
    with pytest.raises(InputError):
        hybrid(nn.Sequential(nn.Conv2d(1, 1, 1)))


def _compressed(steps: int, gradient_codec: str) -> dict[str, Any]:
    model = hybrid(_network("alexnet"), gradient_codec=gradient_codec, timeout_seconds=200)
    optimizer = torch.optim.SGD(model.parameter_groups(), lr=0.1)
    for step in range(steps):
        x, y = _own([4, 4], seed=step)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    found = {name: value for name, value in model.state_dict().items() if name.startswith("features")}
    traffic = model.traffic.to_json()
    model.close()
    return {"whole": found, "traffic": traffic}


@pytest.mark.parametrize("gradient_codec", ["dynamic_tree", "one_bit"])
def test_gradients_of_the_convolutions_travel_encoded_too(gradient_codec: str) -> None:
    first, second = run_on_ranks(_compressed, 2, 4, gradient_codec)

    assert all(torch.equal(first["whole"][name], value) for name, value in second["whole"].items())
    assert first["traffic"]["steps"] == 4
    assert set(first["traffic"]["last_step"]) == {"gradients", "activations"}
