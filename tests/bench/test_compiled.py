"""The command of the benchmark of compiled regions."""

from __future__ import annotations

import pytest

from bench import compiled
from tests.engine.training_laws import needs_compiler


@needs_compiler
def test_a_mistake_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert compiled.main(["--precision", "float8"]) == 2
    assert "--precision float8: give some of float32, bfloat16" in capsys.readouterr().err
