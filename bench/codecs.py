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

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from bench.codecs_error import DISTRIBUTIONS, PAPER, SAMPLES, Distribution, Errors, errors_of
from bench.codecs_recorded import KINDS, recorded
from bench.codecs_speed import BITSANDBYTES, CUDA_SIZES, SIZES, Row, measure, verdicts, with_one_copy
from bench.codecs_tables import bias_table, paper_table, recorded_table, speed_table
from bench.frame import WrongResult, comma_separated, conditions, describe, file_name, make_console, make_folder
from bench.split_accuracy import FULL, NARROW, Pace, images_of
from shoal import codecs
from shoal.app import models
from shoal.codecs import Codec
from shoal.codecs.table_codec import TableCodec
from shoal.core.files import write_json
from shoal.cost.measurement_cache import device_of
from shoal.errors import CodecError, InputError

PARTS = ("table1", "recorded", "bias", "speed")
TABLE1 = ("dynamic_tree", "linear", "mantissa", "static_tree", "dynamic_tree_even")
RECORDED = (*TABLE1, "one_bit", "truncate1", "truncate2", "truncate3", "round1", "round2", "round3", "bf16", "fp16")
BIAS = ("truncate1", "truncate2", "truncate3", "round1", "round2", "round3", "bf16", "fp16")
SPEED = (
    "dynamic_tree",
    "linear",
    "mantissa",
    "static_tree",
    "truncate1",
    "truncate2",
    "truncate3",
    "round2",
    "one_bit",
    "sign_mask",
    "bf16",
    "fp16",
)
PACE = Pace(5_000, 2, 32, 0.05)  # 314 steps
QUICK_PACE = Pace(64, 1, 32, 0.05)
QUICK_SAMPLES, QUICK_SIZES = 20_000, (10_000,)
BIAS_SAMPLES = 4_000_000
# Cutting to two bytes loses half a step of 2**-7 on average: this share of a normal number, in percent.
TRUNCATION_BIAS, _BIAS_WITHIN = -0.281, 0.01
NORMAL = "N(0,1)"
_CHECKED = 1 << 20


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; 0 unless a result was wrong (1) or an argument was (2). A target that is missed is no failure."""
    asked = _parser().parse_args(arguments)
    try:
        return _run(asked)
    except (InputError, CodecError, WrongResult) as error:
        print(f"bench.codecs: {error}", file=sys.stderr)
        return 1 if isinstance(error, WrongResult) else 2


def _run(asked: argparse.Namespace) -> int:
    unknown = set(asked.parts) - set(PARTS)
    if unknown or not asked.parts:
        raise InputError(f"--parts {','.join(asked.parts)}: give some of {', '.join(PARTS)}")
    if not all(count >= 1 for count in (*asked.sizes, *asked.threads, 1 if asked.rounds is None else asked.rounds)):
        raise InputError(f"--sizes {asked.sizes} --threads {asked.threads} --rounds {asked.rounds}: give 1 or more")
    device = device_of(asked.device)
    out = make_folder(asked.out)
    path = out / file_name("codecs", device)
    console = make_console()
    found = conditions(device, 0)
    console.print(describe(found), highlight=False, markup=False)
    result: dict[str, Any] = {"conditions": found}
    run: Mapping[str, Callable[[argparse.Namespace, Console, torch.device], Any]] = {
        "table1": _table1,
        "recorded": _recorded,
        "bias": _bias,
        "speed": _speed,
    }
    for part in PARTS:
        if part in asked.parts:
            result[part] = run[part](asked, console, device)
            write_json(path, result)
    console.print(f"Figures in {path}", highlight=False, markup=False)
    return 0


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


def _table1(asked: argparse.Namespace, console: Console, device: torch.device) -> Any:
    samples = QUICK_SAMPLES if asked.quick else SAMPLES
    found: dict[tuple[str, str], tuple[Errors, Errors]] = {}
    for distribution in DISTRIBUTIONS:
        x = distribution.draw(samples, torch.Generator().manual_seed(0)).to(device)
        for name in TABLE1:
            ours = errors_of(through(paper_codec(name, distribution), [x]))
            found[distribution.name, name] = ours, errors_of(through(codecs.get(name), [x]))
    console.print(paper_table(found, samples))
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


def _recorded(asked: argparse.Namespace, console: Console, device: torch.device) -> Any:
    try:
        data = images_of(device)["train"]
    except InputError as error:
        console.print(f"recorded: left out: {error}", highlight=False, markup=False)
        return {"left_out": str(error)}
    pace = QUICK_PACE if asked.quick else PACE
    networks = FULL if asked.full else NARROW
    result = {}
    for network, build in networks.items():
        tensors = recorded(build, pace, data, seed=0)
        found = {kind: errors_by_codec(tensors[kind], RECORDED) for kind in KINDS}
        elems = {kind: sum(x.numel() for x in tensors[kind]) for kind in KINDS}
        bits = {
            name: 8 * sum(codecs.get(name).bytes_for(x.shape) for x in tensors["activations"]) / elems["activations"]
            for name in RECORDED
        }
        title = (
            f"{network}{'' if asked.full else ', narrow'}, after {pace.epochs * -(-pace.images // pace.batch)} steps"
        )
        console.print(recorded_table(title, found, bits))
        result[network] = {kind: {name: asdict(errors) for name, errors in found[kind].items()} for kind in KINDS}
    return {"pace": vars(pace), "full": asked.full, "networks": result}


def errors_by_codec(tensors: Sequence[torch.Tensor], names: Sequence[str]) -> dict[str, Errors]:
    """Of all tensors together, each encoded by itself."""
    return {name: errors_of(through(codecs.get(name), tensors)) for name in names}


def _bias(asked: argparse.Namespace, console: Console, device: torch.device) -> Any:
    count = QUICK_SAMPLES if asked.quick else BIAS_SAMPLES
    sources = {one.name: [one.draw(count, torch.Generator().manual_seed(0)).to(device)] for one in DISTRIBUTIONS[:2]}
    if not asked.quick:
        network = models.build("resnet18_cifar", seed=0)
        weights = [weight.detach().to(device) for weight in network.parameters() if weight.dim() > 1]
        sources["resnet18_cifar's weights at the start"] = weights
    found = {source: errors_by_codec(tensors, BIAS) for source, tensors in sources.items()}
    console.print(bias_table(found))
    away = abs(found[NORMAL]["truncate2"].bias_percent - TRUNCATION_BIAS)
    if away > _BIAS_WITHIN:
        raise WrongResult(f"truncate2 on {NORMAL}: bias {away:.3f} points from {TRUNCATION_BIAS} %")
    return {source: {name: asdict(errors) for name, errors in rows.items()} for source, rows in found.items()}


def _speed(asked: argparse.Namespace, console: Console, device: torch.device) -> Any:
    sizes = asked.sizes or (QUICK_SIZES if asked.quick else SIZES if device.type == "cpu" else CUDA_SIZES)
    threads = asked.threads or ((1,) if asked.quick or device.type != "cpu" else (1, 2))
    rounds = asked.rounds or (1 if asked.quick else 7)
    made = [codecs.get(name) for name in asked.codecs]
    result = []
    for elems in sizes:
        for count in threads:
            rows = with_one_copy(measure(made, elems, count, rounds, device))
            targets = verdicts(rows, device.type == "cuda")
            console.print(speed_table(rows, targets, any(row.contender == BITSANDBYTES for row in rows)))
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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.codecs",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    numbers = lambda text: tuple(int(one) for one in comma_separated(text))  # noqa: E731
    parser.add_argument("--parts", type=comma_separated, default=list(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--quick", action="store_true", help="few numbers, once: does it run?")
    parser.add_argument("--full", action="store_true", help="record from whole networks: hours on a CPU")
    parser.add_argument("--codecs", type=comma_separated, default=list(SPEED), help="whose speed")
    parser.add_argument("--sizes", type=numbers, default=(), help="elements, for the speed")
    parser.add_argument("--threads", type=numbers, default=(), help="by default 1,2")
    parser.add_argument("--rounds", type=int, help="turns of each contender; by default 7")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--out", type=Path, default=Path("runs/bench"), help="folder for the JSON file")
    return parser


if __name__ == "__main__":
    sys.exit(main())
