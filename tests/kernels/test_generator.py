"""A replay draws what was drawn from a state, and no one else notices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.kernels.generator import generator_state, replaying

CPU = torch.device("cpu")


def two_draws(*shape: int, scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.rand(shape) * scale, torch.randn(shape)


@given(st.integers(0, 2**40), st.integers(0, 50), st.floats(-2, 2))
def test_a_replay_draws_the_same_again_and_puts_the_generator_back(seed: int, drawn: int, scale: float) -> None:
    torch.manual_seed(seed)
    torch.rand(drawn)
    state = generator_state(CPU)
    first = two_draws(3, 5, scale=scale)
    torch.rand(drawn + 1)
    present = torch.get_rng_state()
    again = replaying(two_draws)(state, CPU, 3, 5, scale=scale)
    assert all(map(torch.equal, first, again))
    assert torch.equal(torch.get_rng_state(), present)


def test_a_state_is_not_moved_on_by_what_is_drawn_after_it() -> None:
    state = generator_state(CPU)
    kept = state.clone()
    replaying(two_draws)(state, CPU, 100)
    torch.rand(100)
    assert torch.equal(state, kept)


def test_an_error_in_a_replay_puts_the_generator_back_too() -> None:
    def fail() -> Any:
        torch.rand(3)
        raise RuntimeError("no")

    state = generator_state(CPU)
    torch.rand(1)
    present = torch.get_rng_state()
    with pytest.raises(RuntimeError, match="no"):
        replaying(fail)(state, CPU)
    assert torch.equal(torch.get_rng_state(), present)


@pytest.mark.parametrize("target", [two_draws, torch.ops.aten.native_dropout.default])
def test_a_target_has_one_replay(target: Callable[..., Any]) -> None:
    assert replaying(target) is replaying(target)
    assert replaying(target) is not replaying(torch.rand)


@pytest.mark.gpu
def test_a_replay_on_cuda_moves_neither_device() -> None:
    cuda = torch.device("cuda", torch.cuda.current_device())
    state = generator_state(cuda)
    first = torch.rand(100, device=cuda)
    present, host = torch.cuda.get_rng_state(cuda), torch.get_rng_state()
    assert torch.equal(replaying(torch.rand)(state, cuda, 100, device=cuda), first)
    assert torch.equal(torch.cuda.get_rng_state(cuda), present)
    assert torch.equal(torch.get_rng_state(), host)
