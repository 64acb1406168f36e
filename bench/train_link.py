"""DDP training steps over real links: plain, with PyTorch's hooks and with ours.

    python -m bench.train_link                            all links, 2 and 4 ranks: half an hour
    python -m bench.train_link --ranks 2 --links 1        one piece: two minutes
    python -m bench.train_link --sharded --contenders "none;shoal bf16"    FSDP2; its weights travel in float32
    python -m bench.train_link --quick                    two small images, one step: does it run?

A step is forward, cross entropy, backward and SGD with momentum on the rank's own images, in eager mode, one thread a
rank in the link lab (`bench.link_lab`, root), so four ranks share the cores. The contenders start from the same weights
and take turns; a step takes as long as its slowest rank, times are medians. In the end every contender's weights must
be the same bits on all ranks. "nothing sent" is the same step without any exchange: what the link costs is the rest.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from bench.allreduce_tables import check, summary
from bench.frame import WrongResult, conditions, describe, file_name, make_console, make_folder
from bench.gradient_contenders import AUTO, CONTENDERS, EXACT, NONE, NOTHING, parse_contenders
from bench.link_lab import LINKS, LabError, link_name, open_lab, parse_links, parse_ranks, told, verify
from bench.tables import new_table
from shoal.app import models
from shoal.core.files import write_json
from shoal.errors import InputError

_ROUNDS = {0.1: 3, 1.0: 5, 10.0: 7, None: 7}
_PROBE_SECONDS = 0.3


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; 0 unless ranks differ in the end (1), an argument was wrong (2) or there can be no lab here (3)."""
    asked = _parser().parse_args(arguments)
    try:
        return _run(asked)
    except (InputError, WrongResult, LabError) as error:
        print(f"bench.train_link: {error}", file=sys.stderr)
        return 1 if isinstance(error, WrongResult) else 2 if isinstance(error, InputError) else 3


def _run(asked: argparse.Namespace) -> int:
    image = 32 if asked.quick else asked.image
    batch = 2 if asked.quick else asked.batch
    models.example_shape(asked.network, batch, image)
    device = torch.device("cpu")
    out = make_folder(asked.out)
    path = out / file_name("train_link", device)
    console = make_console()
    found = conditions(device, 0)
    console.print(describe(found), highlight=False, markup=False)
    try:
        kept = json.loads(path.read_text())
    except (OSError, ValueError):
        kept = {}
    for ranks in asked.ranks:
        for rate_gbps in asked.links:
            config = {
                "network": asked.network,
                "batch": batch,
                "image": image,
                "rate": 0.01,
                "sharded": asked.sharded,
                "contenders": asked.contenders,
                "rounds": asked.rounds or (1 if asked.quick else _ROUNDS.get(rate_gbps, 5)),
            }
            with open_lab(ranks, rate_gbps) as lab:
                reached = verify(lab, seconds=_PROBE_SECONDS)
                console.print(f"{ranks} ranks, {link_name(rate_gbps)}: {told(reached)}", highlight=False, markup=False)
                by_rank = lab.run("bench.train_link_rank", config)
            result = gathered(by_rank, ranks)
            result |= {"ranks": ranks, "link": link_name(rate_gbps), "batch": batch, "image": image}
            console.print(step_table(result))
            if AUTO in result["rows"]:
                console.print(f"{AUTO}: {result['rows'][AUTO]['reason']}", highlight=False, markup=False)
            kind = ", sharded" if asked.sharded else ""
            kept[f"{asked.network}{kind}, {ranks} ranks, {result['link']}"] = {"conditions": found, **result, **reached}
            write_json(path, kept)
    console.print(f"Weights the same bits on all ranks. Figures in {path}", highlight=False, markup=False)
    return 0


def gathered(by_rank: Sequence[Mapping[str, Any]], ranks: int) -> dict[str, Any]:
    """One result out of every rank's.

    Raises:
        WrongResult: a contender's weights differ between ranks, or it miscounts its bytes.
    """
    first = by_rank[0]
    rows = {}
    for name in first["rows"]:
        rows[name] = summary([found["rows"][name] for found in by_rank], ranks, first["elems"])
        rows[name]["loss"] = first["rows"][name]["losses"][-1]
    check(rows, may_differ=(NOTHING, EXACT))
    return {"model": first["model"], "elems": first["elems"], "rows": rows}


def step_table(result: Mapping[str, Any]) -> Table:
    """One link."""
    rows = result["rows"]
    table = new_table(
        f"{result['model']}, {result['batch']} x {result['image']} pixels, {result['elems']:,} parameters, "
        f"{result['ranks']} ranks, {result['link']}",
        "<contender | ms a step | least-most | times | exchange not hidden | MB sent | of fp32's ring",
    )
    table.add_column("weights")
    for name, row in rows.items():
        alone = rows[NOTHING]["seconds"] if NOTHING in rows else None
        table.add_row(
            name,
            f"{1e3 * row['seconds']:.0f}",
            f"{1e3 * row['least_seconds']:.0f}-{1e3 * row['most_seconds']:.0f}",
            f"{rows[NONE]['seconds'] / row['seconds']:.2f}" if NONE in rows else "",
            "" if alone is None else f"{1e3 * (row['seconds'] - alone):.0f} ms",
            f"{row['sent_bytes'] / 1e6:.2f}",
            f"{row['of_ring']:.3f}",
            "the same bits" if row["same_on_all_ranks"] else "differ",
        )
    return table


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.train_link", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--network", default="resnet18_cifar", help="a name of shoal.app.models")
    parser.add_argument("--batch", type=int, default=4, help="images of each rank")
    parser.add_argument("--image", type=int, default=32, help="pixels along each side")
    parser.add_argument("--sharded", action="store_true", help="FSDP2, part by part, in place of DDP")
    parser.add_argument("--links", type=parse_links, default=list(LINKS), help="Gbit/s, or loopback")
    parser.add_argument("--ranks", type=parse_ranks, default=[2, 4])
    parser.add_argument("--contenders", type=parse_contenders, default=list(CONTENDERS), help="separated by semicolons")
    parser.add_argument("--rounds", type=int, help="turns of each; by default 3 to 7 by the link")
    parser.add_argument("--quick", action="store_true", help="two small images, one step: does it run?")
    parser.add_argument("--out", type=Path, default=Path("runs/bench"), help="folder for the JSON file")
    return parser


if __name__ == "__main__":
    sys.exit(main())
