"""Triton's kernels in Triton's interpreter on the CPU: the tests of every file that runs them, in one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.interpreter import not_interpreted, passes_interpreted, with_triton

HERE = Path(__file__).parent


@pytest.mark.slow
@with_triton
@not_interpreted
def test_every_kernel_passes_in_the_interpreter() -> None:
    files = [path for path in HERE.rglob("test_*_triton.py") if "on_device" in path.read_text()]
    assert len(files) >= 4
    passes_interpreted(*map(str, files))
