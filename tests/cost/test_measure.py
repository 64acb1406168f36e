"""The machine at hand."""

from __future__ import annotations

import json
import math
from dataclasses import asdict

import pytest
import torch

from shoal.cost import measure as module
from shoal.cost.measure import measure
from shoal.errors import InputError
from shoal.memory.limit import memory_limit
from tests.made_up_machine import HERE
from tests.raising import raising

pytestmark = pytest.mark.usefixtures("real_machine")


@pytest.fixture(autouse=True)
def quick(tmp_path, monkeypatch):
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path))
    monkeypatch.setattr(module, "_ENOUGH_SECONDS", 0.0)
    monkeypatch.setattr(module, "_MIN_RUNS", 1)
    return tmp_path


def test_the_rates_are_possible_and_the_second_time_comes_from_disk(quick, monkeypatch):
    torch.manual_seed(3)
    state = torch.get_rng_state()
    machine = measure("cpu")
    assert torch.equal(torch.get_rng_state(), state)

    device, link = machine.device, machine.link
    assert 1e8 < device.flops_per_second < 1e15
    assert 1e7 < device.bytes_per_second < 1e14
    assert 0 < device.launch_seconds < 1e-2
    assert 2**28 < device.memory_bytes < 2**50
    assert 1e7 < link.to_host_bytes_per_second < 1e14
    assert 1e7 < link.to_device_bytes_per_second < 1e14
    assert torch.__version__ in machine.source

    monkeypatch.setattr(module, "_measure", lambda device: pytest.fail("measured again"))
    assert measure("cpu") == machine


@pytest.mark.parametrize("wrong", ["half a machine", 0, -1.0, math.nan, math.inf, 1e300, True, None, [1], {}, 10**400])
def test_a_cache_file_of_another_form_is_measured_again(quick, wrong, monkeypatch):
    monkeypatch.setattr(module, "_measure", lambda device: HERE)
    known = measure("cpu")
    (file,) = (quick / "rates").iterdir()
    content = json.loads(file.read_text())
    for damaged in (
        wrong,
        {"name": wrong},
        asdict(known) | {"device": asdict(known.device) | {"flops_per_second": wrong}},
    ):
        content["entries"]["hardware"] = damaged
        file.write_text(json.dumps(content))
        assert measure("cpu") == known == HERE
        assert json.loads(file.read_text())["entries"]["hardware"] == asdict(HERE)


def test_it_can_leave_no_trace(quick):
    measure("cpu", cache=False)
    assert list(quick.iterdir()) == []


@pytest.mark.parametrize("device", ["tpu", "meta", "cuda:x"])
def test_an_impossible_device_is_refused(device):
    with raising(InputError, "'cpu'"):
        measure(device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_missing_gpu_points_to_the_presets():
    with raising(InputError, "a100-pcie4"):
        measure("cuda")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_outruns_its_link():
    machine = measure("cuda")
    assert machine.device.bytes_per_second > machine.link.to_host_bytes_per_second


def test_it_is_no_part_of_a_step_that_is_bounded_or_counted():
    with memory_limit("1MiB") as limit:
        measure("cpu")  # streams through 64 MiB
        assert limit.peak_bytes < 1 << 20
