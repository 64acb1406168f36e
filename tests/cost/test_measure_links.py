"""The links of the machine at hand, and files through which they lead."""

from __future__ import annotations

import errno
import json
import math
import os
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from shoal.core.hardware import MeasuredLink
from shoal.core.sizes import HOST_PAGE_BYTES
from shoal.cost import measure
from shoal.cost import measure_links as module
from shoal.cost.measure_links import FILE_BYTES, measure_links
from shoal.errors import InputError
from shoal.offload.links import file as file_module
from tests.raising import raising

pytestmark = pytest.mark.usefixtures("real_machine")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    cache = tmp_path / "cache"
    monkeypatch.setenv("SHOAL_CACHE", str(cache))
    monkeypatch.setattr(measure, "_ENOUGH_SECONDS", 0.0)
    monkeypatch.setattr(measure, "_MIN_RUNS", 1)
    monkeypatch.setattr(module, "_MIN_SECONDS", 0.0)
    return cache


def possible(link: MeasuredLink) -> bool:
    return (
        1e5 < link.to_host_bytes_per_second < 1e13
        and 1e5 < link.to_device_bytes_per_second < 1e13
        and 0 < link.to_host_latency_seconds < 10
        and 0 < link.to_device_latency_seconds < 10
        and 0 < link.allocation_seconds_per_mib < 1
    )


def never(*arguments: object) -> None:
    pytest.fail("measured again")


def test_the_cpu_has_a_slab_and_a_file_and_the_second_time_comes_from_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    links = measure_links("cpu", folder=tmp_path)
    assert [link.name.split(",")[0] for link in links] == ["host slab", f"file in {tmp_path}"]
    assert all(map(possible, links))
    monkeypatch.setattr(module, "_slab_copies", never)
    monkeypatch.setattr(module, "file_link", never)
    assert measure_links("cpu", folder=tmp_path) == links


def test_each_folder_is_measured_for_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slab, one = measure_links("cpu", folder=tmp_path)
    monkeypatch.setattr(module, "_slab_copies", never)
    (tmp_path / "other").mkdir()
    slab_again, other = measure_links("cpu", folder=tmp_path / "other")
    assert slab_again == slab
    assert "other" in other.name and "other" not in one.name
    assert measure_links("cpu", folder=tmp_path)[1] == one


def test_the_name_says_how_the_file_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for flag, said in ((os.O_DIRECT, "direct I/O"), (0, "page cache")):
        monkeypatch.setattr(file_module, "_DIRECT", flag)
        link = measure_links("cpu", folder=tmp_path, cache=False)[1]
        assert link.name in (f"file in {tmp_path}, {said}", f"file in {tmp_path}, page cache")  # not all disks can


@pytest.mark.parametrize("wrong", ["half a link", 0, -1.0, math.nan, math.inf, 1e300, True, None, [1], {}])
def test_a_cache_file_of_another_form_is_measured_again(
    tmp_path: Path, cache: Path, wrong: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_slab_copies", lambda: MeasuredLink("host slab", 2e9, 1e9, 1e-4, 2e-4, 1e-6))
    monkeypatch.setattr(module, "file_link", lambda folder: MeasuredLink("file", 2e9, 1e9, 1e-4, 2e-4, 1e-6))
    whole = asdict(measure_links("cpu", folder=tmp_path)[0])
    (file,) = (cache / "links").iterdir()
    for damaged in (
        wrong,
        [wrong],
        [],
        [{"name": wrong}],
        [whole | {"to_host_latency_seconds": wrong}],
        [whole, wrong],
    ):
        content = json.loads(file.read_text())
        content["entries"] = dict.fromkeys(content["entries"], damaged)
        file.write_text(json.dumps(content))
        links = measure_links("cpu", folder=tmp_path)
        assert len(links) == 2 and (all(map(possible, links)) or wrong == 0 == links[0].to_host_latency_seconds)


def test_it_can_leave_no_trace(tmp_path: Path, cache: Path) -> None:
    state = torch.get_rng_state()
    measure_links("cpu", folder=tmp_path, cache=False)
    assert not (cache / "links").exists()
    assert [path.name for path in tmp_path.iterdir() if path != cache] == []
    assert torch.equal(torch.get_rng_state(), state)


def test_a_bad_folder_or_device_is_told(tmp_path: Path) -> None:
    with raising(InputError, "folder='", "nowhere'"):
        measure_links("cpu", folder=str(tmp_path / "nowhere"))
    with raising(InputError, "'cpu'"):
        measure_links("meta")


def test_a_link_for_plans_has_the_longer_latency() -> None:
    link = MeasuredLink("slow", 3e9, 2e9, 1e-5, 4e-5, 1e-6).link(host_bytes=10**9)
    assert (link.to_host_bytes_per_second, link.to_device_bytes_per_second) == (3e9, 2e9)
    assert link.latency_seconds == 4e-5
    assert link.host_bytes == 10**9


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_has_pinned_and_pageable_memory() -> None:
    pinned, pageable = measure_links("cuda")
    assert (pinned.name, pageable.name) == ("pinned memory", "pageable memory")
    assert possible(pinned) and possible(pageable)
    assert measure_links("cuda") == (pinned, pageable)


@pytest.mark.parametrize("direct", [True, False])
def test_the_rates_are_possible_and_no_file_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direct: bool
) -> None:
    if not direct:
        monkeypatch.setattr(file_module, "_DIRECT", 0)
    before = set(os.listdir("/proc/self/fd"))
    link = module.file_link(tmp_path)
    assert possible(link)
    assert direct or link.name.endswith("page cache")
    assert list(tmp_path.iterdir()) == []
    assert set(os.listdir("/proc/self/fd")) == before


def test_all_of_the_file_is_written_and_read_in_whole_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[tuple[int, int]] = []
    read: list[tuple[int, int]] = []
    pwritev, preadv = os.pwritev, os.preadv

    def write(descriptor: int, pieces: list[memoryview], offset: int) -> int:
        written.append((offset, len(pieces[0])))
        return pwritev(descriptor, pieces, offset)

    def fill(descriptor: int, pieces: list[memoryview], offset: int) -> int:
        read.append((offset, len(pieces[0])))
        return preadv(descriptor, pieces, offset)

    monkeypatch.setattr(os, "pwritev", write)
    monkeypatch.setattr(os, "preadv", fill)
    module.file_link(tmp_path)
    for log in (written, read):
        assert all(offset % HOST_PAGE_BYTES == 0 and nbytes % HOST_PAGE_BYTES == 0 for offset, nbytes in log)
        large = [(offset, nbytes) for offset, nbytes in log if nbytes > HOST_PAGE_BYTES]
        assert sum(nbytes for _, nbytes in large) == 2 * FILE_BYTES  # a run that warms up, and one
        assert sum(nbytes for _, nbytes in dict(large).items()) == FILE_BYTES


def test_a_file_system_without_direct_io_is_measured_through_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.pwritev

    def refuses(descriptor: int, pieces: list[memoryview], offset: int) -> int:
        import fcntl

        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return write(descriptor, pieces, offset)

    monkeypatch.setattr(os, "pwritev", refuses)
    assert module.file_link(tmp_path).name.endswith("page cache")


def test_a_full_disk_is_told_and_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, offset: int, nbytes: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with raising(InputError, "64 MiB"):
        module.file_link(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_folder_is_told(tmp_path: Path) -> None:
    with raising(InputError, "folder='", "nowhere'"):
        module.file_link(tmp_path / "nowhere")
