"""Where saved storages may wait: what a caller asks for, read once and refused in his words."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.core import presets
from shoal.core.hardware import Link
from shoal.errors import InputError
from shoal.offload.policy import Offloading, offloading, rehearsed
from tests.raising import raising

PACE = Link("pace", 1e9, 1e9, 0.0)


@pytest.mark.parametrize(
    ("device_type", "pace", "where"),
    [("cuda", None, "host"), ("cpu", None, None), ("cpu", PACE, "host")],
)
def test_auto_is_the_host_where_the_device_has_memory_of_its_own(
    device_type: str, pace: Link | None, where: str | None
) -> None:
    found = offloading("auto", None, device_type=device_type, pace=pace)
    assert (found.where if found else None) == where


def test_none_is_nothing_and_a_budget_for_nothing_is_a_mistake() -> None:
    assert offloading(None, None, device_type="cuda") is None
    with raising(InputError, "offload_to="):
        offloading(None, "1GiB", device_type="cuda")
    with pytest.raises(InputError):
        offloading("auto", "1GiB", device_type="cpu")


def test_the_host_is_no_folder_and_a_folder_is_one(tmp_path: Path) -> None:
    assert offloading("host", "1GiB", device_type="cpu") == Offloading("host", 2**30)
    there = offloading(tmp_path, 4096, device_type="cpu")
    assert there == Offloading(str(tmp_path), 4096)
    assert there.folder == str(tmp_path)
    assert Offloading("host", 1).folder is None


def test_without_a_budget_there_is_still_a_limit(tmp_path: Path) -> None:
    for where in ("host", tmp_path):
        found = offloading(where, None, device_type="cpu")
        assert found is not None and 0 < found.host_bytes < 1 << 60


def test_a_folder_that_is_not_there_and_a_budget_that_is_no_size_are_named(tmp_path: Path) -> None:
    for where in (tmp_path / "gone", "", "x" * 300):
        with raising(InputError, "'host'"):
            offloading(where, None, device_type="cpu")
    with raising(InputError, "host_budget='much'"):
        offloading("host", "much", device_type="cpu")


@given(st.floats(1e9, 1e15))
def test_a_rehearsed_link_keeps_the_ratio_of_bytes_to_operations(flops_per_second: float) -> None:
    target = presets.get("p100-nvlink")
    here = replace(target, device=replace(target.device, flops_per_second=flops_per_second))
    link = rehearsed(target, here)
    there, back = link.to_host_bytes_per_second, link.to_device_bytes_per_second
    assert there / flops_per_second == pytest.approx(
        target.link.to_host_bytes_per_second / target.device.flops_per_second
    )
    assert back / there == pytest.approx(target.link.to_device_bytes_per_second / target.link.to_host_bytes_per_second)
    assert link.latency_seconds * flops_per_second == pytest.approx(
        target.link.latency_seconds * target.device.flops_per_second
    )
