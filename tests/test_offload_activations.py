"""Offloading in eager mode gives the gradients of plain PyTorch, bit for bit, in what the others got wrong too."""

from __future__ import annotations

import copy
import gc
import importlib
import shutil
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from shoal.errors import InputError, TransferError
from shoal.offload_activations import offload_activations
from shoal.runtime.links.open_link import OpenLink, open_link
from shoal.runtime.wall import wall
from tests.random_steps import unhurried
from tests.runtime.links.slabs import RehearsedHost, open_files, our_threads
from tests.training_laws import classifier, differences, images, train

module = importlib.import_module("shoal.offload_activations")  # shoal has the class under the same name
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
    for link in module._links.values():
        link.close()
    module._links.clear()
    gc.collect()
    assert our_threads() == []


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU(True))
        self.second = nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu_(self.second(self.first(x)) + x)


class Dense(nn.Module):
    """Each convolution reads the concatenation of all before it, and one reads two slices of it."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(nn.Conv2d(channels * (i + 1), channels, 3, padding=1) for i in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features = [x]
        for convolution in self.convolutions:
            features.append(F.relu(convolution(torch.cat(features, 1))))
        together = torch.cat(features, 1)
        left, right = together.chunk(2, 1)
        return left.sigmoid() * right.tanh() + left * right


class Shared(nn.Module):
    """One convolution three times."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = torch.tanh(self.convolution(x))
        return x


class Checkpointed(nn.Module):
    def __init__(self, channels: int, reentrant: bool) -> None:
        super().__init__()
        self.inside, self.outside, self.reentrant = Residual(channels), Residual(channels), reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outside(checkpoint(self.inside, self.outside(x), use_reentrant=self.reentrant))


class Written(nn.Module):
    """Storages are written to between two ops that save them, wherever plain PyTorch allows it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        y.add_(1)
        y[:, 1:].mul_(0.5)
        y.sigmoid_()
        left, right = (y * y).unsafe_chunk(2, 1)
        left.mul_(3)
        a = left.sin()
        right.mul_(-3)  # both are at version 1 now, and share a storage
        return (
            torch.cat([a, right.cos(), left * right], 1)
            + y.flatten(1).t().exp().t().view_as(y).repeat(1, 2, 1, 1)[:, :6]
        )


def head(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), *layers, nn.AdaptiveAvgPool2d(2), nn.Flatten())


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "conv-bn-relu": lambda: classifier(3, 8, 8, 8),
    "residual": lambda: head(Residual(4), Residual(4)),
    "dense": lambda: head(Dense(4)),
    "dropout": lambda: head(nn.Dropout(0.5), nn.ReLU(True), nn.Dropout2d(0.3)),
    "shared weights": lambda: head(Shared(4)),
    "written to in place": lambda: head(Written(), nn.LeakyReLU(0.1, True)),
    "checkpointed": lambda: head(Checkpointed(4, reentrant=False)),
    "checkpointed, reentrant": lambda: head(Checkpointed(4, reentrant=True)),
    "pooling and up-sampling": lambda: head(nn.MaxPool2d(2), nn.Upsample(scale_factor=2), nn.AvgPool2d(3)),
    "group norm": lambda: head(nn.GroupNorm(2, 4), nn.SiLU(True), nn.Hardtanh(inplace=True)),
}


def offload_all(link: OpenLink | str | Path | None = None) -> offload_activations:
    return offload_activations(link, min_bytes=1)


@contextmanager
def counted_fetches(link: OpenLink) -> Iterator[list[StorageWeakRef]]:
    """The storages that are fetched, from here on."""
    fetched: list[StorageWeakRef] = []
    fetch = link.fetch

    def record(storage: torch.UntypedStorage, *rest: Any) -> Any:
        fetched.append(StorageWeakRef(storage))
        return fetch(storage, *rest)

    link.fetch = record  # type: ignore[method-assign]
    yield fetched


def assert_the_same(model: nn.Module, offloading: offload_activations, batches: list[Any], **how: Any) -> None:
    expected = train(copy.deepcopy(model), batches, **how)
    found = train(copy.deepcopy(model), batches, around_forward=lambda: offloading, **how)
    assert not differences(found, expected)
    assert offloading.offloaded_bytes > 0, "the test shows nothing"


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("in_file", [False, True])
def test_gradients_are_those_of_plain_pytorch(name: str, in_file: bool, tmp_path: Path) -> None:
    assert_the_same(NETWORKS[name](), offload_all(tmp_path if in_file else None), images(3, 2, 3, 8, 8))


@pytest.mark.parametrize("name", ["residual", "dense", "written to in place"])
def test_nor_are_they_others_on_a_slow_link(name: str) -> None:
    link = open_link("cpu", "host", None, 3e6, 3e6, 1e-4)
    assert_the_same(NETWORKS[name](), offload_all(link), images(2, 2, 3, 8, 8))


@pytest.mark.parametrize("name", ["residual", "dense", "dropout"])
def test_a_graph_may_be_retained(name: str) -> None:
    assert_the_same(NETWORKS[name](), offload_all(), images(2, 2, 3, 8, 8), backwards=3)


def test_channels_last_comes_back_as_channels_last() -> None:
    batches = [batch.to(memory_format=torch.channels_last) for batch in images(2, 2, 3, 8, 8)]
    model = NETWORKS["residual"]().to(memory_format=torch.channels_last)
    assert_the_same(model, offload_all(), batches)


def test_mixed_precision() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = NETWORKS["residual"]()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return self.inner(x)

    assert_the_same(Mixed(), offload_all(), images(2, 2, 3, 8, 8))


def test_two_forwards_before_one_backward() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = NETWORKS["residual"]()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat([self.inner(x), self.inner(x + 1)])

    assert_the_same(Twice(), offload_all(), images(2, 2, 3, 8, 8))


def test_a_block_may_stand_in_another_and_around_the_backward_pass() -> None:
    def gradients(block: Callable[[], Any]) -> list[torch.Tensor]:
        torch.manual_seed(3)
        model = NETWORKS["residual"]()
        with block():
            with block():
                loss = model(torch.ones(2, 3, 8, 8)).square().sum()
            loss = loss * model(torch.zeros(2, 3, 8, 8)).sum()
            loss.backward()
        return [parameter.grad for parameter in model.parameters()]  # type: ignore[misc]

    offloading = offload_all()
    assert all(map(torch.equal, gradients(lambda: offloading), gradients(nullcontext)))


@pytest.mark.parametrize("inside", [False, True])
def test_gradients_of_gradients(inside: bool) -> None:
    def penalty(offloading: offload_activations | None) -> list[torch.Tensor]:
        torch.manual_seed(5)
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Conv2d(4, 2, 3), nn.Sigmoid())
        x = torch.randn(2, 3, 8, 8, requires_grad=True)
        blocks = [offloading] if offloading else []
        for block in blocks:
            block.__enter__()
        loss = model(x).square().sum()
        for block in blocks if not inside else []:
            block.__exit__(None, None, None)
        (first,) = torch.autograd.grad(loss, x, create_graph=True)
        (loss + first.square().sum()).backward()
        for block in blocks if inside else []:
            block.__exit__(None, None, None)
        return [x.grad, *(parameter.grad for parameter in model.parameters())]  # type: ignore[list-item]

    for ours, theirs in zip(penalty(offload_all()), penalty(None), strict=True):
        assert torch.equal(ours, theirs)


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


def test_a_storage_that_was_written_to_behind_autograds_back_leaves_again() -> None:
    x, weight = torch.randn(64, requires_grad=True), torch.randn(64, requires_grad=True)
    with offload_all() as offloading:
        y = x * 1
        first = y.sin()
        data = y.data
        data.mul_(2)
        (data * weight).sum().backward()
    assert offloading.offloaded_bytes == 2 * 64 * 4
    assert torch.equal(weight.grad, data)  # type: ignore[arg-type]
    del first


def test_a_storage_that_was_written_to_leaves_again() -> None:
    x = torch.randn(64, 64, requires_grad=True)
    with offload_all() as offloading:
        y = x * 1
        wrong = y.square().sum()
        y.mul_(2)
        right = y.square().sum()
    assert offloading.offloaded_bytes == 2 * 64 * 64 * 4
    (found,) = torch.autograd.grad(right, x)
    assert torch.equal(found, 8 * x.detach())
    with pytest.raises(RuntimeError, match="modified by an inplace operation: it is at version 1; expected version 0"):
        wrong.backward()


@pytest.mark.parametrize("min_bytes", [1, "1GiB"])
def test_what_is_written_to_after_it_was_saved_is_an_error_as_without_the_block(min_bytes: int | str) -> None:
    def wrong(block: Any) -> None:
        x = torch.randn(50, requires_grad=True)
        with block:
            y = x.exp()
            z = y * 2
            y.add_(1)
        z.sum().backward()

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        wrong(torch.enable_grad())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        wrong(offload_activations(min_bytes=min_bytes))


class Program:
    """Random calls on a few tensors: ops that save inputs or outputs, views, parts that are no views, and writes."""

    def __init__(self, draw: Callable[[st.SearchStrategy[Any]], Any]) -> None:
        names = [name for name in dir(self) if name.startswith("do_")]
        numbers = st.integers(0, 99)
        self.calls = draw(st.lists(st.tuples(st.sampled_from(names), numbers, numbers), min_size=3, max_size=25))
        self.summed = draw(st.sets(numbers, min_size=1, max_size=5))
        self.retained = draw(st.booleans())

    def run(self, block: AbstractContextManager[Any]) -> torch.Tensor | str:
        """The gradient, or where plain PyTorch refuses to go on."""
        torch.manual_seed(1)
        x = torch.randn(6, 8, requires_grad=True)
        try:
            with block:
                tensors = [x * 1, x.tanh()]
                for name, first, second in self.calls:
                    getattr(self, name)(tensors, first % len(tensors), tensors[second % len(tensors)])
                loss = sum((tensors[which % len(tensors)].sum() for which in self.summed), x.sum())
                del tensors
        except RuntimeError:
            return "an error in the forward pass"
        try:
            if self.retained:
                loss.backward(retain_graph=True)
            loss.backward()
        except RuntimeError as error:
            assert "inplace operation" in str(error)
            return "an error in the backward pass"
        assert x.grad is not None
        return x.grad

    def do_sin(self, tensors: list[torch.Tensor], i: int, other: torch.Tensor) -> None:
        tensors.append(tensors[i].sin())

    def do_sigmoid(self, tensors: list[torch.Tensor], i: int, other: torch.Tensor) -> None:
        tensors.append(tensors[i].sigmoid())

    def do_multiply(self, tensors: list[torch.Tensor], i: int, other: torch.Tensor) -> None:
        count = min(tensors[i].numel(), other.numel())
        tensors.append(tensors[i].flatten()[:count] * other.flatten()[:count])

    def do_join(self, tensors: list[torch.Tensor], i: int, other: torch.Tensor) -> None:
        tensors.append(torch.cat([tensors[i].flatten()[:24], other.flatten()[:24]]))

    def do_turn(self, tensors: list[torch.Tensor], i: int, other: torch.Tensor) -> None:
        tensors.append(tensors[i].flatten().view(2, -1).t())

    def do_take(self, tensors: list[torch.Tensor], i: int, other: torch.Tensor) -> None:
        tensors.append(tensors[i][1:])

    def do_part(self, tensors: list[torch.Tensor], i: int, other: torch.Tensor) -> None:
        tensors.extend((tensors[i] * 1).unsafe_chunk(2))  # of what no one else reads: the rest is in the name

    def do_write(self, tensors: list[torch.Tensor], i: int, other: torch.Tensor) -> None:
        tensors[i].mul_(1.5)

    def do_write_result(self, tensors: list[torch.Tensor], i: int, other: torch.Tensor) -> None:
        tensors[i].tanh_()

    def do_drop(self, tensors: list[torch.Tensor], i: int, other: torch.Tensor) -> None:
        if len(tensors) > 1:
            del tensors[i]


@unhurried
@given(st.data(), st.sampled_from([None, 1e6]))
def test_any_program_has_the_gradient_or_the_refusal_of_plain_pytorch(
    data: st.DataObject, bytes_per_second: float | None
) -> None:
    program = Program(data.draw)
    link = open_link("cpu", "host", None, bytes_per_second, bytes_per_second)
    expected, found = program.run(nullcontext()), program.run(offload_all(link))
    torch.ones(1, requires_grad=True).sum().backward()  # after an error the engine holds the last graph until the next
    assert link.pool.leased == 0
    link.close()
    if isinstance(expected, str) or isinstance(found, str):
        assert found is expected
    else:
        assert torch.equal(found, expected)


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
        x.exp().sin().sum().backward()
    assert (offloading.offloaded_bytes, offloading.kept_bytes) == (0, 8000)
    with offload_activations(min_bytes=4000) as offloading:
        x.exp().sin().sum().backward()
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
        with wall(None) as w:
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


def raise_an_error(x: torch.Tensor) -> torch.Tensor:
    raise ArithmeticError("in the middle")


@pytest.mark.parametrize("in_file", [False, True])
def test_an_exception_in_the_block_leaks_nothing_and_the_next_step_is_right(in_file: bool, tmp_path: Path) -> None:
    link = open_link("cpu", tmp_path if in_file else "host")
    offloading = offload_all(link)
    model = NETWORKS["residual"]()
    for _ in range(2):
        with pytest.raises(ArithmeticError), offloading:
            raise_an_error(model(torch.randn(2, 3, 8, 8)))
        gc.collect()
        assert link.pool.leased == 0
        assert_the_same(model, offloading, images(1, 2, 3, 8, 8))
    assert torch._C._autograd._saved_tensors_hooks_is_enabled()
    link.close()
    del link, offloading
    gc.collect()
    assert open_files(tmp_path) == 0


def test_a_backward_pass_that_fails_leaks_nothing() -> None:
    link = open_link("cpu")
    x = torch.randn(1000, requires_grad=True)
    with offload_all(link):
        middle = x.exp().sin()
        loss = middle.cos().sum()
    middle.register_hook(raise_an_error)
    del middle
    with pytest.raises(ArithmeticError):
        loss.backward()
    del loss
    gc.collect()
    assert link.pool.leased == 0
    assert_the_same(NETWORKS["residual"](), offload_all(link), images(1, 2, 3, 8, 8))
    link.close()


def test_a_disk_that_is_full_is_a_clear_error_and_the_next_step_is_right() -> None:
    host = RehearsedHost()
    link = host.link()
    model = NETWORKS["residual"]()
    for _ in range(2):
        host.full = True
        full = pytest.raises(TransferError, match=r"offloading to host memory of .* failed: No space left")
        with full as caught, offload_all(link):
            model(torch.randn(2, 3, 8, 8))
        assert "\n" not in str(caught.value)
        del caught, full
        host.full = False
        gc.collect()
        assert link.pool.leased == 0
        assert_the_same(model, offload_all(link), images(1, 2, 3, 8, 8))
    link.close()


def test_a_host_budget_that_is_too_small_says_what_was_asked_and_allowed() -> None:
    x = torch.randn(1 << 18, requires_grad=True)
    offloading = offload_activations(host_budget="2MiB")
    over = pytest.raises(TransferError, match=r"1\.000 MiB of host memory asked for, 2\.000 MiB allowed")
    with over as caught, offloading:
        x.exp().exp().exp()
    assert "\n" not in str(caught.value)
    del caught, over
    gc.collect()
    with offloading:
        loss = x.exp().exp().sum()
    loss.backward()


def test_an_abandoned_step_gives_its_host_bytes_to_the_next() -> None:
    host = RehearsedHost()
    link = host.link()
    x = torch.randn(1000, requires_grad=True)
    host.gate.clear()
    with pytest.raises(ArithmeticError), offload_all(link):
        y = x.exp()
        host.at_gate.wait()
        raise_an_error(y)
    del y
    threading.Timer(0.01, host.gate.set).start()
    with offload_all(link):
        loss = x.exp().sum()
    loss.backward()
    assert torch.equal(x.grad, x.detach().exp())  # type: ignore[arg-type]
    assert host.made == 1
    link.close()


def test_a_graph_that_outlives_the_link_is_told_so() -> None:
    offloading = offload_all()
    x = torch.randn(1000, requires_grad=True)
    with offloading:
        loss = x.exp().sum()
    offloading.close()
    with pytest.raises(TransferError, match="closed; open another"):
        loss.backward()
    del loss
    with offloading:
        loss = x.exp().sum()
    loss.backward()


def test_blocks_share_the_link_that_none_of_them_was_given(tmp_path: Path) -> None:
    x = torch.randn(1000, requires_grad=True)
    for where in (None, "host", tmp_path, str(tmp_path)):
        for _ in range(2):
            with offload_activations(where, min_bytes=1):
                loss = x.exp().sum()
            loss.backward()
    assert len(module._links) == 2
    assert [link.pool.held_bytes for link in module._links.values()] == [4096, 4096]


@pytest.mark.parametrize(
    ("arguments", "kind", "why"),
    [
        ({"min_bytes": "many"}, InputError, "min_bytes='many' is not a size"),
        ({"host_budget": 0}, InputError, "host_budget=0"),
        ({"link": 3}, InputError, "link=3: expected 'host', a folder or an open link"),
        ({"link": "/nowhere/at/all"}, TransferError, "/nowhere/at/all: No such file"),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(arguments: dict[str, Any], kind: type[Exception], why: str) -> None:
    with pytest.raises(kind, match=why) as caught:
        offload_activations(**arguments)
    assert "\n" not in str(caught.value)


@pytest.mark.gpu
@pytest.mark.parametrize("name", NETWORKS)
def test_on_cuda_too(name: str) -> None:
    cudnn = torch.backends.cudnn
    with cudnn.flags(enabled=True, deterministic=True, benchmark=False):
        model = NETWORKS[name]().cuda()
        if name == "pooling and up-sampling":
            pytest.skip("its backward pass adds up in any order")
        assert_the_same(model, offload_all(), [batch.cuda() for batch in images(3, 2, 3, 8, 8)])
