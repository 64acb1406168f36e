"""Measure the speed of links and codecs at the start of a run: a second on a fast link, a few on a slow one.

All ranks measure together and keep the slowest rank's seconds, so that they hold the same figures, bit for bit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from shoal.codecs import registry
from shoal.codecs.codec import Codec
from shoal.distributed.comm.agreement import agree
from shoal.distributed.comm.exchange import Exchange
from shoal.distributed.gradients.choose_codec import Chooser, CodecRates, Curve, LinkRates
from shoal.errors import TransferError
from shoal.lowlevel.torch_internals import isolated

CANDIDATES = ("bf16", "dynamic_tree")
_LINK_BYTES = (8 << 10, 64 << 10, 512 << 10, 4 << 20, 32 << 20)
_CODEC_ELEMS = (4 << 10, 64 << 10, 1 << 20, 4 << 20)
_WARM_RUNS = 2
_MIN_TURNS, _MAX_TURNS = 3, 7
_ENOUGH_SECONDS = 0.06  # of turns of one size
_LONG_SECONDS = 0.2  # one turn that takes so long says enough: what disturbs it is short compared with it
_MAX_SECONDS = 0.25  # that a run may be expected to take


def measure_choice(
    exchange: Exchange,
    group: dist.ProcessGroup | None = None,
    *,
    device: torch.device | str,
    candidates: Sequence[str] = CANDIDATES,
    way: str = "all_reduce",
    largest_elems: int = 1 << 62,
) -> Chooser:
    """Measure this group's link and these codecs; what to ask for each bucket. A collective call.

    Args:
        exchange: over the ranks of `group`.
        group: on which gradients would be sent uncompressed; None: all ranks.
        device: of the gradients.
        candidates: names of codecs without needed options.
        way: a name of `shoal.distributed.gradients.choose_codec.route`.
        largest_elems: of a bucket; larger sizes are not measured.

    Raises:
        TransferError: a rank died, sent nothing in time, or measures something else.
        CodecError: there is no codec of one of the names.
    """
    codecs = [registry.get(name) for name in candidates]
    place = torch.device(device)
    what = "the measurement of the link"
    agree(exchange, what, candidates=", ".join(map(str, codecs)), way=way, largest_elems=largest_elems)
    if exchange.ranks == 1:
        return Chooser(LinkRates(1, plain=Curve((1,), (0.0,)), exchange=Curve((1,), (0.0,))), (), way)
    timed = _Timed(group, place)
    with isolated(place):
        link = _link_rates(exchange, timed, way, largest_elems)
        return Chooser(link, tuple(_codec_rates(codec, timed, largest_elems) for codec in codecs), way)


def _link_rates(exchange: Exchange, timed: _Timed, way: str, largest_elems: int) -> LinkRates:
    """Seconds of the plain collective and of an exchange over their bytes, from 8 KiB to 32 MiB.

    Sizes grow until one is expected to take more than a quarter of a second, or is larger than any bucket. The two take
    turns; medians, of the slowest rank.
    """
    ranks, place = exchange.ranks, timed.device
    sizes = _up_to(_LINK_BYTES, 4 * largest_elems)
    values = torch.zeros(sizes[-1] // 4, device=place)
    data, received = (torch.zeros(sizes[-1], dtype=torch.uint8, device=place) for _ in range(2))
    plain_points: list[tuple[int, float]] = []
    exchange_points: list[tuple[int, float]] = []
    for size in sizes:
        part_bytes = size // (ranks - 1)
        parts, part_sizes = [data[:part_bytes]] * ranks, [part_bytes] * ranks
        # As a hook has them: existing memory, of each peer its own.
        out = [received[max(0, peer) * part_bytes :][:part_bytes] for peer in _places(exchange)]
        plain = _plain(way, values[: size // 4 // ranks * ranks], timed.group, ranks)

        def exchanged(parts: list[Any] = parts, part_sizes: list[int] = part_sizes, out: list[Any] = out) -> object:
            return exchange.all_to_all(parts, part_sizes, what="the measurement of the link", out=out)

        taken = timed.in_turns([plain, exchanged], warm_runs=_WARM_RUNS if size == sizes[0] else 0)
        plain_points.append((size, taken[0]))
        exchange_points.append((part_bytes * (ranks - 1), taken[1]))
        if max(_next_seconds(plain_points), _next_seconds(exchange_points)) > _MAX_SECONDS:
            break
    return LinkRates(ranks, Curve.of(plain_points), Curve.of(exchange_points))


def _codec_rates(codec: Codec, timed: _Timed, largest_elems: int) -> CodecRates:
    """Seconds to encode, and to decode and add, on all ranks at once: those of one machine share its cores."""
    sizes = _up_to(_CODEC_ELEMS, largest_elems)
    values = torch.randn(sizes[-1], generator=torch.Generator().manual_seed(0)).to(timed.device)
    decoded, total = torch.empty_like(values), torch.zeros_like(values)
    encode_points, decode_points = [], []
    for size in sizes:
        payload = torch.empty(codec.payload_bytes(size), dtype=torch.uint8, device=timed.device)
        encoded = codec.encode(values[:size], out=payload)

        def encode(size: int = size, payload: torch.Tensor = payload) -> object:
            return codec.encode(values[:size], out=payload)

        def decode(size: int = size, encoded: Any = encoded) -> object:
            return total[:size].add_(codec.decode(encoded, out=decoded[:size]))

        encode_seconds, decode_seconds = timed.in_turns([encode, decode], warm_runs=1)
        encode_points.append((size, encode_seconds))
        decode_points.append((size, decode_seconds))
    bytes_per_elem = codec.payload_bytes(1 << 20) / (1 << 20)
    return CodecRates(codec.name, bytes_per_elem, Curve.of(encode_points), Curve.of(decode_points))


def _up_to(sizes: tuple[int, ...], largest: int) -> tuple[int, ...]:
    """Those below the largest, and the next."""
    below = sum(size < largest for size in sizes)
    return sizes[: below + 1]


def _places(exchange: Exchange) -> list[int]:
    """Of each rank, how many others come before it; this rank has none."""
    return [-1 if r == exchange.rank else r - (r > exchange.rank) for r in range(exchange.ranks)]


def _next_seconds(points: list[tuple[int, float]]) -> float:
    """What the next size, eight times the last, is expected to take; only of latency nothing follows.

    >>> _next_seconds([(1000, 0.5)]), _next_seconds([(1000, 0.5), (8000, 0.75)])
    (0.0, 2.75)
    """
    if len(points) < 2:
        return 0.0
    (before, shorter), (size, seconds) = points[-2:]
    return seconds + max(0.0, seconds - shorter) / (size - before) * 7 * size


def _plain(way: str, values: torch.Tensor, group: dist.ProcessGroup | None, ranks: int) -> Callable[[], object]:
    if way == "reduce_scatter":
        part = torch.empty(values.numel() // ranks, device=values.device)
        return lambda: dist.reduce_scatter_tensor(part, values, group=group)
    return lambda: dist.all_reduce(values, group=group)


class _Timed:
    """Times what all ranks run together."""

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self.group = group
        self.device = device

    def in_turns(self, runs: Sequence[Callable[[], object]], *, warm_runs: int) -> list[float]:
        """The median seconds of each, of the slowest rank: as many turns as all ranks agree to have time for."""
        try:
            for run in [*runs] * warm_runs:
                run()
            turns = [self._turn(runs)]
            first = self._slowest([sum(turns[0])])[0]
            wanted = min(_MAX_TURNS, max(_MIN_TURNS, int(_ENOUGH_SECONDS / max(first, 1e-9))))
            turns += [self._turn(runs) for _ in range(1, 1 if first > _LONG_SECONDS else wanted)]
            return self._slowest([median(seconds) for seconds in zip(*turns, strict=True)])
        except RuntimeError as error:
            raise TransferError(
                f"the measurement of the link: got an error of the process group: {str(error).splitlines()[0]}; "
                "see the other ranks' logs, then start all of them again"
            ) from error

    def _turn(self, runs: Sequence[Callable[[], object]]) -> list[float]:
        taken = []
        for run in runs:
            self._wait()
            start = time.perf_counter()
            run()
            self._wait()
            taken.append(time.perf_counter() - start)
        return taken

    def _slowest(self, seconds: list[float]) -> list[float]:
        shared = torch.tensor(seconds, dtype=torch.float64, device=self.device)
        dist.all_reduce(shared, dist.ReduceOp.MAX, group=self.group)
        found: list[float] = shared.tolist()
        return found

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.accelerator.synchronize(self.device)
