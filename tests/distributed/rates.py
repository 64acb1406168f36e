"""Rates drawn for laws."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import strategies as st

from shoal.distributed.gradients.choose_codec import MARGIN, Chooser, CodecRates, Curve, Decision, LinkRates

NAMES = ("bf16", "dynamic_tree", "one_bit", "linear", "truncate3")


def _curve(first: float, second: float, third: float) -> Curve:
    return Curve((10**3, 10**6, 10**9), (first, first + second, first + second + third))


# From 1 KB/us to 1 GB in a thousand seconds, with every bend between.
curves = st.builds(_curve, st.floats(1e-7, 1e-3), st.floats(0, 1), st.floats(0, 1000))
links = st.builds(LinkRates, st.integers(1, 16), curves, curves)
candidate_lists = st.lists(st.sampled_from(NAMES), unique=True, max_size=4).flatmap(
    lambda names: st.tuples(
        *(st.builds(CodecRates, st.just(name), st.floats(0.1, 4.0), curves, curves) for name in names)
    )
)


def straight(bytes_per_second: float, latency_seconds: float = 0.0) -> Curve:
    """A link without surprises."""
    sizes = (1000, 10**9)
    return Curve(sizes, tuple(latency_seconds + size / bytes_per_second for size in sizes))


def link(gbps: float, ranks: int = 2, latency_seconds: float = 0.0) -> LinkRates:
    """A link of that many Gbit/s; the plain all-reduce is a ring on it (of one rank: of two)."""
    rate = gbps * 1e9 / 8
    ring = rate / (2 * max(1, ranks - 1) / max(2, ranks))
    return LinkRates(ranks, straight(ring, latency_seconds), straight(rate, latency_seconds))


def slowed(curve: Curve, factor: float) -> Curve:
    """The same sizes, each taking `factor` times as long."""
    return Curve(curve.sizes, tuple(factor * seconds for seconds in curve.seconds))


def slower_link(rates: LinkRates, factor: float) -> LinkRates:
    """The same ranks on a link that takes `factor` times as long for everything."""
    return LinkRates(rates.ranks, slowed(rates.plain, factor), slowed(rates.exchange, factor))


def codec(name: str, bytes_per_elem: float, elems_per_second: float) -> CodecRates:
    """A codec without surprises."""
    return CodecRates(name, bytes_per_elem, straight(elems_per_second), straight(elems_per_second))


def choose(
    link: LinkRates,
    candidates: Iterable[CodecRates],
    elems: int,
    *,
    raw_elems: int = 0,
    value_bytes: int = 4,
    way: str = "all_reduce",
    margin: float = MARGIN,
) -> Decision:
    """How a bucket is sent, by these rates."""
    return Chooser(link, tuple(candidates), way, margin).decide(elems, raw_elems, value_bytes)
