"""Machines that are not here, from their data sheets, derated to what training reaches.

A data sheet's rates are ceilings. Planning takes 75 % of the peak float32 rate (large cuDNN convolutions and cuBLAS
products reach 70 to 85 %), 80 % of the memory bandwidth (what large elementwise kernels reach on HBM and GDDR alike)
and 80 % of the link's raw rate each way (packets and flow control take the rest). The links of two papers are taken
as those papers give them. Rates are those of plain float32 with TF32 off. In float16 and bfloat16, as under autocast,
convolutions and products run on tensor cores, of whose dense peak 40 % is taken: large 3-D convolutions reach 30 to
50 %. A machine whose row names no such rate computes halves at the float32 rate.

No data sheet says how long the host takes to launch an op: that depends on the host's processor, not on the card
and of PyTorch. It is taken as 7 µs for all: eager PyTorch's step of ResNet-50, 823 launches, takes 6 ms of a server
core (AMD EPYC) with PyTorch's CUDA build over a driver that computes nothing (`tests/cuda_standin`).

The rates of the four cards that patches are planned for were compared with public pages that quote NVIDIA's:

- rtx-3060-12gb: cores, clock and bandwidth, pcpartdb.com/gpus/view/nvidia-geforce-rtx-3060-12-gb-ga104; the 101
  TFLOP/s of its tensor cores, techtaks.com/geforce-rtx-3060-nvidia-finally-details-the-specifications, are of sparse
  products with float16 sums: a quarter of it is dense with float32 sums.
- rtx-4090-24gb: every rate, waredb.com/processor/nvidia-geforce-rtx-4090.
- a100-40gb, a100-pcie4: every rate, glennklockwood.com/garden/processors/A100, which quotes
  nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf; both forms' bandwidth,
  thundercompute.com/blog/nvidia-a100-specs-full-guide.
- h100-80gb, h100-pcie5: every rate, glennklockwood.com/garden/processors/h100, and
  archive-lib.hpctech.co.jp/gpuproduct/nvidia-h100.html, where rates of tensor cores are sparse: twice the dense ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

from rich.table import Table

from shoal.core.columns import grid
from shoal.core.hardware import Device, Hardware, Link, MeasuredLink
from shoal.core.sizes import format_bytes
from shoal.errors import InputError, brief

_REACHED_FLOPS = 0.75
_REACHED_HALF_FLOPS = 0.40
_REACHED_MEMORY = 0.80
_REACHED_LINK = 0.80
_HOST_LAUNCH_SECONDS = 7e-6
_GIB = 2**30


def names() -> tuple[str, ...]:
    """Every preset's name, as `get` takes them."""
    return tuple(_PRESETS)


def get(name: str, what: str = "hardware") -> Hardware:
    """A machine by name; `what` is the argument that it was given for.

    Raises:
        InputError: there is no such preset; the message names the closest one.

    >>> get("p100-nvlink").link.to_host_bytes_per_second
    34100000000.0
    """
    if name not in _PRESETS:
        close = get_close_matches(str(name).lower(), _PRESETS, n=1, cutoff=0.4)
        hint = f"did you mean {close[0]!r}?" if close else "choose one of those below"
        raise InputError(f"{what}={brief(name)} is not a preset; {hint}", details={"presets": ", ".join(_PRESETS)})
    return _PRESETS[name]


def table(machines: Iterable[Hardware]) -> Table:
    """Machines side by side, for `rich.print`."""
    columns = (
        "name", "device", "memory", "TFLOP/s", "GB/s", "op µs", "launch µs", "to host GB/s", "to device GB/s", "source",
    )  # fmt: skip
    rows = [
        (
            machine.name,
            machine.device.name,
            format_bytes(machine.device.memory_bytes),
            f"{machine.device.flops_per_second / 1e12:.3g}",
            f"{machine.device.bytes_per_second / 1e9:.4g}",
            f"{machine.device.launch_seconds * 1e6:.3g}",
            f"{machine.device.host_launch_seconds * 1e6:.3g}",
            f"{machine.link.to_host_bytes_per_second / 1e9:.3g}",
            f"{machine.link.to_device_bytes_per_second / 1e9:.3g}",
            machine.source,
        )
        for machine in machines
    ]
    return grid("Hardware", columns, rows, left=("name", "device", "source"))


def link_table(links: Iterable[MeasuredLink]) -> Table:
    """The links between this machine's device and its host side by side, for `rich.print`."""
    columns = ("link", "to host GB/s", "to device GB/s", "to host µs", "to device µs", "allocation µs/MiB")
    rows = [
        (
            link.name,
            f"{link.to_host_bytes_per_second / 1e9:.3g}",
            f"{link.to_device_bytes_per_second / 1e9:.3g}",
            f"{link.to_host_latency_seconds * 1e6:.3g}",
            f"{link.to_device_latency_seconds * 1e6:.3g}",
            f"{link.allocation_seconds_per_mib * 1e6:.3g}",
        )
        for link in links
    ]
    return grid("Links of this machine", columns, rows, left=("link",))


def _machine(
    name: str,
    device: str,
    memory_gib: int,
    peak_tflops: float,
    tf32_tflops: float,
    half_tflops: float,
    peak_gbps: float,
    launch_us: float,
    link: str,
    link_gbps: float,
    source: str,
    *,
    is_reached: bool = False,
) -> Hardware:
    """A row of the table below; `is_reached` is whether the link's rate is what a paper measured or calculated with."""
    if not is_reached:
        source += f"; {link}, {link_gbps:g} GB/s raw each way"
    source += f"; peak {peak_tflops:g} TFLOP/s float32 and {peak_gbps:g} GB/s, taken at 75 % and 80 %"
    if half_tflops:
        source += f"; tensor cores {tf32_tflops:g} TF32 (not used) and {half_tflops:g} bfloat16, taken at 40 %"
    link_bytes_per_second = link_gbps * (1.0 if is_reached else _REACHED_LINK) * 1e9
    return Hardware(
        name=name,
        device=Device(
            name=device,
            memory_bytes=memory_gib * _GIB,
            flops_per_second=peak_tflops * 1e12 * _REACHED_FLOPS,
            bytes_per_second=peak_gbps * 1e9 * _REACHED_MEMORY,
            launch_seconds=launch_us * 1e-6,
            half_flops_per_second=half_tflops * 1e12 * _REACHED_HALF_FLOPS,
            host_launch_seconds=_HOST_LAUNCH_SECONDS,
        ),
        link=Link(link, link_bytes_per_second, link_bytes_per_second, latency_seconds=10e-6),
        source=source,
    )


# fmt: off
_MACHINES = (
    # name, device, GiB, TFLOP/s in float32, TF32 and bfloat16, GB/s, µs an op, link and its GB/s each way, source
    _machine("p100-nvlink", "Tesla P100 SXM2 16 GB", 16, 10.6, 0, 0, 732, 6, "NVLink 1.0 to a POWER8 host", 34.1,
             "NVIDIA P100 data sheet; link as measured in the Split-CNN paper, 34.1 GB/s", is_reached=True),
    _machine("titanx-pcie", "GeForce GTX Titan X (Maxwell) 12 GB", 12, 6.6, 0, 0, 336.6, 8, "PCIe 3.0 x16", 6.5,
             "NVIDIA GTX Titan X specification (the paper says only Titan X); link as given in the CPU-offloading "
             "paper", is_reached=True),
    _machine("v100-nvlink2", "Tesla V100 SXM2 16 GB", 16, 15.7, 0, 0, 900, 5, "NVLink 2.0 to a POWER9 host, 3 bricks",
             75, "NVIDIA V100 data sheet; IBM AC922"),
    _machine("a100-pcie4", "A100 PCIe 40 GB", 40, 19.5, 156, 312, 1555, 5, "PCIe 4.0 x16", 31.5,
             "NVIDIA A100 data sheet"),
    _machine("h100-pcie5", "H100 PCIe 80 GB", 80, 51, 378, 756, 2000, 4, "PCIe 5.0 x16", 63,
             "NVIDIA H100 data sheet"),
    _machine("h200", "H200 SXM 141 GB", 139, 67, 494.5, 989.5, 4800, 4, "PCIe 5.0 x16", 63,
             "NVIDIA H200 data sheet"),
    _machine("laptop-rtx4060", "GeForce RTX 4060 Laptop 8 GB", 8, 11.6, 0, 0, 256, 6, "PCIe 4.0 x8", 15.75,
             "NVIDIA RTX 4060 Laptop specification (3072 cores at 1.89 GHz)"),
    _machine("rtx-3060-12gb", "GeForce RTX 3060 12 GB", 12, 12.7, 12.7, 25.5, 360, 6, "PCIe 4.0 x16", 31.5,
             "NVIDIA GeForce RTX 3060 specification (3584 cores at 1.78 GHz, 192 bit, 15 Gbit/s), rates per core as in "
             "NVIDIA's GA102 whitepaper"),
    _machine("rtx-4090-24gb", "GeForce RTX 4090 24 GB", 24, 82.6, 82.6, 165.2, 1008, 5, "PCIe 4.0 x16", 31.5,
             "NVIDIA Ada GPU architecture whitepaper, appendix A"),
    _machine("a100-40gb", "A100 SXM4 40 GB", 40, 19.5, 156, 312, 1555, 5, "PCIe 4.0 x16", 31.5,
             "NVIDIA A100 data sheet (SXM)"),
    _machine("h100-80gb", "H100 SXM5 80 GB", 80, 66.9, 494.7, 989.4, 3350, 4, "PCIe 5.0 x16", 63,
             "NVIDIA H100 architecture whitepaper (SXM5)"),
)
# fmt: on
_PRESETS = {machine.name: machine for machine in _MACHINES}
