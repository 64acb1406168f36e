"""The bytes that training put on the wire, in words: by kind, a step, beside what plain float32 would have sent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shoal.core.sizes import format_bytes


def bytes_by_kind(traffic: Mapping[str, Any] | None) -> dict[str, str]:
    """A line for each kind of `Traffic.to_json`: the mean over all steps.

    >>> total = {"gradients": {"sent_bytes": 2 * 2**20, "raw_bytes": 8 * 2**20}}
    >>> bytes_by_kind({"steps": 2, "total": total})
    {'gradients sent': '1.000 MiB a step, 25.0 % of the 4.000 MiB that float32 takes'}
    """
    if traffic is None or not traffic["steps"]:
        return {}
    return {f"{kind} sent": _words(sent, traffic["steps"]) for kind, sent in traffic["total"].items()}


def _words(sent: Mapping[str, int], steps: int) -> str:
    sent_bytes, raw_bytes = sent["sent_bytes"] // steps, sent["raw_bytes"] // steps
    share = f"{100 * sent_bytes / raw_bytes:.1f} % of the {format_bytes(raw_bytes)}" if raw_bytes else "none"
    return f"{format_bytes(sent_bytes)} a step, {share} that float32 takes"
