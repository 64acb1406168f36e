from __future__ import annotations

import io
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from shoal import codecs
from shoal.distributed.comm.traffic import Sent
from shoal.distributed.weights.precision import AdaptivePrecision
from shoal.distributed.weights.sharded_weights import ShardedWeights
from shoal.errors import InputError, TransferError
from tests.ranks import meet, run_on_ranks

RANKS = 2


def made(*, weight_decay: float = 5e-4, sharded: bool = True, **options: Any) -> tuple[nn.Module, Any]:
    """Weights that do not divide by the ranks, a weight of one row, a batch norm; two shards within the root's."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 7, 3), nn.BatchNorm2d(7), nn.ReLU(), nn.Flatten(), nn.Linear(112, 1), nn.Linear(1, 5)
    )
    if sharded:
        fully_shard(model[0], **options)
        fully_shard(model[4], **options)
        fully_shard(model, **options)
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=weight_decay)


def run(model: nn.Module, optimizer: Any, first: int, last: int, micro: int = 1) -> list[float]:
    losses = []
    for step in range(first, last):
        optimizer.zero_grad()
        for part in range(micro):
            draw = torch.Generator().manual_seed(100 * step + 10 * part + dist.get_rank())
            images, labels = torch.randn(4, 3, 6, 6, generator=draw), torch.randint(5, (4,), generator=draw)
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    """All masters, gathered exactly."""
    found = {}
    for name, value in model.state_dict().items():
        found[name] = value.full_tensor().clone() if hasattr(value, "full_tensor") else value.clone()
    return found


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def trains_as_plain_fsdp() -> list[bool]:
    found = []
    for micro, options in ((1, {}), (2, {"reshard_after_forward": False})):
        plain, optimizer = made(**options)
        expected = run(plain, optimizer, 0, 4, micro)
        model, optimizer = made(**options)
        weights = ShardedWeights(model, optimizer)
        losses = run(model, optimizer, 0, 2, micro)
        weights.close()
        losses += run(model, optimizer, 2, 3, micro)  # plain again
        ShardedWeights(model, optimizer)  # and after steps have been taken
        losses += run(model, optimizer, 3, 4, micro)
        found += [losses == expected, same(whole(model), whole(plain))]
    return found


def test_32_bits_train_as_plain_fsdp_does_bit_for_bit() -> None:
    assert run_on_ranks(trains_as_plain_fsdp, RANKS) == [[True] * 4] * RANKS


def computes_with(precision: int | str, rounding: str, one_byte: str | None, codec: str) -> bool:
    model, optimizer = made()
    ShardedWeights(model, optimizer, precision=precision, rounding=rounding, one_byte=one_byte)
    run(model, optimizer, 0, 2)
    exact = whole(model)
    reference, _ = made(sharded=False)
    reference.load_state_dict(exact)
    the_codec = codecs.get(codec)
    with torch.no_grad():
        for parameter in reference.parameters():
            if parameter.dim() > 1:
                parameter.copy_(the_codec.decode(the_codec.encode(parameter)))
        images = torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(5))
        return torch.equal(model.eval()(images), reference.eval()(images))


@pytest.mark.parametrize(
    ("precision", "rounding", "one_byte", "codec"),
    [
        (8, "cut", None, "truncate1"),
        (8, "cut", "round1", "round1"),
        (24, "nearest", "dynamic_tree", "round3"),
        ("bf16", "cut", None, "bf16"),
    ],
)
def test_the_forward_pass_has_the_packed_weights_and_the_shards_stay_exact(
    precision: int | str, rounding: str, one_byte: str | None, codec: str
) -> None:
    assert run_on_ranks(computes_with, RANKS, precision, rounding, one_byte, codec) == [True] * RANKS


def adapts() -> tuple[list[dict[str, int]], list[float], list[float], Sent]:
    model, optimizer = made(weight_decay=2.0)  # norms fall 10 % a step
    precision = AdaptivePrecision(model, threshold=-0.02, interval=2)
    weights = ShardedWeights(model, optimizer, precision=precision)
    bits = []
    for step in range(7):
        run(model, optimizer, step, step + 1)
        bits.append(precision.bits)
    exact = [float(whole(model)[name].double().norm()) for name in precision.bits]
    return bits, precision.norms(), exact, weights.traffic.last_step("weights")


def test_all_ranks_widen_the_same_layers_by_the_norms_of_whole_weights() -> None:
    found = run_on_ranks(adapts, RANKS)
    bits, norms, exact, sent = found[0]
    assert found[1] == found[0]
    assert norms == pytest.approx(exact, rel=1e-6)
    assert bits[0]["0.weight"] == 8 and bits[-1]["0.weight"] > 8
    assert sent.sent_bytes <= sent.raw_bytes


def counts() -> tuple[Sent, Sent]:
    model, optimizer = made(reshard_after_forward=False)
    weights = ShardedWeights(model, optimizer, precision=8)
    run(model, optimizer, 0, 2)
    sent = weights.traffic.last_step("weights")
    shards = {name: record._sharded_param_data.numel() for name, record in weights._sharded.items()}
    packed = sum(elems * (1 if name in ("0.weight", "4.weight", "5.weight") else 4) for name, elems in shards.items())
    return sent, Sent(packed, 4 * sum(shards.values()))


def test_bytes_are_those_of_a_rings_all_gather() -> None:
    for sent, expected in run_on_ranks(counts, RANKS):
        assert sent == expected


def resumes() -> tuple[bool, bool]:
    def begun() -> tuple[nn.Module, Any, ShardedWeights]:
        model, optimizer = made(weight_decay=2.0)
        precision = AdaptivePrecision(model, threshold=-0.02, interval=2)
        return model, optimizer, ShardedWeights(model, optimizer, precision=precision)

    model, optimizer, weights = begun()
    run(model, optimizer, 0, 4)
    state = dict(model.state_dict())
    file = io.BytesIO()
    torch.save((state, optimizer.state_dict(), weights.state_dict()), file)
    expected = run(model, optimizer, 4, 7)
    resumed, its_optimizer, its_weights = begun()
    with torch.no_grad():
        resumed(torch.randn(2, 3, 6, 6))  # gathered, and to be forgotten
    file.seek(0)
    states = torch.load(file, weights_only=False)
    resumed.load_state_dict(states[0])
    its_optimizer.load_state_dict(states[1])
    its_weights.load_state_dict(states[2])
    return run(resumed, its_optimizer, 4, 7) == expected, same(whole(resumed), whole(model))


def test_a_checkpoint_resumes_bit_for_bit() -> None:
    assert run_on_ranks(resumes, RANKS) == [(True, True)] * RANKS


def refusals() -> list[str]:
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
    from torch.distributed.tensor import Shard

    found = []
    plain = nn.Linear(4, 4)
    half = fully_shard(nn.Linear(4, 4).half())
    columns = fully_shard(nn.Linear(4, 4, bias=False), shard_placement_fn=lambda parameter: Shard(1))
    offloaded = fully_shard(nn.Linear(4, 4), offload_policy=CPUOffloadPolicy(pin_memory=False))
    for model in (plain, half, columns, offloaded):
        try:
            ShardedWeights(model, torch.optim.SGD(model.parameters(), lr=0.1))
        except InputError as error:
            found.append(str(error))
    return found


def test_what_cannot_be_packed_is_refused() -> None:
    for messages in run_on_ranks(refusals, RANKS):
        not_sharded, half, columns, offloaded = messages
        assert "fully_shard" in not_sharded
        assert "expected float32" in half
        assert "dimension 1" in columns
        assert "offload_policy" in offloaded


def outlives_another() -> str:
    model, optimizer = made()
    ShardedWeights(model, optimizer, precision=16)
    run(model, optimizer, 0, 1)
    meet()
    if dist.get_rank() == 1:
        os._exit(1)
    try:
        run(model, optimizer, 1, 3)
    except TransferError as error:
        return str(error)
    return "nothing was noticed"


def test_a_rank_that_dies_ends_the_others_with_a_clear_error() -> None:
    message = run_on_ranks(outlives_another, RANKS, may_end={1})[0]
    assert "rank 0 of 2" in message and "bytes of weights" in message and "last checkpoint" in message
