"""What the part `speed` of `bench.gpu` wrote, as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.markup import escape
from rich.table import Table

from bench.tables import cells, new_table

_COLUMNS = (
    "<contender|in turns ms|of plain|alone ms|predicted ms|counted peak|predicted|budget|repairs|ready after s"
    "|kernels ms|launches|host ms"
)
_FORMATS = (
    "{name}|{ms:.1f}|{of_plain:.3f}|{alone_ms:.1f}|{predicted_ms:.1f}|{peak_bytes:bytes}|{predicted_bytes:bytes}"
    "|{budget_bytes:bytes}|{repairs}|{preparing_seconds:.0f}|{kernels_ms:.1f}|{launches}|{host_ms:.1f}"
)
_KERNELS = 12  # rows for each contender


def tables(result: Mapping[str, Any]) -> Sequence[Table]:
    """A row for each contender, then the slowest kernels of those that were looked at."""
    contenders: dict[str, dict[str, Any]] = {}
    kernels = new_table("The slowest kernels of a step", "<contender | <kernel | launches | ms")
    shown: dict[str, int] = {}
    for row in result["rows"]:
        name = row.get("contender", row["row"])
        if row["row"] == "kernel":
            shown[name] = shown.get(name, 0) + 1
            if shown[name] <= _KERNELS:
                kernels.add_row(escape(name), escape(row["kernel"]), str(row["launches"]), f"{row['ms']:.2f}")
        elif "left_out" not in row and "error" not in row:
            contenders.setdefault(name, {"name": name}).update(row)
    steps = new_table(_title(result), _COLUMNS)
    for found in contenders.values():
        steps.add_row(*cells(_FORMATS, found))
    return [steps, kernels]


def _title(result: Mapping[str, Any]) -> str:
    """The network of the rows, where they name one.

    >>> _title({"network": "gpt2", "batch": 16, "image": 512})
    'gpt2, 16 x 512, bfloat16'
    """
    return f"{result['network']}, {result['batch']} x {result['image']}, bfloat16" if "network" in result else ""
