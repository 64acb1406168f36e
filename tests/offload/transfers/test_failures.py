"""Whatever goes wrong in a step, nothing leaks and the next one is right."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from shoal.errors import TransferError
from shoal.memory.limit import memory_limit
from shoal.offload.links.open_link import OpenLink, open_link
from shoal.offload.transfers import Transfers
from tests.offload.links.slabs import RehearsedHost, open_files, our_threads
from tests.offload.transfers.steps import PAGE, needs_compiler, offload, step_on
from tests.raising import raising


def raise_an_error() -> None:
    raise ArithmeticError("in the middle")


def ready_to_copy(how: str, tmp_path: Path) -> tuple[RehearsedHost | None, OpenLink]:
    if how == "file":
        return None, open_link("cpu", tmp_path)
    host = RehearsedHost()
    return host, host.link()


@pytest.mark.parametrize("how", ["host", "file"])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_exception_in_the_middle_leaks_nothing(how: str, where: str, tmp_path: Path) -> None:
    _, link = ready_to_copy(how, tmp_path)
    step = step_on(link)
    for _ in range(3):
        setattr(step, f"in_{where}", raise_an_error)
        x = torch.randn(300, requires_grad=True)
        with pytest.raises(ArithmeticError):
            step.forward(x).backward()
        assert link.pool.leased == 0
        assert step.is_right()
    assert link.pool.held_bytes == 4 * PAGE
    link.close()
    assert our_threads() == [] and open_files(tmp_path) <= 1


@pytest.mark.parametrize("how", ["host", "file"])
def test_a_step_that_is_abandoned_before_its_backward_leaks_nothing(how: str, tmp_path: Path) -> None:
    _, link = ready_to_copy(how, tmp_path)
    step = step_on(link)
    for _ in range(3):
        loss = step.forward(torch.randn(300, requires_grad=True))
        assert link.pool.leased == 1
        del loss
        assert link.pool.leased == 0
        assert step.is_right()
    assert link.pool.held_bytes == 4 * PAGE


def test_a_step_that_is_abandoned_with_copies_under_way_is_waited_for_by_the_next() -> None:
    host = RehearsedHost()
    link = host.link()
    step = step_on(link)
    host.gate.clear()
    receipt = step.transfers.begin()
    for slot in range(3):
        step.transfers.start_offload(receipt, slot, torch.full((300,), 9.0))
    host.at_gate.wait()
    del receipt
    assert link.pool.leased == 0
    (slab,) = link.pool._slabs
    assert len(slab.running) == 1, "those that had not begun are let go at once"
    threading.Timer(0.01, host.gate.set).start()
    assert step.is_right()
    assert host.made == 1


def test_a_fetch_that_nobody_finished_may_not_read_the_next_steps_bytes() -> None:
    host = RehearsedHost()
    transfers = Transfers(host.link(), [8])
    receipt = transfers.begin()
    offload(transfers, receipt, 0, torch.tensor([1.0, 2.0]))
    host.gate.clear()
    late = transfers.start_fetch(receipt, 0)
    host.at_gate.wait()
    del receipt
    threading.Timer(0.01, host.gate.set).start()
    receipt = transfers.begin()
    offload(transfers, receipt, 0, torch.tensor([3.0, 4.0]))
    assert late.tolist() == [1, 2]


@pytest.fixture
def _ctrl_c_interrupts() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for background jobs
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_ctrl_c_interrupts")
@pytest.mark.parametrize("where", ["offload", "fetch"])
def test_ctrl_c_while_waiting_leaks_nothing(where: str) -> None:
    host = RehearsedHost()
    link = host.link()
    step = step_on(link)

    def interrupt_once_waiting() -> None:
        host.at_gate.wait()
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)  # type: ignore[arg-type]

    for _ in range(3):
        setattr(step, "in_forward" if where == "offload" else "in_backward", host.gate.clear)
        host.at_gate.clear()
        x = torch.randn(300, requires_grad=True)
        threading.Thread(target=interrupt_once_waiting).start()
        with pytest.raises(KeyboardInterrupt):
            # The slot after the gate was closed is waited for until someone interrupts.
            step.forward(x).backward()
            while True:
                host.at_gate.wait(0.01)
        assert link.pool.leased == 0
        host.gate.set()
        assert step.is_right()
    assert host.made == 1
    link.close()
    assert our_threads() == []


def test_a_full_disk_during_an_offload_is_a_clear_error_and_the_next_step_is_right() -> None:
    host = RehearsedHost()
    link = host.link()
    step = step_on(link)
    for _ in range(3):
        host.full = True
        x = torch.randn(300, requires_grad=True)
        with raising(TransferError, "1.172 KiB") as caught:
            step.forward(x)
        del caught
        assert link.pool.leased == 0
        host.full = False
        assert step.is_right()


def test_a_disk_that_is_really_full_is_a_clear_error(tmp_path: Path) -> None:
    link = open_link("cpu", tmp_path)
    step = step_on(link)
    assert step.is_right()
    file = link.pool._slabs[0]._file  # type: ignore[attr-defined]
    spilled, full = os.dup(file._fd), os.open("/dev/full", os.O_RDWR)
    os.dup2(full, file._fd)
    with raising(TransferError, tmp_path, "1.172 KiB"):
        step.forward(torch.randn(300, requires_grad=True))
    os.dup2(spilled, file._fd)
    os.close(spilled)
    os.close(full)
    assert step.is_right()


def test_a_folder_that_vanishes_while_training_does_no_harm(tmp_path: Path) -> None:
    folder = tmp_path / "spill"
    folder.mkdir()
    link = open_link("cpu", folder)
    step = step_on(link)
    assert step.is_right()
    folder.rmdir()
    assert step.is_right()
    loss = step.forward(torch.randn(300, requires_grad=True)) + step.forward(torch.randn(300, requires_grad=True))
    loss.backward()


@needs_compiler
def test_a_device_that_is_full_when_a_fetch_begins_leaks_nothing() -> None:
    step = step_on(open_link("cpu"))
    x = torch.randn(300, requires_grad=True)
    loss = step.forward(x)
    grad = torch.ones(())
    with memory_limit(None) as w:
        w.limit_bytes = w.live_bytes + 3000
        with pytest.raises(torch.OutOfMemoryError):
            loss.backward(grad, retain_graph=True)
    loss.backward()
    assert torch.equal(x.grad, step.expected(x))  # type: ignore[arg-type]
    assert step.is_right()
