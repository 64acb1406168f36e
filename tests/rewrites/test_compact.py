"""What waits in the backward pass is shrunk there: fewer bytes for some time, no bit and no saved byte different."""

from __future__ import annotations

from math import prod

import pytest
import torch
from torch import nn

from shoal.capture.step_writer import shrunk
from shoal.core.simulate import simulate
from tests.joint_graphs import captured_step


def conv(n_in: int, n_out: int) -> nn.Module:
    return nn.Conv2d(n_in, n_out, 3, padding=1, bias=False)


@pytest.mark.parametrize("activation", [nn.ReLU, lambda: nn.LeakyReLU(0.1)], ids=["ReLU", "leaky ReLU"])
def test_a_result_that_the_next_layer_saves_becomes_a_mask_when_that_has_its_gradient(activation: type) -> None:
    images = torch.randn(1, 3, 256, 256)
    captured = captured_step(nn.Sequential(conv(3, 8), activation(), conv(8, 8)), images)
    after = shrunk(captured)
    assert after is not None
    graph, before = after.graph, captured.graph
    (mask,) = [s for s in graph.storages if s.dtype == "bool"]
    assert mask.nbytes == 8 * 256 * 256
    (saved,) = [s for s in graph.storages if s.id in graph.saved and "relu" in s.name]
    weight_gradient, making = (graph.ops[reader] for reader in graph.readers[saved.id][-2:])
    assert (weight_gradient.phase, making.phase, making.writes) == ("backward", "backward", (mask.id,))
    assert [graph.storages[s].nbytes for s in graph.saved] == [before.storages[s].nbytes for s in before.saved]
    less, more = (
        [moment.total_bytes for moment in simulate(step, {}).moments if moment.target.endswith("input_gradient")]
        for step in (graph, before)
    )
    assert [one - other for one, other in zip(more, less, strict=True)] == [3 * mask.nbytes]


def test_a_small_result_and_one_that_is_handed_out_stay_whole() -> None:
    class HandedOut(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = conv(3, 8), conv(8, 8)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            x = self.first(x).relu()
            return x, self.second(x)

    assert shrunk(captured_step(nn.Sequential(conv(3, 8), nn.ReLU(), conv(8, 8)), torch.randn(1, 3, 64, 64))) is None
    assert shrunk(captured_step(HandedOut(), torch.randn(1, 3, 256, 256))) is None


class Skipping(nn.Module):
    """A U-Net of one level: the skip is `share` of what the decoder sees, and waits for `depth` convolutions."""

    def __init__(self, depth: int, skip_channels: int = 4) -> None:
        super().__init__()
        self.stem = conv(3, skip_channels)
        self.path = nn.Sequential(
            nn.Conv2d(skip_channels, 4, 1), *[layer for _ in range(depth) for layer in (conv(4, 4), nn.Tanh())]
        )
        self.head = conv(skip_channels + 4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x).sin()
        return self.head(torch.cat([x, self.path(x)], 1))


@pytest.mark.parametrize(
    ("depth", "skip_channels", "copied"), [(12, 4, True), (2, 4, False), (12, 12, True), (12, 13, False)]
)
def test_the_part_of_a_gradient_that_waits_long_waits_alone(depth: int, skip_channels: int, copied: bool) -> None:
    captured = captured_step(Skipping(depth, skip_channels))
    after = shrunk(captured)
    if not copied:
        assert after is None
        return
    assert after is not None
    graph = after.graph
    part_bytes = 4 * prod((2, skip_channels, 8, 8))
    whole_bytes = 4 * prod((2, skip_channels + 4, 8, 8))
    # The gradient of the whole concatenation, by size, and who reads it last.
    (whole,) = [s for s in graph.storages if s.kind == "activation_gradient" and s.nbytes == whole_bytes]
    (clone,) = [op for op in graph.ops if op.target == "aten.clone.default" and op.phase == "backward"]
    assert graph.storages[clone.writes[0]].nbytes == part_bytes
    waits = graph.readers[clone.writes[0]][-1] - clone.id
    assert waits > graph.readers[whole.id][-1] - graph.producer[whole.id]
