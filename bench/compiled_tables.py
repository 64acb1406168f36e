"""Tables of the benchmark of compiled regions, from what its files hold."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from rich.table import Table

from bench.compiled_contenders import EAGER, INDUCTOR, OURS, most_error
from bench.tables import cells, new_table


def is_wrong(result: Mapping[str, Any], row: Mapping[str, Any]) -> bool:
    """Whether the gradients of a contender are too far from the reference."""
    eager_error = result["contenders"][EAGER]["error"]
    return bool(row.get("error", 0.0) > most_error(result["precision"], eager_error))


def fastest_within(result: Mapping[str, Any], budget_bytes: float) -> dict[str, Any] | None:
    """The fastest of `torch.compile`'s settings with right gradients and a measured peak inside a budget, or None."""
    settings = [row for who, row in result["contenders"].items() if who.startswith(INDUCTOR)]
    rows = [row for row in settings if not is_wrong(result, row)]
    fitting = [row for row in rows if row["measured_peak_bytes"] <= budget_bytes]
    return min(fitting, key=lambda row: statistics.median(row["seconds"]), default=None)


def ratio(ours: Mapping[str, Any], theirs: Mapping[str, Any] | None) -> float | None:
    """Median over the turns of our seconds by theirs."""
    if theirs is None:
        return None
    return statistics.median(one / other for one, other in zip(ours["seconds"], theirs["seconds"], strict=True))


def rows_of(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What a table shows of a result: a row for each of Shoal's at each budget."""
    contenders, plain_bytes = result["contenders"], result["plain_peak_bytes"]
    shares = dict.fromkeys(row["share"] for row in contenders.values() if "share" in row)
    shares |= dict.fromkeys(float(who.split(" at ")[1].split()[0]) for who in result["refused"])
    found = []
    for share in sorted(shares, reverse=True):
        budget_bytes = plain_bytes * share / 100
        theirs = fastest_within(result, budget_bytes)
        eager = contenders.get(f"{OURS[0]} at {share:g} %")
        for ours in OURS:
            who = f"{ours} at {share:g} %"
            row = contenders.get(who)
            if row is None:
                found.append({"who": who, "refused": result["refused"].get(who, "")})
                continue
            peak_bytes = row["measured_peak_bytes"]
            found.append(
                {
                    "who": who,
                    "seconds": row["seconds"],
                    "of_eager": ratio(row, contenders[EAGER]),
                    "of_inductor": ratio(row, contenders[INDUCTOR]),
                    "of_theirs": ratio(row, theirs),
                    "of_ours": ratio(row, eager) if eager is not None and row is not eager else None,
                    "share": 100 * peak_bytes / plain_bytes,
                    "off": 100 * (peak_bytes / row["predicted_peak_bytes"] - 1),
                    "broken": peak_bytes > row["budget_bytes"],
                }
            )
    return found


def network_table(result: Mapping[str, Any]) -> Table:
    """One network in one precision."""
    setting, contenders = result["setting"], result["contenders"]
    n_turns = len(contenders[EAGER]["seconds"])
    title = f"{result['network']}, {setting['batch']} x {setting['image']}, {result['precision']}, {n_turns} turns"
    columns = (
        "<contender | ms | × eager | × torch.compile | × its fastest inside | × ours, eager | peak, % | "
        "measured over predicted, %"
    )
    table = new_table(title, columns)
    for who, row in contenders.items():
        if who not in (EAGER, INDUCTOR) and not who.startswith(INDUCTOR):
            continue
        share = 100 * row["measured_peak_bytes"] / result["plain_peak_bytes"]
        more = {"of_eager": ratio(row, contenders[EAGER]), "share": share}
        named = who + (", wrong gradients" if is_wrong(result, row) else ", not checked" if "unchecked" in row else "")
        table.add_row(*cells("{who} | {seconds:ms} | {of_eager:.2f} | | | | {share:.1f} |", row, who=named, **more))
    form = (
        "{who} | {seconds:ms} | {of_eager:.2f} | {of_inductor:.2f} | {of_theirs:.2f} | {of_ours:.2f} | "
        "{share:.1f} | {off:+.2f}"
    )
    for row in rows_of(result):
        if "refused" in row:
            table.add_row(row["who"], "does not fit", "", "", "", "", "", "")
        else:
            table.add_row(*cells(form, row))
    return table


def error_table(result: Mapping[str, Any]) -> Table:
    """How far the gradients of one network are from the reference."""
    setting, reference = result["setting"], result["reference"]
    title = f"{result['network']}, {setting['batch']} x {setting['image']}, {result['precision']}: gradients off"
    table = new_table(f"{title} from {reference}", "<contender | all | median parameter | worst parameter")
    for who, row in result["contenders"].items():
        if who != reference:
            table.add_row(*cells("{who} | {error:.2g} | {median_error:.2g} | {largest_error:.2g}", row, who=who))
    return table


def start_table(result: Mapping[str, Any]) -> Table:
    """Seconds until the second step."""
    columns = "<network | <kernels | cold | of CPU time | warm | of CPU time"
    table = new_table("Seconds until the second step", columns)
    form = (
        "{network} | {who} | {cold_seconds:.0f} | {cold_cpu_seconds:.0f} | {warm_seconds:.0f} | {warm_cpu_seconds:.0f}"
    )
    for row in result.get("starts", ()):
        table.add_row(*cells(form, row))
    return table


def tables(result: Mapping[str, Any]) -> list[Table]:
    """What a page shows of a file."""
    timed = [one for one in result.get("results", ()) if all(row.get("seconds") for row in one["contenders"].values())]
    found = [make(one) for one in timed for make in (network_table, error_table)]
    return [*found, *([start_table(result)] if result.get("starts") else [])]
