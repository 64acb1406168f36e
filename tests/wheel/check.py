"""What `make wheel` runs in a fresh environment: the native kernels, and a step inside a budget."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from torch import nn

import shoal
from shoal.lowlevel import native

assert not any(map(shutil.which, ("cc", "c++", "g++", "gcc", "clang++"))), "there is a compiler on PATH"
library = native.library()
assert library is not None, "the wheel's native library does not load"
assert Path(library._name).parent == Path(shoal.__file__).parent, library._name
assert "portable" in native.levels(), native.levels()

layers = [layer for n in (3, 8, 8, 8) for layer in (nn.Conv2d(n, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())]
model = shoal.compile(nn.Sequential(*layers), budget="900KiB", allow="bitwise")
model(torch.randn(4, 3, 32, 32)).square().mean().backward()
assert model.shoal.measured_peak_bytes <= 900 * 2**10, model.shoal
codec = shoal.codecs.get("dynamic_tree")
numbers = torch.randn(10_000)
assert torch.allclose(codec.decode(codec.encode(numbers)), numbers, atol=0.05)
print(model.shoal)
