"""Published faults: where activations are computed again, random ops draw other numbers than the loss was made with."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import shoal
from tests.published.training import Network, trains_in_less


def network(module: nn.Module, *shape: int) -> Network:
    return Network(module, (torch.randn(shape, generator=torch.Generator().manual_seed(1)),))


class Noisy(nn.Module):
    """Dropout, noise and a random mask between pointwise ops, which are cheap to compute again."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.dropout(x.sin(), 0.4, self.training).exp()
        x = (x + 0.1 * torch.randn_like(x)).tanh()
        return (x * (torch.rand_like(x) < 0.7)).cos()


def test_random_ops_under_a_budget_below_all() -> None:
    """pytorch/pytorch#190758: at any `activation_memory_budget` below 1, dropout, `randn_like` and others are
    recomputed in backward, where they draw other numbers: silently wrong gradients."""

    def build() -> Network:
        torch.manual_seed(0)
        return network(nn.Sequential(nn.Linear(32, 32), Noisy(), nn.Linear(32, 8)), 64, 32)

    trains_in_less(build)


def test_dropout_at_the_minimum() -> None:
    """pytorch/pytorch#190717: where the budget is least, dropout's mask is recomputed without the generator's state."""

    def build() -> Network:
        torch.manual_seed(0)
        return network(nn.Sequential(nn.Linear(16, 64), nn.Dropout(0.5), nn.Sigmoid(), nn.Linear(64, 4)), 64, 16)

    trains_in_less(build, share=0.2)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), 0.1, self.training)


def test_residual_dropout() -> None:
    """allenai/OLMo-core#828: blocks were checkpointed with `preserve_rng_state=False`, so that gradients belonged to
    another mask than the loss; it moved the loss from 2.2 to 2.5."""

    def build() -> Network:
        torch.manual_seed(0)
        return network(nn.Sequential(Residual(), Residual()), 4, 16, 16)

    trains_in_less(build)


class Diffusion(nn.Module):
    """A residual block with group norms and dropout, of an image and an embedding of the step."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.GroupNorm(4, 8), nn.SiLU(), nn.Conv2d(8, 8, 3, padding=1))
        self.embed = nn.Linear(4, 8)
        self.last = nn.Sequential(nn.GroupNorm(4, 8), nn.SiLU(), nn.Dropout(0.3), nn.Conv2d(8, 8, 3, padding=1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.last(self.first(x) + self.embed(x.mean((2, 3))[:, :4])[..., None, None])


def test_dropout_in_a_residual_block() -> None:
    """openai/guided-diffusion#167: the repository's own checkpoint runs a block again without the generator's state, so
    that dropout has another mask in backward and the loss diverges."""

    def build() -> Network:
        torch.manual_seed(0)
        return network(Diffusion(), 2, 8, 12, 12)

    trains_in_less(build)


def test_the_generator_is_left_as_plain_pytorch_leaves_it() -> None:
    """pytorch/pytorch#14253: a segment that runs again moves the generator on, and all later draws are others."""
    torch.manual_seed(0)
    plain, ours = (nn.Sequential(nn.Linear(16, 64), nn.Dropout(0.5), nn.Linear(64, 4)) for _ in range(2))
    ours.load_state_dict(plain.state_dict())
    shoal.compile(ours, "64KiB", optimizer="sgd", allow="exact")
    states = []
    for model in (plain, ours):
        torch.manual_seed(3)
        for _ in range(3):
            model(torch.ones(64, 16)).mean().backward()
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


def test_dropout_between_inverted_norms() -> None:
    """tychovdo/RevGAN#1: dropout within what is inverted makes another input of the output."""
    torch.manual_seed(0)
    layers = nn.Sequential(
        *(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.LeakyReLU(0.1), nn.Dropout(0.5)),
        *(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.LeakyReLU(0.1)),
    )
    inverted = shoal.invert_norm(nn.Sequential(*(type(layers)(layer)[0] for layer in layers)))
    x = torch.randn(4, 4, 8, 8)
    gradients = []
    for model in (layers, inverted):
        model.zero_grad()
        torch.manual_seed(1)
        model(x).square().mean().backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    for ours, plain in zip(gradients[1], gradients[0], strict=True):
        assert torch.allclose(ours, plain, rtol=1e-3, atol=1e-4 * float(gradients[0][-1].abs().max()))


class Turned(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x.sin().exp().transpose(1, 2).contiguous(), 0.5, self.training).sigmoid().exp().tanh()


def test_dropout_of_a_turned_copy() -> None:
    """pytorch/pytorch#198333: dropout of `x.transpose(1, 2).contiguous()` gives neighbours the same mask, and under
    checkpointing backward has another one than forward."""

    def build() -> Network:
        torch.manual_seed(0)
        return network(nn.Sequential(nn.Linear(32, 32), Turned(), nn.Linear(16, 4)), 4, 16, 32)

    trains_in_less(build)
