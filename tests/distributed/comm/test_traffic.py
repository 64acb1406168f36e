"""Bytes on the wire are counted by kind and by step, in addition to what float32 collectives send."""

from __future__ import annotations

from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from shoal.distributed.comm.traffic import Sent, Traffic, ring_all_gather_bytes, ring_all_reduce_bytes


@given(
    st.lists(st.tuples(st.sampled_from(["gradients", "weights"]), st.integers(0, 2**40), st.integers(0, 2**40))),
    st.lists(st.tuples(st.sampled_from(["gradients", "weights"]), st.integers(0, 2**40), st.integers(0, 2**40))),
)
def test_steps_add_up_to_the_total(first: list[tuple[str, int, int]], second: list[tuple[str, int, int]]) -> None:
    traffic = Traffic()
    for kind, sent, raw in first:
        traffic.add(kind, sent, raw)
    traffic.end_step()
    one = traffic.last_step()
    for kind, sent, raw in second:
        traffic.add(kind, sent, raw)
    traffic.end_step()
    assert traffic.total() == one + traffic.last_step()
    assert traffic.last_step() == Sent(sum(sent for _, sent, _ in second), sum(raw for _, _, raw in second))
    assert traffic.to_json()["steps"] == traffic.steps == 2
    for kind in traffic.kinds:
        assert traffic.to_json()["total"][kind]["sent_bytes"] == traffic.total(kind).sent_bytes


def test_nothing_to_send_is_no_division() -> None:
    assert Traffic().total().share == 1
    assert Traffic().last_step("weights") == Sent()


@given(st.integers(0, 2**45), st.integers(1, 4096))
def test_rings_send_what_their_algorithms_do(payload_bytes: int, ranks: int) -> None:
    assert ring_all_reduce_bytes(payload_bytes, ranks) == int(Fraction(2 * (ranks - 1), ranks) * payload_bytes)
    assert ring_all_gather_bytes(payload_bytes, ranks) == int(Fraction(ranks - 1, ranks) * payload_bytes)
