"""An op that reads a buffer that the forward pass changes can run again if the buffer is small."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.engine.training_laws import assert_same_training, images
from tests.joint_graphs import captured_step


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
