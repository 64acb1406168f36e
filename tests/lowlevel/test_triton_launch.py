"""Where Triton kernels run: nowhere without Triton, and said in one line where they fail."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Iterator

import pytest
import torch

from shoal.codecs import launch
from shoal.errors import CodecError, InputError
from shoal.kernels.norm import norm_sweeps
from shoal.lowlevel import triton_launch
from shoal.lowlevel.triton_launch import TritonKernels

CUDA = torch.device("cuda", 0)
each_module = pytest.mark.parametrize("kernels", [launch.KERNELS, norm_sweeps.TRITON_KERNELS], ids=["codecs", "norm"])


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """What was imported and tried before and after a test is asked again."""
    for cached in (triton_launch._imported, triton_launch._run_on):
        cached.cache_clear()
    yield
    for cached in (triton_launch._imported, triton_launch._run_on):
        cached.cache_clear()


@each_module
def test_without_triton_there_are_none(monkeypatch: pytest.MonkeyPatch, kernels: TritonKernels) -> None:
    monkeypatch.setitem(sys.modules, kernels.module, None)  # importing it raises ImportError
    assert kernels.here() is None and not kernels.run_on(CUDA)
    with pytest.raises(kernels.error, match=f"Triton is not installed; install triton, or use {kernels.instead}"):
        kernels.found()


def test_each_raises_the_error_of_its_own_callers() -> None:
    assert (launch.KERNELS.error, norm_sweeps.TRITON_KERNELS.error) == (CodecError, InputError)


def test_on_the_cpu_they_run_in_the_interpreter_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_launch, "_INTERPRETED", False)
    assert not launch.KERNELS.run_on(torch.device("cpu"))
    assert not launch.KERNELS.run_on(torch.device("meta"))


def test_a_device_where_the_trial_fails_is_left_to_others_with_one_warning() -> None:
    trials = []

    def fail(device: torch.device) -> None:
        trials.append(device)
        raise RuntimeError("no C compiler\nand much more")

    kernels = TritonKernels("math", "slower ones", InputError, fail)
    with pytest.warns(UserWarning, match=r"not run on cuda:0 \(no C compiler\); SHOAL_KERNELS=native spares"):
        assert not kernels.run_on(CUDA)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not kernels.run_on(CUDA) and trials == [CUDA]


def test_a_device_is_tried_once() -> None:
    trials: list[torch.device] = []
    kernels = TritonKernels("math", "slower ones", InputError, trials.append)
    assert kernels.run_on(CUDA) and kernels.run_on(CUDA) and trials == [CUDA]


def test_importing_shoal_imports_no_kernel() -> None:
    program = """
import sys, shoal.codecs.table_codes, shoal.kernels.norm.norm_act
import shoal.kernels.invertible_norm.inverted_batch_norm_sweeps
assert not [name for name in sys.modules if name.startswith("shoal.") and "kernels" in name and "triton" in name]
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
