"""FSDP2's gradients on codes: held to a reference on every rank's own gradients, in bits and against float64."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from shoal.codecs import get
from shoal.codecs.codec import Codec
from shoal.distributed import compress_gradients
from shoal.distributed.comm.message import HEADER_BYTES
from shoal.distributed.comm.traffic import Sent
from shoal.distributed.gradients.sharded_gradients import CompressedShards
from shoal.errors import InputError, TransferError
from tests.ranks import meet, run_on_ranks

Gradients = dict[str, torch.Tensor]


class _Network(nn.Module):
    """Sizes that no number of ranks divides, normalisation, and a parameter that may go unused."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Sequential(nn.Linear(13, 31), nn.LayerNorm(31), nn.ReLU())
        self.second = nn.Sequential(nn.Linear(31, 130), nn.ReLU())
        self.last = nn.Linear(130, 3)
        self.unused = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor, use_all: bool = True) -> torch.Tensor:
        y = self.last(self.second(self.first(x))).square().mean()
        return y + self.unused(x[:, :2]).mean() if use_all else y


def _sharded(network: nn.Module, **options: Any) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in (network.first, network.second):
        fully_shard(module, mesh=mesh, **options)
    fully_shard(network, mesh=mesh, **options)
    return network


def _batch(step: int = 0) -> torch.Tensor:
    return torch.randn(5, 13, generator=torch.Generator().manual_seed(100 * step + dist.get_rank()))


def _gathered(gradients: Gradients) -> list[Gradients]:
    """Every rank's."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, gradients)
    return gathered


def _own(network: nn.Module) -> Gradients:
    return {name: p.grad.to_local().clone() for name, p in network.named_parameters()}


def _local_gradients(network: nn.Module, scale: float = 1.0) -> Gradients:
    """Of this rank's batch, whole."""
    (scale * network(_batch())).backward()
    return {name: p.grad for name, p in network.named_parameters()}


def _through(values: torch.Tensor, codec: Codec) -> torch.Tensor:
    return codec.decode(codec.encode(values))


def _chunk(gradient: torch.Tensor, rank: int) -> torch.Tensor:
    """A rank's rows, padded as FSDP2 pads them."""
    ranks = dist.get_world_size()
    rows = -(-len(gradient) // ranks)
    padded = torch.zeros(ranks * rows, *gradient.shape[1:], dtype=gradient.dtype)
    padded[: len(gradient)] = gradient
    return padded[rank * rows : (rank + 1) * rows]


def _means(codec: Codec, dtype: torch.dtype = torch.float32) -> Iterator[tuple[str, torch.Tensor, torch.Tensor, float]]:
    """Of each parameter: this rank's mean by the book, the exact one, and the error that the codec states."""
    everyone = _gathered(_local_gradients(_Network()))
    rank, ranks = dist.get_rank(), len(everyone)
    for name, gradient in everyone[rank].items():
        total = _chunk(gradient, rank).to(dtype).float()
        exact, bound = total.double(), torch.zeros_like(total, dtype=torch.float64)
        for r in range(ranks):
            if r != rank:
                values = _chunk(everyone[r][name], rank).to(dtype).float()
                coded = gradient.dim() >= 2
                total = total + (_through(values, codec) if coded else values)
                exact = exact + values.double()
                bound += codec.error_bound(values) if coded else 0
        mean = (total / ranks).to(dtype).float()
        kept = len(torch.chunk(gradient, ranks)[rank]) if rank < len(torch.chunk(gradient, ranks)) else 0
        yield name, mean[:kept], exact[:kept] / ranks, float((bound / ranks).max())


def _against_the_reference(name: str, reduce_dtype: torch.dtype | None) -> None:
    codec = get(name)
    network = _sharded(_Network(), mp_policy=MixedPrecisionPolicy(reduce_dtype=reduce_dtype))
    CompressedShards(network, codec, error_feedback=False, timeout_seconds=200)
    network(_batch()).backward()
    own = _own(network)
    for parameter, mean, exact, bound in _means(codec, reduce_dtype or torch.float32):
        assert torch.equal(own[parameter], mean), parameter
        if reduce_dtype is None and mean.numel():
            assert float((own[parameter] - exact).abs().max()) <= bound + 1e-6 * float(exact.abs().max())


@pytest.mark.parametrize(
    ("codec", "ranks", "reduce_dtype"),
    [
        ("dynamic_tree", 2, None),
        ("dynamic_tree", 3, None),
        ("truncate3", 2, None),
        ("dynamic_tree", 2, torch.bfloat16),
    ],
)
def test_a_shard_is_the_mean_of_its_own_values_and_of_decoded_ones(
    codec: str, ranks: int, reduce_dtype: torch.dtype | None
) -> None:
    run_on_ranks(_against_the_reference, ranks, codec, reduce_dtype)


def _beside_plain(codec: str | None) -> bool:
    plain, ours = _sharded(_Network()), _sharded(_Network())
    shards = CompressedShards(ours, get(codec) if codec else None, error_feedback=False, timeout_seconds=200)
    for network in (plain, ours):
        network(_batch()).backward()
    expected, got = _own(plain), _own(ours)
    assert all(decision.codec is None for decision in shards.decisions.values())
    sent = shards.traffic.total("gradients")
    assert sent.sent_bytes == sent.raw_bytes
    return all(torch.equal(expected[name], got[name]) for name in expected)


@pytest.mark.parametrize(("ranks", "codec"), [(1, "dynamic_tree"), (2, None)])
def test_one_rank_and_no_codec_are_plain_fsdp2_to_the_bit(ranks: int, codec: str | None) -> None:
    assert all(run_on_ranks(_beside_plain, ranks, codec))


def _counted() -> tuple[Sent, int, str]:
    network = _sharded(_Network())
    shards = CompressedShards(network, get("dynamic_tree"), error_feedback=False, timeout_seconds=200)
    for step in range(3):
        network(_batch(step)).backward()
    return shards.traffic.last_step("gradients"), shards.traffic.steps, shards.explain()


def test_bytes_are_counted_and_each_backward_pass_is_a_step() -> None:
    """Of each parameter the other rank's half: codes, a scale a block, padded to four bytes; the others' raw."""
    sent, steps, told = run_on_ranks(_counted, 2)[0]
    weights = [16 * 13, 65 * 31, 2 * 130, 1 * 2]
    raw = 4 * (16 + 16 + 16 + 65 + 2 + 1)
    coded = sum(elems + 4 + -elems % 4 for elems in weights)
    assert sent.sent_bytes == 3 * HEADER_BYTES + coded + raw
    assert sent.raw_bytes == 4 * (sum(weights)) + raw
    assert steps == 3
    assert "first, 448 values: dynamic_tree, as asked" not in told
    assert f"first, {2 * (16 * 13 + 3 * 16)} values: dynamic_tree, as asked" in told


def _with_a_nan() -> list[bool]:
    network = _sharded(_Network())
    CompressedShards(network, get("dynamic_tree"), error_feedback=False, timeout_seconds=200)
    x = _batch()
    if dist.get_rank() == 0:
        x[0, 0] = float("nan")
    network(x).backward()
    return [bool(gradient.isnan().any()) for name, gradient in _own(network).items() if "first.0.weight" in name]


def test_a_nan_of_one_rank_is_a_nan_on_all() -> None:
    assert run_on_ranks(_with_a_nan, 2) == [[True], [True]]


def _summed_over_steps(steps: int, error_feedback: bool) -> float:
    codec = get("truncate1")  # loses up to 3/4 of each value, always towards zero
    network = _sharded(_Network())
    shards = CompressedShards(network, codec, error_feedback=error_feedback, timeout_seconds=200)
    network(_batch()).backward()  # never zeroed: the sum of all steps, which is what training sees
    shards.load_state_dict(shards.state_dict())
    for _ in range(steps - 1):
        network(_batch()).backward()
    own = _own(network)
    found = [(own[name] / steps - exact).abs().max() / exact.abs().max() for name, _, exact, _ in _means(codec)]
    return float(max(found))


def test_what_encoding_loses_comes_with_the_next_gradients() -> None:
    lost, lost_again = (
        run_on_ranks(_summed_over_steps, 2, 16, True)[0],
        run_on_ranks(_summed_over_steps, 2, 16, False)[0],
    )
    assert lost < 3 / 16  # what waits is at most three times the greatest value
    assert lost_again > 2 * lost


def _state_of_another_rank() -> str:
    shards = CompressedShards(_sharded(_Network()), get("one_bit"), error_feedback=True, timeout_seconds=200)
    state = {"feedback": {"ranks": 2, "rank": 1 - dist.get_rank(), "gradients": {}, "means": []}}
    with pytest.raises(InputError) as caught:
        shards.load_state_dict(state)
    return str(caught.value)


def test_what_another_rank_owes_is_refused() -> None:
    assert "expected rank 0 of 2" in run_on_ranks(_state_of_another_rank, 2)[0]


def _partly_used() -> bool:
    """Frozen parameters are none of ours; where one has no gradient its module's travel as they are."""
    plain, ours = _Network(), _Network()
    for network in (plain, ours):
        network.second[0].weight.requires_grad_(False)
        _sharded(network)
    CompressedShards(ours, get("dynamic_tree"), error_feedback=False, timeout_seconds=200)
    for network in (plain, ours):
        network(_batch(), use_all=False).backward()
    same = [
        torch.equal(p.grad.to_local(), q.grad.to_local())
        for (name, p), q in zip(plain.named_parameters(), ours.parameters(), strict=True)
        if p.grad is not None and name.startswith("last")
    ]
    assert ours.second[0].weight.grad is None and ours.second[0].bias.grad is not None
    return same == [True, True]


def test_frozen_and_unused_parameters() -> None:
    assert all(run_on_ranks(_partly_used, 2))


def _closed() -> bool:
    plain, ours = _sharded(_Network()), _sharded(_Network())
    shards = CompressedShards(ours, get("dynamic_tree"), error_feedback=False, timeout_seconds=200)
    shards.close()
    for network in (plain, ours):
        network(_batch()).backward()
    expected, got = _own(plain), _own(ours)
    return all(torch.equal(expected[name], got[name]) for name in expected)


def test_closed_it_is_plain_fsdp2_again() -> None:
    assert all(run_on_ranks(_closed, 2))


def _measured(seconds_per_byte: float) -> dict[str, str | None]:
    all_reduce, reduce_scatter = dist.all_reduce, dist.reduce_scatter_tensor

    def slow(output: torch.Tensor, values: torch.Tensor, **named: Any) -> Any:
        time.sleep(seconds_per_byte * values.nbytes)
        return reduce_scatter(output, values, **named)

    assert all_reduce is dist.all_reduce
    dist.reduce_scatter_tensor = slow
    shards = CompressedShards(_sharded(_Network()), "auto", error_feedback=False, timeout_seconds=200)
    assert all(decision.reason for decision in shards.decisions.values())
    return {name: decision.codec for name, decision in shards.decisions.items()}


def test_auto_measures_the_reduce_scatter_and_all_ranks_decide_alike() -> None:
    first, second = run_on_ranks(_measured, 2, 2e-5)
    assert first == second
    assert set(first) == {"the root", "first", "second"}
    assert first["second"] in ("bf16", "dynamic_tree")  # 16 KB in a third of a second


def _a_rank_ends() -> tuple[str, str]:
    network = nn.Linear(100, 10)
    fully_shard(network, mesh=init_device_mesh("cpu", (2,)), reshard_after_forward=False)  # gathers nothing in backward
    CompressedShards(network, get("dynamic_tree"), error_feedback=False, timeout_seconds=200)
    loss = network(torch.ones(1, 100)).sum()
    meet()
    if dist.get_rank() == 1:
        os._exit(0)
    with pytest.raises(TransferError) as caught:
        loss.backward()
    return str(caught.value), type(caught.value).__name__


def test_a_rank_that_ends_is_an_error_of_transfer_out_of_backward() -> None:
    told, kind = run_on_ranks(_a_rank_ends, 2, may_end=[1])[0]
    assert kind == "TransferError"
    assert told.startswith("gradients of") and "rank 1" in told


def _asked_for() -> bool:
    shards = compress_gradients(_sharded(_Network()), "one_bit")
    assert isinstance(shards, CompressedShards)
    return shards.state_dict()["feedback"] is not None


def test_compress_gradients_takes_sharded_models() -> None:
    assert run_on_ranks(_asked_for, 2)[0]  # residuals of one_bit, by default


def _nothing_to_train() -> str:
    with pytest.raises(InputError) as caught:
        compress_gradients(_sharded(_Network().requires_grad_(False)), "dynamic_tree")
    return str(caught.value)


def test_a_model_without_trained_shards_is_refused() -> None:
    assert "without sharded parameters" in run_on_ranks(_nothing_to_train, 2)[0]
