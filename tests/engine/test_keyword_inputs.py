"""A model that is called with keywords is planned by a dict of them, wherever an example is taken."""

from __future__ import annotations

from collections import UserDict
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.errors import CaptureError, InputError
from tests.raising import raising

P100 = "p100-nvlink"


class Classifier(nn.Module):
    """Called as Hugging Face's models are: what is needed does not come first."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Conv2d(3, 8, 3), nn.Linear(8, 4)

    def forward(self, mask: Any = None, pixel_values: Any = None, *, labels: Any) -> dict[str, torch.Tensor]:
        logits = self.head(self.body(pixel_values).mean((2, 3)))
        return {"loss": (logits - labels).square().mean()}


class InOrder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside = Classifier()

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.inside(pixel_values=pixel_values, labels=labels)["loss"]


def batch(count: int, device: str = "meta") -> dict[str, torch.Tensor]:
    return {
        "pixel_values": torch.randn(count, 3, 16, 16, device=device),
        "labels": torch.zeros(count, 4, device=device),
    }


def on_meta(kind: type[nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return kind()


def test_a_plan_by_keywords_is_that_of_the_same_arguments_in_order() -> None:
    by_name = shoal.plan(on_meta(Classifier), batch(4), hardware=P100)
    in_order = shoal.plan(on_meta(InOrder), tuple(batch(4).values()), hardware=P100)
    of_a_tokenizer = shoal.plan(on_meta(Classifier), UserDict(batch(4)), hardware=P100)  # BatchEncoding is one
    assert by_name.predicted_peak_bytes == in_order.predicted_peak_bytes == of_a_tokenizer.predicted_peak_bytes


def test_it_runs_by_the_plan() -> None:
    model, given = Classifier(), batch(4, "cpu")
    plan = shoal.plan(model, given, "1GiB", allow="keep")
    shoal.compile(model, offload_to=None, options=shoal.Options(plan=plan))(**given)["loss"].backward()
    assert model.shoal.plan.residences == plan.residences


def test_fit_and_frontier_take_them_too() -> None:
    how: dict[str, Any] = {"hardware": P100, "allow": "recompute"}
    found = shoal.fit(on_meta(Classifier), batch, "64KiB", max_batch=4, **how)
    alone = shoal.plan(on_meta(Classifier), batch(found.batch), "64KiB", **how)
    assert found.plan.predicted_peak_bytes == alone.predicted_peak_bytes
    patch = shoal.fit(
        on_meta(Classifier),
        lambda sides: {**batch(2), "pixel_values": torch.empty(2, 3, *sides, device="meta")},
        "64KiB",
        patch=(8, 8),
        max_patch=(9, 9),
        multiple_of=1,
        **how,
    )
    assert patch.batch == 2 and patch.patch == (9, 9)
    made = shoal.frontier(on_meta(Classifier), batch(4), points=2, **how)
    assert made.plain_peak_bytes == shoal.plan(on_meta(Classifier), batch(4), hardware=P100).plain_peak_bytes


def test_the_report_on_encoding_takes_them() -> None:
    model = shoal.compile(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3)))
    assert model.shoal.lossy_report({"input": torch.randn(2, 3, 12, 12)}).layers


def test_what_the_model_refuses_is_told_with_the_shapes_and_what_would_do() -> None:
    class Halving(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down, self.up = nn.Conv2d(3, 3, 2, 2), nn.ConvTranspose2d(3, 3, 2, 2)

        def forward(self, *, images: torch.Tensor) -> torch.Tensor:
            return images + self.up(self.down(images))

    with raising(CaptureError, "(2, 3, 9, 8)"):
        shoal.plan(on_meta(Halving), {"images": torch.empty(2, 3, 9, 8, device="meta")}, hardware=P100)


@pytest.mark.parametrize("example", [3, "images", {1: torch.empty(2)}, None])
def test_anything_else_is_refused_with_what_to_type(example: Any) -> None:
    with pytest.raises(InputError):
        shoal.plan(on_meta(Classifier), example, hardware=P100)
