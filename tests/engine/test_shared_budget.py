"""Several models under one budget: the same training as plain PyTorch, and its peaks over all of them."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import shoal
from shoal.memory.limit import memory_limit
from shoal.memory.static_memory import distinct_bytes
from tests.engine.training_laws import costs_that_do_not_matter, needs_compiler

Models = Sequence[nn.Module]
Optimizers = Sequence[torch.optim.Optimizer]
BATCH = 512

pytestmark = needs_compiler


@pytest.fixture(autouse=True)
def matrix_products_need_no_workspace() -> Iterator[None]:
    with costs_that_do_not_matter():
        yield


def network(*widths: int) -> nn.Sequential:
    return nn.Sequential(*(layer for a, b in pairwise(widths) for layer in (nn.Linear(a, b), nn.Sigmoid())))


def pair() -> list[nn.Module]:
    return [network(16, 24, 24, 24, 24, 16), network(16, 24, 24, 24, 24, 8)]


def noise() -> torch.Tensor:
    return torch.randn(BATCH, 16)


def step_all(optimizers: Optimizers) -> None:
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def gan_turns(models: Models, optimizers: Optimizers) -> None:
    """As in PyTorch's example: the generator's result waits while the discriminator takes its step."""
    generator, discriminator = models
    real, seed = noise(), noise()
    discriminator.zero_grad()
    F.softplus(-discriminator(real)).mean().backward()
    fake = generator(seed)
    F.softplus(discriminator(fake.detach())).mean().backward()
    optimizers[1].step()
    generator.zero_grad()
    F.softplus(-discriminator(fake)).mean().backward()
    optimizers[0].step()


def gan_with_a_frozen_discriminator(models: Models, optimizers: Optimizers) -> None:
    generator, discriminator = models
    with torch.no_grad():
        fake = generator(noise())
    (F.softplus(-discriminator(noise())) + F.softplus(discriminator(fake))).mean().backward()
    optimizers[1].step()
    optimizers[1].zero_grad()
    discriminator.requires_grad_(False)
    F.softplus(-discriminator(generator(noise()))).mean().backward()
    discriminator.requires_grad_(True)
    optimizers[0].step()
    optimizers[0].zero_grad()


def encoders_with_one_loss(models: Models, optimizers: Optimizers) -> None:
    image, text = models
    (image(noise())[:, :8] * text(noise())).logsumexp(1).mean().backward()
    step_all(optimizers)


def contrastive_pairs(models: Models, optimizers: Optimizers) -> None:
    one, other = models
    x = noise()
    (one(x)[:, :8] - other(x)).square().mean().add((one(-x)[:, :8] * other(-x)).mean()).backward()
    step_all(optimizers)


def teacher_and_student(models: Models, optimizers: Optimizers) -> None:
    student, teacher = models
    x = noise()
    teacher.eval()
    with torch.no_grad():
        wanted = teacher(x)
    (student(x)[:, :8] - wanted).square().mean().backward()
    step_all(optimizers[:1])


def moving_average_beside(models: Models, optimizers: Optimizers) -> None:
    trained, average = models
    trained(noise()).square().mean().backward()
    step_all(optimizers[:1])
    with torch.no_grad():
        for own, new in zip(average.parameters(), trained.parameters(), strict=True):
            own.lerp_(new, 0.1)


def two_losses(models: Models, optimizers: Optimizers) -> None:
    one, other = models
    both = one(noise())[:, :8] * other(noise())
    both.square().mean().backward(retain_graph=True)
    both.abs().mean().backward()
    step_all(optimizers)


Loop = Callable[[Models, Optimizers], None]
LOOPS: dict[str, tuple[Loop, Callable[[], list[nn.Module]], float]] = {
    "gan turns": (gan_turns, pair, 0.75),
    "frozen discriminator": (gan_with_a_frozen_discriminator, pair, 0.8),
    "encoders": (encoders_with_one_loss, pair, 0.75),
    "pairs": (contrastive_pairs, pair, 0.75),
    "teacher": (teacher_and_student, pair, 0.85),
    "moving average": (moving_average_beside, lambda: [(one := pair()[0]), copy.deepcopy(one)], 0.85),
    "two losses": (two_losses, pair, 0.9),
}


@pytest.mark.parametrize("loop", LOOPS)
def test_models_train_as_in_plain_pytorch_inside_one_budget(loop: str, caplog: pytest.LogCaptureFixture) -> None:
    step, make, share = LOOPS[loop]
    torch.manual_seed(0)
    plain = make()
    ours = copy.deepcopy(plain)
    expected = train(plain, step)
    budget = int(share * max(peak for peak, _ in expected[1:]))
    shared = shoal.Budget(budget)
    for number, model in enumerate(ours):
        shoal.compile(model, budget=shared, allow="bitwise", name=f"model {number}")
    found = train(ours, step)
    for number, ((peak, left), (_, right)) in enumerate(zip(found, expected, strict=True)):
        assert peak <= budget or number == 0, f"step {number} takes {peak} of {budget} bytes"
        wrong = [name for name in right if left[name] != right[name]]
        assert not wrong, f"step {number}: {wrong[:4]}"
    if found[0][0] > budget:
        assert "over the budget" in caplog.text
    assert shared.status is not None and shared.status.repairs == 0
    assert shared.peak_bytes is not None
    if loop == "two losses":
        assert "sends something back twice" in caplog.text
    else:
        assert shared.predicted_peak_bytes is not None
        assert max(peak for peak, _ in found[1:]) <= shared.predicted_peak_bytes <= budget
        assert shared.predicted_peak_bytes <= 1.03 * max(peak for peak, _ in found[1:])
        assert any(plan.recomputed for plan in shared.status.plans)


def train(models: Models, step: Loop, steps: int = 4) -> list[tuple[int, dict[str, Any]]]:
    """The bytes that each step takes over all models, counted around it, and what it leaves behind."""
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9) for model in models]
    found = []
    for number in range(steps):
        torch.manual_seed(number)
        gc.collect()
        there_bytes = standing_bytes(models, optimizers)
        with memory_limit(None) as meter:
            before_bytes = meter.live_bytes
            meter.reset_peak()
            step(models, optimizers)
            peak_bytes = there_bytes + meter.peak_bytes - before_bytes
        # As numbers: a tensor that is kept would count in the budget.
        left = {f"{i}.{name}": p.tolist() for i, m in enumerate(models) for name, p in m.named_parameters()}
        found.append((peak_bytes, left))
    return found


def standing_bytes(models: Models, optimizers: Optimizers) -> int:
    tensors = [t for model in models for t in (*model.parameters(), *model.buffers())]
    tensors += [p.grad for model in models for p in model.parameters() if p.grad is not None]
    tensors += [v for one in optimizers for state in one.state.values() for v in state.values() if torch.is_tensor(v)]
    return distinct_bytes(tensors)
