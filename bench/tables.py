"""The budgets' figures for a reader: one table a network, one of least feasible shares, one line of totals."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from bench.peers import ACTIVATION_MEMORY_BUDGET, CHECKPOINT, PEERS
from shoal.core.sizes import format_bytes

_PEER_TITLES = {ACTIVATION_MEMORY_BUDGET: "activation_memory_budget", CHECKPOINT: "checkpointing"}
_PREDICTED_WITHIN = 2.0  # percent, the contract
_NOISE = 1.0  # percent of added time that two contenders may differ by and be called equal


def console() -> Console:
    """To stdout: as wide as it is on a terminal; plain text, wide enough for every column, where it is piped."""
    terminal = Console()
    return terminal if terminal.is_terminal else Console(width=200, no_color=True)


def network_table(result: Mapping[str, Any]) -> Table:
    """One row for each budget of one network."""
    plain, setting = result["plain"], result["setting"]
    title = (
        f"{result['network']}, {setting['batch']} x {setting['image']} pixels: plain PyTorch "
        f"{format_bytes(plain['peak_bytes'])}, {_median(plain['seconds']):.2f} s a step; parameters and gradients "
        f"{plain['parameters_and_gradients_percent']:.1f} %"
    )
    table = Table(title=escape(title))
    columns = ["budget", "met", "predicted", "measured", "off", "added", "bound", "planned", "MONeT"]
    for column in columns:
        table.add_column(column, justify="left" if column == "met" else "right")
    peers = [peer for peer in PEERS if any(peer in row for row in result["rows"])]
    for peer in peers:
        table.add_column(_PEER_TITLES[peer], justify="right")
    table.add_column("verdict")
    for row in result["rows"]:
        ours = row["shoal"]
        cells = [f"{row['share']:g} %, {format_bytes(row['budget_bytes'])}", _met(ours)]
        if "measured_peak_bytes" in ours:
            cells += [
                format_bytes(ours["predicted_peak_bytes"]),
                format_bytes(ours["measured_peak_bytes"]),
                f"{ours['difference_percent']:+.2f} %",
                f"{ours['added_percent']:+.1f} %",
                f"{ours['lower_bound_percent']:.1f} %",
                f"{ours['planning_seconds']:.1f} s",
            ]
        else:
            cells += [f"≥ {format_bytes(ours.get('least_feasible_bytes', 0))}", *[""] * 5]
        cells.append("-" if row["monet_percent"] is None else f"{row['monet_percent']:+.1f} %")
        cells += [_peer(row[peer]) for peer in peers]
        table.add_row(*map(escape, cells), verdict(row))
    return table


def verdict(row: Mapping[str, Any]) -> str:
    """Who is faster at the same bytes: Shoal or the better of the peers.

    >>> verdict({"shoal": {"met": True, "added_percent": 9.0}, "checkpoint": {"met": True, "added_percent": 30.0}})
    'faster'
    """
    ours = row["shoal"]
    theirs = [row[peer]["added_percent"] for peer in PEERS if peer in row and row[peer]["met"]]
    if not ours["met"]:
        return "lost" if theirs else "none fits"
    if not theirs:
        return "alone"
    gap = ours["added_percent"] - min(theirs)
    return "slower" if gap > _NOISE else "equal" if gap > -_NOISE else "faster"


def least_table(results: Iterable[Mapping[str, Any]]) -> Table:
    """The least feasible share of plain PyTorch's peak for each contender, and what it costs there."""
    table = Table(title="Least feasible share of plain PyTorch's peak, and the time added there")
    for column in ("network", "shoal", *(_PEER_TITLES[peer] for peer in PEERS)):
        table.add_column(column, justify="left" if column == "network" else "right")
    for result in results:
        found = result.get("least", {})
        cells = [
            f"{found[who]['share_percent']:.1f} %, {found[who]['added_percent']:+.0f} %" if who in found else "-"
            for who in ("shoal", *PEERS)
        ]
        table.add_row(result["network"], *cells)
    return table


def summary(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The totals over all rows."""
    rows = [row for result in results for row in result["rows"]]
    ours = [row["shoal"] for row in rows]
    ran = [row for row in ours if "measured_peak_bytes" in row]
    in_paper = [row for row in rows if row["monet_percent"] is not None and row["shoal"]["met"]]
    return {
        "budgets": len(rows),
        "met": sum(row["met"] for row in ours),
        "exceeded": sum(row["exceeded"] for row in ours),
        "predicted_within_2_percent": sum(abs(row["difference_percent"]) <= _PREDICTED_WITHIN for row in ran),
        "ran": len(ran),
        "slower_than_the_better_peer": sum(verdict(row) in ("slower", "lost") for row in rows),
        "at_or_under_monet": sum(row["shoal"]["added_percent"] <= row["monet_percent"] for row in in_paper),
        "compared_with_monet": len(in_paper),
    }


def summary_line(totals: Mapping[str, Any]) -> str:
    """The totals in a sentence."""
    return (
        f"{totals['met']} of {totals['budgets']} budgets met, {totals['exceeded']} exceeded; prediction within 2 % in "
        f"{totals['predicted_within_2_percent']} of {totals['ran']}; slower than the better peer at the same bytes in "
        f"{totals['slower_than_the_better_peer']}; at or under MONeT's overhead in {totals['at_or_under_monet']} of "
        f"{totals['compared_with_monet']}"
    )


def _met(ours: Mapping[str, Any]) -> str:
    return "yes" if ours["met"] else "EXCEEDED" if ours["exceeded"] else "infeasible"


def _peer(found: Mapping[str, Any]) -> str:
    return f"{found['added_percent']:+.1f} % ({found['setting']})" if found["met"] else "no setting fits"


def _median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2
