"""Dynamo's record of a capture, which `get_compilation_metrics` returns."""

from __future__ import annotations

from functools import wraps

from torch._dynamo import utils as dynamo_utils


def record_captures_without_settings() -> None:
    """Let Dynamo's record of a capture leave out its settings where they cannot be written.

    torch 2.11 writes them as JSON, the functions among them too that a model may log with, and fails: the record that
    `get_compilation_metrics` would return is lost, and a traceback is logged.
    """
    written = dynamo_utils._get_dynamo_config_for_logging
    if hasattr(written, "__wrapped__"):
        return

    @wraps(written)
    def written_if_possible() -> str | None:
        try:
            return written()
        except TypeError:
            return None

    dynamo_utils._get_dynamo_config_for_logging = written_if_possible
