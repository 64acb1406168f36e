"""What is run where Shoal is installed and no compiler is found: a step inside a budget, and a plan.

`make wheel` gives no argument: the wheel's native kernels are there. With `source`, what `.ci/slow install` built
without a compiler has none.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import torch
from torch import nn

import shoal
from shoal.lowlevel import native

BUDGET_BYTES = 900 * 2**10

assert not any(map(shutil.which, ("cc", "c++", "g++", "gcc", "clang++"))), "there is a compiler on PATH"
library = native.library()
if sys.argv[1:] == ["source"]:
    assert library is None, library
else:
    assert library is not None, "the wheel's native library does not load"
    assert Path(library._name).parent == Path(shoal.__file__).parent, library._name
    assert "portable" in native.levels(), native.levels()


def network() -> nn.Module:
    layers = [layer for n in (3, 8, 8, 8) for layer in (nn.Conv2d(n, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())]
    return nn.Sequential(*layers)


model = shoal.compile(network(), budget=BUDGET_BYTES, allow="bitwise")
for _ in range(3):  # the loop's own memory is known after the first step, and may change the plan
    model(torch.randn(4, 3, 32, 32)).square().mean().backward()
peak_bytes = model.shoal.measured_peak_bytes
assert peak_bytes is not None and peak_bytes <= BUDGET_BYTES, model.shoal

images = torch.empty(4, 3, 32, 32)
plain_bytes = shoal.plan(network(), images).plain_peak_bytes
assert shoal.plan(network(), images, int(0.8 * plain_bytes)).predicted_peak_bytes <= 0.8 * plain_bytes

codec = shoal.codecs.get("dynamic_tree")
numbers = torch.randn(10_000)
assert torch.allclose(codec.decode(codec.encode(numbers)), numbers, atol=0.05)
print(model.shoal)
