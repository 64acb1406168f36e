"""What `bench.allreduce` found, for a reader: who is right, who is fast, and which targets are met."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from rich.table import Table

from bench.frame import WrongResult
from bench.gradient_contenders import AUTO, NONE, NOTHING
from bench.tables import new_table

WIRE_SHARE, SPEED_UP, SLOWER = 0.26, 3.0, 1.02
SLOW_LINK_GBPS = 1.0
EIGHT_BITS = tuple(f"shoal {name}" for name in ("dynamic_tree", "linear", "mantissa", "static_tree"))
# Root mean square of the error, percent of the mean gradient's: of 32 bits, of PyTorch's fp16 and of codecs whose error
# is known. Two roundings of values and of a mean that is smaller than they.
MOST_ERROR_PERCENT = {
    NONE: 1e-3,
    "fp16 hook": 0.1,
    "shoal bf16": 0.5,
    "shoal dynamic_tree": 4.0,
    "shoal linear": 4.0,
}
_HEADERS = 1.12  # at most so much of the interface's bytes to those told: headers, acknowledgements, a barrier
_FEW_BYTES = 1 << 20  # of messages smaller than this, acknowledgements and barriers are a larger part


def ring_bytes(elems: int, ranks: int) -> float:
    """What one rank sends in a ring all-reduce of float32.

    >>> ring_bytes(1000, 4)
    6000.0
    """
    return 2 * (ranks - 1) / ranks * 4 * elems


def summary(found: Sequence[Mapping[str, Any]], ranks: int, elems: int) -> dict[str, Any]:
    """One contender's figures out of every rank's: a step takes as long as its slowest rank.

    Args:
        found: by rank.

    >>> one = {"seconds": [1.0, 3.0, 2.0], "sent_bytes": [4000], "told_bytes": [3900], "error_percent": 1.0}
    >>> one |= {"same_on_all_ranks": True, "reason": ""}
    >>> summary([one, one | {"seconds": [2.0, 1.0, 1.0]}], 2, 1000)["seconds"]
    2.0
    """
    by_step = [max(seconds) for seconds in zip(*(one["seconds"] for one in found), strict=True)]
    sent = median(max(sent) for sent in zip(*(one["sent_bytes"] for one in found), strict=True))
    told = [one["told_bytes"][-1] for one in found]
    return {
        "seconds": median(by_step),
        "least_seconds": min(by_step),
        "most_seconds": max(by_step),
        "steps": len(by_step),
        "sent_bytes": sent,
        "told_bytes": None if None in told else max(told),
        "of_ring": sent / ring_bytes(elems, ranks),
        "told_of_ring": None if None in told else max(told) / ring_bytes(elems, ranks),
        "error_percent": max((one["error_percent"] for one in found if one["error_percent"] is not None), default=None),
        "same_on_all_ranks": all(one["same_on_all_ranks"] for one in found),
        "reason": found[0]["reason"],
    }


def check(rows: Mapping[str, Mapping[str, Any]], may_differ: Sequence[str] = (NOTHING,)) -> None:
    """Raises:
    WrongResult: ranks got different bits, or bytes told are not those of the interface.
    """
    for name, row in rows.items():
        if not row["same_on_all_ranks"] and name not in may_differ:
            raise WrongResult(f"{name}: the ranks' bits differ")
        told, sent = row["told_bytes"], row["sent_bytes"]
        if told and sent > _FEW_BYTES and not 0.99 * told <= sent <= _HEADERS * told:
            raise WrongResult(f"{name}: says it sent {told} bytes, and the interface {sent}")


def check_errors(rows: Mapping[str, Mapping[str, Any]]) -> None:
    """Raises:
    WrongResult: a mean of gradients has too large an error.
    """
    for name, row in rows.items():
        most = MOST_ERROR_PERCENT.get(name)
        if most is not None and not row["error_percent"] <= most:
            raise WrongResult(f"{name}: error {row['error_percent']:.3g} %, expected at most {most:g} %")


def verdicts(rows: Mapping[str, Mapping[str, Any]], rate_gbps: float | None) -> dict[str, str]:
    """The targets by contender.

    >>> rows = {"none": {"seconds": 1.0}, "shoal auto": {"seconds": 1.01, "told_of_ring": 0.5, "of_ring": 0.5}}
    >>> verdicts(rows, None)
    {'shoal auto': '+1.0 % of +2 %: met'}
    """
    found: dict[str, str] = {}
    if NONE not in rows:
        return found
    plain = rows[NONE]["seconds"]
    for name, row in rows.items():
        told = []
        if name in EIGHT_BITS and row["told_of_ring"] is not None:
            met = "met" if max(row["told_of_ring"], row["of_ring"] / rows[NONE]["of_ring"]) <= WIRE_SHARE else "NOT MET"
            told.append(f"{row['told_of_ring']:.3f} of {WIRE_SHARE}: {met}")
        if name in (*EIGHT_BITS, AUTO) and rate_gbps is not None and rate_gbps <= SLOW_LINK_GBPS:
            times = plain / row["seconds"]
            told.append(f"{times:.1f} of {SPEED_UP:g} times: {'met' if times >= SPEED_UP else 'NOT MET'}")
        if name == AUTO:
            off = row["seconds"] / plain
            told.append(f"{100 * (off - 1):+.1f} % of +2 %: {'met' if off <= SLOWER else 'NOT MET'}")
        if told:
            found[name] = "; ".join(told)
    return found


def step_table(result: Mapping[str, Any]) -> Table:
    """One network over one link."""
    rows = result["rows"]
    targets = verdicts(rows, result["rate_gbps"])
    table = new_table(
        f"{result['model']}, {result['elems']:,} parameters, {result['ranks']} ranks, {result['link']}"
        f" ({result['goodput_gbps']:.3g} reached)",
        "<contender | ms | least-most | times | MB sent | of fp32's ring | told | error",
    )
    table.add_column("targets")
    plain = rows[NONE]["seconds"] if NONE in rows else None
    for name, row in rows.items():
        table.add_row(
            name,
            f"{1e3 * row['seconds']:.1f}",
            f"{1e3 * row['least_seconds']:.0f}-{1e3 * row['most_seconds']:.0f}",
            "" if plain is None else f"{plain / row['seconds']:.2f}",
            f"{row['sent_bytes'] / 1e6:.2f}",
            f"{row['of_ring']:.3f}",
            "" if row["told_of_ring"] is None else f"{row['told_of_ring']:.3f}",
            "" if row["error_percent"] is None else f"{row['error_percent']:.2g} %",
            targets.get(name, ""),
        )
    return table


def size_table(results: Sequence[Mapping[str, Any]]) -> Table:
    """Figure 2 of the paper: milliseconds over the size of a layer, and how often the time of 32 bits each is."""
    first = results[0]
    names = list(first["rows"])
    table = Table(title=f"Time to average one layer's gradient, {first['ranks']} ranks, {first['link']}: ms (times)")
    table.add_column("parameters", justify="right")
    for name in names:
        table.add_column("32 bits" if name == NONE else name.removeprefix("shoal "), justify="right")
    for result in results:
        plain = result["rows"][NONE]["seconds"]
        cells = [result["rows"][name]["seconds"] for name in names]
        table.add_row(
            f"{result['elems']:,}",
            *(
                f"{1e3 * s:.2f}" + ("" if n == NONE else f" ({plain / s:.2f})")
                for n, s in zip(names, cells, strict=True)
            ),
        )
    return table
