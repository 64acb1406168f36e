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
import torch

from tests.published.training import outcome

if TYPE_CHECKING:
    from tests.published.databases import Case

if importlib.util.find_spec("expecttest") is None:
    pytest.skip("torch.testing._internal needs expecttest", allow_module_level=True)

_SLICE = 12
_LIMITS = {"narrow", "narrow_complex64"}  # of docs/explain/limits.md: a view that begins where a tensor says


@cache
def cases() -> list[Case]:
    """In an order that is none, so that the first ones are of every kind."""
    from tests.published.databases import module_cases, op_cases  # seconds, in every worker that collects tests

    return sorted([*module_cases(), *op_cases()], key=lambda case: crc32(case.name.encode()))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:cannot time")  # ops whose operands have to be of one another, as of lu_unpack
@pytest.mark.parametrize("place", range(len(cases()) if "SHOAL_TEST_ALL" in os.environ else _SLICE))
def test_an_entry_trains_as_in_plain_pytorch(place: int) -> None:
    case = cases()[place]
    found = outcome(case.build)
    if found.startswith("refused: CaptureError: "):
        assert case.name in _LIMITS or is_broken(case), f"{case.name}: {found}"
    else:
        assert found in ("right", "not trained"), f"{case.name}: {found}"


def is_broken(case: Case) -> bool:
    """Whether it is not one graph for PyTorch either."""
    network = case.build()
    try:
        torch.compile(network.module, backend="aot_eager", fullgraph=True)(*network.args, **network.kwargs)
    except Exception:  # of Dynamo, or of fake tensors
        return True
    return False
