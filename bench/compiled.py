"""Compiled regions: networks × budgets × precision, beside eager PyTorch and `torch.compile`.

    python -m bench.compiled            every network, float32 and bfloat16 autocast: hours on two cores
    python -m bench.compiled --quick    the same on tiny inputs, to see that it runs
    python -m bench.compiled --networks resnet50,gpt2 --shares 100,50 --precision float32
    python -m bench.compiled --resume runs/bench/compiled_....json   networks that it has are not measured again
    python -m bench.compiled --start --networks resnet50  seconds until the second step, cold and warm

Budgets are shares of eager PyTorch's peak. `torch.compile` runs by itself and at several values of
`activation_memory_budget`; at a budget, the fastest of its settings whose measured peak fits stands for it. Shoal runs
with kernels="eager" and kernels="compiled", in whatever form `--allow` permits: "exact", as by default. All are timed
in turns. Gradients of each contender are held against eager PyTorch's in float64, parameter by parameter, relative to
these; where masks are drawn, `torch.compile`'s as it computes them of eager's masks. The file is written after each
contender and each round; an interrupted run finds in the compilers' caches what it compiled.

GPT-2 is of transformers (here 5.23.0), four of the networks are of timm (here 1.0.31); what does not import is skipped.
"""

from __future__ import annotations

import gc
import sys
from functools import partial

import torch

from bench.compiled_contenders import measure_network
from bench.compiled_start import STARTS, start_seconds
from bench.compiled_tables import error_table, network_table, rows_of, start_table
from bench.frame import CPU_TIME, NETWORKS, Bench, Run, Unavailable, bar, option, percentages, switch
from bench.network import Setting
from shoal.errors import InputError

SETTINGS = {
    "mobilenet_v2": Setting(8, 128),
    "googlenet": Setting(8, 128),
    "unet3d": Setting(1, 48),
    "densenet121": Setting(4, 128),
    "resnet50": Setting(16, 128),
    "unet": Setting(1, 128),
    "vgg16_bn": Setting(16, 128),
    "resnet18": Setting(32, 128),
    "timm/efficientnet_b0": Setting(4, 160),
    "timm/convnext_tiny": Setting(6, 160),
    "timm/hrnet_w18_small": Setting(4, 160),
    "timm/vit_small_patch16_224": Setting(8, 224),
    "gpt2": Setting(2, 256),  # sequences, tokens
}
QUICK_SETTINGS = {name: Setting(2, 64) for name in SETTINGS} | {
    "unet3d": Setting(1, 16),
    "timm/vit_small_patch16_224": Setting(1, 224),
    "gpt2": Setting(1, 32),
}
PRECISIONS = ("float32", "bfloat16")
SHARES = (100.0, 60.0, 40.0)
ACTIVATION_BUDGETS = (0.7, 0.4, 0.1)


def _run(run: Run) -> int:
    asked = run.asked
    settings = run.chosen(SETTINGS, QUICK_SETTINGS)
    if unknown := sorted(set(asked.precision) - set(PRECISIONS)):
        raise InputError(f"--precision {','.join(unknown)}: give some of {', '.join(PRECISIONS)}")
    if asked.start:
        starts = []
        for name in settings:
            for who in STARTS:
                starts.append(start_seconds(name, who))
                run.save(starts=starts)
        run.say(start_table(run.result))
        return 0
    shares = asked.shares or run.pick(SHARES, (100.0,))
    values = asked.sweep if asked.sweep is not None else run.pick(ACTIVATION_BUDGETS, ())
    results = [one for one in run.resume().get("results", ()) if one["complete"]]
    there = {(one["network"], one["precision"]) for one in results}
    wanted = [(name, one) for name in settings for one in asked.precision if (name, one) not in there]
    with bar(len(wanted)) as show:
        for name, precision in wanted:
            try:
                results.append(
                    measure_network(
                        name,
                        settings[name],
                        shares,
                        precision,
                        values,
                        run.pick(asked.rounds, 2),
                        asked.seed,
                        asked.allow,
                        partial(show, f"{name}, {precision}"),
                        run.clock,
                        lambda found: run.save(results=[*results, found]),
                    )
                )
            except Unavailable as reason:
                run.skip(name, reason)
                continue
            run.save(results=results)
            run.say(network_table(results[-1]), error_table(results[-1]))
            torch._dynamo.reset()
            gc.collect()
    run.reject_nothing(results)
    broken = [row["who"] for result in results for row in rows_of(result) if row.get("broken")]
    if broken:
        run.say(f"Over its budget: {', '.join(broken)}")
    return 1 if broken else 0


def _values(text: str) -> list[float]:
    return [float(value) for value in text.split(",") if value]


main = Bench(
    _run,
    NETWORKS,
    option("--shares", type=percentages, minimum=None, help="budgets in percent of eager PyTorch's peak"),
    option(
        "--precision",
        type=lambda text: text.split(","),
        minimum=None,
        default=list(PRECISIONS),
        help="of float32, bfloat16",
    ),
    option("--sweep", type=_values, minimum=None, help="values of activation_memory_budget"),
    option("--rounds", type=int, default=5, help="timed steps of each"),
    option("--allow", default="exact", minimum=None, help="as of shoal.compile, whose default is this one's"),
    switch("--start", "seconds until the second step instead, in processes of their own"),
    CPU_TIME,
    quick="tiny inputs: does it run?",
    resume="keep the networks that this file has whole, and measure the others",
    seed=True,
)

if __name__ == "__main__":
    sys.exit(main())
