"""Laws of the choice: what a slower link, a slower codec, another order or one more candidate do to it."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.distributed.gradients.choose_codec import MARGIN, Chooser, CodecRates, Curve, LinkRates, route
from shoal.errors import InputError
from tests.distributed.rates import candidate_lists, choose, codec, curves, link, links, slowed, slower_link
from tests.raising import raising

elems = st.integers(1, 10**9)
raw_elems = st.integers(0, 10**5)
ways = st.sampled_from(["all_reduce", "reduce_scatter"])
TREE = codec("dynamic_tree", 1 + 4 / 4096, 1e9)
BF16 = codec("bf16", 2.0, 2e9)
sizes = st.floats(0, 1e12)


def test_on_a_slow_link_the_fewest_bytes_win() -> None:
    decision = choose(link(0.1), [BF16, TREE], 1_000_000)
    assert decision.codec == "dynamic_tree"
    # 4 MB at 12.5 MB/s against about 1 MB, and 2.5 million values through the codec.
    assert decision.plain_seconds == pytest.approx(0.32)
    assert decision.encoded_seconds == pytest.approx(0.32 / 4 + 2.5e-3, rel=2e-3)


def test_between_the_break_evens_the_quicker_codec_wins() -> None:
    # Of a thousand values bf16 saves 2 KB in 1.25 us, the tree another 1 KB in another 1.25 us: 12.8 and 6.4 Gbit/s.
    assert choose(link(6.2), [BF16, TREE], 1_000_000, margin=0.0).codec == "dynamic_tree"
    assert choose(link(6.6), [BF16, TREE], 1_000_000, margin=0.0).codec == "bf16"
    assert choose(link(12.6), [BF16, TREE], 1_000_000, margin=0.0).codec == "bf16"
    assert choose(link(13.0), [BF16, TREE], 1_000_000, margin=0.0).codec is None


@pytest.mark.parametrize("candidate", [BF16, TREE])
def test_without_latency_and_margin_the_break_even_bandwidth_is_where_it_turns(candidate: CodecRates) -> None:
    even = choose(link(1.0), [candidate], 1_000_000).break_even_gbps
    assert choose(link(0.999 * even), [candidate], 1_000_000, margin=0.0).codec == candidate.codec
    assert choose(link(1.001 * even), [candidate], 1_000_000, margin=0.0).codec is None


@given(links, candidate_lists, elems, raw_elems, ways, st.floats(1, 1e6))
def test_a_slower_link_never_turns_to_more_bytes(
    fast: LinkRates, candidates: tuple[CodecRates, ...], n: int, raw: int, way: str, factor: float
) -> None:
    before = choose(fast, candidates, n, raw_elems=raw, way=way)
    after = choose(slower_link(fast, factor), candidates, n, raw_elems=raw, way=way)
    if before.codec is None:
        return
    assert after.codec is not None
    turned_to_more = after.sent_bytes > before.sent_bytes
    if turned_to_more:  # only where the two take the same time to the last bits
        of_before = [rates for rates in candidates if rates.codec == before.codec]
        same = choose(slower_link(fast, factor), of_before, n, raw_elems=raw, way=way)
        assert same.encoded_seconds == pytest.approx(after.encoded_seconds, rel=1e-12)


@given(links, candidate_lists, elems, raw_elems, ways)
def test_an_infinitely_fast_link_declines(
    some: LinkRates, candidates: tuple[CodecRates, ...], n: int, raw: int, way: str
) -> None:
    decision = choose(slower_link(some, 0.0), candidates, n, raw_elems=raw, way=way)
    assert decision.codec is None
    assert decision.link_gbps == math.inf
    assert decision.reason.startswith("uncompressed")


@given(links, candidate_lists, elems, raw_elems, ways, st.randoms())
def test_the_order_of_candidates_does_not_matter(
    some: LinkRates, candidates: tuple[CodecRates, ...], n: int, raw: int, way: str, shuffle: random.Random
) -> None:
    other = list(candidates)
    shuffle.shuffle(other)
    assert choose(some, candidates, n, raw_elems=raw, way=way) == choose(some, other, n, raw_elems=raw, way=way)


@given(links, candidate_lists, elems, raw_elems, ways, st.floats(0, 0.9))
def test_what_is_chosen_is_predicted_to_save_the_margin(
    some: LinkRates, candidates: tuple[CodecRates, ...], n: int, raw: int, way: str, margin: float
) -> None:
    decision = choose(some, candidates, n, raw_elems=raw, way=way, margin=margin)
    if decision.codec is not None:
        assert decision.encoded_seconds < (1 - margin) * decision.plain_seconds
        assert decision.reason.startswith(decision.codec)
    else:
        assert decision.sent_bytes == decision.plain_bytes


@given(links, candidate_lists, elems, raw_elems, ways)
def test_one_more_candidate_never_makes_the_best_slower(
    some: LinkRates, candidates: tuple[CodecRates, ...], n: int, raw: int, way: str
) -> None:
    fewer = choose(some, candidates[1:], n, raw_elems=raw, way=way)
    assert choose(some, candidates, n, raw_elems=raw, way=way).encoded_seconds <= fewer.encoded_seconds


@given(links, candidate_lists, elems, ways, st.floats(1, 1e6))
def test_slower_codecs_never_turn_to_encoding(
    some: LinkRates, candidates: tuple[CodecRates, ...], n: int, way: str, factor: float
) -> None:
    slower = [
        replace(rates, encode=slowed(rates.encode, factor), decode=slowed(rates.decode, factor)) for rates in candidates
    ]
    if choose(some, candidates, n, way=way).codec is None:
        assert choose(some, slower, n, way=way).codec is None


@given(candidate_lists, elems)
def test_one_rank_sends_nothing(candidates: tuple[CodecRates, ...], n: int) -> None:
    decision = choose(link(0.001, ranks=1), candidates, n)
    assert (decision.codec, decision.sent_bytes, decision.plain_bytes) == (None, 0, 0)


def test_a_bucket_of_biases_travels_as_it_is() -> None:
    decision = choose(link(0.001), [TREE], 0, raw_elems=1000)
    assert decision.codec is None
    assert decision.reason == "uncompressed: nothing in it may be encoded"


def test_bf16_gains_nothing_on_values_of_two_bytes() -> None:
    assert choose(link(0.01), [BF16], 1_000_000).codec == "bf16"
    decision = choose(link(0.01), [BF16], 1_000_000, value_bytes=2)
    assert (decision.codec, decision.plain_bytes, decision.break_even_gbps) == (None, 2_000_000, 0.0)
    assert choose(link(0.01), [BF16, TREE], 1_000_000, value_bytes=2).codec == "dynamic_tree"


def test_no_candidate() -> None:
    assert choose(link(0.001), [], 1000).reason == "uncompressed: there is no candidate"


@pytest.mark.parametrize("ranks", [2, 3, 4, 16])
def test_the_bytes_of_a_decision(ranks: int) -> None:
    n = 1_000_000
    decision = choose(link(0.1, ranks), [TREE], n)
    assert decision.plain_bytes == math.ceil(2 * (ranks - 1) / ranks * 4 * n)
    assert decision.sent_bytes / decision.plain_bytes == pytest.approx((1 + 4 / 4096) / 4, rel=1e-5)
    sharded = choose(link(0.1, ranks), [TREE], n, way="reduce_scatter")
    assert 2 * sharded.sent_bytes == pytest.approx(decision.sent_bytes, abs=1)


def test_an_unknown_way_is_refused() -> None:
    with raising(InputError, "reduce_scatter"):
        route("broadcast", 2)


@given(links, candidate_lists, ways, st.lists(st.tuples(elems, raw_elems), max_size=5))
def test_a_model_is_declined_where_its_buckets_do_not_save_the_margin_together(
    some: LinkRates, candidates: tuple[CodecRates, ...], way: str, buckets: list[tuple[int, int]]
) -> None:
    chooser = Chooser(some, candidates, way)
    decisions = [chooser.decide(*bucket) for bucket in buckets]
    if all(decision.codec is None for decision in decisions):
        assert chooser.declines(buckets)
    elif all(decision.codec is not None for decision in decisions):
        assert not chooser.declines(buckets)


def test_a_gain_in_a_small_bucket_is_not_worth_a_hook() -> None:
    """Small messages gain on this link, large ones do not."""
    plain = Curve((1000, 10**5, 10**8), (1e-3, 1e-3, 0.1))
    exchange = Curve((1000, 10**5, 10**8), (1e-4, 1e-4, 0.2))
    chooser = Chooser(LinkRates(2, plain, exchange), (codec("bf16", 2.0, 1e9),))
    small, large = (10_000, 0), (10**7, 0)
    assert (chooser.decide(*small).codec, chooser.decide(*large).codec) == ("bf16", None)
    assert chooser.declines([small, large])
    assert not chooser.declines([small])


def test_the_margin_is_of_the_plain_seconds() -> None:
    even = choose(link(1.0), [TREE], 10**6).break_even_gbps
    almost = link(0.95 * even)
    assert choose(almost, [TREE], 10**6, margin=0.0).codec == "dynamic_tree"
    assert choose(almost, [TREE], 10**6, margin=MARGIN).codec is None


@given(curves, sizes, sizes)
def test_more_never_takes_less(curve: Curve, one: float, other: float) -> None:
    small, large = sorted((one, other))
    assert curve.at(small) <= curve.at(large)


@given(curves)
def test_it_goes_through_what_was_measured(curve: Curve) -> None:
    assert [curve.at(size) for size in curve.sizes] == pytest.approx(list(curve.seconds))


@given(curves, st.floats(1, 1e3))
def test_twice_the_largest_takes_twice_as_long(curve: Curve, times: float) -> None:
    assert curve.at(times * curve.sizes[-1]) == pytest.approx(times * curve.seconds[-1])


@given(st.dictionaries(st.integers(1, 10**9), st.floats(0, 10), min_size=1, max_size=6))
def test_a_disturbed_measurement_is_cut_to_what_a_larger_one_took(points: dict[int, float]) -> None:
    curve = Curve.of(points.items())
    assert curve.sizes == tuple(sorted(points))
    for size, seconds in zip(curve.sizes, curve.seconds, strict=True):
        assert seconds == min(took for other, took in points.items() if other >= size)


@pytest.mark.parametrize(
    ("measured", "seconds"),
    [
        ((), ()),
        ((1,), (1.0, 2.0)),
        ((0,), (1.0,)),
        ((2, 1), (1.0, 2.0)),
        ((1, 2), (2.0, 1.0)),
        ((1,), (-1.0,)),
        ((1,), (math.inf,)),
        ((1,), (math.nan,)),
    ],
)
def test_what_is_no_curve_is_refused(measured: tuple[int, ...], seconds: tuple[float, ...]) -> None:
    with pytest.raises(InputError):
        Curve(measured, seconds)
