"""Machines that are not here."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console

from shoal.core import presets
from shoal.core.hardware import MeasuredLink
from shoal.errors import InputError
from tests.raising import raising


@pytest.mark.parametrize("name", presets.names())
def test_every_preset_is_complete_and_derated(name):
    machine = presets.get(name)
    device, link = machine.device, machine.link
    assert machine.name == name
    assert 8 * 2**30 <= device.memory_bytes <= 192 * 2**30
    assert 1e12 < device.flops_per_second < 1e14
    assert 1e11 < device.bytes_per_second < 1e13
    assert 1e-6 <= device.launch_seconds <= 1e-4
    # Links are slower than memory: else offloading would need no plan.
    assert 5e9 < link.to_host_bytes_per_second < device.bytes_per_second
    assert 5e9 < link.to_device_bytes_per_second < device.bytes_per_second
    assert link.latency_seconds > 0
    assert "NVIDIA" in machine.source
    assert device.half_flops_per_second == 0 or device.half_flops_per_second > device.flops_per_second


@pytest.mark.parametrize(
    ("name", "gib"), [("rtx-3060-12gb", 12), ("rtx-4090-24gb", 24), ("a100-40gb", 40), ("h100-80gb", 80)]
)
def test_a_name_that_tells_the_memory_tells_the_truth(name: str, gib: int) -> None:
    assert presets.get(name).device.memory_bytes == gib * 2**30


def test_the_papers_links_are_as_the_papers_give_them():
    assert presets.get("p100-nvlink").link.to_host_bytes_per_second == pytest.approx(34.1e9)
    assert presets.get("titanx-pcie").link.to_device_bytes_per_second == pytest.approx(6.5e9)


@pytest.mark.parametrize(("typo", "hint"), [("p100", "p100-nvlink"), ("A100-PCIE4", "a100-pcie4"), ("h20", "h200")])
def test_an_unknown_name_gets_the_closest_one(typo, hint):
    with raising(InputError, f"'{hint}'"):
        presets.get(typo)


def test_a_name_like_no_other_gets_the_list():
    with raising(InputError, "p100-nvlink", "h200"):
        presets.get("???")


def test_the_table_names_every_machine_and_its_memory():
    console = Console(width=250, file=StringIO())
    with console.capture() as printed:
        console.print(presets.table(presets.get(name) for name in presets.names()))
    text = printed.get()
    for name in presets.names():
        assert name in text
    assert "16.00 GiB" in text


def test_the_table_of_links_tells_both_ways_apart() -> None:
    console = Console(width=200, file=StringIO())
    with console.capture() as printed:
        console.print(presets.link_table([MeasuredLink("file in /a[b]", 2e9, 3e9, 4e-6, 5e-6, 6e-6)]))
    row = next(line for line in printed.get().splitlines() if "file in /a[b]" in line)
    assert [cell.strip() for cell in row.split("│")[2:-1]] == ["2", "3", "4", "5", "6"]
