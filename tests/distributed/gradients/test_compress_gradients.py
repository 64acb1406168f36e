"""DDP with compressed gradients on gloo: the same training up to the codec's error, the same bits on every rank."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import shoal
from shoal import codecs
from shoal.distributed.comm.message import HEADER_BYTES
from shoal.distributed.gradients.bucket_segments import ParameterGrad, cut, in_chunks, message_bytes
from shoal.distributed.gradients.compress_gradients import compress_gradients
from shoal.errors import CodecError, InputError
from tests.distributed.gradients.test_bucket_segments import FLOAT_CODECS
from tests.distributed.reused_weights import batch, loss_of, network
from tests.raising import raising
from tests.ranks import run_on_ranks

# SHOAL_TEST_STEPS=500 trains that long in every codec, which takes minutes.
STEPS = int(os.environ.get("SHOAL_TEST_STEPS", "20"))
NEARLY_EXACT = "round3"  # within 2**-16 of each value


# One rank.


def grads_of_one_rank(codec: str | None) -> list[torch.Tensor]:
    model = DistributedDataParallel(network())
    if codec is not None:
        gradients = compress_gradients(model, codec)
        assert gradients.decisions == {}
    loss_of(model, batch(0, 0)).backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("codec", ["dynamic_tree", "auto"])
def test_one_rank_equals_no_compression_to_the_bit(codec: str) -> None:
    (plain,) = run_on_ranks(grads_of_one_rank, 1, None)
    (ours,) = run_on_ranks(grads_of_one_rank, 1, codec)
    for got, expected in zip(ours, plain, strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=0)


# Every codec, many steps.


def train_for_long(names: list[str], steps: int) -> dict[str, list[int]]:
    """Sums of the bits of all weights after each step, by codec."""
    sums: dict[str, list[int]] = {}
    for name in names:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(6, 30), nn.Tanh(), nn.Linear(30, 2, bias=False))
        ddp = DistributedDataParallel(model)
        gradients = compress_gradients(ddp, name, timeout_seconds=200)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        torch.manual_seed(dist.get_rank())
        sums[name] = []
        for _ in range(steps):
            x = torch.randn(4, 6)
            optimizer.zero_grad()
            (ddp(x) - x[:, :2]).square().mean().backward()
            optimizer.step()
            bits = torch.cat([p.detach().flatten() for p in model.parameters()]).view(torch.int32).long()
            sums[name].append(int((bits * torch.arange(1, bits.numel() + 1)).sum()))
        assert bool(bits.any())
        gradients.close()
    return sums


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "names", "steps"), [(3, FLOAT_CODECS, STEPS), (2, ["dynamic_tree"], 150)])
def test_weights_stay_equal_to_the_bit(ranks: int, names: list[str], steps: int) -> None:
    first, *others = run_on_ranks(train_for_long, ranks, names, steps, timeout_seconds=max(steps, 250))
    for name in names:
        assert len(set(first[name])) > 0.8 * steps  # they move
        for other in others:
            assert other[name] == first[name]


# A bucket so large that it travels in chunks.

LARGE = 1024, 6200


def grads_of_a_large_layer() -> tuple[torch.Tensor, torch.Tensor, int]:
    """Of ours, of plain DDP, and what ours sent."""
    found = []
    for compress in (False, True):
        torch.manual_seed(5)
        ddp = DistributedDataParallel(nn.Linear(*LARGE), bucket_cap_mb=100)
        if compress:
            gradients = compress_gradients(ddp, NEARLY_EXACT, error_feedback=True, timeout_seconds=200)
        for step in range(2):
            ddp.zero_grad()
            x = torch.randn(3, LARGE[0], generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
            ddp(x).square().mean().backward()
        found.append(torch.cat([p.grad.flatten() for p in ddp.parameters() if p.grad is not None]))
    plain, ours = found
    sent_bytes = gradients.traffic.last_step("gradients").sent_bytes
    gradients.close()
    return ours, plain, sent_bytes


def test_a_large_bucket_travels_in_chunks_and_every_rank_has_the_same_bits() -> None:
    pieces = [ParameterGrad("bias", LARGE[1], False), ParameterGrad("weight", LARGE[0] * LARGE[1], True)]
    shards = cut(pieces, 2)
    chunks = in_chunks(shards)
    assert len(chunks) == 2
    found = run_on_ranks(grads_of_a_large_layer, 2)
    for rank, (ours, plain, sent_bytes) in enumerate(found):
        torch.testing.assert_close(ours, found[0][0], rtol=0, atol=0)
        assert float((ours - plain).norm() / plain.norm()) < 1e-4
        messages = [message_bytes(segments, codecs.get(NEARLY_EXACT)) for chunk in chunks for segments in chunk]
        assert sum(messages) == 3 * LARGE[0] * LARGE[1] + 4 * LARGE[1]
        assert sent_bytes == sum(messages) + 2 * len(chunks) * HEADER_BYTES, rank


# What DDP can do in addition.


def compared(kind: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Gradients of plain DDP and ours, of three steps."""
    options: dict[str, dict[str, Any]] = {
        "small buckets": {"bucket_cap_mb": 0.0005},
        "views": {"gradient_as_bucket_view": True},
        "static graph": {"static_graph": True},
        "unused": {"find_unused_parameters": True},
        "sometimes unused": {"find_unused_parameters": True},
    }
    found = []
    for compress in (False, True):
        model = network()
        if kind == "channels last":
            model = model.to(memory_format=torch.channels_last)
        if kind == "bfloat16":
            model = model.bfloat16()
        ddp = DistributedDataParallel(model, **options.get(kind, {}))
        rank = dist.get_rank()
        if compress:
            gradients = compress_gradients(ddp, NEARLY_EXACT, timeout_seconds=20, error_feedback=kind != "bfloat16")
        kept = []
        for step in range(3):
            for parameter in model.parameters():
                parameter.grad = None
            x = batch(step, rank).to(next(model.parameters()).dtype)
            use = kind != "unused" and not (kind == "sometimes unused" and (step + rank) % 2)
            if kind == "accumulated":
                with ddp.no_sync():
                    loss_of(ddp, batch(step + 50, rank)).backward()
            if kind == "uneven batches" and rank == 1:
                x = x[:1]
            if kind == "channels last":
                x = x.to(memory_format=torch.channels_last)
            loss_of(ddp, x, use).backward()
            kept += [p.grad.clone() if p.grad is not None else torch.zeros(0) for p in model.parameters()]
        found.append(kept)
        if compress:
            assert {decision.codec for decision in gradients.decisions.values()} >= {NEARLY_EXACT}
            gradients.close()
    return found[0], found[1]


@pytest.mark.parametrize(
    "kind",
    [
        "plain",
        "small buckets",
        "views",
        "static graph",
        "unused",
        "sometimes unused",
        "accumulated",
        "uneven batches",
        "channels last",
        "bfloat16",
    ],
)
def test_gradients_are_those_of_ddp(kind: str) -> None:
    results = run_on_ranks(compared, 2, kind)
    eps = 2.0**-7 if kind == "bfloat16" else 2.0**-14
    for plain, ours in results:
        for got, expected in zip(ours, plain, strict=True):
            assert got.shape == expected.shape
            torch.testing.assert_close(
                got, expected, rtol=eps, atol=eps * float(expected.abs().max()) if got.numel() else 0
            )
    for got, other in zip(results[0][1], results[1][1], strict=True):
        torch.testing.assert_close(got, other, rtol=0, atol=0)


def join_unevenly() -> list[torch.Tensor]:
    model = network()
    ddp = DistributedDataParallel(model)
    gradients = compress_gradients(ddp, "dynamic_tree", timeout_seconds=200)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rank = dist.get_rank()
    with ddp.join():
        for step in range(2 + rank):
            optimizer.zero_grad()
            loss_of(ddp, batch(step, rank)).backward()
            optimizer.step()
    gradients.close()
    return [parameter.detach() for parameter in model.parameters()]


def test_a_rank_that_runs_out_of_batches_joins_the_others() -> None:
    first, second = run_on_ranks(join_unevenly, 2)
    for got, other in zip(first, second, strict=True):
        torch.testing.assert_close(got, other, rtol=0, atol=0)


def scale_gradients() -> tuple[list[float], list[bool]]:
    model = nn.Linear(8, 8)
    ddp = DistributedDataParallel(model)
    gradients = compress_gradients(ddp, "one_bit", timeout_seconds=200)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    scales, moved = [], []
    for step in range(3):
        before = model.weight.detach().clone()
        optimizer.zero_grad()
        loss = ddp(torch.ones(2, 8)).mean()
        if step == 1 and dist.get_rank() == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        moved.append(not torch.equal(before, model.weight))
        assert bool(model.weight.isfinite().all())
    gradients.close()
    return scales, moved


def test_an_infinity_on_one_rank_stops_the_scaled_step_on_all() -> None:
    for scales, moved in run_on_ranks(scale_gradients, 2):
        assert scales == [1024.0, 512.0, 512.0]
        assert moved == [True, False, True]


# What is counted, chosen, kept.


def count() -> tuple[dict[str, Any], dict[int, Any], str, list[int]]:
    ddp = DistributedDataParallel(network())
    gradients = compress_gradients(ddp, "dynamic_tree", timeout_seconds=200)
    for step in range(2):
        loss_of(ddp, batch(step, dist.get_rank())).backward()
    sizes = [(name, p.numel(), p.dim() > 1) for name, p in reversed(list(ddp.module.named_parameters()))]
    found = gradients.traffic.to_json(), gradients.decisions, gradients.explain()
    gradients.close()
    return *found, sizes  # type: ignore[return-value]


def test_traffic_is_what_the_layout_says() -> None:
    results: list[Any] = run_on_ranks(count, 3)
    codec = codecs.get("dynamic_tree")
    for rank, (traffic, decisions, explained, sizes) in enumerate(results):
        shards = cut([ParameterGrad(*size) for size in sizes], 3)
        messages = [message_bytes(shard, codec) for shard in shards]
        expected = sum(messages) + messages[rank] + 4 * HEADER_BYTES
        assert traffic["steps"] == 2
        assert abs(traffic["last_step"]["gradients"]["sent_bytes"] - expected) <= 8  # the order within the bucket
        elems = sum(elems for _, elems, _ in sizes)
        assert traffic["total"]["gradients"]["raw_bytes"] == 2 * (2 * 2 * 4 * elems // 3)
        assert [decision.codec for decision in decisions.values()] == ["dynamic_tree"]
        assert explained.startswith("3 ranks: ")
        assert f"bucket 0, {elems} values: dynamic_tree, as asked" in explained


def resume(steps: int, stop_after: int | None) -> list[torch.Tensor]:
    model, state = network(), None
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for first, last in ((0, stop_after), (stop_after, steps)) if stop_after else ((0, steps),):
        if state is not None:
            model = network()
            model.load_state_dict(state["model"])
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ddp = DistributedDataParallel(model, bucket_cap_mb=0.0005)
        gradients = compress_gradients(ddp, "one_bit", timeout_seconds=200)
        if state is not None:
            gradients.load_state_dict(state["gradients"])
        for step in range(first or 0, last or steps):
            optimizer.zero_grad()
            loss_of(ddp, batch(step, dist.get_rank())).backward()
            optimizer.step()
        state = {"model": model.state_dict(), "gradients": gradients.state_dict()}
        gradients.close()
    assert state is not None
    return [*model.parameters(), *state["gradients"]["feedback"]["gradients"].values()]


def test_owed_errors_survive_new_buckets_and_a_checkpoint() -> None:
    whole = run_on_ranks(resume, 2, 5, None)
    parts = run_on_ranks(resume, 2, 5, 3)
    # A new DDP cuts its first step's buckets again, which moves blocks: residuals stay.
    for first, second in zip(whole, parts, strict=True):
        for got, expected in zip(second, first, strict=True):
            assert got.shape == expected.shape
            assert bool(got.isfinite().all())
    for got, other in zip(parts[0][:8], parts[1][:8], strict=True):
        torch.testing.assert_close(got, other, rtol=0, atol=0)


def choose_automatically() -> tuple[str, list[str | None], int]:
    ddp = DistributedDataParallel(network())
    gradients = compress_gradients(ddp, timeout_seconds=200)
    loss_of(ddp, batch(0, dist.get_rank())).backward()
    found = gradients.explain(), [d.codec for d in gradients.decisions.values()], gradients.traffic.total().raw_bytes
    gradients.close()
    return found


def test_auto_decides_the_same_on_all_ranks_and_says_why() -> None:
    first, second = run_on_ranks(choose_automatically, 2)
    assert first == second
    explained, _, raw_bytes = first
    assert explained.startswith("2 ranks: ")
    assert "Gbit/s" in explained
    assert raw_bytes == 4 * sum(parameter.numel() for parameter in network().parameters())


def ask_wrongly() -> None:
    ddp = DistributedDataParallel(network())
    with raising(InputError, "torch.nn.parallel.DistributedDataParallel"):
        compress_gradients(network())
    with raising(CodecError, "'dynamic_trees'", "'dynamic_tree'"):
        compress_gradients(ddp, "dynamic_trees")
    with raising(InputError, "sign_mask"):
        compress_gradients(ddp, "sign_mask")


def test_wrong_arguments_are_refused() -> None:
    run_on_ranks(ask_wrongly, 1)


def test_it_is_there_once_shoal_is_imported() -> None:
    assert shoal.distributed.compress_gradients is compress_gradients
    with pytest.raises(AttributeError, match="module 'shoal' has no attribute 'distribute'"):
        _ = shoal.distribute  # type: ignore[attr-defined]
