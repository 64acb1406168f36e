"""Which batch norms are left where all of them fused do not fit."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.core.variant import Variant
from shoal.engine.search.variants import variants_up_to

FUSED = Variant(fuse="bnff")


@given(st.lists(st.integers(1, 1000), max_size=8))
def test_each_variant_fuses_fewer_batch_norms_than_the_last_and_some(elems: list[int]) -> None:
    fused = [len(elems)]
    for candidate in variants_up_to(FUSED, elems):
        assert candidate.fuse == "bnff"
        fused.append(sum(one <= candidate.up_to * max(elems) for one in elems))
    assert fused == sorted(set(fused), reverse=True)
    assert all(fused[1:])


@pytest.mark.parametrize("elems, shares", [([], []), ([8, 8], []), ([100, 60, 20], [0.9, 0.5]), ([100, 20], [0.9])])
def test_maps_that_are_alike_have_no_such_variant(elems: list[int], shares: list[float]) -> None:
    assert [candidate.up_to for candidate in variants_up_to(FUSED, elems)] == shares
