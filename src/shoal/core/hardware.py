"""What a step runs on, as plain data: a device, its link to the host, and the rates a plan needs.

`measure()` (in `shoal.cost.measure`) fills these in for this machine; the presets describe machines that are not
here.
"""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Real
from typing import Any

from shoal.errors import InputError, brief

MAX_SECONDS = 1e9  # thirty years: anything longer is a mistake
_MIN_RATE, _MAX_RATE = 1e-3, 1e24  # per second


@dataclass(frozen=True)
class Device:
    """A processor with memory of its own. InputError where a rate is not positive or a time is negative.

    Attributes:
        name: for tables.
        memory_bytes: what it has in all.
        flops_per_second: what a large float32 convolution or matrix product reaches.
        bytes_per_second: what a large elementwise op reaches, counting bytes read and written.
        launch_seconds: the least time an op takes on the device.
        half_flops_per_second: what a large convolution or matrix product in float16 or bfloat16 reaches; 0 where that
            is not known: then as in float32.
        host_launch_seconds: what the host takes to launch an op, while the device may run earlier ones; 0 where ops run
            on the host itself.
    """

    name: str
    memory_bytes: int
    flops_per_second: float
    bytes_per_second: float
    launch_seconds: float
    half_flops_per_second: float = 0.0
    host_launch_seconds: float = 0.0

    def __post_init__(self) -> None:
        _check_rates(self, "flops_per_second", "bytes_per_second")
        _check_range(self, 0, _MAX_RATE, "half_flops_per_second")
        _check_range(self, 0, MAX_SECONDS, "launch_seconds", "host_launch_seconds")
        _check_range(self, 0, 2**63 - 1, "memory_bytes")


@dataclass(frozen=True)
class Link:
    """The way between device and host. InputError where a rate is not positive or a time is negative.

    Attributes:
        name: for tables.
        to_host_bytes_per_second, to_device_bytes_per_second: each way, both ways may run at once.
        latency_seconds: before the first byte arrives.
        host_bytes: most bytes that may wait on the host at once; 0 for no limit.
        overlaps: whether copies run while the device computes. False: the device waits for each as soon as it begins.
    """

    name: str
    to_host_bytes_per_second: float
    to_device_bytes_per_second: float
    latency_seconds: float
    host_bytes: int = 0
    overlaps: bool = True

    def __post_init__(self) -> None:
        _check_rates(self, "to_host_bytes_per_second", "to_device_bytes_per_second")
        _check_range(self, 0, MAX_SECONDS, "latency_seconds")
        _check_range(self, 0, 2**63 - 1, "host_bytes")

    def to_host_seconds(self, nbytes: int) -> float:
        """How long a copy of `nbytes` from the device to the host takes."""
        return self.latency_seconds + nbytes / self.to_host_bytes_per_second

    def to_device_seconds(self, nbytes: int) -> float:
        """How long a copy of `nbytes` from the host to the device takes."""
        return self.latency_seconds + nbytes / self.to_device_bytes_per_second


@dataclass(frozen=True)
class Hardware:
    """A device and the link to its host. `source` says where the rates come from."""

    name: str
    device: Device
    link: Link
    source: str


@dataclass(frozen=True)
class MeasuredLink:
    """One way between device and host as `shoal.cost.measure_links` measured it on this machine.

    Attributes:
        name: for tables.
        to_host_bytes_per_second, to_device_bytes_per_second: of a large copy, one way at a time.
        to_host_latency_seconds, to_device_latency_seconds: of the smallest copy.
        allocation_seconds_per_mib: what a MiB of fresh host bytes costs before the first copy.
    """

    name: str
    to_host_bytes_per_second: float
    to_device_bytes_per_second: float
    to_host_latency_seconds: float
    to_device_latency_seconds: float
    allocation_seconds_per_mib: float

    def __post_init__(self) -> None:
        _check_rates(self, "to_host_bytes_per_second", "to_device_bytes_per_second")
        latencies = ("to_host_latency_seconds", "to_device_latency_seconds")
        _check_range(self, 0, MAX_SECONDS, *latencies, "allocation_seconds_per_mib")

    def link(self, host_bytes: int = 0) -> Link:
        """The same as plans take it, with the longer latency for both ways."""
        latency_seconds = max(self.to_host_latency_seconds, self.to_device_latency_seconds)
        rates = (self.to_host_bytes_per_second, self.to_device_bytes_per_second)
        return Link(self.name, *rates, latency_seconds, host_bytes)


def _check_rates(machine: Any, *names: str) -> None:
    _check_range(machine, _MIN_RATE, _MAX_RATE, *names)


def _check_range(machine: Any, least: float, most: float, *names: str) -> None:
    for name in names:
        value: Any = getattr(machine, name)
        is_number = isinstance(value, Real) and not isinstance(value, bool)
        if not is_number or not least <= value <= most:
            raise InputError(
                f"{type(machine).__name__} {brief(machine.name)} has {name}={brief(value)}; "
                f"expected a number from {least:g} to {most:g}"
            )
