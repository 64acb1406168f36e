"""`open_link` opens the right link for a device and a place, and a link ends cleanly however its process goes on."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.errors import InputError, TransferError
from shoal.offload.links.open_link import OpenLink, open_link
from tests.offload.links.slabs import open_files, our_threads
from tests.raising import raising

FAST = 1e12


def round_trip(link: OpenLink, tensor: torch.Tensor) -> torch.Tensor:
    lease = link.pool.lease(tensor.nbytes)
    link.begin_step()
    offload = link.offload(tensor.untyped_storage(), lease.slab, 0)
    back = torch.zeros_like(tensor)
    fetch = link.fetch(back.untyped_storage(), lease.slab, 0, offload)
    offload.wait()
    fetch.wait()
    return back


@pytest.mark.parametrize("rehearsed", [{}, {"to_host_bytes_per_second": FAST, "to_device_bytes_per_second": FAST}])
@pytest.mark.parametrize("in_file", [False, True])
def test_bytes_go_out_and_come_back(in_file: bool, rehearsed: dict[str, Any], tmp_path: Path) -> None:
    link = open_link("cpu", tmp_path if in_file else "host", **rehearsed)
    sent = torch.randn(1000, 1000)
    assert torch.equal(round_trip(link, sent), sent)
    assert link.pool.held_bytes >= sent.nbytes
    link.close()
    assert link.pool.held_bytes == 0


@pytest.mark.parametrize("in_file", [False, True])
def test_closing_leaves_no_thread_and_no_file(in_file: bool, tmp_path: Path) -> None:
    for _ in range(3):
        link = open_link("cpu", tmp_path if in_file else "host")
        round_trip(link, torch.randn(10))
        assert len(our_threads()) == 2
        link.close()
        link.close()
        assert our_threads() == []
    with pytest.raises(TransferError):
        round_trip(link, torch.randn(10))
    del link
    assert open_files(tmp_path) == 0


def test_a_link_that_is_forgotten_is_closed(tmp_path: Path) -> None:
    link = open_link("cpu", tmp_path)
    round_trip(link, torch.randn(10))
    assert (len(our_threads()), open_files(tmp_path)) == (2, 1)
    del link
    gc.collect()
    assert our_threads() == []
    assert open_files(tmp_path) == 0


def test_a_lease_that_outlives_its_link_is_let_go_in_peace(tmp_path: Path) -> None:
    link = open_link("cpu", tmp_path)
    lease, pool = link.pool.lease(10), link.pool
    copy = link.offload(torch.randn(10).untyped_storage(), lease.slab, 0)
    copy.settle()
    del link, copy
    gc.collect()
    assert our_threads() == []
    del lease
    assert pool.held_bytes == 0


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"device": "meta"}, "'cpu'"),
        ({"device": "cuda", "where": "/tmp"}, "'host'"),
        ({"device": "cuda", "latency_seconds": 1.0}, ""),
        ({"device": "cpu", "to_host_bytes_per_second": 0.0}, "to_host_bytes_per_second=0.0"),
        ({"device": "cpu", "to_device_bytes_per_second": float("nan")}, "to_device_bytes_per_second=nan"),
        ({"device": "cpu", "latency_seconds": -1.0}, "latency_seconds=-1.0"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(arguments: dict[str, Any], why: str) -> None:
    with raising(InputError, why):
        open_link(**arguments)


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with raising(TransferError, tmp_path / "gone"):
        open_link("cpu", tmp_path / "gone")


PROGRAM = """
import os, sys, torch
torch.set_num_threads(1)  # a child of fork hangs in the pool of its parent
from shoal.errors import TransferError
from shoal.offload.links.open_link import open_link

def use(link):
    lease, x = link.pool.lease(1 << 20), torch.ones(1 << 18)
    return lease, x, link.offload(x.untyped_storage(), lease.slab, 0)
"""


def test_a_forked_child_does_the_link_no_harm_and_a_process_ends_in_peace_with_copies_under_way(tmp_path: Path) -> None:
    program = f"""{PROGRAM}
kept = []
for where in ('host', {str(tmp_path)!r}):
    link = open_link('cpu', where)
    kept.append((link, *use(link)))
    kept[-1][-1].wait()
child = os.fork()
if child == 0:
    for link, lease, x, copy in kept:
        try:
            use(link)
        except TransferError as error:
            assert 'fork' in str(error)
        link.close()
    del kept, link, lease, x, copy
    sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
for link, lease, x, copy in kept:
    y = torch.zeros(1 << 18)
    link.fetch(y.untyped_storage(), lease.slab, 0, copy).wait()
    assert y.all()
for where in ('host', {str(tmp_path)!r}):
    for bytes_per_second in (None, 1e-3):  # the second one would take years
        link = open_link('cpu', where, None, bytes_per_second)
        kept += [link, use(link)]
kept.append(kept)
sys.exit(5)
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, timeout=850)
    assert (done.returncode, done.stderr) == (5, "")


@pytest.mark.gpu
def test_a_cuda_link_keeps_the_order_of_streams() -> None:
    link = open_link("cuda")
    for _ in range(20):
        lease = link.pool.lease(1 << 26)
        link.begin_step()
        sent = torch.randn(1 << 24, device="cuda")
        expected = sent.clone()
        offload = link.offload(sent.untyped_storage(), lease.slab, 0)
        offload.wait()
        del sent
        torch.full((1 << 24,), float("nan"), device="cuda")  # takes the bytes that were given back
        back = torch.empty(1 << 24, device="cuda")
        fetch = link.fetch(back.untyped_storage(), lease.slab, 0, offload)
        fetch.wait()
        assert torch.equal(back, expected)
        del lease
    assert link.pool.held_bytes == 1 << 26
    link.close()
    assert link.pool.held_bytes == 0
