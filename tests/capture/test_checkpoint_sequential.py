"""Layers under `checkpoint_sequential` are one graph, with PyTorch's results."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint_sequential

import shoal
from tests.engine.training_laws import assert_same_training, images


class InSegments(nn.Module):
    def __init__(self, segments: int, reentrant: bool | None = False, **options: object) -> None:
        super().__init__()
        convolutions = [nn.Conv2d(3 if place == 0 else 4, 4, 3, padding=1) for place in range(4)]
        self.layers = nn.Sequential(*(nn.Sequential(one, nn.GELU(), nn.Dropout(0.2)) for one in convolutions))
        self.segments, self.reentrant, self.options = segments, reentrant, options

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x)  # its input needs no gradient: reentrant checkpoints would give it none
        return checkpoint_sequential(self.layers[1:], self.segments, x, self.reentrant, **self.options)


@pytest.mark.parametrize(("segments", "reentrant"), [(1, False), (2, True), (3, False)])
def test_it_is_one_graph_that_trains_as_in_plain_pytorch(segments: int, reentrant: bool) -> None:
    planned = assert_same_training(InSegments(segments, reentrant, preserve_rng_state=True), images(3, 2, 3, 8, 8))
    assert not planned.shoal.plan.breaks


@pytest.mark.parametrize(
    ("segments", "options"), [(100, {}), (2, {"context": 1})], ids=["more segments than layers", "an unknown keyword"]
)
def test_what_pytorch_refuses_raises_what_pytorch_raises(segments: int, options: dict[str, object]) -> None:
    model = InSegments(segments, **options)
    x = images(1, 2, 3, 8, 8)[0]
    with pytest.raises(ValueError, match=".") as plain:
        copy.deepcopy(model)(x)
    with pytest.raises(ValueError, match=".") as planned:
        shoal.compile(model, budget="1GiB")(x)
    assert str(planned.value) == str(plain.value)
