"""What a page of figures shows of each bench's file: its tables, as the bench prints them, and one image."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.markup import escape
from rich.table import Table
from rich.text import Text

from bench import (
    ablation,
    arena,
    compiled_tables,
    first_step,
    gpu_tables,
    hmms,
    hosts,
    least,
    many_shapes,
    models,
    nnunet_presets,
    overhead,
    phantoms,
    several_models,
    steps,
    techniques,
    volumes,
)
from bench.bars_svg import Bar, bars_svg
from bench.budgets import network_table as budgets_network
from bench.budgets_svg import budgets_svg
from bench.one_plan import network_table as one_plan_network
from bench.tables import cells, new_table

Result = Mapping[str, Any]


@dataclass(frozen=True)
class Theme:
    """How one bench is shown.

    Attributes:
        page: of docs/figures.
        tables: of its result.
        chart: an image of it; None: there is none.
    """

    page: str
    tables: Callable[[Result], Sequence[Table]]
    chart: Callable[[Result], str] | None = None


def markdown_of(table: Table) -> str:
    """A table for a terminal as one of a page.

    >>> made = new_table("Times", "<who | ms")
    >>> made.add_row("ours", "2.0")
    >>> print(markdown_of(made))
    | who | ms |
    | --- | ---: |
    | ours | 2.0 |
    """

    def row(of: Sequence[Any]) -> str:
        plain = (Text.from_markup(str(cell)).plain.replace("|", r"\|") for cell in of)
        return f"| {' | '.join(plain)} |"

    columns = table.columns
    lines = [row([column.header for column in columns])]
    lines.append(f"| {' | '.join('---' if column.justify == 'left' else '---:' for column in columns)} |")
    lines += [row(found) for found in zip(*(column.cells for column in columns), strict=True)]
    return "\n".join(lines)


def rows_of(columns: str, formats: str) -> Callable[[Result], Sequence[Table]]:
    """The rows of a result as one table."""

    def tables(result: Result) -> Sequence[Table]:
        table = new_table("", columns)
        for row in result["rows"]:
            table.add_row(*cells(formats, row))
        return [table]

    return tables


def peaks(title: str, name: str) -> Callable[[Result], str]:
    """The largest peak of each row beside its budget; `name` formats what stands before the bar."""

    def chart(result: Result) -> str:
        bars = []
        for row in result["rows"]:
            percent = row.get("of_budget_percent")
            words = f"{percent:.1f} %" if percent is not None else "refused before anything ran"
            bars.append(Bar(name.format_map(row), percent, words))
        return bars_svg(title, "largest peak of whole steps, in percent of the budget", bars, 100.0, "the budget")

    return chart


def taken_over_tables(result: Result) -> Sequence[Table]:
    """A table that was written by hand once, from the columns and rows of its file."""
    taken = result["taken_over"]
    table = new_table("", " | ".join(taken["columns"]))
    for row in taken["rows"]:
        table.add_row(*map(escape, row))
    return [table]


def found_tables(result: Result) -> Sequence[Table]:
    """Every list of rows that a result holds, a column for each plain value: for benches whose own tables need more."""
    tables = []
    for key, rows in result.items():
        if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
            continue
        columns = [name for name, value in rows[0].items() if isinstance(value, str | int | float | None)]
        table = new_table(key, " | ".join(columns))
        for row in rows:
            table.add_row(*(_plain(row.get(name)) for name in columns))
        tables.append(table)
    return tables


def _plain(value: Any) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else escape(str(value))


def taken_over_chart(result: Result) -> str:
    """Bars of one of its columns."""
    taken, bars = result["taken_over"], []
    of = taken["bars"]
    for row in taken["rows"]:
        if any(row[int(place)] != words for place, words in of.get("only", {}).items()):
            continue
        name = ", ".join(filter(None, (row[place] for place in of["names"]))).replace("`", "").replace("*", "")
        words = row[of["column"]].replace("*", "").partition(" (")[0].partition(":")[0]
        number = re.match(r"[-+]?[\d.]+", words.replace("\u2212", "-").replace(",", ""))
        bars.append(Bar(name, float(number.group()) if number else None, words or of.get("none", "")))
    return bars_svg(of["title"], of["about"], bars, of.get("mark"), of.get("marked", ""))


def _overhead_chart(result: Result) -> str:
    bars = []
    for row in result["rows"]:
        bars.append(Bar(row["network"], row["added_percent"], f"{row['added_percent']:+.1f} %"))
        bars.append(Bar("plain PyTorch again", row["noise_percent"], f"{row['noise_percent']:+.1f} %, the noise"))
    about = "time added by a planned step that gives nothing up"
    return bars_svg("What a planned step costs by itself", about, bars, overhead.TARGET_PERCENT, "the target")


def _hmms_chart(result: Result) -> str:
    bars = []
    for row in result["sweep"]:
        name = f"{row['network']} inside {row['budget_percent']:.0f} %"
        bars.append(Bar(name, row["joint_percent"], f"{row['joint_percent']:.1f} %"))
    return bars_svg("Inside a budget on a simulated P100", "throughput lost by the planner joint, in percent", bars)


def _one_plan_chart(result: Result) -> str:
    bars = []
    for network in result["results"]:
        for row in network["rows"]:
            found = row["contenders"].get("exact") or next(iter(row["contenders"].values()))
            percent = found.get("added_percent")
            words = "refused" if percent is None else f"{percent:+.1f} %"
            bars.append(Bar(f"{network['network']} inside {row['share']:g} %", percent, words))
    return bars_svg("Time added by one plan", "of plain PyTorch's step", bars)


def _volumes_chart(result: Result) -> str:
    name, bars = result["network"], []
    for precision, found in result.get("measured", {}).items():
        for row in found["rows"]:
            percent = row["shoal"].get("added_percent")
            words = "refused" if percent is None else f"{percent:+.1f} %"
            bars.append(Bar(f"{precision}, inside {row['share']:g} %", percent, words))
    for precision, found in result.get("added", {}).items():
        for row in found["rows"]:
            percent = row["predicted_added_percent"] if row["fits"] else None
            words = "does not fit" if percent is None else f"{percent:+.1f} %, planned"
            bars.append(Bar(f"{precision}, {found['hardware']}, inside {row['share']:g} %", percent, words))
    return bars_svg(f"{name}: time added inside budgets", "of plain PyTorch's step", bars)


def _arena_chart(result: Result) -> str:
    bars = []
    for network in result["networks"]:
        rows = network["rows"]
        for contender in (arena.DEFAULT, arena.CACHING):
            percent = 100 * _cpu_seconds(rows[contender]) / _cpu_seconds(rows[arena.DEFAULT])
            words = f"{percent:.0f} %, holds {rows[contender]['held_bytes'] / network['most_bytes']:.2f} of its tensors"
            bars.append(Bar(f"{network['network']}, {contender}", percent, words))
    return bars_svg("Whole steps by allocator", "CPU time, in percent of plain PyTorch with malloc", bars)


def _cpu_seconds(row: Result) -> float:
    return statistics.median(row["cpu_seconds"])


def _first_seconds(result: Result) -> str:
    bars = []
    for row in result["rows"]:
        seconds = row["capturing_seconds"]
        plans = f"{row['captures']} captures, {row['plans']} plans, {seconds:.1f} s"
        bars.append(Bar(f"{row['network']}: {row['shapes']} shapes", seconds, plans))
    return bars_svg("Many shapes of one model", "CPU seconds of the steps in which something was captured", bars)


def _first_step_chart(result: Result) -> str:
    bars = []
    for row in result["rows"]:
        name = f"{row['network']}, {row['share']:.0f} %"
        bars.append(Bar(name, row["cold_ratio"], f"{row['cold_ratio']:.1f}, warm {row['warm_ratio']:.1f}"))
    return bars_svg("First steps", "CPU seconds as a multiple of aot_eager's", bars)


THEMES: dict[str, Theme] = {
    "compiled": Theme("compiled.md", compiled_tables.tables),
    "gpu": Theme("gpu.md", gpu_tables.tables),
    "one_plan": Theme("one-plan.md", lambda result: [*map(one_plan_network, result["results"])], _one_plan_chart),
    "least": Theme("one-plan.md", rows_of(least.COLUMNS, least.FORMATS), least.chart),
    "ablation": Theme("one-plan.md", ablation.tables),
    "techniques": Theme("one-plan.md", rows_of(techniques.COLUMNS, techniques.FORMATS), techniques.chart),
    "budgets": Theme("budgets.md", lambda result: [budgets_network(result)], budgets_svg),
    "steps": Theme(
        "steps.md",
        rows_of(steps.COLUMNS, steps.FORMATS),
        peaks("Kinds of steps inside a budget", "{kind}, {share:.0f} %"),
    ),
    "many_shapes": Theme("steps.md", rows_of(many_shapes.COLUMNS, many_shapes.FORMATS), _first_seconds),
    "overhead": Theme("steps.md", rows_of(overhead.COLUMNS, overhead.FORMATS), _overhead_chart),
    "first_step": Theme("steps.md", rows_of(first_step.COLUMNS, first_step.FORMATS), _first_step_chart),
    "arena": Theme("steps.md", lambda result: [*map(arena.network_table, result["networks"])], _arena_chart),
    "several_models": Theme(
        "trainers.md",
        rows_of(several_models.COLUMNS, several_models.FORMATS),
        peaks("Several models under one budget", "{kind}, {share:.0f} %"),
    ),
    "hosts": Theme(
        "trainers.md",
        rows_of(hosts.COLUMNS, hosts.FORMATS),
        peaks("Trainers of others inside a budget", "{name}"),
    ),
    "models": Theme(
        "models.md",
        rows_of(models.COLUMNS, models.FORMATS),
        peaks("Models that nobody here wrote", "{model}, {share:.0f} %"),
    ),
    "volumes": Theme("volumes.md", volumes.tables, _volumes_chart),
    "nnunet_presets": Theme("volumes.md", nnunet_presets.tables),
    "phantoms": Theme("volumes.md", lambda result: [phantoms.table(result)]),
    "hmms": Theme(
        "offloading.md",
        lambda result: [
            hmms.offloadable_table(result["figure_1"]),
            hmms.loss_table(result["figure_8"]),
            hmms.sweep_table(result["sweep"]),
            hmms.curve_table(result["figure_11"]),
        ],
        _hmms_chart,
    ),
} | {
    name: Theme(page, found_tables)
    for page, names in {
        "offloading.md": ("offloading", "order", "layout"),
        "splitting.md": ("split_memory", "split_cost", "split_accuracy"),
        "batch-norm.md": ("batchnorm", "norm_conv", "inverted_batchnorm"),
        "codecs.md": ("codecs", "lossy_training", "lossy_budgets"),
        "parallel.md": ("parallel_accuracy",),
        "gradients.md": ("allreduce", "train_link"),
        "weights.md": ("adaptive_precision", "adaptive_race"),
    }.items()
    for name in names
}
