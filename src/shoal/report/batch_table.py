"""Images per second against batch as rows of text, and as a table for a terminal."""

from __future__ import annotations

from rich.table import Table

from shoal.core.frontier import BatchFrontierData, BatchPoint
from shoal.core.sizes import format_bytes
from shoal.report.frontier_table import grid, milliseconds

COLUMNS = (
    "batch", "images/s", "of best %", "step ms", "bound images/s", "plain images/s", "predicted peak", "kept %",
    "recomputed %", "offloaded %", "encoded %", "computed",
)  # fmt: skip


def rows(frontier: BatchFrontierData) -> list[tuple[str, ...]]:
    """A row for each batch, also for those that have no plan; `COLUMNS` heads them."""
    planned = [(point.batch, row(frontier, point)) for point in frontier.points]
    unfit = [(batch, (str(batch), *"-" * (len(COLUMNS) - 2), reason)) for batch, reason in shown_unfit(frontier)]
    return [cells for _, cells in sorted(planned + unfit)]


def shown_unfit(frontier: BatchFrontierData) -> list[tuple[int, str]]:
    """Batches without a plan, and why: those between others, and above all of those the smallest."""
    end = frontier.largest.batch if frontier.too_many is None else frontier.too_many
    return [(batch, reason) for batch, reason in frontier.unfit if batch <= end]


def table(frontier: BatchFrontierData) -> Table:
    """The batches, for `rich.print`; the best is bold."""
    return grid(title(frontier), COLUMNS, rows(frontier), row(frontier, frontier.best))


def title(frontier: BatchFrontierData) -> str:
    """What is shown, in one line."""
    best, largest = frontier.best, frontier.largest
    return (
        f"{frontier.model}, times for {frontier.hardware}, inside {format_bytes(frontier.budget_bytes)}; "
        f"best: {described(best)}; largest: {largest.batch}"
    )


def described(point: BatchPoint) -> str:
    """A batch and its rate, in words."""
    return f"{point.batch} images, {rate(point.images_per_second)} images/s"


def rate(images_per_second: float) -> str:
    """A rate with at least three digits.

    >>> rate(12.345), rate(1234.5), rate(0.5)
    ('12.3', '1234', '0.500')
    """
    digits = 0 if images_per_second >= 1000 else 1 if images_per_second >= 10 else 3
    return f"{images_per_second:.{digits}f}"


def row(frontier: BatchFrontierData, point: BatchPoint) -> tuple[str, ...]:
    """A batch under `COLUMNS`."""
    plain = point.plain_images_per_second
    shares = (point.share(storages) for storages in (point.kept, point.recomputed, point.offloaded, point.encoded))
    return (
        str(point.batch),
        rate(point.images_per_second),
        f"{100 * point.images_per_second / frontier.best.images_per_second:.1f}",
        milliseconds(point.seconds),
        rate(point.bound_images_per_second),
        "-" if plain is None else rate(plain),
        format_bytes(point.predicted_peak_bytes),
        *(f"{100 * share:.1f}" if share else "-" for share in shares),
        str(point.variant),
    )
