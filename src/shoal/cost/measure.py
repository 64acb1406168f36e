"""The rates of this machine, measured in a few seconds and cached on disk."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import psutil
import torch

from shoal.core.hardware import Device, Hardware, Link
from shoal.core.records import read_record
from shoal.cost import measurement_cache
from shoal.cost.device_clock import DeviceClock, DeviceTime
from shoal.errors import InputError
from shoal.lowlevel.cuda_calls import l2_bytes, total_bytes
from shoal.lowlevel.torch_internals import isolated
from shoal.memory.limit import no_memory_limit

_MIB = 2**20
_MIN_RUNS = 3
_MAX_RUNS = 1000
_ENOUGH_SECONDS = 0.3  # of runs of one measurement


def measure(device: str | torch.device = "cpu", *, cache: bool = True) -> Hardware:
    """Measure this machine.

    - `flops_per_second`: the better of a 3x3 convolution and a matrix product, both float32 under the present
      settings (on CUDA, PyTorch lets convolutions use TF32 unless told otherwise).
    - `bytes_per_second`: `relu` of 64 MiB, its result allocated each time, as in a training step; on CUDA of twice the
      L2 cache.
    - `launch_seconds`: `relu` of one element, many in a row; on CUDA what it takes on the device, and
      `host_launch_seconds` what it takes the host to launch it (`shoal.cost.device_clock`).
    - `memory_bytes`: of the GPU, or of the host; on the CPU the limit of the container, if lower.
    - link: copies between device memory and a pinned host buffer; on the CPU between two buffers, like an offload to
      host memory.

    Args:
        device: "cpu" or "cuda".
        cache: return an earlier measurement under the same settings, and store a new one.

    Raises:
        InputError: the device is not available.
    """
    place = measurement_cache.device_of(device)
    known = measurement_cache.recall("rates", place, ["hardware"]).get("hardware") if cache else None
    if known is not None:
        try:
            hardware = read_record(Hardware, known, "hardware")
        except InputError:
            pass  # an invalid entry is measured again
        else:
            if place.type == "cpu" or hardware.device.host_launch_seconds > 0:  # not so in entries of earlier versions
                return hardware
    with no_memory_limit(), isolated(place):  # takes 300 MB of a GPU's memory at most, for L2 caches up to 64 MiB
        hardware = _measure(place)
    if cache:
        measurement_cache.remember("rates", place, {"hardware": asdict(hardware)})
    return hardware


def _measure(device: torch.device) -> Hardware:
    name = measurement_cache.device_name(device)
    threads = f", {torch.get_num_threads()} threads" if device.type == "cpu" else ""
    launch = _launch(device)
    return Hardware(
        name=f"this machine ({device.type})",
        device=Device(
            name=f"{name}{threads}",
            memory_bytes=_memory_bytes(device),
            flops_per_second=max(_convolution_rate(device), _matmul_rate(device)),
            bytes_per_second=_elementwise_rate(device),
            launch_seconds=launch.kernel_seconds,
            host_launch_seconds=launch.launch_seconds,
        ),
        link=_link(device),
        source=f"measured with torch {torch.__version__}",
    )


def _convolution_rate(device: torch.device) -> float:
    batch, channels, side = (8, 64, 56) if device.type == "cpu" else (32, 256, 28)
    x = torch.randn(batch, channels, side, side, device=device)
    weight = torch.randn(channels, channels, 3, 3, device=device)
    flops = 2 * x.numel() * channels * 9
    return flops / fastest_seconds(lambda: torch.conv2d(x, weight, padding=1), device)


def _matmul_rate(device: torch.device) -> float:
    side = 1024 if device.type == "cpu" else 4096
    a, b = torch.randn(side, side, device=device), torch.randn(side, side, device=device)
    return 2 * side**3 / fastest_seconds(lambda: a @ b, device)


def _elementwise_rate(device: torch.device) -> float:
    nbytes = 64 * _MIB if device.type == "cpu" else max(64 * _MIB, 2 * l2_bytes(device))
    x = torch.randn(nbytes // 4, device=device)
    return 2 * x.nbytes / fastest_seconds(lambda: torch.relu(x), device)


def _launch(device: torch.device) -> DeviceTime:
    x = torch.ones(1, device=device)
    if device.type != "cpu":
        torch.relu(x)
        return DeviceClock(device).time(lambda: torch.relu(x))
    in_a_row = 1000

    def launch() -> None:
        for _ in range(in_a_row):
            torch.relu(x)

    return DeviceTime(fastest_seconds(launch, device) / in_a_row, 0.0)


def _link(device: torch.device) -> Link:
    cuda = device.type == "cuda"
    near = torch.ones(64 * _MIB, dtype=torch.uint8, device=device)
    far = torch.ones(near.numel(), dtype=torch.uint8, pin_memory=cuda)
    return Link(
        name="pinned copies" if cuda else "copies to a host slab",
        to_host_bytes_per_second=near.nbytes / fastest_seconds(lambda: far.copy_(near, non_blocking=cuda), device),
        to_device_bytes_per_second=near.nbytes / fastest_seconds(lambda: near.copy_(far, non_blocking=cuda), device),
        latency_seconds=fastest_seconds(lambda: far[:1].copy_(near[:1], non_blocking=cuda), device),
    )


def _memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return total_bytes(device)
    installed = int(psutil.virtual_memory().total)
    try:
        allowed = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        allowed = "max"
    return min(installed, int(allowed)) if allowed.isdigit() else installed


def fastest_seconds(run: Callable[[], object], device: torch.device) -> float:
    """The time of the fastest run, after one warm-up run; it synchronizes with `device`."""
    times: list[float] = []
    run()
    _wait(device)
    while len(times) < _MIN_RUNS or (sum(times) < _ENOUGH_SECONDS and len(times) < _MAX_RUNS):
        start = time.perf_counter()
        run()
        _wait(device)
        times.append(time.perf_counter() - start)
    return min(times)  # other load only adds time


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
