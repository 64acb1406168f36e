"""Gradients averaged over real links: plain DDP, PyTorch's hooks and ours, on the sizes of real networks.

    python -m bench.allreduce --models resnet18 --links 1 --ranks 2      one piece: a minute
    python -m bench.allreduce                                            all: an hour, in pieces kept in one file
    python -m bench.allreduce --parts figure2 --links 1                  time over the size of a layer
    python -m bench.allreduce --parts failures                           what of PyTorch's does not work on gloo
    python -m bench.allreduce --quick                                    a tiny layer: does it run?

Each rank is a process with one thread in the link lab (`bench.link_lab`, root), so four ranks share the cores.
Every contender is a DDP model with the same gradients ready, buckets as DDP makes them (25 MiB; PowerSGD one for all),
so a time is that of copies into buckets and of the exchange. They take turns; times are medians of the slowest rank's.
Bytes are those that left through a rank's interface, with all headers, beside what `Traffic` told. VGG-11 and AlexNet
are at half their widths (`vgg11/2`): at full size one exchange at 0.1 Gbit/s takes 42 seconds. The normal numbers that
stand for gradients are the worst case for PowerSGD, whose error says nothing here.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from bench.allreduce_tables import check, check_errors, size_table, step_table, summary
from bench.frame import WrongResult, comma_separated, conditions, describe, file_name, make_console, make_folder
from bench.gradient_contenders import AUTO, BROKEN, CONTENDERS, EXACT, NONE, NOTHING, parse_contenders
from bench.layer_sizes import shapes_of
from bench.link_lab import LINKS, Lab, LabError, link_name, open_lab, parse_links, parse_ranks, told, verify
from shoal.core.files import write_json
from shoal.errors import InputError

PARTS = ("steps", "figure2", "failures")
MODELS = ("resnet18", "alexnet/2", "vgg11/2")
SIZES = ("10000", "50000", "100000", "250000", "500000", "1000000", "4000000")
FIGURE2 = (NONE, "shoal dynamic_tree", "shoal one_bit")
QUICK_MODEL, QUICK_SIZES = "20000", ("2000", "20000")
_ROUNDS = {0.1: 3, 1.0: 7, 10.0: 15, None: 15}
_PROBE_SECONDS = 0.3
_WORDS = 200  # of an error


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; 0 unless a result was wrong (1), an argument was (2) or there can be no lab here (3)."""
    asked = _parser().parse_args(arguments)
    try:
        return _run(asked)
    except (InputError, WrongResult, LabError) as error:
        print(f"bench.allreduce: {error}", file=sys.stderr)
        return 1 if isinstance(error, WrongResult) else 2 if isinstance(error, InputError) else 3


def _run(asked: argparse.Namespace) -> int:
    models = asked.models or ([QUICK_MODEL] if asked.quick else list(MODELS))
    for wrong in set(asked.parts) - set(PARTS):
        raise InputError(f"{wrong!r}: parts are {', '.join(PARTS)}")
    for model in models:
        shapes_of(model)
    device = torch.device("cpu")
    out = make_folder(asked.out)
    path = out / file_name("allreduce", device)
    console = make_console()
    found = conditions(device, 1)
    console.print(describe(found), highlight=False, markup=False)
    kept = _kept(path)
    for ranks in asked.ranks:
        if "failures" in asked.parts:
            for name in BROKEN:
                kept["failures"][f"{name}, {ranks} ranks"] = text = failure(name, ranks, models[0])
                console.print(f"{name}, {ranks} ranks, {models[0]}: {text}", highlight=False, markup=False)
            write_json(path, kept)
        for rate_gbps in asked.links if set(asked.parts) & {"steps", "figure2"} else ():
            rounds = asked.rounds or (1 if asked.quick else _ROUNDS.get(rate_gbps, 5))
            with open_lab(ranks, rate_gbps) as lab:
                reached = verify(lab, seconds=_PROBE_SECONDS)
                console.print(f"{ranks} ranks, {link_name(rate_gbps)}: {told(reached)}", highlight=False, markup=False)
                if "steps" in asked.parts:
                    for model in models:
                        for result in measure(lab, [model], asked.contenders, rounds, reached):
                            console.print(step_table(result))
                            _print_reason(console, result)
                            kept["steps"][f"{model}, {ranks} ranks, {result['link']}"] = {"conditions": found, **result}
                            write_json(path, kept)
                if "figure2" in asked.parts:
                    sizes = QUICK_SIZES if asked.quick else SIZES
                    results = list(measure(lab, sizes, FIGURE2, rounds, reached))
                    console.print(size_table(results))
                    for result in results:
                        kept["figure2"][f"{result['model']}, {ranks} ranks, {result['link']}"] = {
                            "conditions": found,
                            **result,
                        }
                    write_json(path, kept)
    console.print(f"Figures in {path}", highlight=False, markup=False)
    return 0


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


def _print_reason(console: Any, result: Mapping[str, Any]) -> None:
    if AUTO in result["rows"]:
        console.print(f"{AUTO}: {result['rows'][AUTO]['reason']}", highlight=False, markup=False)


def _kept(path: Path) -> dict[str, Any]:
    """The pieces of today's earlier runs."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return {part: {} for part in PARTS}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.allreduce", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", type=comma_separated, default=["steps"], help=f"of {', '.join(PARTS)}")
    parser.add_argument("--models", type=comma_separated, default=[], help=f"by default {','.join(MODELS)}")
    parser.add_argument("--links", type=parse_links, default=list(LINKS), help="Gbit/s, or loopback")
    parser.add_argument("--ranks", type=parse_ranks, default=[2, 4])
    parser.add_argument("--contenders", type=parse_contenders, default=list(CONTENDERS), help="separated by semicolons")
    parser.add_argument("--rounds", type=int, help="turns of each; by default 3 to 15 by the link")
    parser.add_argument("--quick", action="store_true", help="a tiny layer, once: does it run?")
    parser.add_argument("--out", type=Path, default=Path("runs/bench"), help="folder for the JSON file")
    return parser


if __name__ == "__main__":
    sys.exit(main())
