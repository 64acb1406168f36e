"""The tables of `bench.codecs` for a reader."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.table import Table

from bench.codecs_error import DISTRIBUTIONS, PAPER, Errors
from bench.codecs_speed import BITSANDBYTES, Row, Verdict
from bench.tables import new_table

_DEPARTS = 1.5  # times


def paper_table(found: Mapping[tuple[str, str], tuple[Errors, Errors]], samples: int) -> Table:
    """Table 1 of the paper beside ours: as the paper scales, and in blocks of 4096."""
    table = new_table(
        f"Table 1: mean errors over {samples:,} numbers; the paper's beside ours",
        "<distribution | <codec | absolute: paper | ours | least possible | relative: paper | ours",
    )
    table.add_column("in blocks of 4096", justify="right")
    table.add_column("the paper's absolute error")
    least = {distribution.name: distribution.least_absolute for distribution in DISTRIBUTIONS}
    for (distribution, codec), (ours, in_blocks) in found.items():
        paper = PAPER.get((distribution, codec))
        table.add_row(
            distribution,
            codec,
            f"{paper[0]:g}" if paper else "",
            f"{ours.absolute:.3g}",
            f"{least[distribution]:.2g}",
            f"{paper[1]:.2f} %" if paper else "",
            f"{ours.relative_percent:.2f} %",
            f"{in_blocks.relative_percent:.2f} %",
            remark(paper[0], ours.absolute, least[distribution]) if paper else "",
        )
    return table


def remark(paper: float, ours: float, least: float) -> str:
    """Whether the paper's mean absolute error can be had again.

    >>> remark(0.00004, 0.0034, 0.001), remark(0.0024, 0.002, 0.001), remark(0.5, 0.1, 0.01)
    ('irreproducible: no 256 values do that', 'within 1.5 times', 'not reproduced')
    """
    if paper < least:
        return "irreproducible: no 256 values do that"
    return "within 1.5 times" if max(paper / ours, ours / paper) <= _DEPARTS else "not reproduced"


def recorded_table(network: str, found: Mapping[str, Mapping[str, Errors]], bits: Mapping[str, float]) -> Table:
    """Of tensors from real training: one row a codec, mean relative error and root mean square of each kind."""
    table = Table(title=f"{network}, recorded while training on CIFAR-10: relative error, mean / root mean square")
    table.add_column("codec")
    table.add_column("bits a value", justify="right")
    for kind in found:
        table.add_column(f"{kind} ({next(iter(found[kind].values())).elems:,})", justify="right")
    for codec in next(iter(found.values())):
        cells = [found[kind][codec] for kind in found]
        table.add_row(
            codec,
            f"{bits[codec]:.2f}",
            *(f"{errors.relative_percent:.2f} % / {errors.root_mean_square_percent:.2f} %" for errors in cells),
        )
    return table


def bias_table(found: Mapping[str, Mapping[str, Errors]]) -> Table:
    """Mean of (decoded - x) / x, and the mean relative error, of each source."""
    table = Table(title="Bias: mean of (decoded - x) / x, and the mean relative error")
    table.add_column("codec")
    for source in found:
        table.add_column(source, justify="right")
    for codec in next(iter(found.values())):
        table.add_row(
            codec,
            *(f"{found[s][codec].bias_percent:+.4f} %, {found[s][codec].relative_percent:.4f} %" for s in found),
        )
    return table


def speed_table(rows: Sequence[Row], targets: Mapping[str, Sequence[Verdict]], peer_is_here: bool) -> Table:
    """One size and number of threads."""
    first = rows[0]
    table = new_table(
        f"{first.elems:,} float32, {first.threads} thread{'s' * (first.threads > 1)}: GB/s of float32",
        "<contender | bytes a value | encode | decode | break-even",
    )
    table.add_column("targets")
    for row in rows:
        even = row.break_even_gbps
        table.add_row(
            row.contender,
            f"{row.payload_bytes / row.elems:.3f}",
            f"{row.encode_gbps:.2f}",
            "" if row.decode_gbps is None else f"{row.decode_gbps:.2f}",
            "" if even is None else f"{even:.2f} GB/s",
            "; ".join(told(verdict) for verdict in targets.get(row.contender, ())),
        )
    if not peer_is_here:
        table.add_row(BITSANDBYTES, "", "not installed", "not installed", "", "")
    return table


def told(verdict: Verdict) -> str:
    """A target in a few words.

    >>> told(Verdict("encode to memcpy", 0.8, 0.913)), told(Verdict("encode to bitsandbytes", 20.0, None))
    ('encode to memcpy 0.91 of 0.8: met', 'encode to bitsandbytes: not installed')
    """
    if verdict.measured is None:
        return f"{verdict.what}: not installed"
    return f"{verdict.what} {verdict.measured:.2f} of {verdict.wanted:g}: {'met' if verdict.met else 'NOT MET'}"
