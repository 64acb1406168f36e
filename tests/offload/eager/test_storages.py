"""Which storages leave, how often, and how few bytes of them are back at once."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shoal.memory.limit import memory_limit
from shoal.offload.eager import offload_activations
from shoal.offload.links.open_link import open_link
from tests.offload.eager.networks import NETWORKS, counted_fetches, module, needs_compiler, offload_all
from tests.offload.links.slabs import RehearsedHost


def test_a_storage_leaves_once_however_many_views_of_it_are_saved() -> None:
    x = torch.randn(64, 64, requires_grad=True)

    def loss_of() -> torch.Tensor:
        y = x * 1
        parts = (
            y.sin(),
            y.t().cos(),
            y[3:5].sin(),
            y.view(-1).square(),
            y.expand(2, 64, 64).sin(),
            y.unflatten(0, (2, 32)).cos(),
        )
        return sum((part.sum() for part in parts), torch.zeros(()))

    (expected,) = torch.autograd.grad(loss_of(), x)
    link = open_link("cpu")
    with counted_fetches(link) as fetched, offload_all(link) as offloading:
        loss = loss_of()
    assert offloading.offloaded_bytes == 64 * 64 * 4
    (found,) = torch.autograd.grad(loss, x)
    assert torch.equal(found, expected)
    assert len(fetched) == 1
    link.close()


def test_a_new_storage_at_the_address_of_an_old_one_is_not_taken_for_it() -> None:
    with offload_all() as offloading:
        kept = []
        for value in range(1, 30):
            x = torch.full((1000,), 1.0, requires_grad=True)
            y = x * value
            kept.append((x, value, (y * y).sum()))
            del x, y
    assert offloading.offloaded_bytes >= 29 * 4000
    for x, value, loss in reversed(kept):
        loss.backward()
        assert x.grad.eq(2 * value * value).all()  # type: ignore[union-attr]


def test_parameters_and_leaves_that_need_gradients_stay() -> None:
    weight = nn.Parameter(torch.randn(64, 64))
    x = torch.randn(64, 64, requires_grad=True)
    with offload_all() as offloading:
        loss = (x @ weight @ weight.t() @ weight[:, :3]).sum()
        assert loss.grad_fn is not None
    x_at_weight = 64 * 64 * 4
    assert offloading.offloaded_bytes == 2 * x_at_weight, "the two products in between"
    loss.backward()


def test_small_tensors_stay() -> None:
    x = torch.randn(1000, requires_grad=True)
    with offload_activations(min_bytes=4001) as offloading:
        loss = x.exp().sin().sum()
    assert (offloading.offloaded_bytes, offloading.kept_bytes) == (0, 8000)
    loss.backward()
    with offload_activations(min_bytes=4000) as offloading:
        loss = x.exp().sin().sum()
    assert (offloading.offloaded_bytes, offloading.kept_bytes) == (4000, 0)


@pytest.mark.parametrize("min_bytes", [1, "1GiB"])
def test_a_graph_that_is_let_go_is_gone_without_the_garbage_collector(min_bytes: int | str) -> None:
    class Mark(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            alive.append(weakref.ref(ctx))
            return x.clone()

    alive: list[weakref.ref[Any]] = []
    gc.disable()
    try:
        with offload_activations(min_bytes=min_bytes):
            y = Mark.apply(torch.randn(1000, requires_grad=True)).exp()  # exp saves its own output
        assert alive[0]() is not None
        del y
        assert alive[0]() is None
    finally:
        gc.enable()


def test_what_the_backward_pass_goes_by_is_not_held() -> None:
    link = open_link("cpu")
    most = 0

    def count(_: Any) -> None:
        nonlocal most
        most = max(most, sum(not storage.expired() for storage in fetched))

    x, y = (torch.randn(10, requires_grad=True) for _ in range(2))
    with counted_fetches(link) as fetched, offload_all(link):
        a, b = x * 1, y * 1
        for _ in range(12):
            a, b = a.sin(), b.sin()  # what one branch saves lies between what the other does
    node = a.grad_fn
    while node is not None and node.next_functions:
        node.register_prehook(count)
        node = node.next_functions[0][0]
    a.sum().backward()
    assert 1 <= most <= 4 and len(fetched) > 12
    b.sum().backward()
    chain = torch.randn(10)
    for tensor in (x, y):
        chain = tensor.detach().clone().requires_grad_()
        end = chain * 1
        for _ in range(12):
            end = end.sin()
        end.sum().backward()
        assert torch.equal(chain.grad, tensor.grad)  # type: ignore[arg-type]
    link.close()


def test_what_the_caller_still_holds_is_not_fetched_a_second_time() -> None:
    link = open_link("cpu")
    x = torch.randn(1000, requires_grad=True)
    with counted_fetches(link) as fetched, offload_all(link):
        held = x.exp()
        gone = x.sigmoid()
        loss = held.sum() + gone.sum()
        del gone
    loss.backward()
    assert len(fetched) == 1
    link.close()


@needs_compiler
@pytest.mark.parametrize("in_file", [False, True])
def test_torchs_bytes_are_free_after_the_block_and_come_back_two_at_most(in_file: bool, tmp_path: Path) -> None:
    nbytes, layers = 40_000, 10

    def forward() -> torch.Tensor:
        y = x
        for _ in range(layers):
            y = y.sin()
        return y.sum()

    x = torch.randn(nbytes // 4, requires_grad=True)
    offloading = offload_activations(tmp_path if in_file else None, min_bytes=nbytes)
    for _ in range(3):
        x.grad = None
        with memory_limit(None) as w:
            before = w.live_bytes
            with offloading:
                loss = forward()
            # What `sin` saves: x, which is a leaf, and all others but the last.
            assert w.live_bytes - before <= 4 + 64
            assert offloading.offloaded_bytes == (layers - 1) * nbytes
            w.reset_peak()
            loss.backward()
            # One fetched, one ahead, the gradient and the next, cos of the saved one.
            assert w.peak_bytes - before <= 5 * nbytes + 64
            plain_peak = w.peak_bytes - before
            del loss
            assert w.live_bytes - before == nbytes, "the gradient"
            w.reset_peak()
            forward().backward()
            assert w.peak_bytes - before > plain_peak + (layers - 6) * nbytes


def test_slots_are_used_again_by_the_next_step() -> None:
    host = RehearsedHost()
    link = host.link()
    model = NETWORKS["residual"]()
    for step in range(4):
        with offload_all(link):
            loss = model(torch.randn(2, 3, 8, 8)).sum()
        if step == 0:
            made, held = host.made, link.pool.held_bytes
        loss.backward()
        del loss
        assert link.pool.leased == 0
    assert (host.made, link.pool.held_bytes) == (made, held)


def test_one_saved_tensor_is_fetched_ahead_of_the_backward_pass() -> None:
    link = open_link("cpu")
    x = torch.randn(10, requires_grad=True)
    with counted_fetches(link) as asked, offload_all(link):
        values = [x * 1]
        for _ in range(4):
            values.append(values[-1].sin())
    last = values.pop()
    values.clear()
    seen: list[int] = []
    node = last.grad_fn
    while node is not None and type(node).__name__ == "SinBackward0":
        node.register_prehook(lambda _: seen.append(len(asked)))  # type: ignore[attr-defined]
        node = node.next_functions[0][0]
    last.sum().backward()
    # Before the ops run: nothing; then each has asked for its own, unless that was asked for, and for the next.
    assert seen == [0, 2, 3, 4] and len(asked) == 4


def test_blocks_share_the_link_that_none_of_them_was_given(tmp_path: Path) -> None:
    x = torch.randn(1000, requires_grad=True)
    for where in (None, "host", tmp_path, str(tmp_path)):
        for _ in range(2):
            with offload_activations(where, min_bytes=1):
                loss = x.exp().sum()
            loss.backward()
    assert len(module._links) == 2
    assert [link.pool.held_bytes for link in module._links.values()] == [4096, 4096]
