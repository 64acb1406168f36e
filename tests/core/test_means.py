"""`allow=`: names of means and of sets of them, as a text or a collection."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.core.means import BITWISE, EXACT, LOSSY, means_of
from shoal.errors import InputError
from tests.raising import raising


def test_sets_lie_one_within_the_other() -> None:
    assert means_of("keep") < means_of("bitwise") < means_of("exact") < means_of("lossy")
    assert (means_of("bitwise"), means_of("exact"), means_of("lossy")) == (BITWISE, EXACT, LOSSY)


def test_the_inverted_form_is_asked_for_by_name() -> None:
    assert "invert" not in means_of("exact") and "invert" in means_of("exact, invert")


@pytest.mark.parametrize(
    "allow", ["recompute, fuse", ["recompute", "fuse"], {"fuse", "recompute"}, "fuse,recompute,fuse"]
)
def test_names_come_as_a_text_or_a_collection(allow: Any) -> None:
    assert means_of(allow) == {"recompute", "fuse"}


@pytest.mark.parametrize(
    ("allow", "said"),
    [
        ("fusion", "'fusion'"),
        ("", "''"),
        ((), ""),
        (7, "allow=7"),
        ([7], ""),
        ({"fuse": False}, ""),
        ("fuse, keep", "'keep'"),
    ],
)
def test_a_mistake_is_told(allow: Any, said: str) -> None:
    with raising(InputError, said):
        means_of(allow)
