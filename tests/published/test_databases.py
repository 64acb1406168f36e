"""PyTorch's own databases of modules and ops: each entry trains as in plain PyTorch, with room and at the minimum.

A slice of them by default, the same in every run; all of them where SHOAL_TEST_ALL is set, which takes an hour.
"""

from __future__ import annotations

import importlib.util
import os
from functools import cache
from typing import TYPE_CHECKING
from zlib import crc32

import pytest

from tests.published.training import outcome

if TYPE_CHECKING:
    from tests.published.databases import Case

if importlib.util.find_spec("expecttest") is None:
    pytest.skip("torch.testing._internal needs expecttest", allow_module_level=True)

_SLICE = 20
# Not one graph that a plan could hold is in them, under `torch.compile` neither.
REFUSED = {"nn.CTCLoss", "nn.GRU", "nn.LSTM", "nn.RNN", "nn.GaussianNLLLoss"}


@cache
def cases() -> list[Case]:
    """In an order that is none, so that the first ones are of every kind."""
    from tests.published.databases import module_cases, op_cases  # seconds, in every worker that collects tests

    return sorted([*module_cases(), *op_cases()], key=lambda case: crc32(case.name.encode()))


@pytest.mark.parametrize("place", range(len(cases()) if "SHOAL_TEST_ALL" in os.environ else _SLICE))
def test_an_entry_trains_as_in_plain_pytorch(place: int) -> None:
    case = cases()[place]
    found = outcome(case.build)
    refused = found.startswith("refused: CaptureError") and case.name.split("_")[0] in REFUSED
    assert refused or found in ("right", "not trained"), f"{case.name}: {found}"
