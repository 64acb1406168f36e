"""Published faults: what a forward pass writes is written again, or read too late, where the pass is computed again."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import shoal
from tests.published.training import Network, trains_in_less


def norm_block(channels: int = 8) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.SiLU())


def network(module: nn.Module, *shape: int) -> Network:
    return Network(module, (torch.randn(shape or (4, 8, 12, 12), generator=torch.Generator().manual_seed(1)),))


@pytest.mark.slow
def test_running_statistics_move_once_a_step() -> None:
    """pytorch/pytorch#96136: under `torch.utils.checkpoint`, batch norms update their statistics twice."""

    def build() -> Network:
        torch.manual_seed(0)
        return network(nn.Sequential(*(norm_block() for _ in range(2))))

    trains_in_less(build)


def test_batches_are_counted_once_a_step() -> None:
    """Tencent/YOLO-Master#262: a checkpointed Conv moves `num_batches_tracked` twice; with `momentum=None`, the mean
    over all batches is made of that count."""

    def build() -> Network:
        torch.manual_seed(0)
        blocks = nn.Sequential(*(norm_block() for _ in range(3)))
        for block in blocks:
            block[1].momentum = None
        return network(blocks)

    trains_in_less(build)


def test_statistics_move_where_backward_is_never_called() -> None:
    """facebookresearch/fairscale#1035: statistics are gathered while recomputing, and not at all without a backward."""
    torch.manual_seed(0)
    x = torch.randn(4, 8, 12, 12)
    plain, ours = (nn.Sequential(norm_block(), norm_block()) for _ in range(2))
    ours.load_state_dict(plain.state_dict())
    shoal.compile(ours, "1MiB", allow="exact")
    for model in (plain, ours):
        model(x).mean().backward()  # planned
        model(x)
    for name, buffer in plain.named_buffers():
        assert torch.allclose(ours.get_buffer(name), buffer, rtol=1e-6), name


def test_an_inverted_norm_moves_its_statistics_once() -> None:
    """silvandeleemput/memcnn#12: inputs that are computed from outputs run batch norms in training mode again."""
    torch.manual_seed(0)
    x = torch.randn(4, 8, 12, 12)
    layers = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.LeakyReLU(0.1))
    inverted = shoal.invert_norm(nn.Sequential(*layers))
    for step in range(3):
        for model in (layers, inverted):
            model(x + step).square().mean().backward()
    (plain,) = (one for one in layers.modules() if isinstance(one, nn.BatchNorm2d))
    moved = {name.split(".")[-1]: buffer for name, buffer in inverted.named_buffers()}
    assert moved["num_batches_tracked"] == plain.num_batches_tracked
    assert torch.allclose(moved["running_mean"], plain.running_mean, atol=1e-6)


class Gate(nn.Module):
    """A router of tokens to experts that counts how many each got."""

    def __init__(self) -> None:
        super().__init__()
        self.route, self.experts = nn.Linear(8, 4), nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.register_buffer("load", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = torch.softmax(self.route(x), -1)
        chosen = weights.argmax(-1)
        self.load += nn.functional.one_hot(chosen, 4).sum(0)
        results = torch.stack([expert(x).tanh() for expert in self.experts], 1)
        return (results * (weights * nn.functional.one_hot(chosen, 4))[..., None]).sum(1)


def test_tokens_of_experts_are_counted_once() -> None:
    """NVIDIA-NeMo/Automodel#3247: the gate's load is counted again where activations are recomputed."""

    def build() -> Network:
        torch.manual_seed(0)
        return network(Gate(), 128, 8)

    trains_in_less(build)


class Memory(nn.Module):
    """Reads a buffer, then writes to it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.register_buffer("kept", torch.linspace(-1, 1, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        read = (self.layer(x) * torch.sigmoid(self.kept)).tanh()
        read = (read + self.kept.view(4, 4).t().flatten().exp()).sin()
        self.kept.mul_(0.5).add_(read.detach().mean(0))
        return read.cos() * read


def test_buffers_are_read_as_they_were() -> None:
    """pytorch/pytorch#197039: a read of a buffer that forward writes later is recomputed, and reads what was written:
    silently wrong gradients."""

    def build() -> Network:
        torch.manual_seed(0)
        return network(Memory(), 128, 16)

    trains_in_less(build)
