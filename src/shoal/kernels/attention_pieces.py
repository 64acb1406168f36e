"""Attention with biased scores, some windows at a time: two tensors of a piece's scores in place of two of all.

softmax(q k + biases) v, as window attention (Swin, SwinUNETR) writes it out. The forward pass keeps no scores; the
backward pass computes them again from queries and keys. Products and softmaxes of a window do not depend on the others,
so that pieces have the bits of the whole wherever the library's batched product does. A bias's gradient, summed over
windows, is in another order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shoal.kernels.pieces import WORTH_PIECES_BYTES, Cut, are_sizes_known, repeats_bits, spans

_aten = torch.ops.aten
_WINDOWS = 0
_PIECES = 8
_LAST = -1
Shape = tuple[int, ...]


class AttentionLayout(NamedTuple):
    """How the batch of products is made up, and in which precisions it is computed.

    Attributes:
        images, windows, heads: whose product is the batch.
        biases: of each bias, its shape as (images, windows, heads, queries, keys), 1 where it is the same for all.
        casts: to which dtypes scores are converted: before each bias, and before the softmax; None: as they are.
        weights: the dtype of the softmax's result when values are added up.
    """

    images: int
    windows: int
    heads: int
    biases: tuple[Shape, ...]
    casts: tuple[torch.dtype | None, ...]
    weights: torch.dtype | None


def forward(q: Tensor, k: Tensor, v: Tensor, biases: Sequence[Tensor], layout: Sequence[Any], pieces: int) -> Tensor:
    """softmax(q k + biases) v.

    Args:
        q, k, v: (batch, queries, n), (batch, n, keys) and (batch, keys, m): the batch as `AttentionLayout` says.
        biases: added to the scores one after another.
        layout: a `AttentionLayout`.
        pieces: in how many parts the windows of all images are computed, at least one for each image.
    """
    made = AttentionLayout(*layout)
    out = v.new_empty(q.shape[0], q.shape[1], v.shape[2])
    for some, image, windows in _pieces(made, pieces):
        weights = _weights(q[some], k[some], biases, made, image, windows)
        torch.bmm(_cast(weights, made.weights), v[some], out=out[some])
        del weights  # before the next are allocated
    return out


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    biases: Sequence[Tensor],
    layout: Sequence[Any],
    wanted: Sequence[Shape],
    pieces: int,
) -> tuple[Tensor, ...]:
    """The gradients of q, k and v, and what the scores' adds up to in each shape of `wanted`.

    Args:
        grad: of the result.
        q, k, v, biases, layout, pieces: as `forward` took them.
        wanted: as the shapes in `AttentionLayout.biases`.
    """
    made = AttentionLayout(*layout)
    of_q, of_k, of_v = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    dtype = _score_dtype(q.dtype, biases, made)
    sums = [torch.zeros(shape, dtype=_wide(dtype), device=q.device) for shape in wanted]
    for some, image, windows in _pieces(made, pieces):
        weights = _weights(q[some], k[some], biases, made, image, windows)
        torch.bmm(_cast(weights, made.weights).transpose(1, 2), grad[some], out=of_v[some])
        of_scores = _cast(torch.bmm(grad[some], v[some].transpose(1, 2)), dtype)
        _aten._softmax_backward_data.out(of_scores, weights, _LAST, dtype, grad_input=of_scores)
        del weights
        by_window = of_scores.view(1, windows.stop - windows.start, made.heads, *of_scores.shape[1:])
        for total, shape in zip(sums, wanted, strict=True):
            summed = [axis for axis, size in enumerate(shape) if size == 1]
            part = by_window.sum(summed, True, dtype=total.dtype) if summed else by_window  # of no axis: of all
            _part(total, shape, image, windows).add_(part)
            del part
        of_product = _cast(of_scores, q.dtype)
        del of_scores, by_window
        torch.bmm(q[some].transpose(1, 2), of_product, out=of_k[some])
        torch.bmm(of_product, k[some].transpose(1, 2), out=of_q[some])
        del of_product
    return of_q, of_k, of_v, *(total.to(dtype) for total in sums)


def choose(
    q: Tensor, k: Tensor, v: Tensor, biases: Sequence[Tensor], layout: AttentionLayout, sums: bool
) -> Cut | None:
    """How attention is cut into pieces on the device that it is on; None: not at all.

    Args:
        q, k, v, biases, layout: as for `forward`. Tensors may be fake: their shapes, strides and dtypes are read only.
        sums: whether gradients of biases are wanted, which are reordered.
    """
    cut = cut_elsewhere(q, k, v, biases, layout, sums)
    if cut is None or cut.reordered or q.device.type == "meta":
        return cut
    grad = v.new_empty((*q.shape[:2], v.shape[2]))
    same = repeats_bits(_at_once, _in_pieces, (grad, q, k, v, biases, layout), cut.count)
    return cut if same else replace(cut, reordered=True)


def cut_elsewhere(
    q: Tensor, k: Tensor, v: Tensor, biases: Sequence[Tensor], layout: AttentionLayout, sums: bool
) -> Cut | None:
    """`choose` for a device that is not here, on which it cannot be tried whether pieces repeat the bits."""
    if not are_sizes_known(q, k, v, *biases):
        return None
    windows = layout.images * layout.windows
    nbytes = scores_bytes(q, k, biases, layout)
    if windows < 2 or nbytes < WORTH_PIECES_BYTES:
        return None
    count = max(layout.images, min(_PIECES, windows))
    return Cut(_WINDOWS, count, 2 * nbytes - scratch_bytes(q, k, biases, layout, count), reordered=sums)


def scores_bytes(q: Tensor, k: Tensor, biases: Sequence[Tensor], layout: AttentionLayout) -> int:
    """Of the scores of all windows, as the softmax reads them."""
    elems = int(q.shape[0]) * int(q.shape[1]) * int(k.shape[2])
    return elems * _score_dtype(q.dtype, biases, layout).itemsize


def scratch_bytes(q: Tensor, k: Tensor, biases: Sequence[Tensor], layout: AttentionLayout, pieces: int) -> int:
    """The most that the two passes hold in addition to operands and results: weights, and their gradient."""
    most = max(windows.stop - windows.start for _, _, windows in _pieces(layout, pieces))
    share = most / (layout.images * layout.windows)
    converted = 0 if q.dtype == _score_dtype(q.dtype, biases, layout) else 1
    return int((2 + converted) * share * scores_bytes(q, k, biases, layout))


def _weights(
    q: Tensor, k: Tensor, biases: Sequence[Tensor], layout: AttentionLayout, image: int, windows: slice
) -> Tensor:
    scores = torch.bmm(q, k)
    shape = scores.shape
    for bias, of_bias, cast in zip(biases, layout.biases, layout.casts, strict=False):
        by_window = _cast(scores, cast).view(1, windows.stop - windows.start, layout.heads, *shape[1:])
        part = _part(bias.reshape(of_bias), of_bias, image, windows)
        fits = torch.promote_types(by_window.dtype, part.dtype) == by_window.dtype
        scores = (by_window.add_(part) if fits else by_window + part).view(shape)
        del by_window
    scores = _cast(scores, layout.casts[-1])
    weights: Tensor = _aten._softmax.out(scores, _LAST, False, out=scores)
    return weights


def _part(tensor: Tensor, shape: Shape, image: int, windows: slice) -> Tensor:
    """What some windows of an image read of a tensor of such a shape."""
    of_image = tensor if shape[0] == 1 else tensor[image : image + 1]
    return of_image if shape[1] == 1 else of_image[:, windows]


def _pieces(layout: AttentionLayout, pieces: int) -> Iterator[tuple[slice, int, slice]]:
    """Which products, of which image, which of its windows."""
    for image in range(layout.images):
        first = image * layout.windows
        for some in spans(layout.windows, max(1, pieces // layout.images)):
            of_all = slice((first + some.start) * layout.heads, (first + some.stop) * layout.heads)
            yield of_all, image, some


def _score_dtype(dtype: torch.dtype, biases: Sequence[Tensor], layout: AttentionLayout) -> torch.dtype:
    for bias, cast in zip(biases, layout.casts, strict=False):
        dtype = torch.promote_types(cast or dtype, bias.dtype)
    return layout.casts[-1] or dtype


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor if dtype is None else tensor.to(dtype)


def _at_once(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, biases: Sequence[Tensor], given: Sequence[Any]
) -> tuple[Tensor, ...]:
    """Result and gradients of q, k and v as the library computes them."""
    layout, scores = AttentionLayout(*given), torch.bmm(q, k)
    shape, by_window = scores.shape, (layout.images, layout.windows, layout.heads, *scores.shape[1:])
    for bias, of_bias, cast in zip(biases, layout.biases, layout.casts, strict=False):
        scores = (_cast(scores, cast).view(by_window) + bias.reshape(of_bias)).view(shape)
    scores = _cast(scores, layout.casts[-1])
    weights = torch.softmax(scores, _LAST)
    rounded = _cast(weights, layout.weights)
    of_weights = _cast(torch.bmm(grad, v.transpose(1, 2)), scores.dtype)
    of_product = _cast(_aten._softmax_backward_data(of_weights, weights, _LAST, scores.dtype), q.dtype)
    of_q, of_k = torch.bmm(of_product, k.transpose(1, 2)), torch.bmm(q.transpose(1, 2), of_product)
    return torch.bmm(rounded, v), of_q, of_k, torch.bmm(rounded.transpose(1, 2), grad)


def _in_pieces(grad: Tensor, *operands: Any) -> tuple[Tensor, ...]:
    q, k, v, biases, layout, pieces = operands
    return forward(q, k, v, biases, layout, pieces), *backward(grad, q, k, v, biases, layout, (), pieces)
