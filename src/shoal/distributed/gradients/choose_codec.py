"""Whether a bucket of gradients is sent encoded, and in which codec, by the measured cost of links and codecs.

Encoded, n values take

    exchange(bytes) of each round + encode(values) + decode(values)

seconds, for each as many as `Route` has. Encoding and decoding are counted in full: they may overlap with the
backward pass, but on a CPU they take its cores. The fastest candidate is taken if it saves more than a margin of
what the plain collective takes; else the bucket is sent uncompressed.

The *break-even bandwidth* of a codec is bytes saved / (seconds to encode + seconds to decode): on a faster link sending
the values uncompressed takes less time. On a slower link never more bytes are sent.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from shoal.codecs import registry
from shoal.codecs.codec import Codec
from shoal.codecs.float_codec import FLOATS
from shoal.core.sizes import format_bytes
from shoal.distributed.comm.traffic import Traffic
from shoal.distributed.gradients.bucket_segments import ParameterGrad
from shoal.errors import InputError

# Of the plain seconds: what a prediction must save at least, for it errs. Two ranks on two cores, 10 Gbit/s: 0.23 less
# was predicted, where encoding and gloo share the cores, and 0.35 more measured.
MARGIN = 0.3
_RAW_BYTES = 4  # raw values are sent in addition to encoded ones as float32


@dataclass(frozen=True)
class Route:
    """What one way to exchange n values moves and computes on each rank, as multiples of n.

    Attributes:
        plain: float32 values that the plain collective sends.
        rounds: encoded values that each exchange sends.
        encoded, decoded: values through the codec.
    """

    plain: float
    rounds: tuple[float, ...]
    encoded: float
    decoded: float


def route(name: str, ranks: int) -> Route:
    """The route of this name among that many ranks.

    - "all_reduce": encode what others sum, all-to-all, decode and sum, encode the sum, all-gather, decode; in place of
      a ring.
    - "reduce_scatter": encode what others sum, all-to-all, decode and sum; in place of a reduce-scatter.

    Raises:
        InputError: there is none of this name.

    >>> route("all_reduce", 4)
    Route(plain=1.5, rounds=(0.75, 0.75), encoded=1.0, decoded=1.75)
    """
    others = (ranks - 1) / ranks
    if name == "all_reduce":
        return Route(2 * others, (others, others), 1.0, 1 + others)
    if name == "reduce_scatter":
        return Route(others, (others,), others, others)
    raise InputError(f"unknown route {name!r}: give one of all_reduce, reduce_scatter")


@dataclass(frozen=True)
class Decision:
    """How one bucket is sent.

    Attributes:
        codec: its name; None: uncompressed.
        elems: of the bucket.
        plain_seconds: predicted, of the plain collective.
        encoded_seconds: predicted, of the best candidate, whether taken or not; infinite where there is none.
        break_even_gbps: of the best candidate, in Gbit/s; 0 where there is none.
        link_gbps: what the plain collective sends, in Gbit/s.
        sent_bytes: by each rank, as decided.
        plain_bytes: by each rank, by the plain collective.
        reason: in one line.
    """

    codec: str | None
    elems: int
    plain_seconds: float
    encoded_seconds: float
    break_even_gbps: float
    link_gbps: float
    sent_bytes: int
    plain_bytes: int
    reason: str


@dataclass(frozen=True)
class Chooser:
    """What was measured, the same on every rank, so that all decide alike without asking.

    Attributes:
        link: of the ranks that exchange.
        candidates: in any order.
        way: a name of `route`.
        margin: share of the plain seconds that must be saved.
    """

    link: LinkRates
    candidates: tuple[CodecRates, ...]
    way: str = "all_reduce"
    margin: float = MARGIN

    def decide(self, elems: int, raw_elems: int = 0, value_bytes: int = 4) -> Decision:
        """The candidate that a bucket is predicted to be sent in fastest, or none; remembered.

        Args:
            elems: values that may be encoded.
            raw_elems: of the same bucket that never are (batch norms, biases): they are sent in addition to the encoded
                ones.
            value_bytes: of a value of the bucket as it is: 2 for bfloat16 gradients, which the plain collective sends
                so.

        Example: a million values between two ranks at 1 Gbit/s, and at a hundred times that.

            >>> slow, fast = (Curve((1250, 125_000_000), seconds) for seconds in ((1e-5, 1.0), (1e-7, 1e-2)))
            >>> encode, decode = Curve((10, 10**9), (1e-8, 1.0)), Curve((10, 10**9), (5e-9, 0.5))
            >>> tree = CodecRates("dynamic_tree", 1.001, encode, decode)
            >>> print(Chooser(LinkRates(2, slow, slow), (tree,)).decide(1_000_000).reason)
            dynamic_tree: 9.76 ms instead of 32 ms (-70 %); pays below 13.7 Gbit/s, the link gives 1
            >>> print(Chooser(LinkRates(2, fast, fast), (tree,)).decide(1_000_000).reason.partition(" (")[0])
            uncompressed: dynamic_tree would take 1.83 ms instead of 320 us
        """
        return _decide(self, elems, raw_elems, value_bytes)

    def declines(self, buckets: Iterable[tuple[int, int]]) -> bool:
        """Whether a model's buckets are sent uncompressed, all of them: encoding some does not save the margin in all.

        A hook costs a pass over the buckets that it leaves as they are, for DDP divides while it copies.

        Args:
            buckets: of each, the values that may be encoded and those that may not.
        """
        decisions = [self.decide(*bucket) for bucket in buckets]
        plain_seconds = sum(decision.plain_seconds for decision in decisions)
        saved_seconds = sum(d.plain_seconds - d.encoded_seconds for d in decisions if d.codec is not None)
        return not saved_seconds > self.margin * plain_seconds


@dataclass(frozen=True)
class _Prediction:
    """One candidate's."""

    codec: str
    seconds: float
    codec_seconds: float
    sent_bytes: int

    @staticmethod
    def of(link: LinkRates, moves: Route, rates: CodecRates, elems: int, raw_elems: int) -> _Prediction:
        message_bytes = rates.bytes_per_elem * elems + _RAW_BYTES * raw_elems
        codec_seconds = rates.encode.at(moves.encoded * elems) + rates.decode.at(moves.decoded * elems)
        link_seconds = sum(link.exchange.at(share * message_bytes) for share in moves.rounds)
        sent_bytes = math.ceil(sum(moves.rounds) * message_bytes)
        return _Prediction(rates.codec, link_seconds + codec_seconds, codec_seconds, sent_bytes)


@lru_cache(maxsize=4096)
def _decide(chooser: Chooser, elems: int, raw_elems: int, value_bytes: int) -> Decision:
    total = elems + raw_elems
    link, moves = chooser.link, route(chooser.way, chooser.link.ranks)
    plain_seconds = link.plain.at(value_bytes * total)
    plain_bytes = math.ceil(value_bytes * moves.plain * total)
    link_gbps = _gbps(plain_bytes, plain_seconds)

    def decided(codec: str | None, reason: str, seconds: float, break_even_gbps: float, sent_bytes: int) -> Decision:
        figures = plain_seconds, seconds, break_even_gbps, link_gbps, sent_bytes, plain_bytes
        return Decision(codec, total, *figures, reason)

    if link.ranks == 1:
        return decided(None, "uncompressed: there is one rank", math.inf, 0.0, plain_bytes)
    predictions = (
        [_Prediction.of(link, moves, rates, elems, raw_elems) for rates in chooser.candidates] if elems else []
    )
    if not predictions:
        why = "there is no candidate" if elems else "nothing in it may be encoded"
        return decided(None, f"uncompressed: {why}", math.inf, 0.0, plain_bytes)
    # Of candidates that take the same time, the one with fewer bytes: so a slower link never turns to more.
    best = min(predictions, key=lambda one: (one.seconds, one.sent_bytes, one.codec))
    break_even_gbps = _gbps(max(0, plain_bytes - best.sent_bytes), best.codec_seconds)
    times = f"{_time(best.seconds)} instead of {_time(plain_seconds)} ({_change(best.seconds, plain_seconds)})"
    pays = f"pays below {break_even_gbps:.3g} Gbit/s, the link gives {link_gbps:.3g}"
    if best.seconds < (1 - chooser.margin) * plain_seconds:
        reason = f"{best.codec}: {times}; {pays}"
        return decided(best.codec, reason, best.seconds, break_even_gbps, best.sent_bytes)
    reason = f"uncompressed: {best.codec} would take {times}; {pays}"
    return decided(None, reason, best.seconds, break_even_gbps, plain_bytes)


def _gbps(sent_bytes: int, seconds: float) -> float:
    return 8 * sent_bytes / seconds / 1e9 if seconds else math.inf


def _change(seconds: float, plain_seconds: float) -> str:
    return f"{100 * (seconds / plain_seconds - 1):+.0f} %" if plain_seconds else "of nothing"


def _time(seconds: float) -> str:
    """
    >>> _time(2.5), _time(0.0123), _time(4.5e-5)
    ('2.5 s', '12.3 ms', '45 us')
    """
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} us"


@dataclass(frozen=True)
class Curve:
    """Seconds over a size, in straight lines between the measured ones.

    Constant below the smallest size, proportional to the size above the largest.

    Attributes:
        sizes: ascending.
        seconds: of each, never descending.

    Raises:
        InputError: it is not so.
    """

    sizes: tuple[int, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        ascending = all(a < b for a, b in zip(self.sizes, self.sizes[1:], strict=False))
        never_less = all(a <= b for a, b in zip(self.seconds, self.seconds[1:], strict=False))
        if (
            not self.sizes
            or len(self.sizes) != len(self.seconds)
            or self.sizes[0] < 1
            or not (ascending and never_less)
        ):
            raise InputError(
                f"got seconds {self.seconds} of sizes {self.sizes}, expected as many of each, sizes ascending from 1, "
                "and seconds never descending; make it with Curve.of"
            )
        if not (self.seconds[0] >= 0 and self.seconds[-1] < float("inf")):
            raise InputError(f"got seconds {self.seconds}, expected finite ones of 0 or more; measure again")

    @staticmethod
    def of(points: Iterable[tuple[int, float]]) -> Curve:
        """Of measured (size, seconds).

        What disturbs a measurement only adds time: none takes longer than a larger one did.

        >>> Curve.of([(1024, 2e-3), (4096, 1e-3), (65536, 5e-3)]).seconds
        (0.001, 0.001, 0.005)
        """
        sizes, seconds = zip(*sorted(points), strict=True)
        return Curve(sizes, tuple(np.minimum.accumulate(seconds[::-1])[::-1].tolist()))

    def at(self, size: float) -> float:
        """Seconds of this size; 0 has none.

        >>> curve = Curve((1000, 2000), (1.0, 3.0))
        >>> curve.at(0), curve.at(10), curve.at(1500), curve.at(4000)
        (0.0, 1.0, 2.0, 6.0)
        """
        if size <= 0:
            return 0.0
        if size > self.sizes[-1]:
            return self.seconds[-1] * (size / self.sizes[-1])
        return float(np.interp(size, self.sizes, self.seconds))


@dataclass(frozen=True)
class LinkRates:
    """What collectives between the ranks of one group cost, the slowest rank's seconds.

    Attributes:
        ranks: that take part.
        plain: the collective that compression would replace (all-reduce, reduce-scatter) over bytes of float32 values.
        exchange: one round of `Exchange` over the bytes that each rank sends to all others together.
    """

    ranks: int
    plain: Curve
    exchange: Curve


@dataclass(frozen=True)
class CodecRates:
    """What one codec costs on this machine, the slowest rank's seconds while all ranks are busy with the same.

    Attributes:
        codec: its name.
        bytes_per_elem: of its payloads, scales included.
        encode: over float32 values.
        decode: over float32 values, adding them to a sum included.
    """

    codec: str
    bytes_per_elem: float
    encode: Curve
    decode: Curve


def decide(
    gradients: Iterable[ParameterGrad], dtype: torch.dtype, ranks: int, codec: Codec | None, chooser: Chooser | None
) -> tuple[Decision, Codec | None]:
    """How what is reduced together is sent, the same on every rank; None for uncompressed.

    Args:
        gradients: all of it, over all ranks.
        dtype: in which it is reduced.
        ranks: that reduce it.
        codec: what was asked for, where nothing was measured.
        chooser: what was measured.

    >>> from shoal.distributed.gradients.bucket_segments import ParameterGrad
    >>> gradients = ParameterGrad("weight", 100, encoded=True), ParameterGrad("bias", 10, encoded=False)
    >>> decision, codec = decide(gradients, torch.float32, 2, registry.get("bf16"), None)
    >>> decision.reason, decision.elems, codec.name
    ('bf16, as asked', 110, 'bf16')
    """
    encoded = raw = 0
    for gradient in gradients:
        encoded, raw = (encoded + gradient.elems, raw) if gradient.encoded else (encoded, raw + gradient.elems)
    if dtype not in FLOATS:
        return _asked(None, f"uncompressed: no codec takes {dtype}", encoded + raw), None
    if chooser is not None:
        decision = chooser.decide(encoded, raw, dtype.itemsize)
        return decision, None if decision.codec is None else registry.get(decision.codec)
    if ranks == 1 or codec is None:
        return _asked(
            None, "uncompressed: there is one rank" if ranks == 1 else "uncompressed, as asked for", encoded + raw
        ), None
    if not encoded:
        return _asked(None, "uncompressed: no parameter in it has two dimensions", raw), None
    return _asked(codec.name, f"{codec.name}, as asked", encoded + raw), codec


def explained(traffic: Traffic, ranks: int, lines: Iterable[str]) -> str:
    """The bytes of the last step, above the lines on how each part is sent.

    >>> traffic = Traffic()
    >>> traffic.add("gradients", sent_bytes=2**20, raw_bytes=2**22)
    >>> traffic.end_step()
    >>> explained(traffic, 2, ["bucket 0: bf16"]).splitlines()
    ['2 ranks: 1.000 MiB of gradients a step instead of 4.000 MiB (0.250)', 'bucket 0: bf16']
    """
    step = traffic.last_step("gradients")
    sent, raw = format_bytes(step.sent_bytes), format_bytes(step.raw_bytes)
    return "\n".join([f"{ranks} ranks: {sent} of gradients a step instead of {raw} ({step.share:.3f})", *lines])


def _asked(codec: str | None, reason: str, elems: int) -> Decision:
    """A decision without measurements."""
    return Decision(codec, elems, math.nan, math.nan, 0.0, 0.0, 0, 0, reason)
