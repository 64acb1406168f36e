"""A step changes running statistics and counters where they lie, once, as plain PyTorch does; an op that reads a small
buffer that is changed can run again."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import fx, nn

import shoal
from shoal.capture.captured import Captured
from shoal.graph.joint import Joint
from shoal.kernels.buffers import add_to
from shoal.rewrites.buffers import count_at_once, launched_counters
from tests.engine.training_laws import assert_same_training, images
from tests.joint_graphs import captured_step


class Twice(nn.Module):
    """One layer on two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.conv(self.norm(x)))


class Watching(nn.Module):
    """The result depends on the running mean after it has moved."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.conv(x)) * self.norm.running_mean.sum()


class Failing(nn.Module):
    """The second batch norm is after a look-up that fails where the model says so."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.first, self.last = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.BatchNorm2d(3)
        self.shifts = nn.Embedding(2, 3)
        self.register_buffer("place", torch.tensor([1]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(self.conv(x)) + self.shifts(self.place).view(1, 3, 1, 1))


def blocks() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8, momentum=0.3)),
        *(nn.ReLU(), nn.Conv2d(8, 2, 1)),
    )


def targets(captured: Captured) -> set[str]:
    return {op.target for op in captured.graph.ops if op.phase == "forward"}


def test_the_forward_pass_hands_over_the_buffers_themselves() -> None:
    captured = captured_step(blocks())
    own = {captured.graph.storages[captured.storage_of[node]].kind for node in captured.forward_outputs}
    assert own == {"buffer", "output"}
    assert sum(storage.kind == "output" for storage in captured.graph.storages) == 1
    assert targets(captured) >= {"aten._native_batch_norm_legit.default", "shoal.buffers.add_to"}
    assert not targets(captured) & {"aten._native_batch_norm_legit_functional.default", "aten.add.Tensor"}


@pytest.mark.parametrize("model", [Twice, Watching])
def test_statistics_that_something_else_reads_leave_as_new_tensors(model: type[nn.Module]) -> None:
    captured = captured_step(model())
    assert "aten._native_batch_norm_legit_functional.default" in targets(captured)
    assert "aten._native_batch_norm_legit.default" not in targets(captured)


@pytest.mark.parametrize("model", [blocks, Twice, Watching])
@pytest.mark.parametrize("planner", ["keep_all", "chain"])
def test_buffers_are_moved_as_in_plain_pytorch(model: Callable[[], nn.Module], planner: str) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(3, 3, 1), model())
    planned = copy.deepcopy(plain)
    step = shoal.compile(planned, budget="1GiB", options=shoal.Options(planner=planner))
    for _ in range(3):
        plain.zero_grad(), planned.zero_grad()
        x = torch.randn(4, 3, 9, 9)
        results = [one(x) for one in (plain, step)]
        for result in results:
            result.square().sum().backward()
        assert torch.equal(*results)
        for one, other in zip(plain.parameters(), planned.parameters(), strict=True):
            assert one.grad is not None and other.grad is not None and torch.equal(one.grad, other.grad)
    assert all(map(torch.equal, plain.buffers(), planned.buffers()))


def test_an_exception_leaves_buffers_as_it_does_in_plain_pytorch() -> None:
    torch.manual_seed(0)
    plain = Failing()
    planned = copy.deepcopy(plain)
    step = shoal.compile(planned, budget="1GiB", options=shoal.Options(planner="keep_all"))
    x = torch.randn(4, 3, 9, 9)
    for model in (plain, step):
        for _ in range(3):
            model(x).sum().backward()
            model.zero_grad()
    for model, buffers in ((plain, plain), (step, planned)):
        buffers.place.fill_(2)
        with pytest.raises(IndexError):
            model(x)
    assert plain.first.num_batches_tracked.item() == 4 and plain.last.num_batches_tracked.item() == 3
    assert all(map(torch.equal, plain.buffers(), planned.buffers()))


def test_on_cuda_counters_that_count_alike_are_one_op() -> None:
    graph = fx.Graph()
    buffers = [graph.placeholder(f"counter_{place}") for place in range(4)]
    for buffer, device in zip(buffers, ("cuda", "cpu", "cuda", "cuda"), strict=True):
        buffer.meta["val"] = SimpleNamespace(device=torch.device(device), dtype=torch.int64)
        graph.call_function(add_to, (buffer, 1))
    graph.output(())
    joint = Joint(fx.GraphModule({}, graph), set())
    for site in launched_counters(joint):
        count_at_once(joint, site)
    counted = [node.args[0] for node in graph.find_nodes(op="call_function", target=add_to)]
    assert counted == [[buffers[0], buffers[2], buffers[3]], buffers[1]]


def test_several_counters_are_moved_as_one_is() -> None:
    several, alone = [torch.tensor(3), torch.tensor(5)], torch.tensor(7)
    add_to(several, 2)
    add_to(alone, 2)
    assert [int(counter) for counter in (*several, alone)] == [5, 7, 9]


class Shifted(nn.Module):
    """Subtracts a running mean, which it then moves: of each channel, or of each element."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.register_buffer("shift", torch.zeros(shape))
        self.shift: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = (x - self.shift.unsqueeze(-1).squeeze(-1)).tanh()  # reads a view of it
        with torch.no_grad():
            self.shift.mul_(0.9).add_(0.1 * x.mean())
        return y


def network(*shape: int) -> nn.Module:
    layer = Shifted(*shape)
    return nn.Sequential(nn.Conv2d(3, 4, 1), layer, nn.Conv2d(4, 4, 1), layer, nn.Conv2d(4, 2, 1))


@pytest.mark.parametrize(("shape", "runs_again"), [((4, 1, 1), True), ((2, 4, 8, 8), False)])
def test_what_reads_a_small_buffer_can_run_again(shape: tuple[int, ...], runs_again: bool) -> None:
    captured = captured_step(network(*shape), images(1, 2, 3, 8, 8)[0])
    differences = [op for op in captured.graph.ops if "sub" in op.target and op.phase == "forward"]
    assert differences[0].recomputable is runs_again


def test_a_second_run_reads_the_values_of_the_first() -> None:
    """A layer that is called twice moves its buffer twice."""
    assert_same_training(network(4, 1, 1), images(3, 2, 3, 8, 8))
