"""Activations between ranks: gathered, summed back, transposed; exactly without a codec, alike everywhere with one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from examples.parallel.activation_exchange import ActivationExchange, activation_codec
from examples.parallel.shares import in_order, shares
from shoal import codecs
from shoal.distributed.comm.exchange import Exchange
from shoal.distributed.comm.message import HEADER_BYTES
from shoal.errors import CodecError
from tests.raising import raising
from tests.ranks import run_on_ranks

ROWS, LENGTH = 5, 7


def _mine(rank: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(rank))


def _moved(codec: str | None) -> dict[str, Any]:
    """Every operation once, on what `_mine` gives each rank."""
    exchange = ActivationExchange(Exchange(timeout_seconds=200), codec)
    rank, ranks = exchange.rank, exchange.ranks
    have = shares(LENGTH, ranks)
    need = [(max(start - 1, 0), min(stop + 1, LENGTH)) for start, stop in have]
    width = have[rank][1] - have[rank][0]
    joins = in_order([2] * ranks)
    found: dict[str, Any] = {}
    found["gather"] = exchange.gather(_mine(rank, ROWS, width), 1, have, what="test")
    found["edges"] = exchange.gather(_mine(rank, ROWS, width), 1, have, need, what="test")
    found["sum_back"] = exchange.sum_back(_mine(rank, ROWS, LENGTH), 1, have, what="test")
    found["sum_edges"] = exchange.sum_back(_mine(rank, ROWS, need[rank][1] - need[rank][0]), 1, have, need, what="test")
    found["all_sum"] = exchange.all_sum(_mine(rank, ROWS, LENGTH), what="test")
    found["transpose"] = exchange.transpose(_mine(rank, LENGTH, 2), 0, have, 1, joins, what="test")
    found["back"] = exchange.transpose(found["transpose"], 1, joins, 0, have, what="test")
    found["traffic"] = exchange.traffic.total("activations")
    exchange.exchange.close()
    return found


def _expected(ranks: int, rank: int, part: Any) -> dict[str, torch.Tensor]:
    """The same in one process, each share passed through `part(of rank, tensor)`, in float64."""
    have = shares(LENGTH, ranks)
    need = [(max(start - 1, 0), min(stop + 1, LENGTH)) for start, stop in have]
    every = [_mine(r, ROWS, have[r][1] - have[r][0]) for r in range(ranks)]
    whole = [_mine(r, ROWS, LENGTH).double() for r in range(ranks)]
    bands = torch.zeros(ranks, ROWS, LENGTH, dtype=torch.float64)
    for r, (start, stop) in enumerate(need):
        bands[r, :, start:stop] = _mine(r, ROWS, stop - start).double()
    mine, (first, last) = slice(*have[rank]), need[rank]
    gathered = torch.cat(every, 1).double()
    return {
        "gather": gathered,
        "edges": gathered[:, first:last],
        "sum_back": sum(whole)[:, mine],
        "sum_edges": bands.sum(0)[:, mine],
        "all_sum": sum(whole),
        "transpose": torch.cat([_mine(r, LENGTH, 2) for r in range(ranks)], 1).double()[mine],
        "back": _mine(rank, LENGTH, 2).double(),
    }


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_without_a_codec_only_the_order_of_sums_is_left_open(ranks: int) -> None:
    for rank, found in enumerate(run_on_ranks(_moved, ranks, None)):
        for name, expected in _expected(ranks, rank, None).items():
            exact = not name.endswith("sum") and not name.startswith("sum")
            tolerance = 0.0 if exact else ranks * 2.0**-22
            torch.testing.assert_close(found[name].double(), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("codec", ["dynamic_tree", "linear", "bf16"])
def test_with_a_codec_every_rank_reads_the_same_bits_within_its_errors(codec: str) -> None:
    ranks = 3
    found = run_on_ranks(_moved, ranks, codec)

    # Errors of a rounding are at most these shares of the greatest value; sums round two parts, and once more in all.
    greatest = 4.0
    step = codecs.get(codec).properties.absolute_error * greatest
    steps = {"gather": 1, "edges": 1, "sum_back": 2, "sum_edges": 2, "all_sum": 2 + ranks, "transpose": 1, "back": 2}
    for rank in range(ranks):
        assert torch.equal(found[rank]["gather"], found[0]["gather"])
        assert torch.equal(found[rank]["all_sum"], found[0]["all_sum"])
        for name, expected in _expected(ranks, rank, None).items():
            assert (found[rank][name] - expected).abs().max() <= steps[name] * step
    seen = torch.full((ranks, ROWS, LENGTH), torch.nan)
    for rank, (start, stop) in enumerate(shares(LENGTH, ranks)):
        first, last = max(start - 1, 0), min(stop + 1, LENGTH)
        seen[rank, :, first:last] = found[rank]["edges"]
    assert all(len(of_place[~of_place.isnan()].unique()) == 1 for of_place in seen.flatten(1).T)


def _bytes_of_a_gather(codec: str | None, width: int) -> Any:
    exchange = ActivationExchange(Exchange(timeout_seconds=200), codec)
    have = in_order([width] * exchange.ranks)
    exchange.gather(torch.randn(32, width), 1, have, what="test")
    exchange.exchange.close()
    return exchange.traffic.total("activations")


def test_bytes_are_counted_as_they_are_sent() -> None:
    ranks, width = 3, 1024
    for codec, nbytes in ((None, 4 * 32 * width), ("dynamic_tree", 32 * width + 4 * 8)):
        for sent in run_on_ranks(_bytes_of_a_gather, ranks, codec, width):
            assert sent.raw_bytes == (ranks - 1) * 4 * 32 * width
            assert sent.sent_bytes == (ranks - 1) * (nbytes + HEADER_BYTES)
    assert sent.share <= 0.26


@pytest.mark.parametrize("codec", ["one_bit", "sign_mask"])
def test_codecs_that_do_not_give_activations_back_are_refused(codec: str) -> None:
    with raising(CodecError, "dynamic_tree"):
        activation_codec(codec)
