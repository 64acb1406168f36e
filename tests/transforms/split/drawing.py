"""Functions of images that draw random numbers, which nothing may run once a patch, a slice or a slab."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

DRAWING: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "Dropout": nn.Dropout(0.5),
    "Dropout2d": nn.Dropout2d(0.5),
    "AlphaDropout": nn.AlphaDropout(0.5),
    "FeatureAlphaDropout": nn.FeatureAlphaDropout(0.5),
    "RReLU": nn.RReLU(),
    "FractionalMaxPool2d": nn.FractionalMaxPool2d(2, output_size=6),
    "dropout": F.dropout,
    "torch.dropout": lambda x: torch.dropout(x, 0.5, True),
    "torch.feature_dropout": lambda x: torch.feature_dropout(x, 0.5, True),
    "feature_alpha_dropout": lambda x: F.feature_alpha_dropout(x, 0.5, training=True),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "torch.rrelu": lambda x: torch.rrelu(x, training=True),
    "rand_like": lambda x: x * torch.rand_like(x),
    "bernoulli": lambda x: x * torch.bernoulli(torch.full_like(x, 0.5)),
    "normal": lambda x: x + torch.normal(x.detach(), 1.0),
    "gumbel_softmax": lambda x: F.gumbel_softmax(x, dim=1),
}
