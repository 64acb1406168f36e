"""Where Triton kernels run: nowhere without Triton, and said in one line where they fail."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from shoal.codecs import launch
from shoal.errors import CodecError, InputError
from shoal.kernels.norm.norm_sweeps_triton import TRITON_KERNELS
from shoal.lowlevel import triton_launch
from shoal.lowlevel.triton_launch import Launch, Launches, TritonKernels
from tests.raising import raising

CUDA = torch.device("cuda", 0)
each_module = pytest.mark.parametrize("kernels", [launch.KERNELS, TRITON_KERNELS], ids=["codecs", "norm"])


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
    with raising(kernels.error, kernels.instead):
        kernels.found()


def test_each_raises_the_error_of_its_own_callers() -> None:
    assert (launch.KERNELS.error, TRITON_KERNELS.error) == (CodecError, InputError)


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


@dataclass
class Compiled:
    """What Triton gives back: a kernel that is launched without a look at its arguments."""

    quick: list[tuple[Any, ...]]
    packed_metadata: tuple[int, ...] = ()

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        assert len(grid) == 3
        return lambda *args: self.quick.append(args)


@dataclass
class Kernel:
    """A kernel that notes how it was launched."""

    slow: list[tuple[Any, ...]] = field(default_factory=list)
    quick: list[tuple[Any, ...]] = field(default_factory=list)

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any) -> Compiled:
            self.slow.append(args)
            return Compiled(self.quick)

        return launch


@dataclass(frozen=True)
class There:
    """A tensor on a GPU, as far as a launch asks."""

    address: int
    is_cuda: bool = True

    def data_ptr(self) -> int:
        return self.address


def launched(launches: Launches, kernel: Kernel, key: str, *tensors: Any) -> None:
    launches.run(key, tensors, lambda: Launch(kernel, (2,), lambda *given: (*given, 7)))


def test_a_launch_that_is_repeated_is_found_by_its_key_with_the_tensors_of_now() -> None:
    launches, kernel = Launches(), Kernel()
    first, second = There(1 << 20), There(1 << 21)
    launched(launches, kernel, "one", first, None)
    launched(launches, kernel, "one", second, None)
    launched(launches, kernel, "another", second, None)
    assert kernel.slow == [(first, None, 7), (second, None, 7)]
    assert kernel.quick == [(second, None, 7)]


@pytest.mark.parametrize("odd", [0, 1])
def test_tensors_that_begin_elsewhere_than_at_16_bytes_are_looked_at_by_triton(odd: int) -> None:
    launches, kernel = Launches(), Kernel()
    even, shifted = There(1 << 20), There((1 << 20) + 4)
    launched(launches, kernel, "one", shifted)
    assert kernel.quick == []
    launched(launches, kernel, "one", even)
    launched(launches, kernel, "one", *(even, shifted)[odd : odd + 1])
    assert len(kernel.quick) == 1 - odd
    assert len(kernel.slow) == 2 + odd


def test_nothing_is_kept_of_launches_that_no_gpu_ran() -> None:
    launches, kernel = Launches(), Kernel()
    for _ in range(2):
        launched(launches, kernel, "one", There(0, is_cuda=False))
    assert len(kernel.slow) == 2


def test_sizes_that_vary_without_end_take_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_launch, "_MAX_KNOWN", 3)
    launches, kernel = Launches(), Kernel()
    for number in range(10):
        launched(launches, kernel, str(number), There(0))
        assert len(launches._known) <= 3
