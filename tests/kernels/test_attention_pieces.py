"""Attention in pieces: the bits of the whole, but for biases' gradients, which are no further from float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shoal.kernels import attention_pieces
from shoal.kernels.attention_pieces import AttentionLayout
from shoal.kernels.pieces import Cut
from shoal.lowlevel import allocations

QUERIES, KEYS, CHANNELS = 5, 7, 4


def operands(layout: AttentionLayout, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    """Incoming gradient, queries, keys, values and biases; the biases in float32 where the others are narrower."""
    generator = torch.Generator().manual_seed(0)
    batch = layout.images * layout.windows * layout.heads
    shapes = [(batch, QUERIES, CHANNELS), (batch, QUERIES, CHANNELS), (batch, CHANNELS, KEYS), (batch, KEYS, CHANNELS)]
    wide = torch.promote_types(dtype, torch.float32)
    made = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    return *made, *(torch.randn(shape, generator=generator).to(wide) for shape in layout.biases)


def laid_out(images: int, *biases: tuple[int, ...], weights: torch.dtype | None = None) -> AttentionLayout:
    shapes = tuple((*shape, QUERIES, KEYS) for shape in biases)
    return AttentionLayout(images, 6, 2, shapes, (None,) * (len(shapes) + 1), weights)


def by_autograd(layout: AttentionLayout, grad: torch.Tensor, *given: torch.Tensor) -> list[torch.Tensor]:
    """Result and gradients of queries, keys, values and biases as PyTorch computes them."""
    q, k, v, *biases = (tensor.detach().requires_grad_() for tensor in given)
    scores = (q @ k).view(layout.images, layout.windows, layout.heads, QUERIES, KEYS)
    for bias in biases:
        scores = scores + bias
    weights = scores.softmax(-1).view(-1, QUERIES, KEYS)
    out = weights.to(v.dtype) @ v
    out.backward(grad)
    return [out.detach(), *(tensor.grad for tensor in (q, k, v, *biases) if tensor.grad is not None)]


@pytest.mark.parametrize("pieces", [1, 4, 6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(
    "layout",
    [laid_out(1), laid_out(1, (1, 1, 2)), laid_out(2, (1, 1, 2), (1, 6, 1)), laid_out(3, (3, 6, 2), (1, 1, 1))],
    ids=["no bias", "by head", "by head and by window", "of each image, and of all"],
)
def test_pieces_have_the_bits_of_the_whole(layout: AttentionLayout, dtype: torch.dtype, pieces: int) -> None:
    layout = layout._replace(weights=torch.bfloat16 if dtype is torch.bfloat16 else None)
    grad, q, k, v, *biases = operands(layout, dtype)
    out, *grads = by_autograd(layout, grad, q, k, v, *biases)
    _, *exact = by_autograd(layout, *(tensor.double() for tensor in (grad, q, k, v, *biases)))
    count = max(pieces, layout.images)
    assert torch.equal(attention_pieces.forward(q, k, v, biases, layout, count), out)
    found = attention_pieces.backward(grad, q, k, v, biases, layout, layout.biases, count)
    for ours, theirs in zip(found[:3], grads, strict=False):
        assert torch.equal(ours, theirs)
    for ours, theirs, right in zip(found[3:], grads[3:], exact[3:], strict=True):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        off, theirs_off = ((one.double() - right).abs().max() for one in (ours, theirs))
        assert off <= theirs_off + 4 * torch.finfo(ours.dtype).eps * right.abs().max()


def large(**changes: Any) -> tuple[AttentionLayout, list[torch.Tensor]]:
    """64 windows of 2 heads, with scores of 8 MiB."""
    layout = AttentionLayout(1, 64, 2, ((1, 1, 2, 128, 128),), (None, None), None)._replace(**changes)
    batch = layout.images * layout.windows * layout.heads
    q, v = (torch.randn(batch, 128, 8) for _ in range(2))
    return layout, [q, q.transpose(1, 2).contiguous(), v, *(torch.randn(shape) for shape in layout.biases)]


def test_two_eighths_of_the_scores_are_held_beside_operands_and_results() -> None:
    layout, (q, k, v, *biases) = large()
    scores = attention_pieces.scores_bytes(q, k, biases, layout)
    assert scores == 8 << 20 and attention_pieces.scratch_bytes(q, k, biases, layout, 8) == scores // 4
    _, changes = allocations.record(lambda: attention_pieces.forward(q, k, v, biases, layout, 8))
    assert allocations.peak_bytes(changes) <= v.nbytes + scores // 8 + 4096
    _, changes = allocations.record(lambda: attention_pieces.backward(v, q, k, v, biases, layout, layout.biases, 8))
    results = q.nbytes + k.nbytes + v.nbytes + biases[0].nbytes
    assert allocations.peak_bytes(changes) <= results + scores // 4 + biases[0].nbytes + 4096


def test_large_scores_are_cut_by_windows() -> None:
    layout, (q, k, v, *biases) = large()
    saved = (2 << 23) - (1 << 21)
    assert attention_pieces.choose(q, k, v, biases, layout, False) == Cut(0, 8, saved)
    assert attention_pieces.choose(q, k, v, biases, layout, True) == Cut(0, 8, saved, reordered=True)
    assert attention_pieces.cut_elsewhere(q, k, v, biases, layout, False) == Cut(0, 8, saved)
    alone = layout._replace(windows=1, heads=128, biases=((1, 1, 1, 128, 128),))
    assert attention_pieces.choose(q, k, v, [biases[0][:, :, :1]], alone, False) is None
    some = layout._replace(windows=16)
    assert attention_pieces.choose(q[:32], k[:32], v[:32], biases, some, False) is None  # 2 MiB


def test_what_does_not_repeat_the_bits_here_is_reordered(monkeypatch: pytest.MonkeyPatch) -> None:
    layout, (q, k, v, *biases) = large()
    monkeypatch.setattr(attention_pieces, "repeats_bits", lambda *_: False)
    cut = attention_pieces.choose(q, k, v, biases, layout, False)
    assert cut is not None and cut.reordered
