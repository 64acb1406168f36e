"""What techniques do by themselves and together: every plan inside its budget, no more techniques slower."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import techniques
from bench.frame import WrongResult


def test_it_plans_each_set_of_techniques_inside_each_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(techniques, "SETS", {name: techniques.SETS[name] for name in ("recompute", "fuse", "both")})
    assert techniques.main(["--quick", "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("techniques_*.json")
    result = json.loads(path.read_text())
    assert len(result["rows"]) == 2 * 3
    assert result["plain_us"] > 0
    image = techniques.chart(result)
    assert image.count("<circle") >= len(result["rows"])


def test_a_set_that_is_slower_than_one_that_it_includes_is_no_result() -> None:
    rows = [{"techniques": name, "share": 50, "us": us} for name, us in (("fuse", 100.0), ("both", 102.0))]
    techniques._check(rows, plain_us=100.0)
    rows[1]["us"] = 104.0
    with pytest.raises(WrongResult):
        techniques._check(rows, plain_us=100.0)
