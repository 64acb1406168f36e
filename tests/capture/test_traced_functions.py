"""Functions at which Dynamo breaks by itself are part of one graph, with PyTorch's results."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint_sequential

import shoal
from tests.engine.training_laws import assert_same_training, blocks, images


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
def test_segments_are_one_graph_that_trains_as_in_plain_pytorch(segments: int, reentrant: bool) -> None:
    planned = assert_same_training(InSegments(segments, reentrant, preserve_rng_state=True), images(3, 2, 3, 8, 8))
    assert not planned.shoal.plan.breaks


@pytest.mark.parametrize(
    ("segments", "options"), [(100, {}), (2, {"context": 1})], ids=["more segments than layers", "an unknown keyword"]
)
def test_segments_that_pytorch_refuses_raise_what_pytorch_raises(segments: int, options: dict[str, object]) -> None:
    model = InSegments(segments, **options)
    x = images(1, 2, 3, 8, 8)[0]
    with pytest.raises(ValueError, match=".") as plain:
        copy.deepcopy(model)(x)
    with pytest.raises(ValueError, match=".") as planned:
        shoal.compile(model, budget="1GiB")(x)
    assert str(planned.value) == str(plain.value)


class Asking(nn.Module):
    """As MONAI's BasicUNet asks whether there is a skip."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.layers = nn.Sequential(*blocks(3, 4, 4))
        self.kind, self.in_a_dict = kind, not isinstance(kind, type | tuple)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layers(x)
        value = {"skip": y} if self.in_a_dict else y
        return y * 2 if torch.jit.isinstance(value, self.kind) else y + 1


@pytest.mark.parametrize(
    ("kind", "breaks"),
    [(torch.Tensor, False), (int, False), ((int, torch.Tensor), False), (dict[str, torch.Tensor], True)],
    ids=["a tensor", "an int", "one of two", "a dict of tensors"],
)
def test_to_ask_for_a_type_ends_no_graph_unless_a_container_is_looked_into(kind: Any, breaks: bool) -> None:
    planned = assert_same_training(Asking(kind), images(3, 2, 3, 8, 8))
    assert bool(planned.shoal.plan.breaks) == breaks
