"""Dettmers' data parallelism: within one rounding of the mean, alike on all ranks only after a broadcast."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from examples.parallel.local_exact import LocalExact
from shoal import codecs
from shoal.errors import InputError, TransferError
from tests.distributed.reused_weights import batch, loss_of, network
from tests.raising import raising
from tests.ranks import run_on_ranks


def _gradients(codec: str | None) -> list[torch.Tensor]:
    """Of one step: the mean, or with no codec this rank's own."""
    rank, model = dist.get_rank(), network()
    if codec is None:
        loss_of(model, batch(0, rank)).backward()
    else:
        ddp = DistributedDataParallel(model)
        ours = LocalExact(ddp, codec, timeout_seconds=200)
        loss_of(ddp, batch(0, rank)).backward()
        assert ours.traffic.steps == 1 and ours.traffic.last_step("gradients").sent_bytes > 0
        ours.close()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("name", ["dynamic_tree", "bf16"])
def test_a_rank_adds_its_own_exactly_and_the_others_rounded_once(name: str) -> None:
    codec = codecs.get(name)
    ranks = 3
    own = run_on_ranks(_gradients, ranks, None)
    means = run_on_ranks(_gradients, ranks, name)
    for rank, found in enumerate(means):
        for place, got in enumerate(found):
            parts = [grads[place] for grads in own]
            if got.dim() > 1:
                parts = [part if r == rank else codec.decode(codec.encode(part)) for r, part in enumerate(parts)]
            expected = torch.stack(parts).double().mean(0)
            torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-7)
            if got.dim() < 2:
                torch.testing.assert_close(got, means[0][place], rtol=0, atol=0)


def _drift(broadcast_every: int) -> tuple[list[bool], int]:
    model = network()
    ddp = DistributedDataParallel(model)
    ours = LocalExact(ddp, broadcast_every=broadcast_every, timeout_seconds=20)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    equal = []
    for step in range(5):
        output = ddp(batch(step, dist.get_rank()))
        weights = torch.cat([p.detach().flatten() for p in model.parameters()])
        both = [torch.empty_like(weights) for _ in range(2)]
        dist.all_gather(both, weights)
        equal.append(torch.equal(both[0], both[1]))
        optimizer.zero_grad()
        output.logsumexp(1).mean().backward()
        optimizer.step()
    ours.close()
    return equal, ours.traffic.total("weights").sent_bytes


def test_weights_drift_until_they_are_broadcast() -> None:
    for equal, sent in run_on_ranks(_drift, 2, 0):
        assert equal == [True, False, False, False, False]
        assert sent == 0
    (equal, sent), (other, none) = run_on_ranks(_drift, 2, 2)
    assert equal == other == [True, False, True, False, True]
    assert sent > none == 0


def _ask_wrongly() -> None:
    ddp = DistributedDataParallel(network())
    with raising(InputError, "broadcast_every=-1"):
        LocalExact(ddp, broadcast_every=-1)
    with raising(TransferError, "broadcast_every 1 on rank 0, 2 on rank 1"):
        LocalExact(ddp, broadcast_every=1 + dist.get_rank(), timeout_seconds=20)


def test_wrong_or_differing_arguments_are_refused() -> None:
    run_on_ranks(_ask_wrongly, 2)
