"""What a fused network calls in place of its layers: batch norm in two halves, and a convolution that does its part.

They hold the network's own layers and read parameters, buffers and modes from them at every call. Where a map is too
small for fusing to pay (`shoal.transforms.fuse.fusion_size`) they call those layers instead: the map is not measured,
so its batch norm, which is given no statistics, normalises it whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from shoal.kernels.batch_norm_vectors import batch_norm_scale, measures, move_statistics, runs_again
from shoal.kernels.memory_format import memory_format_of, suggested_memory_format
from shoal.kernels.norm.dense_block import DenseLayer, dense_block
from shoal.kernels.norm.norm_act import joined, norm_act
from shoal.kernels.norm.norm_conv import norm_conv
from shoal.kernels.norm.norm_conv_native import ConvWindow
from shoal.kernels.norm.norm_operands import wide
from shoal.kernels.norm.statistics import detached_statistics, is_narrow, statistics
from shoal.lowlevel.torch_state import check_batch_norm_input
from shoal.transforms.fuse import fusion_size
from shoal.transforms.fuse.fusion_size import FusionSize

Moments = tuple[torch.Tensor, torch.Tensor]  # mean, variance


class Vectors(NamedTuple):
    """What a batch norm does to each channel, (C,): (x - mean) * scale + shift.

    Attributes:
        variance: where mean and scale are of what is normalised and its readers make its whole gradient, else None;
            see `norm_act`.
        eps: of the batch norm, where there is a variance.
    """

    mean: torch.Tensor
    scale: torch.Tensor
    shift: torch.Tensor
    variance: torch.Tensor | None = None
    eps: float = 0.0


class Measure(nn.Module):
    """Statistics in a sweep of their own, for batch norms whose input no fused convolution produced."""

    def __init__(self, readers: Iterable[_BatchNorm], size: FusionSize) -> None:
        super().__init__()
        self.readers, self.size = tuple(readers), size

    def forward(self, x: torch.Tensor) -> Moments | None:
        """(N, C, ...) → mean and variance, (C,); None where every reader is frozen, or `x` is small."""
        wanted = any(measures(layer) for layer in self.readers) and self.size.fuses(x)
        return _measured(x) if wanted else None


class Affine(nn.Module):
    """The half of a batch norm over vectors: running statistics, and the line it draws through each channel.

    Args:
        layer: the batch norm.
        relu: whether a ReLU comes right after it.
        size: decides which maps are too small.
    """

    def __init__(self, layer: _BatchNorm, relu: bool, size: FusionSize) -> None:
        super().__init__()
        self.layer, self.relu, self.size = layer, relu, size

    def forward(self, xs: Sequence[torch.Tensor], moments: Sequence[Moments | None]) -> Vectors | torch.Tensor:
        """The tensors that are normalised side by side, and the statistics of each → mean, scale, shift, (C,).

        What is too small to be fused comes back normalised, and after the ReLU where one follows.
        """
        layer, x = self.layer, xs[0]
        check_batch_norm_input(layer, x)
        if not measures(layer):
            if not self.size.fuses(x):
                return self._plain(xs)
            assert layer.running_mean is not None and layer.running_var is not None
            mean, variance = layer.running_mean.to(wide(x.dtype)), layer.running_var.to(wide(x.dtype))
            return self._line(mean, variance)
        if all(pair is None for pair in moments):
            return self._plain(xs)
        count = x.numel() // x.shape[1]
        if count == 1:
            raise ValueError(f"Expected more than 1 value per channel when training, got input size {x.shape}")
        pairs = [_measured(part) if pair is None else pair for part, pair in zip(xs, moments, strict=True)]
        mean = joined_vectors([pair[0] for pair in pairs])
        variance = joined_vectors([pair[1] for pair in pairs])
        move_statistics(layer, mean, variance, count)
        if not any(is_narrow(part.dtype) for part in xs):
            return self._line(mean, variance)
        mean, variance = mean.detach(), variance.detach()  # of parts in float32 beside narrow ones
        return self._line(mean, variance)._replace(variance=variance, eps=layer.eps)

    def _plain(self, xs: Sequence[torch.Tensor]) -> torch.Tensor:
        layer, x = self.layer, joined(xs)
        if layer.training and runs_again():  # its running statistics have moved
            mean, variance = (None if old is None else old.clone() for old in (layer.running_mean, layer.running_var))
            z = F.batch_norm(x, mean, variance, layer.weight, layer.bias, True, 0.0, layer.eps)
        else:
            z = layer.forward(x)
        return z.relu_() if self.relu else z

    def _line(self, mean: torch.Tensor, variance: torch.Tensor) -> Vectors:
        layer = self.layer
        scale = batch_norm_scale(variance, layer.weight, layer.eps)
        return Vectors(mean, scale, torch.zeros_like(mean) if layer.bias is None else layer.bias.to(mean.dtype))


class Normalise(nn.Module):
    """The other half where more than convolutions read it: normalise, add a residual, apply the ReLU."""

    def __init__(self, layer: _BatchNorm, relu: bool) -> None:
        super().__init__()
        self.layer, self.relu = layer, relu

    def forward(
        self, xs: Sequence[torch.Tensor], vectors: Vectors | torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        """As `norm_act`; in place of vectors what they would have made of `xs` (with ReLU where nothing is added)."""
        if isinstance(vectors, torch.Tensor):
            if residual is None:
                return vectors
            z = vectors + residual
            return z.relu_() if self.relu else z
        if residual is not None and residual.shape != _shape(xs):  # broadcast: the sum by itself
            z = norm_act(xs, *vectors[:3], None, False, *vectors[3:]) + residual
            return z.relu() if self.relu else z
        return norm_act(xs, *vectors[:3], residual, self.relu, *vectors[3:])


class Convolve(nn.Module):
    """A convolution with a normalisation and a ReLU before it, and statistics after it.

    Args:
        layer: the convolution.
        relu: whether a ReLU comes before it.
        readers: batch norms that read its result.
        size: decides which maps are too small.
    """

    def __init__(self, layer: _ConvNd, relu: bool, readers: Iterable[_BatchNorm], size: FusionSize) -> None:
        super().__init__()
        self.layer, self.relu, self.size = layer, relu, size
        self.readers = tuple(readers)
        stride, padding, dilation = (list(numbers) for numbers in (layer.stride, zero_padding(layer), layer.dilation))
        self.window = ConvWindow(stride, padding, dilation, layer.groups)

    def forward(
        self, xs: Sequence[torch.Tensor], vectors: Vectors | torch.Tensor | None = None
    ) -> tuple[torch.Tensor, Moments | None]:
        """The result, and its statistics where a reader wants them; in place of vectors, what it convolves as it is."""
        layer, window, relu = self.layer, self.window, self.relu
        if isinstance(vectors, torch.Tensor):
            xs, vectors, relu = [vectors], None, False
        x = xs[0]
        if x.dim() != len(window.stride) + 2:  # one image without a batch
            return layer.forward(torch.relu(joined(xs)) if relu else joined(xs)), None
        quick = self.size.is_quick(xs, layer.weight, layer.bias, window)
        wanted = any(measures(reader) for reader in self.readers) and (quick or self.size.fuses(x, self._elems(x)))
        if vectors is None and not (wanted or quick or (relu and self.size.fuses(x))):
            return layer.forward(torch.relu(joined(xs)) if relu else joined(xs)), None
        mean, scale, shift, variance, eps = vectors or (None, None, None, None, 0.0)
        weight, bias = layer.weight, layer.bias
        y, mean_y, variance_y = norm_conv(
            *(xs, mean, scale, shift, relu, weight, bias, window, wanted), variance=variance, eps=eps
        )
        return y, ((mean_y, variance_y) if wanted else None)

    def _elems(self, x: torch.Tensor) -> int:
        """About as many as the result has."""
        return x.numel() // x.shape[1] * self.layer.out_channels // prod(self.window.stride)


class DenseBlock(nn.Module):
    """The layers of a dense block, each a chain of batch norms and convolutions.

    Args:
        layers: batch norms and convolutions of each.
        size: decides which maps are too small.
    """

    def __init__(self, layers: Sequence[Sequence[tuple[Affine, Convolve]]], size: FusionSize) -> None:
        super().__init__()
        self.size = size
        self.layers = tuple(tuple(layer) for layer in layers)  # in tuples, so that none is a child

    def forward(
        self, xs: Sequence[torch.Tensor], moments: Sequence[Moments | None]
    ) -> tuple[torch.Tensor, Moments | None]:
        """What the first layer reads, and its statistics → all channels and their statistics.

        Statistics that are not given are measured; None where no batch norm of the block does.
        """
        if not self._is_one_op(xs):
            return self._layer_by_layer(xs, moments)
        known = [pair for pair in moments if pair is not None]
        mean, variance = None, None
        if len(known) == len(xs):
            mean, variance = (joined_vectors([pair[which] for pair in known]) for which in range(2))
        steps = [
            [
                DenseLayer(norm.layer.weight, norm.layer.bias, conv.layer.weight, norm.layer.eps, conv.relu)
                for norm, conv in layer
            ]
            for layer in self.layers
        ]
        x = joined(xs)
        features, (means, variances), between = dense_block(x, mean, variance, steps)
        count = x.numel() // x.shape[1]
        for layer, pairs in zip(self.layers, between, strict=True):
            channels = layer[0][0].layer.num_features
            read = [(means[:channels], variances[:channels]), *pairs]
            for (norm, _), pair in zip(layer, read, strict=True):
                move_statistics(norm.layer, *pair, count)
        return features, (means, variances)

    def _elems(self, x: torch.Tensor) -> int:
        """Of what the last layer reads."""
        return x.numel() // x.shape[1] * self.layers[-1][0][0].layer.num_features

    def _is_one_op(self, xs: Sequence[torch.Tensor]) -> bool:
        kind, device = xs[0].dtype, xs[0].device
        # The block has the layout of what it reads; where PyTorch's convolutions may have another, they run one by one.
        layout = suggested_memory_format(*xs, *(conv.layer.weight for layer in self.layers for _, conv in layer))
        return (
            all(memory_format_of(x) == layout for x in xs)
            and layout != torch.channels_last_3d
            and self.size.fuses(xs[0], self._elems(xs[0]), fusion_size.MIN_BLOCK_ELEMS)
            and (xs[0].is_meta or not torch.is_autocast_enabled(device.type))
            and all(x.dtype == kind for x in xs)
            and not is_narrow(
                kind
            )  # one op adds to the gradients of all layers, and what is rounded loses what is added
            and xs[0].numel() > xs[0].shape[1]
            and all(
                norm.layer.training and conv.layer.weight.dtype == kind and xs[0].dim() == conv.layer.weight.dim()
                for layer in self.layers
                for norm, conv in layer
            )
        )

    def _layer_by_layer(
        self, xs: Sequence[torch.Tensor], moments: Sequence[Moments | None]
    ) -> tuple[torch.Tensor, Moments | None]:
        measuring = any(measures(norm.layer) for layer in self.layers for norm, _ in layer)
        features = list(xs)
        measured = [
            _measured(x) if pair is None and measuring and self.size.fuses(x) else pair
            for x, pair in zip(xs, moments, strict=True)
        ]
        for layer in self.layers:
            read, pairs = list(features), list(measured)
            for norm, conv in layer:
                y, pair = conv(read, norm(read, pairs))
                read, pairs = [y], [pair]
            features += read
            measured += pairs
        if all(pair is None for pair in measured):
            return joined(features), None
        known = [_measured(x) if pair is None else pair for x, pair in zip(features, measured, strict=True)]
        mean, variance = (joined_vectors([pair[which] for pair in known]) for which in range(2))
        return joined(features), (mean, variance)


def zero_padding(layer: _ConvNd) -> list[int]:
    """The padding at each side; raises ValueError where the two sides differ or it is not zeros."""
    if layer.padding_mode != "zeros":
        raise ValueError(f"its padding is {layer.padding_mode!r}")
    if layer.padding == "valid":
        return [0] * len(layer.stride)
    if layer.padding == "same":
        totals = [d * (k - 1) for d, k in zip(layer.dilation, layer.kernel_size, strict=True)]
        if any(total % 2 for total in totals):
            raise ValueError("its padding is one more on one side than on the other")
        return [total // 2 for total in totals]
    return [int(padding) for padding in layer.padding]


def _measured(x: torch.Tensor) -> Moments:
    """Mean and variance of `x`; where it is narrow, its readers make its whole gradient."""
    return detached_statistics(x) if is_narrow(x.dtype) else statistics(x)


def joined_vectors(vectors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Vectors of channels end to end."""
    return vectors[0] if len(vectors) == 1 else torch.cat(list(vectors))


def _shape(xs: Sequence[torch.Tensor]) -> torch.Size:
    channels = sum(x.shape[1] for x in xs)
    return torch.Size([xs[0].shape[0], channels, *xs[0].shape[2:]])
