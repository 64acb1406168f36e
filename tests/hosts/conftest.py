"""What the hosts' tests run under: torchvision in addition to a PyTorch without CUDA, and no network."""

from __future__ import annotations

import os

import torch

# PyPI's torchvision is built for CUDA, so that its own kernels do not load here; to be imported it needs the schemas of
# two of them. No test calls one.
_TORCHVISION = torch.library.Library("torchvision", "FRAGMENT")
_TORCHVISION.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
_TORCHVISION.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
