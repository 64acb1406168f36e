"""DDP training steps over real links: plain, with PyTorch's hooks and with ours.

    python -m bench.train_link                            all links, 2 and 4 ranks: half an hour
    python -m bench.train_link --ranks 2 --links 1        one piece: two minutes
    python -m bench.train_link --ranks 2 --links 1 --contenders "none;none, again;planned;nothing sent" --rounds 20
    python -m bench.train_link --sharded --contenders "none;shoal bf16"    FSDP2; its weights travel in float32
    python -m bench.train_link --quick                    two small images, one step: does it run?

A step is forward, cross entropy, backward and SGD with momentum on the rank's own images, in eager mode, one thread a
rank in the link lab (`bench.link_lab`, root), so four ranks share the cores. The contenders start from the same weights
and take turns; a step takes as long as its slowest rank, times are medians. In the end every contender's weights must
be the same bits on all ranks. "nothing sent" is the same step without any exchange: what the link costs is the rest.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from bench.allreduce import check, each_lab, earlier_today, say_step, span_of, summary
from bench.frame import Bench, Run, option, switch
from bench.gradient_contenders import CONTENDERS, EXACT, NONE, NOTHING, parse_contenders
from bench.link_lab import LAB_OPTIONS, link_name
from bench.tables import cells, new_table
from examples import networks as models

_ROUNDS = {0.1: 3, 1.0: 5, 10.0: 7, None: 7}


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
        "<contender | ms a step | min-max | times | exchange not hidden | MB sent | of fp32's ring | <weights",
    )
    for name, row in rows.items():
        figures = {
            "times": rows[NONE]["seconds"] / row["seconds"] if NONE in rows else None,
            "more": 1e3 * (row["seconds"] - rows[NOTHING]["seconds"]) if NOTHING in rows else None,
            "sent": row["sent_bytes"] / 1e6,
            "same": "the same bits" if row["same_on_all_ranks"] else "differ",
        }
        form = "{seconds:ms} | {span} | {times:.2f} | {more:.0f} ms | {sent:.2f} | {of_ring:.3f} | {same}"
        table.add_row(name, *cells(form, row | figures, span=span_of(row)))
    return table


def _run(run: Run) -> None:
    asked = run.asked
    image, batch = run.pick((asked.image, asked.batch), (32, 2))
    models.example_shape(asked.network, batch, image)
    run.result = earlier_today(run)
    config = {"network": asked.network, "batch": batch, "image": image, "rate": 0.01, "sharded": asked.sharded}
    for lab, rounds, reached in each_lab(run, _ROUNDS):
        asks = {**config, "contenders": asked.contenders, "rounds": rounds}
        result = gathered(lab.run("bench.train_link_rank", asks), lab.ranks)
        result |= {"ranks": lab.ranks, "link": link_name(lab.rate_gbps), "batch": batch, "image": image}
        say_step(run, step_table(result), result["rows"])
        kind = ", sharded" if asked.sharded else ""
        name = f"{asked.network}{kind}, {lab.ranks} ranks, {result['link']}"
        run.save(**{name: {"conditions": run.conditions, **result, **reached}})
    run.say("Weights the same bits on all ranks")


main = Bench(
    _run,
    option("--network", default="resnet18_cifar", help="a name of examples.networks"),
    option("--batch", type=int, default=4, help="images of each rank"),
    option("--image", type=int, default=32, help="pixels along each side"),
    switch("--sharded", "FSDP2, part by part, in place of DDP"),
    *LAB_OPTIONS,
    option("--contenders", type=parse_contenders, default=list(CONTENDERS), help="with semicolons between"),
    option("--rounds", type=int, help="turns of each; by default 3 to 7 by the link"),
    quick="two small images, one step: does it run?",
)

if __name__ == "__main__":
    sys.exit(main())
