"""A step as two CUDA graphs: launches, bytes, waits, and what the graphs give back; contents mean nothing here.

What replayed steps compute is in tests/engine/test_cuda_graphs.py, on emulated graphs.
"""

from __future__ import annotations

import gc
import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import shoal
from shoal.engine import compiled_regions
from shoal.errors import CaptureError
from tests.cuda_standin.counts import device_counts
from tests.engine.training_laws import blocks

CUDA = torch.device("cuda", 0)


@dataclass(frozen=True)
class Pass:
    """What one pass asked of the device."""

    launches: int
    copies: int
    graph_launches: int
    graph_kernels: int
    synchronizations: int
    mallocs: int


def passed(run: Any) -> tuple[Pass, Any]:
    before = device_counts()
    result = run()
    after = device_counts()
    names = ("launches", "copies", "graph_launches", "graph_kernels", "synchronizations", "mallocs")
    return Pass(*(getattr(after, name) - getattr(before, name) for name in names)), result


def stepped(model: nn.Module, x: torch.Tensor, amp: bool = False) -> tuple[Pass, Pass, int]:
    """The two passes of a step, whose results stay valid until the next, and the peak of what was allocated."""
    model.zero_grad()
    torch.cuda.reset_peak_memory_stats()
    with torch.autocast("cuda", torch.bfloat16, enabled=amp):
        forward, result = passed(lambda: model(x))
    gradient = torch.ones_like(result)
    backward, _ = passed(lambda: result.backward(gradient))
    return forward, backward, torch.cuda.max_memory_allocated()


def network() -> nn.Module:
    """Without matrix products, so that cuBLAS keeps nothing; with its input's gradient left out."""
    torch.manual_seed(0)
    return nn.Sequential(*blocks(3, 32, 32, 32), nn.Conv2d(32, 8, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten()).to(CUDA)


def batch(n: int = 8) -> torch.Tensor:
    return torch.zeros(n, 3, 64, 64, device=CUDA)


@pytest.mark.parametrize("kernels", ["eager", "compiled"])
def test_a_replayed_step_is_two_launches_of_the_same_kernels(kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_regions, "_SLOWER", math.inf)
    model = shoal.compile(
        network(), budget="1GiB", allow="recompute", options=shoal.Options(kernels=kernels, cuda_graphs=True)
    )
    x = batch()
    _, last, recorded, *replayed = [stepped(model, x, amp=True) for _ in range(5)]
    for forward, backward, _ in (recorded, *replayed):
        assert (forward.graph_launches, backward.graph_launches) == (1, 1)
        assert (forward.launches, backward.launches) == (1, 1)
        # Before it is recorded a step copies the buffers, to be begun again: a launch for each of their dtypes.
        assert forward.graph_kernels == last[0].launches - 2 > 15
        assert backward.graph_kernels == last[1].launches > 15
    for forward, backward, _ in replayed:
        assert (forward.copies, backward.copies) == (1, 1)  # the batch, the gradient of the result
        assert forward.synchronizations == backward.synchronizations == 0
        assert forward.mallocs == backward.mallocs == 0


@pytest.mark.parametrize("budget", ["150MiB", "1GiB"])
def test_its_bytes_are_as_predicted_and_the_pool_is_little_more(budget: str) -> None:
    gc.collect()
    torch.cuda.empty_cache()
    others_bytes = torch.cuda.memory_allocated()
    model = shoal.compile(
        network(), budget=budget, allow="recompute", options=shoal.Options(kernels="eager", cuda_graphs=True)
    )
    x = batch(64)
    static_bytes = torch.cuda.memory_allocated() - others_bytes
    peaks = [stepped(model, x)[2] - others_bytes for _ in range(4)]
    status = model.shoal
    assert status.measured_peak_bytes == pytest.approx(status.predicted_peak_bytes, rel=0.005)
    assert status.repairs == 0
    recorded_bytes, replayed_bytes = peaks[2:]
    assert recorded_bytes == pytest.approx(status.predicted_peak_bytes, rel=0.005)
    assert replayed_bytes < static_bytes + 2 * x.nbytes + 2**20  # the pool is not allocated any more, but stays
    held_bytes = status.graph_bytes + static_bytes + x.nbytes
    page_bytes = 20 << 20
    assert 0.98 * status.predicted_peak_bytes < held_bytes < 1.02 * status.predicted_peak_bytes + page_bytes
    assert bool(status.plan.recomputed) == (budget == "150MiB")


def test_a_loss_that_takes_much_memory_outside_of_the_pool_counts_beside_it() -> None:
    gc.collect()
    torch.cuda.empty_cache()
    others_bytes = torch.cuda.memory_allocated()
    torch.manual_seed(0)
    dense = nn.Sequential(*blocks(3, 32, 32, 32), nn.Conv2d(32, 64, 1)).to(CUDA)
    model = shoal.compile(
        dense, budget="2GiB", allow="recompute", options=shoal.Options(kernels="eager", cuda_graphs=True)
    )
    x = batch(64)
    target = torch.zeros(64, 64, 64, dtype=torch.int64, device=CUDA)
    for _ in range(5):
        model.zero_grad()
        torch.cuda.reset_peak_memory_stats()
        F.cross_entropy(model(x), target).backward()
        outside_bytes = torch.cuda.max_memory_allocated() - others_bytes - target.nbytes
    status = model.shoal
    predicted_bytes, page_bytes = status.predicted_peak_bytes, 20 << 20
    assert 0.98 * predicted_bytes < status.graph_bytes + outside_bytes < 1.02 * predicted_bytes + page_bytes
    assert status.measured_peak_bytes < 0.98 * predicted_bytes  # of steps without a pool


def test_the_pool_is_given_back_with_the_model_and_by_steps_of_other_sizes() -> None:
    gc.collect()
    torch.cuda.empty_cache()
    before_bytes = device_counts().used_bytes
    model = shoal.compile(network(), budget="1GiB", options=shoal.Options(kernels="eager", cuda_graphs=True))
    for _ in range(4):
        stepped(model, batch())
    large_bytes = model.shoal.graph_bytes
    stepped(model, batch(2))
    assert model.shoal.graph_bytes is None
    for _ in range(3):
        stepped(model, batch(2))
    assert 0 < model.shoal.graph_bytes < large_bytes / 2
    del model
    gc.collect()
    torch.cuda.empty_cache()
    assert device_counts().used_bytes - before_bytes < 2**22


def test_a_result_is_valid_until_the_next_call_and_says_so_afterwards() -> None:
    model = shoal.compile(network(), options=shoal.Options(kernels="eager", cuda_graphs=True))
    x = batch()
    for _ in range(4):
        stepped(model, x)
    model.zero_grad()
    result = model(x)
    result.sum().backward()
    assert result.cpu().shape == (8, 8)
    model.zero_grad()
    model(x).sum().backward()
    with pytest.raises(RuntimeError, match="a later step has overwritten"):
        result.cpu()


def test_a_replay_moves_the_generator_as_the_step_does() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Dropout(0.5), nn.AdaptiveAvgPool2d(1), nn.Flatten()).to(CUDA)
    shoal.compile(model, options=shoal.Options(kernels="eager", cuda_graphs=True))
    generator, offsets = torch.cuda.default_generators[0], []
    for _ in range(6):
        stepped(model, batch())
        offsets.append(generator.get_offset())
    assert len({after - before for before, after in pairwise(offsets)}) == 1


def test_a_step_that_waits_for_the_device_is_refused_in_one_line() -> None:
    @torch.library.custom_op("standin::waits", mutates_args=())
    def waits(x: torch.Tensor) -> torch.Tensor:
        return x * x.flatten()[0].item()

    waits.register_fake(torch.empty_like)
    waits.register_autograd(lambda context, gradient: gradient)

    class Waiting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Conv2d(3, 8, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return waits(self.layer(x)).mean((2, 3))

    model = shoal.compile(Waiting().to(CUDA), options=shoal.Options(kernels="eager", cuda_graphs=True))
    for _ in range(2):
        stepped(model, batch())
    with pytest.raises(CaptureError):
        stepped(model, batch())


def test_as_a_backend_of_torch_compile() -> None:
    model = network()
    compiled = torch.compile(
        model, backend="shoal", options={"budget": "1GiB", "kernels": "eager", "cuda_graphs": True}
    )
    x = batch()
    steps = [stepped(compiled, x) for _ in range(4)]
    assert [(forward.launches, backward.launches) for forward, backward, _ in steps[2:]] == [(1, 1), (1, 1)]
    with pytest.raises(CaptureError):
        compiled(x)
