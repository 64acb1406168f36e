"""What surrounds a capture leaves the process as it was."""

from __future__ import annotations

import gc

import pytest

from shoal.capture.dynamo import few_collections


@pytest.mark.parametrize("before", [(700, 10, 10), (100_000, 5, 5), (0, 10, 10)])
def test_cycles_are_looked_for_less_often_within_and_as_before_behind(before: tuple[int, int, int]) -> None:
    own = gc.get_threshold()
    gc.set_threshold(*before)
    try:
        with pytest.raises(KeyError), few_collections():
            within = gc.get_threshold()
            raise KeyError
        assert gc.get_threshold() == before
    finally:
        gc.set_threshold(*own)
    assert (within[0] >= before[0]) and (within[0] == 0) == (before[0] == 0), "who switched it off has it off"
    assert before[0] != 700 or within[0] > 10 * before[0]
