"""ReLU's backward from one truth value per element.

On the CPU piece by piece: PyTorch's kernel would first turn the whole mask into floats.
"""

from __future__ import annotations

import torch

_PIECE_ELEMS = 1 << 18


def backward(grad: torch.Tensor, positive: torch.Tensor) -> torch.Tensor:
    """`grad` where `positive`, zero elsewhere; both (N, ...) of one shape and layout."""
    return where_above(grad, positive.view(torch.uint8), 0)


def backward_(grad: torch.Tensor, positive: torch.Tensor) -> torch.Tensor:
    """`backward` that writes over `grad`."""
    return where_above_(grad, positive.view(torch.uint8), 0)


def where_above(grad: torch.Tensor, mask: torch.Tensor, threshold: int) -> torch.Tensor:
    """`grad` where `mask`, bytes of its shape, is above `threshold`; zero elsewhere."""
    if grad.stride() != mask.stride() or not _fills_its_block(grad):
        # The library decides the layout of the result, as it does for the plain network.
        return torch.ops.aten.threshold_backward(grad, mask, threshold)
    return where_above_(grad.clone(memory_format=torch.preserve_format), mask, threshold)


def where_above_(grad: torch.Tensor, mask: torch.Tensor, threshold: int) -> torch.Tensor:
    """`where_above` that writes over `grad`."""
    if grad.device.type != "cpu" or grad.stride() != mask.stride() or not _fills_its_block(grad):
        return torch.ops.aten.threshold_backward.grad_input(grad, mask, threshold, grad_input=grad)
    flat_grad, flat_mask = (t.as_strided((t.numel(),), (1,)) for t in (grad, mask))
    for start in range(0, grad.numel(), _PIECE_ELEMS):
        piece = flat_grad[start : start + _PIECE_ELEMS]
        torch.ops.aten.threshold_backward.grad_input(
            piece, flat_mask[start : start + _PIECE_ELEMS], threshold, grad_input=piece
        )
    return grad


def _fills_its_block(tensor: torch.Tensor) -> bool:
    span_elems = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return span_elems == tensor.numel()
