"""What a BudgetError says of the training loop."""

from __future__ import annotations

import pytest

from shoal.core.over_budget import over_budget
from shoal.engine.refusal_hints import with_optimistic
from shoal.errors import MESSAGE_CHARACTERS, BudgetError


@pytest.mark.parametrize("name", ["Net", "ANetworkWithAName"])
def test_the_first_line_has_both_minima_before_it_has_what_could_be_smaller(name: str) -> None:
    def error(needed_bytes: int) -> BudgetError:
        instead = "a smaller model, or an optimizer with less state"
        return over_budget(name, needed_bytes, 100_000, instead=instead)

    found = with_optimistic(error(908_448), error(351_648))
    assert len(found.message) <= MESSAGE_CHARACTERS
    assert f"{name} needs 343.4 KiB to 887.2 KiB, by what the loop holds" in found.message
    assert "Use budget='888KiB'" in found.message
    assert ("smaller" in found.message) == (name == "Net")
    assert found.least_feasible_bytes == 908_448
