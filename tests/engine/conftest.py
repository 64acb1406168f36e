"""Laws of the engine that compare bits with plain PyTorch's, and minima of a step that is not rewritten."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def _bitwise() -> Iterator[None]:
    """Unless a test passes `allow=`: under the default every step of these tests is searched in all its variants, which
    takes as long again as the tests, and has other minima."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHOAL_ALLOW", "bitwise")
        yield
