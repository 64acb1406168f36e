"""Codecs: what they cost in accuracy, and how fast they are.

    python -m bench.codecs                          all of it, two minutes and 6 GB
    python -m bench.codecs --parts table1,bias      some of it: table1, recorded, bias, speed
    python -m bench.codecs --parts speed --device cuda
    python -m bench.codecs --quick                  few numbers, once: does it run?

`table1`: the errors of table 1 of Dettmers (ICLR'16) on the same distributions, 25 million numbers each, scaled as the
paper scales (one scale a tensor; an exponent offset for the mantissa and the static tree), and in blocks of 4096.
`recorded`: the same errors on the gradients, activations and weights of a ResNet and a VGG that trained for a few
hundred steps; each tensor is encoded by itself. `bias`: what cutting bytes off does to the mean, against rounding.
`speed`: GB/s of float32 beside a copy, bitsandbytes and PyTorch's cast, and the bandwidth of a link from which a codec
no longer gains. Times are medians of turns taken by all. What is timed is checked against the error that each codec
states; targets that are missed are printed as such.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from rich.table import Table

from bench.codecs_error import DISTRIBUTIONS, KINDS, PAPER, SAMPLES, Distribution, Errors, errors_of, recorded
from bench.codecs_speed import BITSANDBYTES, CUDA_SIZES, SIZES, Row, Verdict, measure, verdicts, with_one_copy
from bench.frame import Bench, Run, WrongResult, comma_separated, integers, option, switch
from bench.split_accuracy import FULL, NARROW, Pace, images_of
from bench.tables import cells, new_table
from examples import networks as models
from shoal import codecs
from shoal.codecs import Codec
from shoal.codecs.table_codec import TableCodec
from shoal.errors import InputError

PARTS = ("table1", "recorded", "bias", "speed")
TABLE1 = ("dynamic_tree", "linear", "mantissa", "static_tree", "dynamic_tree_even")
BIAS = ("truncate1", "truncate2", "truncate3", "round1", "round2", "round3", "bf16", "fp16")
RECORDED = (*TABLE1, "one_bit", *BIAS)
SPEED = (*TABLE1[:4], "truncate1", "truncate2", "truncate3", "round2", "one_bit", "sign_mask", "bf16", "fp16")
PACE = Pace(5_000, 2, 32, 0.05)  # 314 steps
QUICK_PACE = Pace(64, 1, 32, 0.05)
QUICK_SAMPLES, QUICK_SIZES = 20_000, (10_000,)
BIAS_SAMPLES = 4_000_000
# Cutting to two bytes loses half a step of 2**-7 on average: this share of a normal number, in percent.
TRUNCATION_BIAS, _BIAS_WITHIN = -0.281, 0.01
NORMAL = "N(0,1)"
_CHECKED = 1 << 20


def paper_codec(name: str, distribution: Distribution) -> Codec:
    """As the paper scales: by an exponent offset where the type has one, else by the greatest magnitude of all.

    >>> paper_codec("static_tree", DISTRIBUTIONS[2]).fixed_scale, paper_codec("linear", DISTRIBUTIONS[2]).block
    (100.0, None)
    """
    if name in ("mantissa", "static_tree"):
        return codecs.get(name, exponent_offset=distribution.offset)
    return codecs.get(name, block=None)


def through(codec: Codec, tensors: Sequence[torch.Tensor]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Each tensor in memory order, and what it comes back as.

    Raises:
        WrongResult: one of its first million values comes back further from itself than the codec states.
    """
    for x in tensors:
        x = x.as_strided((x.numel(),), (1,))
        decoded = codec.decode(codec.encode(x))
        stated = codec
        if isinstance(codec, TableCodec) and codec.block is None and codec.fixed_scale is None:
            stated = codecs.get(codec.name, scale=float(x.abs().max()))  # so that a part has the scale of the whole
        first = slice(0, _CHECKED)
        if not bool(((decoded[first].double() - x[first]).abs() <= stated.error_bound(x[first])).all()):
            raise WrongResult(f"{codec.name}: a value came back further from itself than it states")
        yield x, decoded


def _table1(run: Run) -> Any:
    samples = run.pick(SAMPLES, QUICK_SAMPLES)
    found: dict[tuple[str, str], tuple[Errors, Errors]] = {}
    for distribution in DISTRIBUTIONS:
        x = distribution.draw(samples, torch.Generator().manual_seed(0)).to(run.device)
        for name in TABLE1:
            ours = errors_of(through(paper_codec(name, distribution), [x]))
            found[distribution.name, name] = ours, errors_of(through(codecs.get(name), [x]))
    run.say(paper_table(found, samples))
    return [
        {
            "distribution": distribution,
            "codec": name,
            "paper": PAPER.get((distribution, name)),
            "ours": asdict(ours),
            "blocks_of_4096": asdict(in_blocks),
        }
        for (distribution, name), (ours, in_blocks) in found.items()
    ]


def _recorded(run: Run) -> Any:
    try:
        data = images_of(run.device)["train"]
    except InputError as error:
        run.say(f"recorded: left out: {error}")
        return {"left_out": str(error)}
    pace = run.pick(PACE, QUICK_PACE)
    networks = FULL if run.asked.full else NARROW
    result = {}
    for network, build in networks.items():
        tensors = recorded(build, pace, data, seed=0)
        found = {kind: errors_by_codec(tensors[kind], RECORDED) for kind in KINDS}
        elems = {kind: sum(x.numel() for x in tensors[kind]) for kind in KINDS}
        bits = {
            name: 8 * sum(codecs.get(name).bytes_for(x.shape) for x in tensors["activations"]) / elems["activations"]
            for name in RECORDED
        }
        steps = pace.epochs * -(-pace.images // pace.batch)
        title = f"{network}{'' if run.asked.full else ', narrow'}, after {steps} steps"
        run.say(recorded_table(title, found, bits))
        result[network] = {kind: {name: asdict(errors) for name, errors in found[kind].items()} for kind in KINDS}
    return {"pace": vars(pace), "full": run.asked.full, "networks": result}


def errors_by_codec(tensors: Sequence[torch.Tensor], names: Sequence[str]) -> dict[str, Errors]:
    """Of all tensors together, each encoded by itself."""
    return {name: errors_of(through(codecs.get(name), tensors)) for name in names}


def _bias(run: Run) -> Any:
    count = run.pick(BIAS_SAMPLES, QUICK_SAMPLES)
    sources = {
        one.name: [one.draw(count, torch.Generator().manual_seed(0)).to(run.device)] for one in DISTRIBUTIONS[:2]
    }
    if not run.asked.quick:
        network = models.build("resnet18_cifar", seed=0)
        weights = [weight.detach().to(run.device) for weight in network.parameters() if weight.dim() > 1]
        sources["resnet18_cifar's weights at the start"] = weights
    found = {source: errors_by_codec(tensors, BIAS) for source, tensors in sources.items()}
    run.say(bias_table(found))
    away = abs(found[NORMAL]["truncate2"].bias_percent - TRUNCATION_BIAS)
    if away > _BIAS_WITHIN:
        raise WrongResult(f"truncate2 on {NORMAL}: bias {away:.3f} points from {TRUNCATION_BIAS} %")
    return {source: {name: asdict(errors) for name, errors in rows.items()} for source, rows in found.items()}


def _speed(run: Run) -> Any:
    sizes = run.asked.sizes or run.pick(SIZES if run.device.type == "cpu" else CUDA_SIZES, QUICK_SIZES)
    threads = run.asked.threads or ((1,) if run.asked.quick or run.device.type != "cpu" else (1, 2))
    rounds = run.asked.rounds or run.pick(7, 1)
    made = [codecs.get(name) for name in run.asked.codecs]
    result = []
    for elems in sizes:
        for count in threads:
            rows = with_one_copy(measure(made, elems, count, rounds, run.device))
            targets = verdicts(rows, run.device.type == "cuda")
            run.say(speed_table(rows, targets, any(row.contender == BITSANDBYTES for row in rows)))
            result += [_told(row, targets) for row in rows]
    return result


def _told(row: Row, targets: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **asdict(row),
        "encode_gbps": row.encode_gbps,
        "decode_gbps": row.decode_gbps,
        "break_even_gbps": row.break_even_gbps,
        "targets": [{**asdict(verdict), "met": verdict.met} for verdict in targets.get(row.contender, ())],
    }


_DEPARTS = 1.5  # times


def paper_table(found: Mapping[tuple[str, str], tuple[Errors, Errors]], samples: int) -> Table:
    """Table 1 of the paper beside ours: as the paper scales, and in blocks of 4096."""
    table = new_table(
        f"Table 1: mean errors over {samples:,} numbers; the paper's beside ours",
        "<distribution | <codec | absolute: paper | ours | least possible | relative: paper | ours "
        "| in blocks of 4096 | <the paper's absolute error",
    )
    least = {distribution.name: distribution.least_absolute for distribution in DISTRIBUTIONS}
    for (distribution, codec), (ours, in_blocks) in found.items():
        paper = PAPER.get((distribution, codec))
        form = "{paper[0]:g} | {ours.absolute:.3g} | {least:.2g} | {paper[1]:.2f} % | {ours.relative_percent:.2f} % | "
        form += "{in_blocks.relative_percent:.2f} %"
        shown = cells(form, paper=paper, ours=ours, in_blocks=in_blocks, least=least[distribution])
        reported = remark(paper[0], ours.absolute, least[distribution]) if paper else ""
        table.add_row(distribution, codec, *shown, reported)
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
    kinds = (f"{kind} ({next(iter(errors.values())).elems:,})" for kind, errors in found.items())
    table = new_table(
        f"{network}, recorded while training on CIFAR-10: relative error, mean / root mean square",
        " | ".join(["<codec", "bits a value", *kinds]),
    )
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
    table = new_table("Bias: mean of (decoded - x) / x, and the mean relative error", " | ".join(["<codec", *found]))
    for codec in next(iter(found.values())):
        table.add_row(
            codec, *(f"{found[s][codec].bias_percent:+.4f} %, {found[s][codec].relative_percent:.4f} %" for s in found)
        )
    return table


def speed_table(rows: Sequence[Row], targets: Mapping[str, Sequence[Verdict]], peer_is_here: bool) -> Table:
    """One size and number of threads."""
    first = rows[0]
    table = new_table(
        f"{first.elems:,} float32, {first.threads} thread{'s' * (first.threads > 1)}: GB/s of float32",
        "<contender | bytes a value | encode | decode | break-even | <targets",
    )
    for row in rows:
        form = "{row.contender} | {size:.3f} | {row.encode_gbps:.2f} | {row.decode_gbps:.2f} | "
        form += "{row.break_even_gbps:.2f} GB/s"
        reported = "; ".join(described(verdict) for verdict in targets.get(row.contender, ()))
        table.add_row(*cells(form, row=row, size=row.payload_bytes / row.elems), reported)
    if not peer_is_here:
        table.add_row(BITSANDBYTES, "", "not installed", "not installed", "", "")
    return table


def described(verdict: Verdict) -> str:
    """A target in a few words.

    >>> described(Verdict("encode to memcpy", 0.8, 0.913)), described(Verdict("encode to bitsandbytes", 20.0, None))
    ('encode to memcpy 0.91 of 0.8: met', 'encode to bitsandbytes: not installed')
    """
    if verdict.measured is None:
        return f"{verdict.what}: not installed"
    return f"{verdict.what} {verdict.measured:.2f} of {verdict.wanted:g}: {'met' if verdict.met else 'NOT MET'}"


def _run(run: Run) -> None:
    parts = {"table1": _table1, "recorded": _recorded, "bias": _bias, "speed": _speed}
    for part in PARTS:
        if part in run.asked.parts:
            run.save(**{part: parts[part](run)})


main = Bench(
    _run,
    option("--parts", known=PARTS, default=list(PARTS)),
    switch("--full", "record from whole networks: hours on a CPU"),
    option("--codecs", type=comma_separated, default=list(SPEED), help="whose speed"),
    option("--sizes", type=integers, default=(), help="elements, for the speed"),
    option("--threads", type=integers, default=(), help="by default 1,2"),
    option("--rounds", type=int, help="turns of each contender; by default 7"),
    quick="few numbers, once: does it run?",
    device=True,
)

if __name__ == "__main__":
    sys.exit(main())
