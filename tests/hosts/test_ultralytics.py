"""ultralytics' trainer inside a budget, by a callback: a classifier and a detector."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from tests.hosts import page
from tests.hosts.image_folder import write_boxes, write_images
from tests.hosts.laws import CLASSES, batch_bytes, holds_to, images

os.environ["YOLO_CONFIG_DIR"] = tempfile.mkdtemp()  # where it would write settings of its own
os.environ["YOLO_OFFLINE"] = "true"
ultralytics = pytest.importorskip("ultralytics", reason="ultralytics is not installed: make test-hosts")
LINES = page.block("ultralytics.md")
BACKBONE = "backbone: [[-1, 1, Conv, [8, 3, 2]], [-1, 1, Conv, [16, 3, 2]], [-1, 1, C2f, [16]]]\n"
CLASSIFIER = f"nc: {CLASSES}\n{BACKBONE}head: [[-1, 1, Classify, [nc]]]\n"
DETECTOR = f"nc: {CLASSES}\n{BACKBONE}head: [[-1, 1, Conv, [16, 3, 2]], [[2, 3], 1, Detect, [nc]]]\n"


def settings(folder: Path) -> dict[str, Any]:
    return {
        "device": "cpu",
        "workers": 0,
        "amp": False,
        "plots": False,
        "val": False,
        "save": False,
        "optimizer": "SGD",
        "verbose": False,
        "project": str(folder / "runs"),
    }


def train_by(code: str, budget: int | None, task: str, folder: Path) -> nn.Module:
    written = folder / f"tiny-{task}.yaml"
    written.write_text(DETECTOR if task == "detect" else CLASSIFIER)
    model = ultralytics.YOLO(str(written), task=task)
    data = str(folder / "boxes" / "data.yaml" if task == "detect" else folder / "images")
    page.run(code, budget, model=model, data=data, settings=settings(folder))
    return model.trainer.model


@pytest.mark.parametrize(("task", "share"), [("classify", 0.65), ("detect", 0.8)])
def test_it_trains_inside_the_budget_as_plain_pytorch_does(task: str, share: float, tmp_path: Path) -> None:
    write_images(tmp_path / "images", ("train", "val"))
    write_boxes(tmp_path / "boxes", ("train", "val"))
    (tmp_path / f"tiny-{task}.yaml").write_text(DETECTOR if task == "detect" else CLASSIFIER)
    made = ultralytics.YOLO(str(tmp_path / f"tiny-{task}.yaml"), task=task)
    copies_bytes = 2 * sum(value.nbytes for value in made.model.state_dict().values())
    del made
    beside_bytes = copies_bytes + batch_bytes(images(side=64))  # as the page says
    holds_to(share, lambda budget: train_by(LINES, budget, task, tmp_path), beside_bytes=beside_bytes)
