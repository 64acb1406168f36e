"""What a step runs on, as plain data: a device, its link to the host, and the rates a plan needs.

`measure()` (in `shoal.measure`) fills these in for the machine at hand; the presets describe machines that are not
here.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Device:
    """A processor with memory of its own.

    Attributes:
        name: for tables.
        memory_bytes: what it has in all.
        flops_per_second: what a large float32 convolution or matrix product reaches.
        bytes_per_second: what a large elementwise op reaches, counting bytes read and written.
        launch_seconds: the least time an op takes.
    """

    name: str
    memory_bytes: int
    flops_per_second: float
    bytes_per_second: float
    launch_seconds: float


@dataclass(frozen=True)
class Link:
    """The way between device and host.

    Attributes:
        name: for tables.
        to_host_bytes_per_second, to_device_bytes_per_second: each way, both ways may run at once.
        latency_seconds: before the first byte arrives.
        host_bytes: most bytes that may wait on the host at once; 0 for no limit.
        overlaps: whether copies run beside the computation. False: the device waits for each as soon as it begins.
    """

    name: str
    to_host_bytes_per_second: float
    to_device_bytes_per_second: float
    latency_seconds: float
    host_bytes: int = 0
    overlaps: bool = True

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
    """One way between device and host as `shoal.measure_links` found it on the machine at hand.

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

    def link(self, host_bytes: int = 0) -> Link:
        """The same as plans take it, with the longer latency for both ways."""
        latency_seconds = max(self.to_host_latency_seconds, self.to_device_latency_seconds)
        rates = (self.to_host_bytes_per_second, self.to_device_bytes_per_second)
        return Link(self.name, *rates, latency_seconds, host_bytes)
