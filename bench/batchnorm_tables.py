"""What `bench.batchnorm` measured, for a reader: a table a network and malloc, one of the zoo, a line a target."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.markup import escape
from rich.table import Table

from bench.batchnorm_contenders import A_A, COMPILED_FUSED, EAGER, FUSED, INDUCTOR
from bench.tables import new_table
from shoal.core.sizes import format_bytes

DEFAULT_MALLOC, TUNED_MALLOC = "default", "tuned"
NOISE = 0.02  # of a step: two contenders that near are equal

PAPER = {  # Jung et al., MLSys'19, section 5: how much faster than its baseline; "estimated" is the paper's word
    "densenet121": {"rcf": "1.09", "mvf": "1.11", "bnff": "1.26 (1.48, 1.15)", "icf": "1.44, estimated"},
    "resnet50": {"bnff": "1.16 (1.31, 1.09)"},
}
PAPER_CONDITIONS = (
    "paper: Jung et al., MLSys'19, figure 7: step (forward, backward) times faster than its own baseline, Intel Caffe "
    "with MKL-DNN 0.11, batch 120, two Xeon Gold 6138 of 20 cores each; ICF was not run there"
)


@dataclass(frozen=True)
class Target:
    """What one network must reach with tuned malloc, batch 16 at 224 pixels, at the level that is its default.

    Attributes:
        network: its name.
        against: a contender to be faster than, or "memory" for the share of eager's peak.
        least: times faster; of memory the highest share.
        stretch: more than is asked for; 0 for none.
    """

    network: str
    against: str
    least: float
    stretch: float = 0.0


MEMORY = "memory"
TARGETS = (
    Target("densenet121", EAGER, 1.35, stretch=1.5),
    Target("densenet121", INDUCTOR, 1.35),
    Target("densenet121", MEMORY, 0.30),
    Target("resnet50", EAGER, 1.10),
)
_TARGETS_SETTING = (16, 224)


def step_table(result: Mapping[str, Any]) -> Table:
    """One row a contender. Columns measured here, then the paper's."""
    asked, rows = result["asked"], result["rows"]
    limit = result["limit_flops_per_second"]
    title = f"{setting_of(result)}: {result['flops'] / 1e9:.1f} GFLOP a step, limit {limit / 1e9:.0f} GFLOP/s (sgemm)"
    table = new_table(
        escape(title),
        "<contender | forward | backward | step | × eager | × Inductor | saved | peak | of eager's | GFLOP/s | of "
        "limit | paper",
        caption=escape(PAPER_CONDITIONS),
        caption_justify="left",
    )
    eager = row_of(result, EAGER)
    for row in rows:
        paper = PAPER.get(asked["network"], {}).get(row["contender"], "-")
        if "failed" in row:
            table.add_row(escape(f"{row['title']}: {row['failed']}"), *[""] * (len(table.columns) - 2), paper)
            continue
        seconds = medians(row)
        speed = result["flops"] / seconds["step"]
        share = f"{100 * row['peak_bytes'] / eager['peak_bytes']:.1f} %" if eager else "-"
        cells = [row["title"], *(f"{seconds[part]:.3f} s" for part in ("forward", "backward", "step"))]
        cells += [f"{row['times'][other]['step']:.2f}" if other in row["times"] else "-" for other in (EAGER, INDUCTOR)]
        cells += [format_bytes(row["saved_bytes"]), format_bytes(row["peak_bytes"]), share]
        table.add_row(*map(escape, cells), f"{speed / 1e9:.1f}", f"{100 * speed / limit:.0f} %", paper)
    return table


def notes(result: Mapping[str, Any]) -> Iterator[str]:
    """What the table has no column for: levels, arenas, how far off each contender's training was."""
    for row in result["rows"]:
        reported = []
        if "level" in row and row["contender"] == FUSED:
            reported.append(f"level {row['level']}")
        if "arena" in row:
            arena = row["arena"]
            reported.append(
                f"arena of {format_bytes(arena['bytes'])}, {arena['fragmentation']:.3f} of the most in use, "
                f"{arena['departures']} departures in {arena['replayed_steps']} replayed steps"
            )
        if "off" in row and row["contender"] != EAGER:
            reported.append(", ".join(f"{what} {off:.1e} off" for what, off in row["off"].items()))
        if reported:
            yield f"{row['title']}: {'; '.join(reported)}"


def zoo_table(results: Sequence[Mapping[str, Any]]) -> Table:
    """Every network at its default level beside eager, and eager beside itself: that is the noise."""
    table = new_table(
        f"fuse_batchnorm's default beside eager, {results[0]['malloc']} malloc",
        "<network | eager step | eager A/A | fused: forward | backward | step | saved | peak, of eager's | fused "
        "| left | <verdict",
    )
    for result in results:
        eager, fused = row_of(result, EAGER), row_of(result, FUSED)
        asked = result["asked"]
        name = f"{asked['network']}, {asked['batch']} x {asked['image']}"
        if eager is None or fused is None:
            table.add_row(name, *[""] * 9, "not measured")
            continue
        again = row_of(result, A_A)
        times = fused["times"][EAGER]
        saved = fused["saved_bytes"] / eager["saved_bytes"] if eager["saved_bytes"] else 1.0
        table.add_row(
            name,
            f"{1e3 * medians(eager)['step']:.0f} ms",
            f"× {again['times'][EAGER]['step']:.2f}" if again else "-",
            *(f"× {times[part]:.2f}" for part in ("forward", "backward", "step")),
            f"{100 * saved:.0f} %",
            f"{100 * fused['peak_bytes'] / eager['peak_bytes']:.0f} %",
            f"{fused['fused']}, {fused['level']}",
            str(fused["left"]),
            "SLOWER" if is_slower(fused) else "not slower",
        )
    return table


def is_slower(row: Mapping[str, Any]) -> bool:
    """Whether a row's step takes longer than eager's, by more than the noise."""
    return bool(row["times"][EAGER]["step"] < 1 - NOISE)


def setting_of(result: Mapping[str, Any]) -> str:
    """`densenet121, 16 x 224 pixels, 2 threads, tuned malloc, pools first for all`."""
    asked = result["asked"]
    threads = f"{asked['threads']} thread{'s' * (asked['threads'] > 1)}"
    pools = f"pools first for {'all' if asked['pool_first'] else 'none'}"
    return (
        f"{asked['network']}, {asked['batch']} x {asked['image']} pixels, {threads}, {result['malloc']} malloc, {pools}"
    )


def verdicts(results: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Each target beside what was measured: `met` is None where it was not, or at another size than the target's.

    Returns:
        A line each: `target`, `measured` (number or None), `met`, `reported`.
    """
    found = []
    for target in TARGETS:
        held = [r for r in results if r["asked"]["network"] == target.network and r["malloc"] == TUNED_MALLOC]
        wanted = (
            f"{target.network}: at most {100 * target.least:.0f} % of eager's step memory"
            if target.against == MEMORY
            else f"{target.network}: at least {target.least:.2f} × {target.against}"
        )
        if not held:
            found.append(_verdict(wanted, None, None, f"not measured with {TUNED_MALLOC} malloc"))
        found += [_held(target, wanted, result) for result in held]
    return found


def _held(target: Target, wanted: str, result: Mapping[str, Any]) -> dict[str, Any]:
    ours, eager = default_row(result), row_of(result, EAGER)
    asked = result["asked"]
    where = f"{asked['batch']} x {asked['image']} pixels, pools first for {'all' if asked['pool_first'] else 'none'}"
    as_asked = (asked["batch"], asked["image"]) == _TARGETS_SETTING
    if not as_asked:
        where += f"; the target is for {_TARGETS_SETTING[0]} x {_TARGETS_SETTING[1]}"
    if ours is None:
        levels = f"neither {FUSED!r} nor its default level {result['default_level']!r} was measured"
        return _verdict(wanted, None, None, f"{levels} ({where})")
    if eager is None or (target.against != MEMORY and target.against not in ours["times"]):
        return _verdict(wanted, None, None, f"not measured ({where})")
    if target.against == MEMORY:
        share = ours["peak_bytes"] / eager["peak_bytes"]
        met = share <= target.least if as_asked else None
        return _verdict(wanted, share, met, f"{100 * share:.1f} % with {ours['title']} ({where})")
    times = ours["times"][target.against]["step"]
    reported = f"{times:.2f} × with {ours['title']} ({where})"
    if target.stretch:
        reported += f"; the stretch of {target.stretch:.2f} is {'met' if times >= target.stretch else 'not met'}"
    return _verdict(wanted, times, times >= target.least if as_asked else None, reported)


def without_tunables(results: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """What a user gets who sets nothing: a fused and compiled network in an arena, against plain eager."""
    for result in results:
        row = row_of(result, COMPILED_FUSED)
        if result["malloc"] == DEFAULT_MALLOC and row is not None and EAGER in row["times"]:
            times = row["times"][EAGER]
            yield (
                f"Without a tunable: {setting_of(result)}: {times['step']:.2f} × plain eager (forward "
                f"{times['forward']:.2f}, backward {times['backward']:.2f}) with {row['title']}"
            )


def zoo_verdict(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Whether a fused network is slower than eager on any network that was measured."""
    rows = [(result, row) for result in results if (row := row_of(result, FUSED)) is not None]
    slower = [
        f"{result['asked']['network']} ({result['malloc']} malloc) {row['times'][EAGER]['step']:.2f} ×"
        for result, row in rows
        if is_slower(row)
    ]
    worst = min((row["times"][EAGER]["step"] for _, row in rows), default=None)
    reported = f"slower, by more than {100 * NOISE:.0f} %, in {len(slower)} of {len(rows)}" + (": " if slower else "")
    return _verdict(
        "never slower than eager on any network of the zoo",
        worst,
        None if worst is None else not slower,
        reported + ", ".join(slower),
    )


def verdict_line(verdict: Mapping[str, Any]) -> str:
    """One line.

    >>> verdict_line({"target": "a: at least 2 × eager", "met": False, "reported": "1.90 ×"})
    'NOT MET  a: at least 2 × eager: 1.90 ×'
    """
    word = {True: "met", False: "NOT MET", None: "-"}[verdict["met"]]
    return f"{word:7}  {verdict['target']}: {verdict['reported']}"


def medians(row: Mapping[str, Any]) -> dict[str, float]:
    """Seconds of a row: forward, backward, step."""
    parts = row["forward_seconds"], row["backward_seconds"]
    whole = [forward + backward for forward, backward in zip(*parts, strict=True)]
    return dict(zip(("forward", "backward", "step"), map(statistics.median, (*parts, whole)), strict=True))


def row_of(result: Mapping[str, Any], contender: str) -> dict[str, Any] | None:
    """The contender's row, if it was measured."""
    for row in result["rows"]:
        if row["contender"] == contender and "failed" not in row:
            return row
    return None


def default_row(result: Mapping[str, Any]) -> dict[str, Any] | None:
    """The row of the level that `fuse_batchnorm` takes by itself; "icf" is "bnff" where nothing is concatenated."""
    levels = [result["default_level"], *(["icf"] if result["default_level"] == "bnff" else [])]
    return next((row for name in (FUSED, *levels) if (row := row_of(result, name)) is not None), None)


def _verdict(target: str, measured: float | None, met: bool | None, reported: str) -> dict[str, Any]:
    return {"target": target, "measured": measured, "met": met, "reported": reported}
