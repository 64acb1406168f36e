"""Published faults: where a part of a model is frozen, checkpointing takes the gradients of other parts away."""

from __future__ import annotations

import torch
from torch import nn

import shoal
from tests.published.training import Network, trains_in_less


def tower(frozen: int, layers: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(layers)))
    for block in model[:frozen]:
        block.requires_grad_(False)
    return model


def network(module: nn.Module) -> Network:
    return Network(module, (torch.randn(64, 16, generator=torch.Generator().manual_seed(1)),))


def test_a_frozen_beginning() -> None:
    """huggingface/transformers#21381: with frozen first layers, nothing that is checkpointed gets a gradient, and the
    output wants none."""
    trains_in_less(lambda: network(tower(frozen=2)))


def test_layers_that_are_thawed_later() -> None:
    """modelscope/ms-swift#10142: whether the first layer is frozen is asked once, for all layers and for good, so that
    later layers, and those thawed after the first step, get no gradient."""
    plain, ours = tower(frozen=2), tower(frozen=2)
    shoal.compile(ours, "64KiB", allow="exact")
    x = torch.randn(64, 16)
    for step in range(3):
        for model in (plain, ours):
            model[0].requires_grad_(step > 0)
            model.zero_grad()
            model(x).sin().mean().backward()
        for name, parameter in plain.named_parameters():
            gradient = ours.get_parameter(name).grad
            assert (gradient is None) == (parameter.grad is None), (step, name)
            assert gradient is None or torch.allclose(gradient, parameter.grad, rtol=1e-4, atol=1e-7), (step, name)


class Embedded(nn.Module):
    """Nothing that goes into the first block wants a gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(32, 16)
        self.blocks, self.last = tower(frozen=0, layers=2), nn.Linear(16, 4)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            x = self.embedding(tokens)
        return self.last(self.blocks(x))


def test_a_first_block_whose_input_wants_no_gradient() -> None:
    """pytorch/pytorch#33962: where no input of a checkpointed segment wants a gradient, its backward is never called
    and its parameters get none."""

    def build() -> Network:
        return Network(Embedded(), (torch.arange(64).view(2, 32) % 32,))

    trains_in_less(build)


class Tokens(nn.Module):
    """The embedding itself is a part that is computed again."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.last = nn.Embedding(32, 16), nn.Linear(16, 32)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.last(self.embedding(tokens).sin().exp().tanh())


def test_an_embedding_that_is_computed_again() -> None:
    """FlagAI-Open/FlagAI#383: of a checkpointed embedding, whose input is integers, no gradient was calculated."""
    trains_in_less(lambda: Network(Tokens(), (torch.arange(128).view(2, 64) % 32,)))
