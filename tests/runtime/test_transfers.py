"""A planned step's transfers: every bit comes back, and whatever goes wrong in a step, the next one is right."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import InputError, TransferError
from shoal.runtime.links.open_link import OpenLink, open_link
from shoal.runtime.transfers import Transfers
from shoal.runtime.wall import wall
from tests.random_steps import unhurried
from tests.runtime.links.slabs import RehearsedHost, open_files, our_threads

CPU = torch.device("cpu")
PAGE = 4096
needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="the CPU's wall needs a C++ compiler"
)


@pytest.fixture(scope="module", autouse=True)
def _collecting_is_quick() -> Iterator[None]:
    gc.collect()
    gc.freeze()  # what was imported is garbage to no test
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _no_test_leaves_a_thread() -> Iterator[None]:
    yield
    gc.collect()
    assert our_threads() == []


def offload(transfers: Transfers, receipt: torch.Tensor, slot: int, tensor: torch.Tensor) -> None:
    transfers.start_offload(receipt, slot, tensor)
    transfers.finish_offload(receipt, slot)


def fetch(transfers: Transfers, receipt: torch.Tensor, slot: int) -> torch.Tensor:
    fetched = transfers.start_fetch(receipt, slot)
    transfers.finish_fetch(receipt, slot)
    return fetched


def same_bits(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    return ours.untyped_storage().tolist() == theirs.untyped_storage().tolist()


class Step:
    """A planned step in small: y = Σ (x · i)² over a number of storages, each of which waits on the host.

    The gradient is 2 x Σ i². `in_forward` and `in_backward` are called in the middle of each.
    """

    def __init__(self, transfers: Transfers, slots: int) -> None:
        self.transfers, self.slots = transfers, slots
        self.in_forward: Callable[[], None] = lambda: None
        self.in_backward: Callable[[], None] = lambda: None
        step = self

        class Function(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
                receipt = transfers.begin()
                total = x.new_zeros(())
                ctx.shape = x.shape
                for slot in range(slots):
                    value = x * (slot + 1)
                    transfers.start_offload(receipt, slot, value)
                    total = total + value.square().sum()
                    if slot == slots // 2:
                        step.in_forward()
                    transfers.finish_offload(receipt, slot)
                ctx.save_for_backward(receipt)
                return total

            @staticmethod
            def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
                (receipt,) = ctx.saved_tensors
                result = torch.zeros(ctx.shape)
                coming = transfers.start_fetch(receipt, slots - 1)
                for slot in reversed(range(slots)):
                    transfers.finish_fetch(receipt, slot)
                    value = coming
                    if slot:
                        coming = transfers.start_fetch(receipt, slot - 1)
                    if slot == slots // 2:
                        step.in_backward()
                    result += grad * 2 * value * (slot + 1)
                return result

        self.function = Function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function.apply(x)

    def expected(self, x: torch.Tensor) -> torch.Tensor:
        return sum((2 * (x.detach() * (i + 1)) * (i + 1) for i in reversed(range(self.slots))), torch.zeros_like(x))

    def is_right(self) -> bool:
        """Whether a whole step gives the gradient it must."""
        self.in_forward = self.in_backward = lambda: None
        x = torch.randn(300, requires_grad=True)
        self.forward(x).backward()
        return torch.equal(x.grad, self.expected(x))  # type: ignore[arg-type]


def step_on(link: OpenLink, slots: int = 4) -> Step:
    return Step(Transfers(link, [1200] * slots), slots)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Any dtype, empty ones, permuted and strided views of larger storages, channels_last, expanded ones."""
    dtype = draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool]))
    shape = draw(st.lists(st.integers(0, 5), max_size=4))
    base = torch.randint(0, 2, shape) if dtype is torch.bool else torch.randn(shape) * 100
    base = base.to(dtype)
    match draw(st.integers(0, 4)):
        case 0 if base.dim() == 4:
            return base.to(memory_format=torch.channels_last)
        case 1 if base.dim():
            return base[1:]
        case 2 if base.dim():
            return base[..., ::2]
        case 3:
            return base.permute(draw(st.permutations(range(base.dim()))))
        case 4:
            return base.expand(3, *base.shape)
    return base


@unhurried
@given(st.lists(tensors(), max_size=5), st.booleans(), st.data())
def test_every_bit_and_every_stride_comes_back(held: list[torch.Tensor], in_file: bool, data: st.DataObject) -> None:
    link = open_link("cpu", "/tmp" if in_file else "host")
    transfers = Transfers(link, [tensor.untyped_storage().nbytes() for tensor in held])
    receipt = transfers.begin()
    for slot in data.draw(st.permutations(range(len(held)))):
        offload(transfers, receipt, slot, held[slot])
    for slot in data.draw(st.permutations(range(len(held)))):
        fetched = fetch(transfers, receipt, slot)
        assert (fetched.dtype, fetched.size(), fetched.stride()) == (
            held[slot].dtype,
            held[slot].size(),
            held[slot].stride(),
        )
        assert fetched.storage_offset() == held[slot].storage_offset() and not fetched.requires_grad
        assert same_bits(fetched, held[slot])
    moved = sum(tensor.untyped_storage().nbytes() for tensor in held)
    assert (transfers.last.to_host_bytes, transfers.last.to_device_bytes) == (moved, moved)
    link.close()


def test_a_step_on_the_host_has_the_gradients_of_plain_pytorch() -> None:
    step = step_on(open_link("cpu"))
    for _ in range(3):
        assert step.is_right()


def test_a_receipt_is_a_small_tensor_that_shares_its_storage_with_its_views() -> None:
    transfers = Transfers(open_link("cpu"), [8])
    receipt = transfers.begin()
    assert (receipt.dtype, receipt.device, receipt.numel()) == (torch.int64, CPU, 1)
    offload(transfers, receipt, 0, torch.ones(2))
    alias = receipt.detach().view(1, 1)
    del receipt
    gc.collect()
    assert fetch(transfers, alias, 0).tolist() == [1, 1]


@needs_compiler
def test_torchs_bytes_are_free_once_the_offload_is_finished() -> None:
    transfers = Transfers(open_link("cpu"), [4000, 8000])
    with wall(None) as w:
        before = w.live_bytes
        receipt = transfers.begin()
        assert w.allocations == 0, "neither receipt nor slab are torch's"
        x, y = torch.ones(1000), torch.ones(2000)
        transfers.start_offload(receipt, 0, x)
        transfers.start_offload(receipt, 1, y)
        del x, y
        transfers.finish_offload(receipt, 1)
        assert w.live_bytes - before <= 4000
        transfers.finish_offload(receipt, 0)
        assert w.live_bytes == before
        fetched = transfers.start_fetch(receipt, 0)
        assert w.live_bytes - before == 4000
        transfers.finish_fetch(receipt, 0)
        assert fetched.sum() == 1000
        del fetched
        assert w.live_bytes == before


def test_no_step_after_the_first_makes_a_slab() -> None:
    host = RehearsedHost()
    link = host.link()
    step = step_on(link)
    assert host.made == 1, "it is made with the transfers, not with the first step"
    for _ in range(5):
        assert step.is_right()
        assert link.pool.leased == 0
    assert host.made == 1
    assert link.pool.held_bytes == 4 * PAGE


def test_two_forwards_before_two_backwards_have_a_slab_each() -> None:
    host = RehearsedHost()
    link = host.link()
    step = step_on(link)
    for _ in range(3):
        x, y = (torch.randn(300, requires_grad=True) for _ in range(2))
        loss = step.forward(x) + step.forward(y)
        assert link.pool.leased == 2
        loss.backward()
        assert torch.equal(x.grad, step.expected(x)) and torch.equal(y.grad, step.expected(y))  # type: ignore[arg-type]
        del loss
        assert link.pool.leased == 0
    assert host.made == 2


def test_a_second_forward_over_the_host_budget_is_refused_and_the_first_goes_on() -> None:
    link = RehearsedHost().link(budget_bytes=7 * PAGE)
    step = step_on(link)
    x = torch.randn(300, requires_grad=True)
    loss = step.forward(x)
    with pytest.raises(TransferError, match=r"16\.00 KiB of host memory asked for, 28\.00 KiB allowed") as caught:
        step.forward(x)
    assert "\n" not in str(caught.value)
    loss.backward()
    assert torch.equal(x.grad, step.expected(x))  # type: ignore[arg-type]
    del loss
    assert step.is_right()


def test_a_slab_over_the_host_budget_is_refused_when_the_step_is_planned() -> None:
    link = RehearsedHost().link(budget_bytes=3 * PAGE)
    with pytest.raises(TransferError, match=r"16\.00 KiB of host memory asked for, 12\.00 KiB allowed, none are in u"):
        step_on(link)
    assert link.pool.held_bytes == 0
    assert step_on(link, slots=3).is_right()


def test_steps_of_two_shapes_share_the_larger_slab() -> None:
    host = RehearsedHost()
    link = host.link()
    small, large = step_on(link, 2), step_on(link, 5)
    for _ in range(2):
        assert large.is_right() and small.is_right()
    assert link.pool.held_bytes == 5 * PAGE
    large.transfers.close()
    assert small.is_right()
    small.transfers.close()
    assert link.pool.held_bytes == 0


def test_a_graph_that_is_retained_fetches_again() -> None:
    step = step_on(open_link("cpu"))
    x = torch.randn(300, requires_grad=True)
    loss = step.forward(x)
    first, second, third = (torch.autograd.grad(loss, x, retain_graph=again)[0] for again in (True, True, False))
    assert torch.equal(first, step.expected(x)) and torch.equal(second, first) and torch.equal(third, first)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
    assert step.is_right()


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
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for what it puts behind
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
        with pytest.raises(
            TransferError, match="offloading to host memory of 1.172 KiB failed: No space left"
        ) as caught:
            step.forward(x)
        assert "\n" not in str(caught.value)
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
    with pytest.raises(TransferError, match=f"a file in {tmp_path} of 1.172 KiB failed: (No space left|Illegal seek)"):
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
    with wall(None) as w:
        w.limit_bytes = w.live_bytes + 3000
        with pytest.raises(torch.OutOfMemoryError):
            loss.backward(grad, retain_graph=True)
    loss.backward()
    assert torch.equal(x.grad, step.expected(x))  # type: ignore[arg-type]
    assert step.is_right()


def test_closing_is_for_good_and_twice_is_once() -> None:
    host = RehearsedHost()
    link = host.link()
    step = step_on(link)
    loss = step.forward(torch.randn(300, requires_grad=True))
    step.transfers.close()
    step.transfers.close()
    with pytest.raises(TransferError, match="host bytes of this step are gone.*run the forward pass again"):
        loss.backward()
    with pytest.raises(TransferError, match="were closed"):
        step.forward(torch.randn(300, requires_grad=True))
    del loss
    gc.collect()
    assert link.pool.held_bytes == 0


def test_a_closed_link_is_said_to_be_closed() -> None:
    link = open_link("cpu")
    step = step_on(link)
    link.close()
    for _ in range(2):
        with pytest.raises(TransferError, match="closed; open another"):
            step.forward(torch.randn(300, requires_grad=True))


def test_what_is_forgotten_is_gone(tmp_path: Path) -> None:
    step = step_on(open_link("cpu", tmp_path))
    assert step.is_right()
    assert (len(our_threads()), open_files(tmp_path)) == (2, 1)
    del step
    gc.collect()
    assert (len(our_threads()), open_files(tmp_path)) == (0, 0)


def test_the_stalls_of_the_last_step_are_counted() -> None:
    host = RehearsedHost()
    transfers = Transfers(host.link(), [8])
    receipt = transfers.begin()
    assert (transfers.last.offload_stall_seconds, transfers.last.fetch_stall_seconds) == (0, 0)
    host.gate.clear()
    transfers.start_offload(receipt, 0, torch.ones(2))
    host.at_gate.wait()
    threading.Timer(0.01, host.gate.set).start()
    transfers.finish_offload(receipt, 0)
    assert transfers.last.offload_stall_seconds > 0 and transfers.last.fetch_stall_seconds == 0
    transfers.begin()
    assert (transfers.last.to_host_bytes, transfers.last.offload_stall_seconds) == (0, 0)


def test_calls_out_of_order_are_refused_in_one_line() -> None:
    transfers = Transfers(open_link("cpu"), [8, 8])
    receipt = transfers.begin()
    x = torch.ones(2)
    offload(transfers, receipt, 0, x)
    wrong: list[tuple[type[Exception], str, Callable[[], object]]] = [
        (TransferError, "no offload of slot 1", lambda: transfers.finish_offload(receipt, 1)),
        (TransferError, "no offload of slot 1", lambda: transfers.start_fetch(receipt, 1)),
        (TransferError, "no fetch of slot 0", lambda: transfers.finish_fetch(receipt, 0)),
        (InputError, "slot 2 is none of the 2", lambda: transfers.start_offload(receipt, 2, x)),
        (InputError, "slot 0 has 8 B; .* 4.0.* KiB", lambda: transfers.start_offload(receipt, 0, torch.ones(1025))),
        (InputError, "on meta", lambda: transfers.start_offload(receipt, 1, torch.ones(2, device="meta"))),
        (TransferError, "this step are gone", lambda: transfers.start_offload(torch.tensor(10**9), 0, x)),
    ]
    for kind, message, call in wrong:
        with pytest.raises(kind, match=message) as caught:
            call()
        assert "\n" not in str(caught.value)
    assert torch.equal(fetch(transfers, receipt, 0), x)


@pytest.mark.gpu
def test_steps_on_cuda_have_the_right_bits_and_leave_no_device_bytes() -> None:
    link = open_link("cuda")
    cuda = link.device
    sent = [torch.randn(1 << 22, device=cuda) for _ in range(6)]
    expected = [tensor.clone() for tensor in sent]
    transfers = Transfers(link, [tensor.nbytes for tensor in sent])
    for ends in (True, False, True):
        values = [tensor.clone() for tensor in sent]
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        receipt = transfers.begin()
        for slot in range(6):
            transfers.start_offload(receipt, slot, values[slot])
            if slot:
                transfers.finish_offload(receipt, slot - 1)
                values[slot - 1] = torch.empty(0)
            torch.full((1 << 22,), float("nan"), device=cuda)
        if not ends:
            del receipt, values
            continue
        transfers.finish_offload(receipt, 5)
        values.clear()
        assert torch.cuda.memory_allocated() == before - 6 * sent[0].nbytes
        for slot in reversed(range(6)):
            assert torch.equal(fetch(transfers, receipt, slot), expected[slot])
        assert transfers.last.offload_stall_seconds >= 0
        del receipt
    assert link.pool.leased == 0
    transfers.close()
    assert link.pool.held_bytes == 0
    link.close()
