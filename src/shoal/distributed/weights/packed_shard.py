"""A shard whose all-gather moves packed bytes: FSDP2's two extension points, on a plain tensor.

FSDP2 asks a sharded parameter's local tensor for `fsdp_pre_all_gather` (what to send) and `fsdp_post_all_gather` (the
whole parameter from what arrived). Everything else that is done to it, the optimizer's step included, sees the same
float32 memory as before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shoal.codecs.codec import Codec, Encoded
from shoal.distributed.comm.silent_ranks import lost_in
from shoal.distributed.comm.traffic import Traffic
from shoal.distributed.weights.weight_codecs import RAW_BYTES
from shoal.lowlevel.process_groups import forget_gathered, padded_shard, unsharded_elems
from shoal.lowlevel.torch_state import no_torch_function


class ShardWire:
    """How one parameter's shards are packed; belongs to this rank's shard.

    Args:
        sharded: FSDP2's own record of the parameter.
        codec: returns the current codec, the same on all ranks; None for plain float32.
        traffic: where bytes are counted.
        ranks: that the parameter is sharded over.
    """

    def __init__(self, sharded: Any, codec: Callable[[], Codec | None], traffic: Traffic, ranks: int) -> None:
        self._sharded = sharded
        self._codec = codec
        self._traffic = traffic
        self._ranks = ranks
        self._elems = unsharded_elems(sharded)
        self._sent_bytes = -1

    def pack(self) -> tuple[torch.Tensor, Codec | None]:
        """This rank's shard as bytes, as many on every rank, and what encoded them."""
        padded = padded_shard(self._sharded)
        codec = self._codec()
        payload = padded.view(torch.uint8) if codec is None else codec.encode(padded).payload
        others = self._ranks - 1
        self._traffic.add("weights", others * payload.numel(), others * RAW_BYTES * padded.numel())
        if payload.numel() != self._sent_bytes:
            # Another width takes other buffers.
            forget_gathered(self._sharded)
            self._sent_bytes = payload.numel()
        return payload, codec

    def unpack(self, gathered: torch.Tensor, codec: Codec | None, out: torch.Tensor) -> None:
        """The whole parameter from the bytes of all ranks, in their order, into (elems,) of any floating dtype."""
        each = padded_shard(self._sharded).numel()
        for rank, payload in enumerate(gathered.view(self._ranks, -1)):
            wanted = out[rank * each : (rank + 1) * each]
            if not wanted.numel():
                break
            if codec is None:
                wanted.copy_(payload.view(torch.float32)[: wanted.numel()])
            elif wanted.numel() == each and wanted.dtype == torch.float32:
                Encoded(codec, torch.float32, (each,), (1,), payload).decode(wanted)
            else:
                wanted.copy_(Encoded(codec, torch.float32, (each,), (1,), payload).decode()[: wanted.numel()])

    @property
    def elems(self) -> int:
        """Of the whole parameter."""
        return self._elems


class PackedShard(torch.Tensor):
    """A float32 shard that FSDP2 gathers in packed form; made by `packed`."""

    __torch_function__ = no_torch_function  # type: ignore[assignment]
    wire: ShardWire

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[torch.Tensor, ...], Any]:
        """What FSDP2 sends, and what it hands to `fsdp_post_all_gather`."""
        payload, codec = self.wire.pack()
        return (payload,), codec

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[torch.Tensor, ...],
        metadata: Codec | None,
        param_dtype: torch.dtype,
        *,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None:
        """The whole parameter: a new one the first time, into `out` from then on."""
        (gathered,) = all_gather_outputs
        if out is not None:
            self.wire.unpack(gathered, metadata, out.data.view(-1))  # data: autograd may hold the same values
            return None
        whole = torch.empty(self.wire.elems, dtype=param_dtype, device=gathered.device)
        self.wire.unpack(gathered, metadata, whole)
        return whole, (whole,)


class CheckedAllGather:
    """FSDP2's own all-gather of a module's weights, whose failure names who failed and what to do.

    Args:
        comm: what FSDP2 gathers with.
    """

    def __init__(self, comm: Any) -> None:
        self.comm = comm

    def allocate(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As `comm` does."""
        return self.comm.allocate(*args, **kwargs)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False
    ) -> Any:
        """As `comm` does.

        Raises:
            TransferError: a rank died, sent nothing in time, or sent something else.
        """
        try:
            return self.comm(output_tensor=output_tensor, input_tensor=input_tensor, group=group, async_op=async_op)
        except RuntimeError as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise lost_in(
                group,
                f"rank {group.rank()} of {group.size()}: the all-gather of {input_tensor.nbytes} bytes of weights a "
                f"rank failed ({reason})",
                "a rank died, stalled or has other weights: resume from the last checkpoint",
            ) from error


def packed(shard: torch.Tensor, wire: ShardWire) -> PackedShard:
    """The same memory, gathered over `wire`."""
    found = shard.as_subclass(PackedShard)
    found.wire = wire
    return found
