"""Dynamo's record of a capture exists on every version of torch that Shoal supports."""

from __future__ import annotations

import pytest

from shoal.lowlevel import capture_records as module


def test_settings_that_cannot_be_written_are_left_out_of_a_captures_record(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing() -> str:
        raise TypeError("'<' not supported between instances of 'function' and 'function'")  # as torch 2.11

    monkeypatch.setattr(module.dynamo_utils, "_get_dynamo_config_for_logging", failing)
    module.record_captures_without_settings()
    assert module.dynamo_utils._get_dynamo_config_for_logging() is None
    monkeypatch.setattr(module.dynamo_utils, "_get_dynamo_config_for_logging", lambda: "{}")
    module.record_captures_without_settings()
    assert module.dynamo_utils._get_dynamo_config_for_logging() == "{}"
