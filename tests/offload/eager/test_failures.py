"""Whatever goes wrong in a block, nothing leaks, one line says it and the next step is right."""

from __future__ import annotations

import gc
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.errors import InputError, TransferError
from shoal.offload.eager import offload_activations
from shoal.offload.links.open_link import open_link
from tests.engine.training_laws import images
from tests.offload.eager.networks import NETWORKS, assert_the_same, offload_all, raise_an_error
from tests.offload.links.slabs import RehearsedHost, open_files
from tests.raising import raising


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
        full = pytest.raises(TransferError)
        with full as caught, offload_all(link):
            model(torch.randn(2, 3, 8, 8))
        del caught, full
        host.full = False
        gc.collect()
        assert link.pool.leased == 0
        assert_the_same(model, offload_all(link), images(1, 2, 3, 8, 8))
    link.close()


def test_a_host_budget_that_is_too_small_says_what_was_asked_and_allowed() -> None:
    x = torch.randn(1 << 18, requires_grad=True)
    offloading = offload_activations(host_budget="2MiB")
    over = raising(TransferError, "1.000 MiB", "2.000 MiB")
    with over as caught, offloading:
        loss = x.exp().exp().exp()
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
        y = x.exp().exp().exp()  # the first result is free when the last op saves its own
        host.at_gate.wait(60)
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
    with pytest.raises(TransferError):
        loss.backward()
    del loss
    with offloading:
        loss = x.exp().sum()
    loss.backward()


@pytest.mark.parametrize(
    ("arguments", "kind", "why"),
    [
        ({"min_bytes": "many"}, InputError, "min_bytes='many'"),
        ({"host_budget": 0}, InputError, "host_budget=0"),
        ({"link": 3}, InputError, "link=3"),
        ({"link": "/nowhere/at/all"}, TransferError, "/nowhere/at/all"),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(arguments: dict[str, Any], kind: type[Exception], why: str) -> None:
    with raising(kind, why):
        offload_activations(**arguments)
