"""Steps whose attention is computed in pieces: the same function and gradients, without tensors of scores."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from shoal.capture.attention import attended_in_pieces, choose_attentions
from shoal.capture.capture_step import capture_step
from shoal.capture.captured import Captured
from shoal.capture.pieces import choose_elsewhere, choose_pieces, in_pieces
from shoal.core import presets
from shoal.core.simulate import simulate
from shoal.core.variant import Pieces
from shoal.cost.profile import profile_step
from shoal.cost.roofline import roofline
from shoal.errors import PlanError
from tests.joint_graphs import operands, run_joint
from tests.raising import raising

BOTH = {"pieces", "direct"}


class Windows(nn.Module):
    """Attention in windows as Swin writes it: biased by position and head, some windows masked."""

    def __init__(self, tokens: int = 6, windows: int = 4, *, shifted: bool = True, biased: bool = True) -> None:
        super().__init__()
        self.heads, self.windows = 2, windows
        self.qkv = nn.Linear(8, 24)
        self.bias = nn.Parameter(torch.randn(self.heads, tokens, tokens)) if biased else None
        mask = torch.randn(windows, tokens, tokens) if shifted else None
        self.register_buffer("mask", mask)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, n, c = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        scores = (q * 0.5) @ k.transpose(-2, -1)
        if self.bias is not None:
            scores = scores + self.bias.unsqueeze(0)
        if self.mask is not None:
            by_image = scores.view(b // self.windows, self.windows, self.heads, n, n)
            scores = (by_image + self.mask.unsqueeze(1).unsqueeze(0)).view(-1, self.heads, n, n)
        return (scores.softmax(-1) @ v).transpose(1, 2).reshape(b, n, c)


class Cast(nn.Module):
    """Under bfloat16 autocast."""

    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside = inside

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.inside(x).float()


def captured_of(net: nn.Module, x: torch.Tensor) -> Captured:
    return capture_step(net, x, name="net")[0]


def softmaxes(captured: Captured) -> list[str]:
    return [op.name for op in captured.graph.ops if op.target == "aten._softmax.default"]


@pytest.mark.parametrize("cast", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_results_and_gradients_are_those_of_the_step(cast: bool, shifted: bool, biased: bool) -> None:
    torch.manual_seed(0)
    net: nn.Module = Windows(shifted=shifted, biased=biased)
    net, x = (Cast(net) if cast else net), torch.randn(8, 6, 8)
    captured = captured_of(net, x)
    (name,) = softmaxes(captured)
    changed = attended_in_pieces(captured, [Pieces(name, 0, 4, reordered=biased)])
    targets = [op.target for op in changed.graph.ops]
    assert targets.count("shoal.attention_pieces.forward") == targets.count("shoal.attention_pieces.backward") == 1
    assert not any("softmax" in target for target in targets) and len(softmaxes(captured)) == 1
    tensors = operands(captured.joint)
    for ours, theirs in zip(run_joint(changed.joint, tensors), run_joint(captured.joint, tensors), strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None and ours.shape == (2, 6, 6):  # the bias's, whose sum is in another order
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
        elif ours is not None:
            assert torch.equal(ours, theirs)


class Watched(Windows):
    """Somebody else reads the weights."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = x @ x.transpose(-2, -1)
        weights = scores.softmax(-1)
        return weights @ self.qkv(x) + weights.sum()


class Multiplied(Windows):
    """What lies between product and softmax is no bias."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ x.transpose(-2, -1)).tanh().softmax(-1) @ self.qkv(x)


class Classes(Windows):
    """A softmax that weights nothing."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.qkv(x).softmax(-1)


@pytest.mark.parametrize("kind", [Watched, Multiplied, Classes])
def test_what_is_no_attention_of_its_own_is_left(kind: type[Windows]) -> None:
    captured = captured_of(kind(), torch.randn(8, 6, 8, requires_grad=True))
    (name,) = softmaxes(captured)
    with raising(PlanError, f"'{name}'"):
        attended_in_pieces(captured, [Pieces(name, 0, 4)])


def large(biased: bool = True) -> tuple[nn.Module, torch.Tensor]:
    """Scores of 16 MiB."""
    return Windows(128, 128, biased=biased, shifted=False), torch.randn(128, 128, 8)


def test_large_ones_are_chosen_and_hold_an_eighth_of_their_scores_twice() -> None:
    captured = captured_of(*large())
    whole = profile_step(captured, torch.device("cpu"))
    chosen = choose_pieces(captured, whole, BOTH, lambda step: profile_step(step, torch.device("cpu")))
    assert chosen == (Pieces(softmaxes(captured)[0], 0, 8, reordered=True),)
    cut = profile_step(in_pieces(captured, chosen), torch.device("cpu"))
    scores = 128 * 2 * 128 * 128 * 4
    (backward,) = (op for op in cut.ops if op.target == "shoal.attention_pieces.backward")
    assert scores // 4 <= backward.workspace_bytes <= scores // 4 + (1 << 18)
    assert max(one.nbytes for one in whole.storages) == scores
    assert max(one.nbytes for one in cut.storages) < scores // 8
    assert simulate(cut, {}).peak_bytes < 0.5 * simulate(whole, {}).peak_bytes


def test_a_gpu_that_is_not_here_is_told_what_they_move_and_hold() -> None:
    captured = captured_of(*large())
    gpu: Any = presets.get("rtx-4090-24gb")
    whole = roofline(captured.graph, gpu)
    chosen = choose_elsewhere(captured, whole, BOTH, lambda step: roofline(step.graph, gpu))
    assert [(one.dim, one.count, one.reordered) for one in chosen] == [(0, 8, True)]
    cut = roofline(in_pieces(captured, chosen).graph, gpu)
    scores = 128 * 2 * 128 * 128 * 4
    ours = {op.target.rpartition(".")[2]: op for op in cut.ops if "attention_pieces" in op.target}
    assert all(op.workspace_bytes == scores // 4 for op in ours.values())
    # Product, bias, softmax, product: two read, one does both, and more in the backward pass.
    assert 6 * scores <= ours["forward"].moved_bytes < 7 * scores
    assert ours["backward"].moved_bytes > ours["forward"].moved_bytes + 4 * scores
    before = sum(op.flops for op in whole.ops)
    again = ours["forward"].flops - 2 * 2 * 128 * 128 * 128 * 4 * 128 // 128
    assert before < sum(op.flops for op in cut.ops) <= before + again


def test_only_what_has_plain_pytorchs_bits_is_in_pieces_without_direct() -> None:
    gpu: Any = presets.get("rtx-4090-24gb")
    for biased, n in ((True, 0), (False, 1)):
        captured = captured_of(*large(biased))
        graph = roofline(captured.graph, gpu)
        assert len(choose_attentions(captured, graph, {"pieces"}, runs_here=False)) == n


def test_scores_that_are_small_beside_other_ops_are_left() -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside, self.behind = large()[0], nn.Linear(8, 8192)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.behind(self.inside(x))

    captured = captured_of(Wide(), large()[1])
    assert choose_attentions(captured, captured.graph, BOTH, runs_here=False) == ()
