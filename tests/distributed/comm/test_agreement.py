"""Ranks that differ in a codec, an option or a layout are all told before they train on with unequal weights."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from examples.parallel.activation_exchange import ActivationExchange
from examples.parallel.hybrid import hybrid
from shoal import codecs
from shoal.app.training.options import TrainOptions
from shoal.app.training.ranks import Ranks
from shoal.distributed.comm.agreement import agree
from shoal.distributed.comm.exchange import Exchange
from shoal.distributed.gradients import ddp_reducer
from shoal.distributed.gradients.choose_codec import decide
from shoal.distributed.gradients.compress_gradients import CompressedGradients, compress_gradients
from shoal.distributed.gradients.measure_rates import measure_choice
from shoal.distributed.weights.precision import AdaptivePrecision
from shoal.distributed.weights.sharded_weights import ShardedWeights
from shoal.errors import TransferError
from tests.distributed.reused_weights import batch, loss_of, network
from tests.ranks import run_on_ranks


def _told(call: Callable[[], object]) -> str:
    """What a call raises, and nothing if it does not; it does not wait for its time to be up."""
    started = time.monotonic()
    try:
        call()
    except TransferError as error:
        assert time.monotonic() - started < 15
        return str(error)
    return ""


def _agreed(settings: list[dict[str, Any]], whats: list[str], members: list[int] | None) -> str:
    group = dist.new_group(members) if members else None
    if members and dist.get_rank() not in members:
        return "not asked"
    rank = dist.get_rank(group)
    exchange = Exchange(group, timeout_seconds=20)
    return _told(lambda: agree(exchange, whats[rank], **settings[rank]))


def test_equal_settings_are_no_error() -> None:
    assert run_on_ranks(_agreed, 2, [{"codec": "bf16", "block": None}] * 2, ["x"] * 2, None) == ["", ""]


def test_every_rank_is_told_who_has_what() -> None:
    settings: list[dict[str, Any]] = [{"codec": "linear", "block": 8}, {"codec": "linear"}, {"codec": "tree"}]
    told = run_on_ranks(_agreed, 3, settings, ["x"] * 3, None)
    assert set(told) == {
        "x: ranks differ: got codec linear on ranks 0, 1, tree on rank 2; block 8 on rank 0, not there on ranks 1, 2; "
        "give every rank the same model, codec and options"
    }


def test_ranks_of_a_part_agree_among_themselves() -> None:
    told = run_on_ranks(_agreed, 3, [{"a": 1}, {"a": 2}], ["x"] * 2, [0, 2])
    assert told[1] == "not asked"
    assert told[0] == told[2] and "got a 1 on rank 0, 2 on rank 1;" in told[0]


def test_ranks_that_set_up_different_things_are_told() -> None:
    first, second = run_on_ranks(_agreed, 2, [{"a": 1}] * 2, ["hybrid", "ShardedWeights"], None)
    assert "settings of hybrid" in first and "settings of ShardedWeights" in first
    assert "settings of hybrid" in second and "settings of ShardedWeights" in second


def _ddp(**options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(nn.Linear(64, 64), **options)


def _shards(codec: str | None, error_feedback: bool = False) -> object:
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(nn.Linear(8, 8))
    fully_shard(model)
    return compress_gradients(model, codec, error_feedback=error_feedback, timeout_seconds=20)


def _weights(precision: Any = 8, threshold: float | None = None, interval: int = 5, **options: Any) -> ShardedWeights:
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(nn.Linear(8, 8))
    fully_shard(model)
    if threshold is not None:
        precision = AdaptivePrecision(model, threshold, interval)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return ShardedWeights(model, optimizer, precision=precision, timeout_seconds=20, **options)


def _hybrid(codec: str | None, gradient_codec: str | None, features: int = 4) -> object:
    model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.Flatten(), nn.Linear(2 * 4, features), nn.Linear(features, 4))
    return hybrid(model, codec, gradient_codec=gradient_codec, timeout_seconds=20)


def _column(out: bool) -> object:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import parallelize_module

    from examples.parallel.tensor_parallel import ColumnParallel

    activations = ActivationExchange(Exchange(timeout_seconds=20), None)
    style = ColumnParallel(activations, output_layouts=Shard(-1) if out else Replicate())
    return parallelize_module(nn.Linear(4, 4), init_device_mesh("cpu", (2,)), style)


def _train(**options: Any) -> object:
    settings = TrainOptions(planner="none", **options)
    return Ranks(dist.get_rank(), 2, 20.0, grouped=True).agree("shoal train", settings.deciding())


# What each of two ranks sets up, and what both are told.
DIFFERENT: dict[str, tuple[list[Callable[[], object]], str]] = {
    "codec": (
        [lambda: compress_gradients(_ddp(), "dynamic_tree"), lambda: compress_gradients(_ddp(), "linear")],
        "codec dynamic_tree(block=4096) on rank 0, linear(block=4096) on rank 1",
    ),
    "codec's options": (
        [
            lambda: compress_gradients(_ddp(), codecs.get("linear", block=256)),
            lambda: compress_gradients(_ddp(), codecs.get("linear", block=512)),
        ],
        "codec linear(block=256) on rank 0, linear(block=512) on rank 1",
    ),
    "no codec": (
        [lambda: compress_gradients(_ddp(), None), lambda: compress_gradients(_ddp(), "bf16")],
        "codec none on rank 0, bf16() on rank 1",
    ),
    "auto": (
        [lambda: compress_gradients(_ddp()), lambda: compress_gradients(_ddp(), "bf16")],
        "codec auto on rank 0, bf16() on rank 1",
    ),
    "error feedback": (
        [
            lambda: compress_gradients(_ddp(), "linear"),
            lambda: compress_gradients(_ddp(), "linear", error_feedback=True),
        ],
        "error_feedback False on rank 0, True on rank 1",
    ),
    "bucket size": (
        [lambda: compress_gradients(_ddp(bucket_cap_mb=1)), lambda: compress_gradients(_ddp(bucket_cap_mb=2))],
        "bucket_cap_bytes 1048576 on rank 0, 2097152 on rank 1",
    ),
    "candidates": (
        [
            lambda: measure_choice(Exchange(timeout_seconds=20), device="cpu", candidates=["bf16"]),
            lambda: measure_choice(Exchange(timeout_seconds=20), device="cpu", candidates=["linear"]),
        ],
        "candidates bf16() on rank 0, linear(block=4096) on rank 1",
    ),
    "codec of shards": (
        [lambda: _shards("dynamic_tree"), lambda: _shards("linear")],
        "codec dynamic_tree(block=4096) on rank 0, linear(block=4096) on rank 1",
    ),
    "no codec of shards": ([lambda: _shards(None), lambda: _shards("bf16")], "codec none on rank 0, bf16() on rank 1"),
    "error feedback of shards": (
        [lambda: _shards("linear"), lambda: _shards("linear", error_feedback=True)],
        "error_feedback False on rank 0, True on rank 1",
    ),
    "weights": ([lambda: _weights(16), lambda: _weights("bf16")], "precision truncate2() on rank 0, bf16() on rank 1"),
    "raw weights": ([lambda: _weights(32), lambda: _weights(8)], "precision float32 on rank 0, truncate1() on rank 1"),
    "one byte": (
        [lambda: _weights(8, one_byte="dynamic_tree"), lambda: _weights(8, one_byte="linear")],
        "precision dynamic_tree(block=4096) on rank 0, linear(block=4096) on rank 1",
    ),
    "threshold": (
        [lambda: _weights(threshold=-0.5), lambda: _weights(threshold=-0.25, rounding="nearest")],
        "rounding cut on rank 0, nearest on rank 1; one_byte truncate1() on rank 0, round1() on rank 1; "
        "threshold -0.5 on rank 0, -0.25 on rank 1",
    ),
    "interval": (
        [lambda: _weights(threshold=-0.5, interval=3), lambda: _weights(threshold=-0.5, interval=4)],
        "interval 3 on rank 0, 4 on rank 1",
    ),
    "activations": (
        [
            lambda: ActivationExchange(Exchange(timeout_seconds=20), "dynamic_tree"),
            lambda: ActivationExchange(Exchange(timeout_seconds=20), "linear"),
        ],
        "codec dynamic_tree(block=4096) on rank 0, linear(block=4096) on rank 1",
    ),
    "hybrid": (
        [lambda: _hybrid("dynamic_tree", None), lambda: _hybrid("linear", None)],
        "codec dynamic_tree(block=4096) on rank 0, linear(block=4096) on rank 1",
    ),
    "hybrid's gradients": (
        [lambda: _hybrid(None, "dynamic_tree"), lambda: _hybrid(None, "linear")],
        "codec dynamic_tree(block=4096) on rank 0, linear(block=4096) on rank 1",
    ),
    "hybrid's model": (
        [lambda: _hybrid(None, None, 4), lambda: _hybrid(None, None, 6)],
        "model 6 parameters, 60 values, ",
    ),
    "layouts": (
        [lambda: _column(True), lambda: _column(False)],
        "output shared out on rank 0, whole on rank 1",
    ),
    "shoal train": (
        [lambda: _train(budget_bytes=1, lr=0.1), lambda: _train(budget_bytes=2, lr=0.2)],
        "lr 0.1 on rank 0, 0.2 on rank 1;",
    ),
}


def _set_up(names: list[str]) -> list[str]:
    torch.manual_seed(0)
    return [_told(DIFFERENT[name][0][dist.get_rank()]) for name in names]


def test_what_differs_between_ranks_is_refused_on_each_of_them() -> None:
    first, second = run_on_ranks(_set_up, 2, list(DIFFERENT), timeout_seconds=250)
    assert first == second
    for told, (name, (_, expected)) in zip(first, DIFFERENT.items(), strict=True):
        assert all(difference in told for difference in expected.split("; ")), name
        assert told.endswith("give every rank the same model, codec and options")


def _differs_after_the_first_step(buckets_anew: bool) -> tuple[list[str], list[int]]:
    """Four steps: what they raise, and how often ranks agreed. After the first one rank 1 decides otherwise."""
    ddp = DistributedDataParallel(network(), bucket_cap_mb=0.0005, find_unused_parameters=not buckets_anew)
    gradients = compress_gradients(ddp, "dynamic_tree", timeout_seconds=20)
    assert isinstance(gradients, CompressedGradients)
    reducer: Any = gradients._reducer
    times = []
    counted = ddp_reducer.agree
    linear = codecs.get("linear")

    def count(*args: Any, **settings: Any) -> int:
        times[-1] += 1
        return counted(*args, **settings)

    ddp_reducer.agree = count
    told = []
    for step in range(4):
        times.append(0)
        told.append(_told(lambda step=step: loss_of(ddp, batch(step, dist.get_rank())).backward()))  # type: ignore[misc]
        if dist.get_rank() == 1:
            reducer._decide = lambda pieces, dtype: decide(pieces, dtype, 2, linear, None)
    return told, times


def test_buckets_are_agreed_on_when_ddp_first_fills_them_and_never_else() -> None:
    for told, times in run_on_ranks(_differs_after_the_first_step, 2, False):
        assert told == [""] * 4
        assert times[0] > 1 and times[1:] == [0, 0, 0]


def test_a_difference_after_ddp_cut_its_buckets_anew_is_told_on_every_rank() -> None:
    (first, times), (second, _) = run_on_ranks(_differs_after_the_first_step, 2, True)
    assert first[0] == second[0] == "" and times[0] == times[1] == 1  # of one bucket, then of the first of several
    assert "codec dynamic_tree on rank 0, linear on rank 1" in first[1]
    assert second[1] == first[1]
    assert first[2:] == second[2:] == [first[1]] * 2  # it stays so


def _load() -> list[str]:
    told = []
    for bits in (16, 16 + 8 * dist.get_rank()):
        weights = _weights(threshold=-0.5)
        state = weights.state_dict()
        state["adaptive"]["bits"] = dict.fromkeys(state["adaptive"]["bits"], bits)
        weights.load_state_dict(state)
        told.append(_told(lambda weights=weights: weights._model(torch.ones(1, 8))))  # type: ignore[misc]
    return told


def test_loaded_states_must_be_equal_too() -> None:
    first, second = run_on_ranks(_load, 2)
    assert first == second and first[0] == ""
    assert "bits 2 bytes a weight, hash " in first[1]
