"""What was to be shown on one GPU, and whether the rows that `bench.gpu` wrote show it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shoal.core.sizes import format_bytes

RESERVED = 1.1  # of the budget that the allocator may reserve
_WITHIN = 0.02  # of the metered peak that a prediction may lie from it: the contract
Verdict = tuple[str, str, str, bool | None]


def verdicts(parts: Mapping[str, list[dict[str, Any]]]) -> list[Verdict]:
    """Part, what was to be shown, what was found, and whether it holds; None: it was not measured.

    >>> verdicts({})[0]
    ('environment', 'Triton runs', '', None)
    """
    named = {part: {row["row"]: row for row in rows} for part, rows in parts.items()}
    steps = [row for row in parts.get("contract", []) if str(row["row"]).startswith("step ")][1:]
    told = [(row["allocated_bytes"] or row["metered_bytes"], row["predicted_bytes"]) for row in steps]
    off = max((abs(measured / predicted - 1) for measured, predicted in told), default=None)
    reserved = max((row["reserved_bytes"] / row["budget_bytes"] for row in steps), default=None)
    walls, stall = named.get("wall", {}), named.get("offload", {}).get("offload")
    tests = named.get("triton", {}).get("tests")
    contract = named.get("contract", {})
    bits = contract.get("Shoal op by op against eager")
    repeats = contract.get("plain PyTorch again", {}).get("equal", True)  # else there is nothing to be equal to
    same = bits["equal"] if bits and repeats else None
    runs = named.get("environment", {}).get("triton")
    ours = [row for row in parts.get("speed", []) if row["row"].startswith("Shoal ") and "peak_bytes" in row]
    over = [row["row"] for row in ours if row["peak_bytes"] > row["budget_bytes"]]
    plain_wall, our_wall = walls.get("plain PyTorch"), walls.get("Shoal")
    found: list[Verdict] = [
        ("environment", "Triton runs", str(runs["runs"]) if runs else "", runs and runs["runs"]),
        ("contract", "predicted = allocated within 2 %", _percent(off), None if off is None else off <= _WITHIN),
        ("contract", "no repairs", _counted(steps), None if not steps else steps[-1]["repairs"] == 0),
        (
            "contract",
            f"reserved at most {RESERVED} of the budget",
            "" if reserved is None else f"{reserved:.2f}",
            None if reserved is None else reserved <= RESERVED,
        ),
        ("contract", "gradients of eager, op by op, bit for bit", _found(bits), same),
        ("speed", "each budget met", f"over: {over}" if over else f"{len(ours)} met", not over if ours else None),
        (
            "wall",
            "Shoal trains where plain PyTorch ends",
            f"{our_wall['steps']} and {plain_wall['steps']} steps" if our_wall and plain_wall else "",
            our_wall["steps"] == 3 and plain_wall["steps"] == 0 if our_wall and plain_wall else None,
        ),
        (
            "offload",
            "its step as predicted within 10 %",
            f"{stall['measured_ms']:.1f} ms, predicted {stall['predicted_ms']:.1f}" if stall else "",
            stall and abs(stall["measured_ms"] / stall["predicted_ms"] - 1) <= 0.1,
        ),
        ("triton", "numbers of the references", _found(tests), tests and tests["exit_code"] == 0),
    ]
    found += [
        (part, "ran to its end", rows["ended early"]["error"], False)
        for part, rows in named.items()
        if "ended early" in rows
    ]
    turns = [row for row in parts.get("speed", []) if row["row"] == "in turns" and "ms" in row]
    found += [
        ("speed", row["contender"], f"{row['ms']:.1f} ms, {row['of_plain']:.3f} of plain PyTorch's", None)
        for row in turns
    ]
    return found


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.2f} % off"


def _counted(steps: list[dict[str, Any]]) -> str:
    return f"{steps[-1]['repairs']} in {len(steps) + 1} steps" if steps else ""


def _found(row: Mapping[str, Any] | None) -> str:
    return (
        "" if row is None else ", ".join(f"{name} {short(name, value)}" for name, value in row.items() if name != "row")
    )


def short(name: str, value: Any) -> str:
    """A value of a row as text: bytes by its name."""
    if name.endswith("_bytes") and isinstance(value, int):
        return format_bytes(value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)
