"""A planned step's transfers: every bit comes back."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import InputError, TransferError
from shoal.offload.links.open_link import open_link
from shoal.offload.transfers import Transfers
from tests.offload.transfers.steps import CPU, fetch, offload, step_on


def same_bits(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    return ours.untyped_storage().tolist() == theirs.untyped_storage().tolist()


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


def test_a_graph_that_is_retained_fetches_again() -> None:
    step = step_on(open_link("cpu"))
    x = torch.randn(300, requires_grad=True)
    loss = step.forward(x)
    first, second, third = (torch.autograd.grad(loss, x, retain_graph=again)[0] for again in (True, True, False))
    assert torch.equal(first, step.expected(x)) and torch.equal(second, first) and torch.equal(third, first)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
    assert step.is_right()


def test_calls_out_of_order_are_refused_in_one_line() -> None:
    transfers = Transfers(open_link("cpu"), [8, 8])
    receipt = transfers.begin()
    x = torch.ones(2)
    offload(transfers, receipt, 0, x)
    wrong: list[tuple[type[Exception], Callable[[], object]]] = [
        (TransferError, lambda: transfers.finish_offload(receipt, 1)),
        (TransferError, lambda: transfers.start_fetch(receipt, 1)),
        (TransferError, lambda: transfers.finish_fetch(receipt, 0)),
        (InputError, lambda: transfers.start_offload(receipt, 2, x)),
        (InputError, lambda: transfers.start_offload(receipt, 0, torch.ones(1025))),
        (InputError, lambda: transfers.start_offload(receipt, 1, torch.ones(2, device="meta"))),
        (TransferError, lambda: transfers.start_offload(torch.tensor(10**9), 0, x)),
    ]
    for kind, call in wrong:
        with pytest.raises(kind):
            call()
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
        del receipt
    assert link.pool.leased == 0
    transfers.close()
    assert link.pool.held_bytes == 0
    link.close()
