"""Triton's kernels in tests: on CUDA where there is one, else in Triton's interpreter on the CPU.

The interpreter is chosen before Triton is imported, so one test runs all of them in a process of its own. That
process compiles nothing: what the interpreter puts in place of the language, else again for each launch and each call
within one, stays there.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from typing import Any

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
on_device = pytest.mark.parametrize("device", [pytest.param(DEVICE, marks=() if INTERPRETED else pytest.mark.gpu)])
with_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
not_interpreted = pytest.mark.skipif(INTERPRETED, reason="of no use in the interpreter's process")
LAYOUTS = {
    "channels_last": torch.channels_last,
    "channels_last_3d": torch.channels_last_3d,
    "contiguous": torch.contiguous_format,
}
# (shape, layout, channels left out in addition to it). No count fits a tile; one image; one channel; more channels than
# a program has; a line, a volume, no pixels at all.
SHAPES = [
    ((3, 37, 9, 7), "channels_last", 0),
    ((3, 37, 9, 7), "channels_last", 3),
    ((3, 37, 9, 7), "contiguous", 3),
    ((2, 20, 13, 11), "contiguous", 0),
    ((1, 5, 3, 3), "channels_last", 0),
    ((1, 1, 1, 1), "contiguous", 0),
    ((2, 1, 5, 6), "contiguous", 2),
    ((4, 70, 2, 2), "channels_last", 0),
    ((70, 3), "contiguous", 1),
    ((3, 6, 50), "contiguous", 0),
    ((2, 3, 3, 4, 5), "contiguous", 0),
    ((2, 3, 3, 4, 5), "channels_last_3d", 1),
]
each_shape = pytest.mark.parametrize(("shape", "layout", "gap"), SHAPES, ids=lambda value: str(value))
# Where each of them meets every option: in the interpreter, which takes a tenth of a second a case, one of each kind.
each_kind_of_shape = pytest.mark.parametrize(
    ("shape", "layout", "gap"), SHAPES[1::4] + SHAPES[-1:] if INTERPRETED else SHAPES, ids=lambda value: str(value)
)


def _patch_the_language_once() -> None:
    from triton.runtime import interpreter

    patch, patched = interpreter._patch_lang, set()

    def once(kernel: Any) -> Any:
        if kernel.__module__ not in patched:
            patched.add(kernel.__module__)
            patch(kernel)
        return interpreter._LangPatchScope()  # has nothing to restore

    interpreter._patch_lang = once


if INTERPRETED:
    _patch_the_language_once()


def drawn(
    shape: tuple[int, ...], layout: str, seed: int, device: str, gap: int = 0, offset: float = 0.0
) -> torch.Tensor:
    """Float32 in the layout, a slice of the channels of a tensor that has `gap` more."""
    wide = (shape[0], shape[1] + gap, *shape[2:])
    x = torch.randn(wide, generator=torch.Generator().manual_seed(seed)) + offset
    return x.contiguous(memory_format=LAYOUTS[layout])[:, gap // 2 : gap // 2 + shape[1]].to(device)


def passes_interpreted(*files: str) -> None:
    """Run the tests of files in Triton's interpreter."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", *files]
    where = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, capture_output=True, text=True, env=where, timeout=850)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    assert " passed" in done.stdout
