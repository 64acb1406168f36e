"""Published faults: parts of a step that are computed by themselves are added up twice, or not as in the whole."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import shoal
from tests.published.training import Network, trains_in_less


class Tied(nn.Module):
    """Two chunks of logits from one head, which is the embedding as well."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.layer = nn.Embedding(48, 16), nn.Linear(16, 16)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.layer(self.embedding(tokens)).tanh()
        return torch.cat([F.log_softmax(part @ self.embedding.weight.t(), -1) for part in hidden.chunk(2)])


def test_a_head_that_chunks_share() -> None:
    """unslothai/unsloth-zoo#892: the log-softmax that is recomputed in backward leaves the head's gradient in `.grad`
    and returns it too: twice the gradient, more where chunks share the head."""
    trains_in_less(lambda: Network(Tied(), (torch.arange(64) % 48,)))


def test_gradients_are_added_to_those_of_an_earlier_batch() -> None:
    """unslothai/unsloth-zoo#892: what an earlier micro-batch had left in `.grad` is added once more."""
    plain, ours = Tied(), Tied()
    shoal.compile(ours, "128KiB", allow="exact")
    for _ in range(2):
        for model in (plain, ours):
            model.zero_grad()
            for batch in range(3):
                model((torch.arange(64) * (batch + 1)) % 48).square().mean().backward()
    for name, parameter in plain.named_parameters():
        assert torch.allclose(ours.get_parameter(name).grad, parameter.grad, rtol=1e-4, atol=1e-7), name


class WithLoss(nn.Module):
    """A mean over the targets that are not ignored, of which one half of the batch has few."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 6, 3, padding=1))

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.body(x), target, ignore_index=0)


def test_a_mean_over_targets_that_are_unevenly_ignored() -> None:
    """NVIDIA-NeMo/Automodel#3803: a chunked cross entropy returns the sum of the chunks' means."""

    def build() -> Network:
        chance = torch.Generator().manual_seed(1)
        target = torch.randint(0, 6, (4, 12, 12), generator=chance)
        target[2:, 1:] = 0
        return Network(WithLoss(), (torch.randn(4, 3, 12, 12, generator=chance), target))

    trains_in_less(build)
