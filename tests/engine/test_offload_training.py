"""Training with storages on the host, or in a file: the same bits as plain PyTorch, and nothing left over."""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import threading
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import shoal
from shoal.core.hardware import Device, Hardware, Link
from shoal.errors import InputError, PlanError, TransferError
from shoal.memory.limit import memory_limit
from shoal.offload.links import file, host
from tests.engine.keywords import keywords
from tests.engine.training_laws import (
    assert_same_training,
    blocks,
    classifier,
    costs_that_do_not_matter,
    differences,
    images,
    mean_square,
    needs_compiler,
    offload_by_chance,
    train,
)
from tests.raising import raising


class Residual(nn.Module):
    """x + f(x), added in place."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.path = nn.Sequential(*blocks(channels, channels), nn.Conv2d(channels, channels, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.path(x)
        y += x
        return torch.relu_(y)


class Concatenated(nn.Module):
    """x in addition to f(x), and a view of both that several ops save."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.path = nn.Sequential(*blocks(channels, channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        both = torch.cat([x, self.path(x)], 1)
        rows = both.flatten(2)
        return (rows.sin() + rows.transpose(1, 2).cos().transpose(1, 2)).view_as(both)


def a_bit_of_everything() -> nn.Sequential:
    return nn.Sequential(
        *blocks(3, 8, 8), Residual(8), nn.MaxPool2d(2), nn.Dropout(0.3), Concatenated(8), *blocks(16, 8)
    )


def a_few_layers() -> nn.Sequential:
    """Something in place, running statistics and random numbers: for laws of the loop, not of what is offloaded."""
    return nn.Sequential(*blocks(3, 8, 8), nn.Dropout(0.3))


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    gc.collect()
    left = set(threading.enumerate()) - before
    assert not [thread.name for thread in left if thread.name.startswith("shoal-")]


@pytest.fixture(params=["host", "file"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return "host" if request.param == "host" else str(tmp_path)


def test_any_choice_of_what_to_offload_and_when_trains_like_plain_pytorch(place: str) -> None:
    seed = int(place == "host")
    assert_same_training(a_bit_of_everything(), images(3, 4, 3, 8, 8), offload_by_chance(seed), place)


def test_mixed_precision_trains_like_plain_pytorch() -> None:
    around = partial(torch.autocast, "cpu", dtype=torch.bfloat16)
    batches = images(2, 4, 3, 8, 8)
    assert_same_training(a_bit_of_everything(), batches, offload_by_chance(1), "host", around_forward=around)


def test_channels_last_trains_like_plain_pytorch() -> None:
    net = a_bit_of_everything().to(memory_format=torch.channels_last)
    batches = [batch.to(memory_format=torch.channels_last) for batch in images(2, 4, 3, 8, 8)]
    assert_same_training(net, batches, offload_by_chance(2), "host")


def test_shared_weights_and_layers_used_twice_train_like_plain_pytorch() -> None:
    twice = nn.Sequential(*blocks(8, 8))
    assert_same_training(
        nn.Sequential(*blocks(3, 8), twice, twice), images(2, 4, 3, 8, 8), offload_by_chance(3), "host"
    )


def test_gradients_accumulate_and_a_short_batch_comes_last(tmp_path: Path) -> None:
    batches = [*images(4, 4, 3, 8, 8), *images(1, 3, 3, 8, 8)]
    assert_same_training(a_few_layers(), batches, offload_by_chance(4), str(tmp_path), batches_a_step=2)


def test_a_loss_can_be_sent_back_twice(tmp_path: Path) -> None:
    assert_same_training(a_few_layers(), images(2, 4, 3, 8, 8), offload_by_chance(5), str(tmp_path), backwards=2)


def offloaded(net: nn.Module, place: str = "host", seed: int = 0, host_budget: int | None = None) -> nn.Module:
    options = shoal.Options(planner=offload_by_chance(seed), host_budget=host_budget)
    return shoal.compile(copy.deepcopy(net), budget="1TiB", offload_to=place, options=options)


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_a_second_forward_pass_may_come_before_the_backward_pass_sent_back_or_not(share: float) -> None:
    def loss_with_second_pass(model: nn.Module, outputs: torch.Tensor) -> torch.Tensor:
        second = mean_square(model(batches[0]))
        return mean_square(outputs) + share * second if share else mean_square(outputs)

    net, batches = a_few_layers(), images(3, 4, 3, 8, 8)
    with costs_that_do_not_matter():
        planned = offloaded(net)
        found = train(planned, batches, loss_of=partial(loss_with_second_pass, planned))
    assert not differences(found, train(net, batches, loss_of=partial(loss_with_second_pass, net)))


@pytest.mark.slow
def test_two_forward_passes_at_once_need_host_bytes_for_both() -> None:
    net, (one, two) = classifier(3, 8, 8), images(2, 4, 3, 8, 8)

    def loop(model: nn.Module) -> None:
        for _ in range(4):
            (mean_square(model(one)) + mean_square(model(two))).backward()

    with costs_that_do_not_matter():
        probe = offloaded(net)
        loop(probe)
        host_bytes = probe.shoal.plan.host_bytes
        with pytest.raises(TransferError):
            loop(offloaded(net, host_budget=host_bytes // 2))
        loop(offloaded(net, host_budget=2 * host_bytes))


def test_evaluation_between_steps_changes_nothing() -> None:
    net, batches = a_few_layers(), images(4, 4, 3, 8, 8)
    with costs_that_do_not_matter():
        planned = offloaded(net)
        for model in (net, planned):
            train(model, batches[:2])
            model.eval()
            model(batches[0])
            model.train()
        assert not differences(train(planned, batches[2:]), train(net, batches[2:]))


def test_an_error_in_the_loss_and_an_abandoned_step_harm_no_later_step(place: str) -> None:
    net, batches = a_few_layers(), images(3, 4, 3, 8, 8)

    def failing(outputs: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("no loss")

    with costs_that_do_not_matter():
        planned = offloaded(net, place)
        for model in (net, planned):
            with pytest.raises(ArithmeticError, match="no loss"):
                train(model, batches, loss_of=failing)
            model(batches[0])
        assert not differences(train(planned, batches), train(net, batches))


@needs_compiler
def test_a_step_that_runs_out_of_device_memory_harms_no_later_one() -> None:
    net, (batch, *batches) = a_few_layers(), images(3, 4, 3, 8, 8)
    with costs_that_do_not_matter():
        planned = offloaded(net)
        train(planned, [batch])
        train(net, [batch])
        planned.zero_grad()
        with memory_limit(1), pytest.raises(torch.OutOfMemoryError):
            planned(batch)
        loss = mean_square(planned(batch))
        with memory_limit(1), pytest.raises(torch.OutOfMemoryError):
            loss.backward()
        del loss
        net(batch)  # the failed forward pass moved no statistics, the one whose backward pass failed did
        assert not differences(train(planned, batches), train(net, batches))


@pytest.mark.parametrize(
    ("slab", "place", "way"),
    [(host.HostSlab, "host", "write"), (host.HostSlab, "host", "read"), (file.FileSlab, "file", "write")],
)
def test_a_copy_that_fails_is_told_and_the_next_step_is_right(
    slab: type, place: str, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, batches = a_few_layers(), images(2, 4, 3, 8, 8)

    def fails(*_: object) -> None:
        raise OSError(28, os.strerror(28))

    with costs_that_do_not_matter():
        planned = offloaded(net, "host" if place == "host" else str(tmp_path))
        planned(batches[0])
        net(batches[0])
        with monkeypatch.context() as patch:
            patch.setattr(slab, way, fails)
            with pytest.raises(TransferError):
                mean_square(planned(batches[0])).backward()
        planned.zero_grad(), net.zero_grad()
        for name, buffer in net.named_buffers():
            planned.get_buffer(name).copy_(buffer)
        assert not differences(train(planned, batches), train(net, batches))


def test_a_folder_that_is_gone_is_told(tmp_path: Path) -> None:
    folder = tmp_path / "spill"
    with pytest.raises(InputError):
        offloaded(classifier(3, 8), str(folder))
    folder.mkdir()
    planned = offloaded(classifier(3, 8, 8), str(folder))
    folder.rmdir()
    with costs_that_do_not_matter(), pytest.raises((InputError, TransferError)):
        planned(images(1, 4, 3, 8, 8)[0])


def test_the_file_has_no_name_while_it_is_in_use(tmp_path: Path) -> None:
    planned = offloaded(classifier(3, 8, 8), str(tmp_path))
    with costs_that_do_not_matter():
        loss = mean_square(planned(images(1, 4, 3, 8, 8)[0]))
        assert planned.shoal.plan.offloaded
        assert not list(tmp_path.iterdir())
        loss.backward()


def test_a_host_budget_that_is_too_small_for_the_plan_is_told() -> None:
    planned = offloaded(classifier(3, 8, 8), host_budget=4096)
    with costs_that_do_not_matter(), pytest.raises(TransferError):
        planned(images(1, 4, 3, 8, 8)[0])


def test_threads_and_host_bytes_go_with_the_model(place: str) -> None:
    planned = offloaded(classifier(3, 8, 8), place)
    with costs_that_do_not_matter():
        mean_square(planned(images(1, 4, 3, 8, 8)[0])).backward()
    assert [thread for thread in threading.enumerate() if thread.name.startswith("shoal-")]
    del planned  # the fixture looks for what is left


def test_a_plan_that_offloads_is_refused_where_nothing_may_leave_the_device() -> None:
    net, (batch,) = classifier(3, 8, 8), images(1, 4, 3, 8, 8)
    planned = shoal.compile(net, budget="1TiB", options=shoal.Options(planner=offload_by_chance(0)))
    with costs_that_do_not_matter(), raising(PlanError, "offload_to"):
        planned(batch)


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        ({"offload_to": "/no/such/folder"}, ""),
        ({"host_budget": "1GiB"}, ""),
        ({"offload_to": "host", "host_budget": "lots"}, ""),
        ({"rehearse": "p100"}, "p100-nvlink"),
    ],
)
def test_an_argument_that_cannot_be_is_refused(wrong: dict[str, object], complaint: str) -> None:
    with raising(InputError, complaint):
        shoal.compile(classifier(3, 8), budget="1GiB", **keywords(wrong))


@needs_compiler
def test_inside_its_budget_joint_offloads_and_the_measured_peak_is_the_predicted_one() -> None:
    net = classifier(3, 32, 64, 64).to(memory_format=torch.channels_last)
    batch = torch.randn(16, 3, 32, 32).to(memory_format=torch.channels_last)
    planned = shoal.compile(net, budget="18MiB", offload_to="host")  # of 29
    for _ in range(2):
        planned.zero_grad()
        planned(batch).square().mean().backward()
    told = planned.shoal
    assert told.plan.offloaded
    assert told.measured_peak_bytes <= told.budget_bytes
    assert told.measured_peak_bytes == pytest.approx(told.predicted_peak_bytes, rel=0.02)
    assert told.repairs == 0


def test_a_rehearsed_link_is_as_slow_beside_this_machine_as_the_target_beside_its_own() -> None:
    target = Hardware("target", Device("fast", 1 << 34, 1e15, 1e12, 1e-6), Link("wire", 1e12, 1e12, 0.0), "made up")
    planned = shoal.compile(
        classifier(3, 8, 8), budget="1TiB", options=shoal.Options(planner=offload_by_chance(0), rehearse=target)
    )
    with costs_that_do_not_matter(), warnings.catch_warnings():
        mean_square(planned(images(1, 4, 3, 8, 8)[0])).backward()
    here = shoal.cost.measure.measure("cpu")
    link = planned.shoal.plan.graph.link
    assert link.to_host_bytes_per_second / here.device.flops_per_second == pytest.approx(1e12 / 1e15)


def _open_files(folder: Path) -> list[str]:
    """What this process has open in a folder, whether it has a name or not."""
    found = []
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the list itself
            found.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return [path for path in found if path.startswith(f"{folder}/")]


def test_the_file_of_a_model_is_closed_when_the_model_is_collected(tmp_path: Path) -> None:
    for _ in range(3):
        net = offloaded(nn.Sequential(*blocks(3, 4)), str(tmp_path), seed=2)
        net(torch.randn(2, 3, 8, 8)).sum().backward()
        assert net.shoal.plan.offloaded and len(_open_files(tmp_path)) == 1
        del net
        gc.collect()
        assert _open_files(tmp_path) == []


@pytest.mark.parametrize("budget", ["1GiB", None])
def test_an_empty_batch_trains_like_plain_pytorch(budget: str | None, tmp_path: Path) -> None:
    place = "host" if budget else str(tmp_path)
    plain = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 4, 2), nn.ReLU(), nn.Flatten())
    planned = shoal.compile(copy.deepcopy(plain), budget, offload_to=place) if budget else offloaded(plain, place)
    for batch in (torch.empty(0, 3, 8, 8), torch.randn(2, 3, 8, 8)):
        losses = [net(batch).square().sum() for net in (plain, planned)]
        for loss in losses:
            loss.backward()
        assert torch.equal(*losses)
    for ours, theirs in zip(planned.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)
