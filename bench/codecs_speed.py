"""How fast codecs are, in turns with a plain copy, bitsandbytes and PyTorch's bfloat16 cast.

All buffers are there before the clock starts, and every contender's result is checked before and after. A copy is the
faster of memcpy over as many threads and of `Tensor.copy_`; on CUDA it is `Tensor.copy_`. bitsandbytes makes new
tensors in every call: on the CPU it cannot fill given ones.

bitsandbytes is a peer of this benchmark alone: `pip install --no-deps bitsandbytes==0.50.2`.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import torch

from bench import frame
from bench.frame import WrongResult
from bench.interleave import in_turns, synchronize
from shoal.codecs import Codec

MEMCPY, TORCH_BF16, BITSANDBYTES = "memcpy", "torch bf16 cast", "bitsandbytes"
SIZES = (1 << 16, 1 << 20, 1 << 25)
CUDA_SIZES = (1 << 25, 1 << 27)  # the smaller takes about as long as a launch does
_TARGETED = 1 << 25  # elements that the targets are about
_CHECKED = 1 << 20  # values, whole blocks
# Of the peer's absolute maximum in a block: half of the widest gap of its table.
_PEER_BOUND = 0.01


@dataclass(frozen=True)
class Contender:
    """What is timed; `decode` is None where there is nothing to undo.

    Attributes:
        name: in the tables.
        encode, decode: into buffers that are there.
        buffers: what they fill.
        result: what `decode` gave last, or else `encode`.
        check: raises `WrongResult` where the result is not what it should be.
    """

    name: str
    encode: Callable[[], object]
    decode: Callable[[], object] | None
    buffers: tuple[torch.Tensor, ...]
    result: Callable[[], torch.Tensor]
    payload_bytes: int
    check: Callable[[], None]


@dataclass(frozen=True)
class Row:
    """One contender at one size: medians of a call."""

    contender: str
    elems: int
    threads: int
    payload_bytes: int
    encode_seconds: float
    decode_seconds: float | None

    @property
    def encode_gbps(self) -> float:
        """Of float32 read."""
        return 4 * self.elems / self.encode_seconds / 1e9

    @property
    def decode_gbps(self) -> float | None:
        """Of float32 written."""
        return None if self.decode_seconds is None else 4 * self.elems / self.decode_seconds / 1e9

    @property
    def break_even_gbps(self) -> float | None:
        """The bandwidth of a link on which encoding and decoding cost what the saved bytes would.

        >>> Row("truncate2", 1000, 1, 2000, 0.5e-6, 0.5e-6).break_even_gbps
        2.0
        """
        if self.decode_seconds is None:
            return None
        return (4 * self.elems - self.payload_bytes) / (self.encode_seconds + self.decode_seconds) / 1e9


def measure(codecs: Sequence[Codec], elems: int, threads: int, rounds: int, device: torch.device) -> list[Row]:
    """Every contender on normal numbers, in turns.

    Raises:
        WrongResult: one does not do what it states.
    """
    x = torch.randn(elems, generator=torch.Generator().manual_seed(0)).to(device)
    with frame.threads(threads), plain_copies(x, threads) as copies:
        contenders = [*copies, cast(x), *peers(x), *(ours(codec, x) for codec in codecs)]
        return time_in_turns(contenders, elems, threads, rounds, device)


def time_in_turns(
    contenders: Sequence[Contender], elems: int, threads: int, rounds: int, device: torch.device
) -> list[Row]:
    """Medians over the rounds. A call too short for the clock is repeated within a round."""

    def seconds(call: Callable[[], object], repeat: int) -> float:
        synchronize(device)
        start = time.perf_counter()
        for _ in range(repeat):
            call()
        synchronize(device)
        return (time.perf_counter() - start) / repeat

    calls = [call for one in contenders for call in (one.encode, one.decode) if call is not None]
    for call in calls:
        call()
    repeats = [max(1, min(200, int(2e-3 / max(seconds(call, 1), 1e-6)))) for call in calls]
    for one in contenders:
        one.check()
    sums = [_sum_of_bits(one.result()) for one in contenders]
    for one in contenders:
        for buffer in one.buffers:
            buffer.zero_()  # so that what is checked in the end was written while the clock ran
    runs = {place: partial(seconds, call, repeats[place]) for place, call in enumerate(calls)}
    taken = in_turns(runs, rounds, warm_ups=0)
    for one, before in zip(contenders, sums, strict=True):
        if _sum_of_bits(one.result()) != before:
            raise WrongResult(f"{one.name}: what was decoded while the clock ran differs from what was before")
    medians = iter(statistics.median(times) for times in taken.values())
    return [
        Row(one.name, elems, threads, one.payload_bytes, next(medians), None if one.decode is None else next(medians))
        for one in contenders
    ]


def ours(codec: Codec, x: torch.Tensor) -> Contender:
    """Encode into one payload, decode from it into one tensor."""
    encoded = codec.encode(x)
    out = codec.decode(encoded)

    def check() -> None:
        # Whole blocks by themselves: the bound takes many times the tensor's bytes.
        for theirs, values in zip(out.split(_CHECKED), x.split(_CHECKED), strict=True):
            if out.dtype == torch.bool:
                right = torch.equal(theirs, values > 0)
            else:
                right = bool(((theirs.double() - values).abs() <= codec.error_bound(values)).all())
            if not right:
                raise WrongResult(f"{codec.name}: a value came back further from itself than it states")

    return Contender(
        codec.name,
        lambda: codec.encode(x, encoded.payload),
        lambda: codec.decode(encoded, out),
        (encoded.payload, out),
        lambda: out,
        encoded.nbytes,
        check,
    )


@contextmanager
def plain_copies(x: torch.Tensor, threads: int) -> Iterator[list[Contender]]:
    """The ways to copy a tensor: the fastest of them is what `memcpy` means in the tables."""
    to = torch.empty_like(x).copy_(x)

    def check() -> None:
        if not torch.equal(to, x):
            raise WrongResult("a copy differs from what was copied")

    found = [Contender(f"{MEMCPY} (copy_)", lambda: to.copy_(x), None, (to,), lambda: to, x.nbytes, check)]
    if x.device.type != "cpu":
        yield found
        return
    share = -(-x.nbytes // threads // 64) * 64
    parts = [(first, min(share, x.nbytes - first)) for first in range(0, x.nbytes, share)]

    def move(part: tuple[int, int]) -> None:
        ctypes.memmove(to.data_ptr() + part[0], x.data_ptr() + part[0], part[1])

    with ThreadPoolExecutor(max(threads - 1, 1)) as pool:

        def memcpy() -> None:
            others = [pool.submit(move, part) for part in parts[1:]]
            move(parts[0])
            for other in others:
                other.result()

        yield [*found, Contender(f"{MEMCPY} ({threads} threads)", memcpy, None, (to,), lambda: to, x.nbytes, check)]


def cast(x: torch.Tensor) -> Contender:
    """`Tensor.copy_` into bfloat16, and back."""
    narrow, out = torch.empty_like(x, dtype=torch.bfloat16), torch.empty_like(x)

    def check() -> None:
        if not torch.equal(out, x.bfloat16().float()):
            raise WrongResult("PyTorch's cast differs from itself")

    return Contender(
        TORCH_BF16, lambda: narrow.copy_(x), lambda: out.copy_(narrow), (narrow, out), lambda: out, narrow.nbytes, check
    )


def peers(x: torch.Tensor) -> list[Contender]:
    """bitsandbytes, block by block of 4096; none where it is not installed."""
    functional = bitsandbytes()
    if functional is None:
        return []
    kept: dict[str, Any] = {}

    def encode() -> None:
        kept["encoded"] = functional.quantize_blockwise(x, blocksize=4096)

    def decode() -> None:
        kept["decoded"] = functional.dequantize_blockwise(*kept["encoded"])

    def check() -> None:
        most = kept["encoded"][1].absmax.repeat_interleave(4096)[: x.numel()] * _PEER_BOUND
        if not bool(((kept["decoded"] - x).abs() <= most).all()):
            raise WrongResult("bitsandbytes: a value came back further from itself than half its table's widest gap")

    payload_bytes = x.numel() + 4 * -(-x.numel() // 4096)
    return [Contender(BITSANDBYTES, encode, decode, (), lambda: kept["decoded"], payload_bytes, check)]


def bitsandbytes() -> Any:
    """Its functions; None where it is not installed."""
    try:
        return import_module("bitsandbytes.functional")
    except ImportError:
        return None


def with_one_copy(rows: Sequence[Row]) -> list[Row]:
    """The same with the fastest of the copies in place of all of them, as `MEMCPY`."""
    copies = [row for row in rows if row.contender.startswith(MEMCPY)]
    best = min(copies, key=lambda row: row.encode_seconds)
    others = [row for row in rows if row not in copies]
    return [Row(MEMCPY, best.elems, best.threads, best.payload_bytes, best.encode_seconds, None), *others]


def _sum_of_bits(result: torch.Tensor) -> int:
    return int((result.view(torch.int32) if result.dtype == torch.float32 else result).sum(dtype=torch.int64))


@dataclass(frozen=True)
class Verdict:
    """A target: what it is about, at least what, and what was measured."""

    what: str
    wanted: float
    measured: float | None  # None: the peer is not installed

    @property
    def met(self) -> bool | None:
        return None if self.measured is None else self.measured >= self.wanted


def verdicts(rows: Sequence[Row], on_cuda: bool) -> dict[str, list[Verdict]]:
    """The targets by contender: of rows of one size and number of threads; none at sizes they do not speak of."""
    if rows[0].elems < _TARGETED:
        return {}
    by_name = {row.contender: row for row in rows}
    copy, peer = by_name[MEMCPY], by_name.get(BITSANDBYTES)
    found: dict[str, list[Verdict]] = {}
    for name, row in by_name.items():
        table = name in ("dynamic_tree", "linear", "mantissa")
        if row.decode_seconds is None or not (table or name.startswith("truncate")):
            continue
        if on_cuda:
            share = (4 * row.elems + row.payload_bytes) / (8 * row.elems) * copy.encode_seconds
            found[name] = [
                Verdict("encode, bytes a second to a copy's", 0.7, share / row.encode_seconds),
                Verdict("decode, bytes a second to a copy's", 0.7, share / row.decode_seconds),
            ]
            continue
        wanted = 0.8 if table else 1.0
        found[name] = [
            Verdict("encode to memcpy", wanted, copy.encode_seconds / row.encode_seconds),
            Verdict("decode to memcpy", wanted, copy.encode_seconds / row.decode_seconds),
        ]
        if table:
            times = None if peer is None else peer.encode_seconds / row.encode_seconds
            found[name].append(Verdict("encode to bitsandbytes", 20.0, times))
    return found
