"""FSDP2's reduce-scatter on codes: encode, all-to-all of bytes, decode and sum in float32, with one rounding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from shoal.codecs.codec import Codec
from shoal.distributed.comm.exchange import Exchange
from shoal.distributed.comm.traffic import Traffic, ring_all_gather_bytes
from shoal.distributed.gradients.bucket_segments import (
    PART_ELEMS,
    ParameterGrad,
    Segment,
    Segments,
    add,
    message_bytes,
    pack,
)
from shoal.distributed.gradients.error_feedback import ErrorFeedback
from shoal.errors import InputError


def shard_segments(gradients: Sequence[ParameterGrad], rank: int) -> Segments:
    """What a rank's shard is made of: its part of every parameter, one after another, in parts that fit the caches.

    Args:
        gradients: of one rank's shard; every rank's has the same lengths, with padding.
        rank: whose.

    >>> gradients = [ParameterGrad("weight", 100, True), ParameterGrad("bias", 3, False)]
    >>> shard_segments(gradients, 1)  # doctest: +NORMALIZE_WHITESPACE
    (Segment(name='weight', start=100, first=0, elems=100, encoded=True),
     Segment(name='bias', start=3, first=100, elems=3, encoded=False))
    """
    segments = []
    first = 0
    for gradient in gradients:
        size = PART_ELEMS if gradient.encoded else max(1, gradient.elems)
        for start in range(0, gradient.elems, size):
            elems = min(size, gradient.elems - start)
            segments.append(
                Segment(gradient.name, rank * gradient.elems + start, first + start, elems, gradient.encoded)
            )
        first += gradient.elems
    return tuple(segments)


@dataclass(eq=False)
class CodedReduceScatter:
    """What `FSDPModule.set_custom_reduce_scatter` takes: it has `allocate` and is called.

    Attributes:
        name: of the module, for errors.
        gradients: of one rank's shard, in FSDP2's order.
        codec: of the encoded ones; None: all are sent uncompressed.
        plain: FSDP2's own, which allocates, and reduces what does not hold all of the gradients.
        exchange: over the ranks that hold shards.
        feedback: residuals, or None to keep none.
        traffic: where bytes are counted.
        reduced: called after each.
    """

    name: str
    gradients: tuple[ParameterGrad, ...]
    codec: Codec | None
    plain: Any
    exchange: Exchange
    feedback: ErrorFeedback | None
    traffic: Traffic
    reduced: Callable[[], None]

    def __post_init__(self) -> None:
        self._shards = [shard_segments(self.gradients, rank) for rank in range(self.exchange.ranks)]
        self._shard_elems = sum(gradient.elems for gradient in self.gradients)
        self._added = False

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """As FSDP2 does."""
        return self.plain.allocate(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        """Reduce (ranks * n,) to (n,), both float32, bfloat16 or float16.

        Raises:
            TransferError: another rank died, sent nothing in time, or sent something else.
            InputError: the reduction is no sum and no mean.
        """
        ranks = self.exchange.ranks
        raw_bytes = ring_all_gather_bytes(input_tensor.nbytes, ranks)
        work = None
        if self.codec is None or input_tensor.numel() != ranks * self._shard_elems:
            work = self.plain(output_tensor, input_tensor, group=group, op=op, async_op=async_op)
            self.traffic.add("gradients", raw_bytes, raw_bytes)
        else:
            divisor = _divisor(op, ranks, self.name)
            before = self.exchange.sent_bytes
            self._reduce(output_tensor, input_tensor.float().view(ranks, -1), divisor, self.codec)
            self.traffic.add("gradients", self.exchange.sent_bytes - before, raw_bytes)
        self.reduced()
        return work

    def _reduce(self, output: torch.Tensor, shards: torch.Tensor, divisor: int, codec: Codec) -> None:
        rank = self.exchange.rank
        if self.feedback is not None and not self._added:
            whole = [
                ParameterGrad(gradient.name, len(shards) * gradient.elems, gradient.encoded)
                for gradient in self.gradients
            ]
            self.feedback.add(whole, (), shards.device)
            self._added = True
        size_bytes = message_bytes(self._shards[rank], codec)
        sizes = [0 if r == rank else size_bytes for r in range(len(shards))]
        messages = [torch.empty(size, dtype=torch.uint8, device=shards.device) for size in sizes]
        for r, message in enumerate(messages):
            if r != rank and self.feedback is not None:
                self.feedback.pack_gradients(shards[r], self._shards[r], codec, message)
            elif r != rank:
                pack(shards[r], self._shards[r], codec, message)
        received = self.exchange.all_to_all(messages, sizes, what=f"gradients of {self.name}")
        total = shards[rank]  # the rank's own values are not encoded
        for r, message in enumerate(received):
            if r != rank:
                add(message, self._shards[rank], codec, total)
        output.copy_(total.div_(divisor) if divisor > 1 else total)


def _divisor(op: Any, ranks: int, name: str) -> int:
    if op == dist.ReduceOp.SUM:
        return 1
    if op == dist.ReduceOp.AVG:
        return ranks
    raise InputError(
        f"gradients of {name}: got the reduction {op}, expected a sum or a mean; call "
        "set_force_sum_reduction_for_comms(True) on the sharded modules"
    )
