"""What is measured at the start of a run is the same on every rank, and slow links are found slow."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shoal.distributed.comm.exchange import Exchange
from shoal.distributed.gradients import measure_rates
from shoal.distributed.gradients.choose_codec import Chooser
from shoal.distributed.gradients.measure_rates import measure_choice
from shoal.errors import CodecError, TransferError
from tests.ranks import meet, run_on_ranks


def _measured(way: str, largest_elems: int) -> tuple[Chooser, bool]:
    exchange = Exchange()
    before = torch.random.get_rng_state()
    chooser = measure_choice(
        exchange, device="cpu", way=way, largest_elems=largest_elems, candidates=("bf16", "linear")
    )
    exchange.close()
    return chooser, torch.equal(before, torch.random.get_rng_state())


@pytest.mark.parametrize(("ranks", "way"), [(2, "all_reduce"), (3, "reduce_scatter")])
def test_all_ranks_hold_the_same_figures(ranks: int, way: str) -> None:
    results = run_on_ranks(_measured, ranks, way, 20_000)
    chooser = results[0][0]
    assert all(result == (chooser, True) for result in results)
    assert (chooser.link.ranks, chooser.way) == (ranks, way)
    assert [rates.codec for rates in chooser.candidates] == ["bf16", "linear"]
    assert chooser.candidates[0].bytes_per_elem == 2.0
    # 80 KB are measured with the sizes on either side.
    assert chooser.link.plain.sizes == (8 << 10, 64 << 10, 512 << 10)
    assert chooser.candidates[0].encode.sizes == (4 << 10, 64 << 10)
    assert all(seconds > 0 for curve in (chooser.link.plain, chooser.link.exchange) for seconds in curve.seconds)


def test_one_rank_measures_nothing() -> None:
    chooser = run_on_ranks(_measured, 1, "all_reduce", 1 << 20)[0][0]
    assert chooser.candidates == ()
    assert chooser.declines([(1 << 20, 0)])


class _SlowExchange(Exchange):
    """10 MB/s."""

    def all_to_all(self, parts: Any, sizes_bytes: Any, **named: Any) -> Any:
        time.sleep(1e-7 * sum(sizes_bytes[1:]))
        return super().all_to_all(parts, sizes_bytes, **named)


def _on_a_slow_link() -> Chooser:
    all_reduce = dist.all_reduce

    def slow_all_reduce(values: torch.Tensor, *args: Any, **named: Any) -> Any:
        time.sleep(1e-7 * values.nbytes)
        return all_reduce(values, *args, **named)

    dist.all_reduce = slow_all_reduce
    chooser = measure_choice(_SlowExchange(), device="cpu")
    return chooser


def test_a_slow_link_ends_the_measurement_early_and_is_worth_encoding() -> None:
    chooser = run_on_ranks(_on_a_slow_link, 2)[0]
    assert chooser.link.plain.sizes[-1] < 32 << 20
    assert chooser.decide(1 << 20).codec == "dynamic_tree"
    assert not chooser.declines([(1 << 20, 0)])


def _with_codecs(names: Sequence[str]) -> str:
    with pytest.raises(CodecError) as caught:
        measure_choice(Exchange(), device="cpu", candidates=names)
    return str(caught.value)


def test_an_unknown_candidate_is_refused_before_anything_is_measured() -> None:
    assert "unknown codec 'dynamic_three'" in run_on_ranks(_with_codecs, 1, ("dynamic_three",))[0]


def _ends(rank_to_end: int) -> str:
    exchange = Exchange(timeout_seconds=200)
    meet()
    if dist.get_rank() == rank_to_end:
        os._exit(0)
    with pytest.raises(TransferError) as caught:
        measure_choice(exchange, device="cpu", largest_elems=10_000)
    return str(caught.value)


def test_a_rank_that_ends_is_an_error_of_transfer() -> None:
    said = run_on_ranks(_ends, 2, 1, may_end=[1])[0]
    assert "measurement of the link" in said


def test_what_the_next_size_takes_follows_from_the_slope() -> None:
    assert measure_rates._next_seconds([(1 << 10, 1e-3), (1 << 13, 1e-3)]) == 1e-3
