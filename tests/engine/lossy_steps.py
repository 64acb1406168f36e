"""Networks whose convolution inputs are encoded, and plans that encode them, for the tests of "encode"."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from shoal.capture.captured import Captured
from shoal.capture.encode_activations import encoded, offers
from shoal.core.lossy import LossyOptions
from shoal.core.plan import Plan
from shoal.cost import profile as profiling
from shoal.cost.profile import Costs
from shoal.engine.lossy_report import plan_of_encoded
from tests.joint_graphs import captured_step

CODEC_OP = "encoded_activation."


def chain(*widths: int, act: type[nn.Module] = nn.ReLU, **options: Any) -> nn.Sequential:
    """Convolutions with an activation after each and a small head: no batch norm, so that inputs are all they save."""
    layers: list[nn.Module] = []
    for a, b in pairwise(widths):
        layers += [nn.Conv2d(a, b, 3, padding=1, **options), act()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], 5))


def everything_encoded(captured: Captured, lossy: LossyOptions | None = None) -> Captured:
    """The step with all encoded that may be."""
    lossy = lossy or LossyOptions("dynamic_tree")
    found = [offer.storage for offer in offers(captured, lossy)]
    assert found, "the test shows nothing: there is nothing to encode"
    return encoded(captured, found, lossy)


def plan_encoding_everything(model: nn.Module, example: torch.Tensor, codec: str = "dynamic_tree", **how: Any) -> Plan:
    """A plan that keeps everything, and encodes all that may be."""
    lossy = LossyOptions(codec, **how)
    captured = captured_step(model, example)
    return plan_of_encoded(captured, [offer.storage for offer in offers(captured, lossy)], lossy)


@contextmanager
def codecs_of_no_time() -> Iterator[None]:
    """Ops are profiled as always, but those that encode and decode take no time: plans encode wherever it helps."""
    measured = profiling.profile

    def patched(nodes: Mapping[str, Any], **how: Any) -> Costs:
        costs = measured(nodes, **how)
        free = {key: 0.0 if CODEC_OP in key else seconds for key, seconds in costs.seconds.items()}
        return replace(costs, seconds=free)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(profiling, "profile", patched)
        yield
