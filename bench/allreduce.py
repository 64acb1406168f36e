"""Gradients averaged over real links: plain DDP, PyTorch's hooks and ours, on the sizes of real networks.

    python -m bench.allreduce --models resnet18 --links 1 --ranks 2      one piece: a minute
    python -m bench.allreduce                                            all: an hour, in pieces kept in one file
    python -m bench.allreduce --parts figure2 --links 1                  time over the size of a layer
    python -m bench.allreduce --parts failures                           what of PyTorch's does not work on gloo
    python -m bench.allreduce --quick                                    a tiny layer: does it run?

Each rank is a process with one thread in the link lab (`bench.link_lab`, root), so four ranks share the cores.
Every contender is a DDP model with the same gradients ready, buckets as DDP makes them (25 MiB; PowerSGD one for all),
so a time is that of copies into buckets and of the exchange. They take turns; times are medians of the slowest rank's.
Bytes are those that left through a rank's interface, with all headers, beside what `Traffic` counts. VGG-11 and AlexNet
are at half their widths (`vgg11/2`): at full size one exchange at 0.1 Gbit/s takes 42 seconds. The normal numbers that
replace gradients are the worst case for PowerSGD, whose error says nothing here.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from rich.table import Table

from bench.allreduce_rank import shapes_of
from bench.frame import Bench, Run, WrongResult, comma_separated, option
from bench.gradient_contenders import AUTO, BROKEN, CONTENDERS, EXACT, NONE, NOTHING, parse_contenders
from bench.link_lab import LAB_OPTIONS, Lab, LabError, described, link_name, open_lab, verify
from bench.tables import cells, new_table

PARTS = ("steps", "figure2", "failures")
MODELS = ("resnet18", "alexnet/2", "vgg11/2")
SIZES = ("10000", "50000", "100000", "250000", "500000", "1000000", "4000000")
FIGURE2 = (NONE, "shoal dynamic_tree", "shoal one_bit")
QUICK_MODEL, QUICK_SIZES = "20000", ("2000", "20000")
_ROUNDS = {0.1: 3, 1.0: 7, 10.0: 15, None: 15}
_PROBE_SECONDS = 0.3
_WORDS = 200  # of an error


def measure(
    lab: Lab, models: Sequence[str], contenders: Sequence[str], rounds: int, reached: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    """Each model's contenders, in turns.

    Raises:
        WrongResult: a contender's gradients are not what it states, or it miscounts its bytes.
    """
    config = {"models": list(models), "contenders": list(contenders), "rounds": rounds}
    by_rank = lab.run("bench.allreduce_rank", config)
    for index, first in enumerate(by_rank[0]):
        rows = {
            name: summary([found[index]["rows"][name] for found in by_rank], lab.ranks, first["elems"])
            for name in first["rows"]
        }
        check(rows, may_differ=(NOTHING, EXACT))
        check_errors(rows)
        yield {
            "model": first["model"],
            "elems": first["elems"],
            "ranks": lab.ranks,
            "link": link_name(lab.rate_gbps),
            "rate_gbps": lab.rate_gbps,
            "goodput_gbps": reached["goodput_gbps"],
            "rows": rows,
        }


def failure(name: str, ranks: int, model: str) -> str:
    """What comes of a contender by itself: the last line of its error, or that it works."""
    with open_lab(ranks, None) as lab:
        try:
            lab.run("bench.allreduce_rank", {"models": [model], "contenders": [name], "rounds": 1}, timeout_seconds=60)
        except LabError as error:
            lines = [line for line in str(error).splitlines() if "rror" in line or "enforce" in line]
            return (lines[-1] if lines else str(error).splitlines()[0])[-_WORDS:].strip()
    return "works"


WIRE_SHARE, SPEED_UP, SLOWER = 0.26, 3.0, 1.02
SLOW_LINK_GBPS = 1.0
EIGHT_BITS = tuple(f"shoal {name}" for name in ("dynamic_tree", "linear", "mantissa", "static_tree"))
# Root mean square of the error, percent of the mean gradient's: of 32 bits, of PyTorch's fp16 and of codecs whose error
# is known. Two roundings of values and of a mean that is smaller than they.
MAX_ERROR_PERCENT = {NONE: 1e-3, "fp16 hook": 0.1, "shoal bf16": 0.5, "shoal dynamic_tree": 4.0, "shoal linear": 4.0}
_HEADERS = 1.12  # at most so much of the interface's bytes to those reported: headers, acknowledgements, a barrier
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

    >>> one = {"seconds": [1.0, 3.0, 2.0], "sent_bytes": [4000], "reported_bytes": [3900], "error_percent": 1.0}
    >>> one |= {"same_on_all_ranks": True, "reason": ""}
    >>> summary([one, one | {"seconds": [2.0, 1.0, 1.0]}], 2, 1000)["seconds"]
    2.0
    """
    by_step = [max(seconds) for seconds in zip(*(one["seconds"] for one in found), strict=True)]
    sent = median(max(sent) for sent in zip(*(one["sent_bytes"] for one in found), strict=True))
    reported = [one["reported_bytes"][-1] for one in found]
    return {
        "seconds": median(by_step),
        "min_seconds": min(by_step),
        "max_seconds": max(by_step),
        "steps": len(by_step),
        "sent_bytes": sent,
        "reported_bytes": None if None in reported else max(reported),
        "of_ring": sent / ring_bytes(elems, ranks),
        "reported_of_ring": None if None in reported else max(reported) / ring_bytes(elems, ranks),
        "error_percent": max((one["error_percent"] for one in found if one["error_percent"] is not None), default=None),
        "same_on_all_ranks": all(one["same_on_all_ranks"] for one in found),
        "reason": found[0]["reason"],
    }


def check(rows: Mapping[str, Mapping[str, Any]], may_differ: Sequence[str] = (NOTHING,)) -> None:
    """Raises:
    WrongResult: ranks got different bits, or bytes reported are not those of the interface.
    """
    for name, row in rows.items():
        if not row["same_on_all_ranks"] and name not in may_differ:
            raise WrongResult(f"{name}: the ranks' bits differ")
        reported, sent = row["reported_bytes"], row["sent_bytes"]
        if reported and sent > _FEW_BYTES and not 0.99 * reported <= sent <= _HEADERS * reported:
            raise WrongResult(f"{name}: says it sent {reported} bytes, and the interface {sent}")


def check_errors(rows: Mapping[str, Mapping[str, Any]]) -> None:
    """Raises:
    WrongResult: a mean of gradients has too large an error.
    """
    for name, row in rows.items():
        most = MAX_ERROR_PERCENT.get(name)
        if most is not None and not row["error_percent"] <= most:
            raise WrongResult(f"{name}: error {row['error_percent']:.3g} %, expected at most {most:g} %")


def verdicts(rows: Mapping[str, Mapping[str, Any]], rate_gbps: float | None) -> dict[str, str]:
    """The targets by contender.

    >>> rows = {"none": {"seconds": 1.0}, "shoal auto": {"seconds": 1.01, "reported_of_ring": 0.5, "of_ring": 0.5}}
    >>> verdicts(rows, None)
    {'shoal auto': '+1.0 % of +2 %: met'}
    """
    found: dict[str, str] = {}
    if NONE not in rows:
        return found
    plain = rows[NONE]["seconds"]
    for name, row in rows.items():
        reported = []
        if name in EIGHT_BITS and row["reported_of_ring"] is not None:
            met = (
                "met"
                if max(row["reported_of_ring"], row["of_ring"] / rows[NONE]["of_ring"]) <= WIRE_SHARE
                else "NOT MET"
            )
            reported.append(f"{row['reported_of_ring']:.3f} of {WIRE_SHARE}: {met}")
        if name in (*EIGHT_BITS, AUTO) and rate_gbps is not None and rate_gbps <= SLOW_LINK_GBPS:
            times = plain / row["seconds"]
            reported.append(f"{times:.1f} of {SPEED_UP:g} times: {'met' if times >= SPEED_UP else 'NOT MET'}")
        if name == AUTO:
            off = row["seconds"] / plain
            reported.append(f"{100 * (off - 1):+.1f} % of +2 %: {'met' if off <= SLOWER else 'NOT MET'}")
        if reported:
            found[name] = "; ".join(reported)
    return found


def span_of(row: Mapping[str, Any]) -> str:
    """The fastest and the slowest step, in milliseconds."""
    return f"{1e3 * row['min_seconds']:.0f}-{1e3 * row['max_seconds']:.0f}"


def step_table(result: Mapping[str, Any]) -> Table:
    """One network over one link."""
    rows = result["rows"]
    targets = verdicts(rows, result["rate_gbps"])
    table = new_table(
        f"{result['model']}, {result['elems']:,} parameters, {result['ranks']} ranks, {result['link']}"
        f" ({result['goodput_gbps']:.3g} reached)",
        "<contender | ms | min-max | times | MB sent | of fp32's ring | reported | error | <targets",
    )
    plain = rows[NONE]["seconds"] if NONE in rows else None
    for name, row in rows.items():
        figures = {"times": plain and plain / row["seconds"], "sent": row["sent_bytes"] / 1e6}
        form = "{seconds:ms} | {span} | {times:.2f} | {sent:.2f} | {of_ring:.3f} | {reported_of_ring:.3f} | "
        form += "{error_percent:.2g} %"
        table.add_row(name, *cells(form, row, span=span_of(row), **figures), targets.get(name, ""))
    return table


def size_table(results: Sequence[Mapping[str, Any]]) -> Table:
    """Figure 2 of the paper: milliseconds over the size of a layer, and how often the time of 32 bits each is."""
    first = results[0]
    names = list(first["rows"])
    titles = ("32 bits" if name == NONE else name.removeprefix("shoal ") for name in names)
    table = new_table(
        f"Time to average one layer's gradient, {first['ranks']} ranks, {first['link']}: ms (times)",
        " | ".join(["parameters", *titles]),
    )
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


def each_lab(run: Run, rounds: Mapping[float | None, int]) -> Iterator[tuple[Lab, int, dict[str, Any]]]:
    """A lab for each number of ranks and each link, how many rounds to measure there, and what plain sockets reach."""
    for ranks in run.asked.ranks:
        for rate_gbps in run.asked.links:
            with open_lab(ranks, rate_gbps) as lab:
                reached = verify(lab, seconds=_PROBE_SECONDS)
                run.say(f"{ranks} ranks, {link_name(rate_gbps)}: {described(reached)}")
                yield lab, run.asked.rounds or run.pick(rounds.get(rate_gbps, 5), 1), reached


def earlier_today(run: Run) -> dict[str, Any]:
    """What this day's earlier runs wrote."""
    try:
        return json.loads(run.path.read_text())
    except (OSError, ValueError):
        return {}


def say_step(run: Run, table: Table, rows: Mapping[str, Any]) -> None:
    """A table of contenders, and what "auto" decided."""
    run.say(table, *([f"{AUTO}: {rows[AUTO]['reason']}"] if AUTO in rows else []))


def _run(run: Run) -> None:
    asked = run.asked
    models = asked.models or run.pick(list(MODELS), [QUICK_MODEL])
    for model in models:
        shapes_of(model)
    run.result = {part: {} for part in PARTS} | earlier_today(run)
    if "failures" in asked.parts:
        for ranks in asked.ranks:
            for name in BROKEN:
                text = run.result["failures"][f"{name}, {ranks} ranks"] = failure(name, ranks, models[0])
                run.say(f"{name}, {ranks} ranks, {models[0]}: {text}")
            run.save()
    for lab, rounds, reached in each_lab(run, _ROUNDS) if {"steps", "figure2"} & set(asked.parts) else ():

        def keep(part: str, result: Mapping[str, Any]) -> None:
            name = f"{result['model']}, {result['ranks']} ranks, {result['link']}"
            run.result[part][name] = {"conditions": run.conditions, **result}
            run.save()

        for model in models if "steps" in asked.parts else ():
            for result in measure(lab, [model], asked.contenders, rounds, reached):
                say_step(run, step_table(result), result["rows"])
                keep("steps", result)
        if "figure2" in asked.parts:
            results = list(measure(lab, run.pick(SIZES, QUICK_SIZES), FIGURE2, rounds, reached))
            run.say(size_table(results))
            for result in results:
                keep("figure2", result)


main = Bench(
    _run,
    option("--parts", known=PARTS, default=["steps"]),
    option("--models", type=comma_separated, default=[], help=f"by default {','.join(MODELS)}"),
    *LAB_OPTIONS,
    option("--contenders", type=parse_contenders, default=list(CONTENDERS), help="with semicolons between"),
    option("--rounds", type=int, help="turns of each; by default 3 to 15 by the link"),
    quick="a tiny layer, once: does it run?",
)

if __name__ == "__main__":
    sys.exit(main())
