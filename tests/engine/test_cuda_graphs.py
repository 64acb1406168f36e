"""Steps replayed as CUDA graphs: what they compute, on emulated graphs, and what is refused.

Launches and bytes on a device are in tests/cuda_standin/test_cuda_graphs.py.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import shoal
from shoal.engine.compile_options import CompileOptions
from shoal.engine.options import Options
from shoal.errors import CaptureError, InputError
from tests.engine.emulated_graphs import EmulatedGraph, emulate
from tests.engine.keywords import keywords
from tests.engine.training_laws import classifier, images, keep_nothing
from tests.raising import raising


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[EmulatedGraph]:
    return emulate(monkeypatch)


def network() -> nn.Module:
    torch.manual_seed(0)
    return classifier(3, 8, 8)


def trained(model: nn.Module, batches: list[torch.Tensor]) -> list[float]:
    """The losses of SGD with momentum, whose state is read from gradients."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for x in batches:
        loss = F.cross_entropy(model(x), torch.arange(len(x)) % 5)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("how", [{}, {"planner": keep_nothing, "budget": "1GiB"}], ids=["all kept", "recomputed"])
def test_replayed_steps_have_the_bits_of_plain_pytorch(graphs: list[EmulatedGraph], how: dict[str, Any]) -> None:
    plain = network()
    model = copy.deepcopy(plain)
    shoal.compile(model, **keywords({"kernels": "eager", "cuda_graphs": True, **how}))
    batches = images(7, 4, 3, 16, 16)
    assert trained(model, batches) == trained(plain, batches)
    assert [graph.replays for graph in graphs] == [5, 5]  # two steps are metered
    for ours, theirs in zip(model.state_dict().values(), plain.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs)  # running statistics too
    assert bool(model.shoal.plan.recomputed) == bool(how)


def test_a_replay_draws_random_numbers_anew(graphs: list[EmulatedGraph]) -> None:
    plain = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 5))
    model = copy.deepcopy(plain)
    shoal.compile(model, options=shoal.Options(kernels="eager", cuda_graphs=True))
    batches = images(6, 4, 8)
    torch.manual_seed(0)
    ours = trained(model, batches)
    torch.manual_seed(0)
    assert ours == trained(plain, batches)
    assert len(graphs) == 2


def test_a_plan_that_draws_them_a_second_time_is_refused(graphs: list[EmulatedGraph]) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 5))
    shoal.compile(model, budget="1GiB", options=shoal.Options(planner=keep_nothing, kernels="eager", cuda_graphs=True))
    with pytest.raises(CaptureError):
        trained(model, images(1, 4, 8))


def test_a_step_of_another_shape_is_recorded_by_itself_and_the_other_again(graphs: list[EmulatedGraph]) -> None:
    plain = network()
    model = copy.deepcopy(plain)
    shoal.compile(model, options=shoal.Options(kernels="eager", cuda_graphs=True))
    long, short = images(8, 4, 3, 16, 16), images(4, 2, 3, 16, 16)
    batches = [*long[:4], *short, *long[4:]]
    assert trained(model, batches) == trained(plain, batches)
    assert [graph.replays for graph in graphs] == [2, 2, 2, 2, 4, 4]


def test_parameters_that_lie_elsewhere_are_recorded_anew(graphs: list[EmulatedGraph]) -> None:
    plain = network()
    model = copy.deepcopy(plain)
    shoal.compile(model, options=shoal.Options(kernels="eager", cuda_graphs=True))
    batches = images(8, 4, 3, 16, 16)
    losses = trained(model, batches[:4])
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    assert losses + trained(model, batches[4:]) == trained(plain, batches[:4]) + trained(plain, batches[4:])
    assert [graph.replays for graph in graphs] == [2, 2, 4, 4]


def test_a_call_without_a_backward_pass_leaves_nothing_behind(graphs: list[EmulatedGraph]) -> None:
    plain = network()
    model = copy.deepcopy(plain)
    shoal.compile(model, options=shoal.Options(kernels="eager", cuda_graphs=True))
    batches = images(6, 4, 3, 16, 16)
    for one in (model, plain):
        trained(one, batches[:2])
        one(batches[2])  # recorded only
    assert trained(model, batches[3:]) == trained(plain, batches[3:])
    assert [graph.replays for graph in graphs] == [1, 3, 3]


def loss_of(model: nn.Module) -> torch.Tensor:
    return model(torch.randn(4, 3, 16, 16)).sum()


def accumulate(model: nn.Module) -> None:
    for _ in range(2):
        loss_of(model).backward()


def keep_zeros(model: nn.Module) -> None:
    for _ in range(2):
        loss_of(model).backward()
        model.zero_grad(set_to_none=False)


def call_twice(model: nn.Module) -> None:
    first = loss_of(model)
    (first + loss_of(model)).backward()


def go_back_twice(model: nn.Module) -> None:
    for _ in range(4):
        model.zero_grad()
        loss = loss_of(model)
        loss.backward(retain_graph=True)
    loss.backward()


def step_in_hooks(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    loss_of(model).backward()


@pytest.mark.parametrize(
    ("use", "said"),
    [
        (accumulate, "gradients of the step before are still there"),
        (keep_zeros, r"set_to_none=True"),
        (call_twice, "called while an earlier call waits for its backward pass"),
        (go_back_twice, r"retain_graph=True"),
        (step_in_hooks, "used in hooks while the backward pass runs"),
    ],
)
def test_loops_that_a_replay_would_train_wrongly_are_refused(graphs: list[EmulatedGraph], use: Any, said: str) -> None:
    model = shoal.compile(network(), options=shoal.Options(kernels="eager", cuda_graphs=True))
    with raising(CaptureError, "cuda_graphs=True", said):
        use(model)


class Breaking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x)
        torch._dynamo.graph_break()
        return self.layer(x)


def test_a_model_of_several_graphs_is_refused(graphs: list[EmulatedGraph]) -> None:
    model = shoal.compile(Breaking(), options=shoal.Options(kernels="eager", cuda_graphs=True))
    with raising(CaptureError, "cuda_graphs=True"):
        model(torch.randn(2, 8)).sum().backward()


def test_under_a_budget_of_several_models_it_is_refused() -> None:
    with raising(InputError, "cuda_graphs"):
        shoal.compile(network(), shoal.Budget("1GiB"), options=shoal.Options(cuda_graphs=True))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"cuda_graphs": "perhaps"}, "cuda_graphs='perhaps'"),
        ({"cuda_graphs": True, "budget": "1GiB", "offload_to": "host"}, "offload_to='host'"),
        ({"cuda_graphs": True, "budget": "1GiB", "allow": "recompute,offload"}, "allow='offload'"),
        ({"cuda_graphs": True, "budget": "1GiB", "budget_of": "reserved"}, ""),
    ],
)
def test_what_it_cannot_be_combined_with(given: dict[str, Any], said: str) -> None:
    with raising(InputError, said):
        CompileOptions.of(**keywords(given))


def test_it_is_off_by_default_and_may_be_text() -> None:
    assert not CompileOptions.of().cuda_graphs
    assert CompileOptions.of(options=Options(cuda_graphs="true")).cuda_graphs
    assert "offload" not in CompileOptions.of(budget="1GiB", options=Options(cuda_graphs=True)).means


def test_on_the_cpu_it_is_refused_by_name() -> None:
    with raising(InputError, "cuda_graphs=True"):
        shoal.compile(nn.Linear(4, 4), options=shoal.Options(cuda_graphs=True))
    model = torch.compile(nn.Linear(4, 4), backend="shoal", options={"cuda_graphs": True})
    with pytest.raises(InputError):
        model(torch.randn(2, 4)).sum().backward()
