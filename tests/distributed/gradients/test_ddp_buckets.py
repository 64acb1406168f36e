"""Expected buckets are those that torch's own assignment makes."""

from __future__ import annotations

import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from shoal.distributed.gradients.ddp_reducer import FIRST_BUCKET_BYTES, expected_buckets


@given(
    st.lists(st.tuples(st.integers(1, 5000), st.booleans()), min_size=1, max_size=20),
    st.integers(1, 20_000),
    st.integers(1, 20_000),
)
def test_they_are_those_of_torch(parameters: list[tuple[int, bool]], cap: int, first_cap: int) -> None:
    tensors = [torch.empty(elems) for elems, _ in reversed(parameters)]
    assigned, _ = dist._compute_bucket_assignment_by_size(tensors, [first_cap, cap])
    sizes = sorted(sum(tensors[index].numel() for index in bucket) for bucket in assigned)
    assert sorted(coded + raw for coded, raw in expected_buckets(parameters, cap, first_cap)) == sizes


@given(st.lists(st.tuples(st.integers(1, 5000), st.booleans()), min_size=1, max_size=20), st.integers(1, 20_000))
def test_every_value_is_in_one(parameters: list[tuple[int, bool]], cap: int) -> None:
    buckets = expected_buckets(parameters, cap)
    assert sum(coded for coded, _ in buckets) == sum(elems for elems, encoded in parameters if encoded)
    assert sum(raw for _, raw in buckets) == sum(elems for elems, encoded in parameters if not encoded)


def test_the_first_bucket_is_that_of_torch() -> None:
    assert FIRST_BUCKET_BYTES == dist._DEFAULT_FIRST_BUCKET_BYTES
