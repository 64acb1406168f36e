"""Bytes between ranks, checked: every rank gets what every other sent for it, or an error that says who failed.

Replaces `torch.distributed.all_to_all_single` and `all_gather_into_tensor` on uint8, where a peer's other size ends
the process (gloo) or hangs (NCCL), and a damaged or late message is taken for the right one.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from threading import Lock
from typing import Any

import torch
import torch.distributed as dist

from shoal.distributed.message import Header
from shoal.distributed.round import HEADER_TAG, Round
from shoal.errors import InputError, TransferError

# After an error: what the backend may still read or write, whatever becomes of the exchange.
_in_flight: list[Any] = []


class Exchange:
    """A process group of its own over the ranks of another, so that its messages meet no others.

    Making one is a collective call. All exchanges are made by one thread at a time, in the same order on every rank.
    After an error an exchange is spent: every later call raises it again. The other ranks are told of it, so that they
    raise at their next exchange instead of when their time is up (not where NCCL is the only backend).

    Args:
        group: whose ranks; None: all.
        timeout_seconds: for each exchange.

    Attributes:
        rank, ranks: of this process in the group, and how many.
        sent_bytes: put on the wire so far, headers and all.

    Raises:
        InputError: torch.distributed was not initialised, or the timeout is not positive.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, *, timeout_seconds: float = 600.0) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise InputError("got no process group, expected one; call torch.distributed.init_process_group first")
        if not timeout_seconds > 0:
            raise InputError(f"got timeout_seconds={timeout_seconds}, expected more than 0")
        backends = dist.get_backend_config(group)
        kinds = {place.partition(":")[2] for place in backends.split(",")}
        self._members: list[int] = dist.get_process_group_ranks(group)
        self._group: Any = dist.new_group(
            self._members,
            timeout=timedelta(seconds=timeout_seconds),
            backend=kinds.pop() if len(kinds) == 1 else backends,
            use_local_synchronization=len(self._members) < dist.get_world_size(),
        )
        self._host_sends = "cpu:" in backends
        self._device_sends = "cuda:nccl" in backends
        self.rank: int = dist.get_rank(group)
        self.ranks: int = len(self._members)
        self.timeout_seconds = timeout_seconds
        self.sent_bytes = 0
        self._sequence = 0
        self._failure: str | None = None
        self._lock = Lock()

    def all_to_all(
        self,
        parts: Sequence[torch.Tensor],
        sizes_bytes: Sequence[int],
        *,
        what: str,
        out: Sequence[torch.Tensor] | None = None,
    ) -> list[torch.Tensor]:
        """Send parts[r] to each rank r and return what each rank sent to this one.

        Args:
            parts: one a rank, dense (bytes,) uint8 on one device; this rank's own is returned as it is.
            sizes_bytes: of what each rank sends.
            what: is exchanged, for errors: "gradients of bucket 3".
            out: one a rank of those sizes, filled and returned (this rank's own is not used); None: new ones.

        Raises:
            TransferError: a rank died, gave up, sent nothing in time, or sent something else.
            InputError: the parts, sizes or `out` are not so.
        """
        parts, sizes_bytes = list(parts), list(sizes_bytes)
        self._check(parts, sizes_bytes, what, out)
        if self.ranks == 1:
            return parts
        with self._lock:
            if self._failure is not None:
                raise TransferError(self._failure)
            sequence = self._sequence
            self._sequence += 1
        device = parts[self.rank].device
        staged = device.type != "cpu" and not self._device_sends  # gloo sends from the host
        if staged:
            parts = [part.cpu() for part in parts]
        received = [
            parts[r]
            if r == self.rank
            else out[r]
            if out is not None and not staged
            else torch.empty(size_bytes, dtype=torch.uint8, device=parts[r].device)
            for r, size_bytes in enumerate(sizes_bytes)
        ]
        round_ = Round(
            self._group,
            self._members,
            self.rank,
            sequence,
            what,
            parts,
            received,
            self.timeout_seconds,
            host_headers=self._host_sends,
        )
        try:
            round_.run()
        except TransferError as error:
            _in_flight.append(round_)
            self.give_up(str(error))
            raise
        self.sent_bytes += round_.sent_bytes
        if staged:
            received = [data.to(device) for data in received]
            if out is not None:
                received = [data if r == self.rank else out[r].copy_(data) for r, data in enumerate(received)]
        return received

    def all_gather(
        self,
        part: torch.Tensor,
        sizes_bytes: Sequence[int],
        *,
        what: str,
        out: Sequence[torch.Tensor] | None = None,
    ) -> list[torch.Tensor]:
        """Send one part to every rank and return what each rank sent; arguments and errors as for `all_to_all`."""
        return self.all_to_all([part] * self.ranks, sizes_bytes, what=what, out=out)

    def give_up(self, reason: str) -> None:
        """Raise TransferError(reason) from now on, here and at the others' next exchange; any thread may call it."""
        with self._lock:
            if self._failure is not None:
                return
            self._failure = reason
            if not self._host_sends:
                return
            header = Header(self._sequence, 0, 0, f"rank {self.rank} gave up: {reason}", gave_up=True).to_tensor()
            for peer, member in enumerate(self._members):
                if peer != self.rank:
                    try:
                        _in_flight.append((header, dist.isend(header, member, self._group, HEADER_TAG)))
                    except RuntimeError:
                        continue  # the one that died

    def close(self) -> None:
        """Free the process group. A collective call; nothing may be exchanged after it."""
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._group = None

    def _check(
        self, parts: list[torch.Tensor], sizes_bytes: list[int], what: str, out: Sequence[torch.Tensor] | None
    ) -> None:
        if self._group is None:
            raise InputError(f"{what}: got a closed exchange, expected an open one; make another")
        if not len(parts) == len(sizes_bytes) == self.ranks:
            raise InputError(
                f"{what}: got {len(parts)} parts and {len(sizes_bytes)} sizes, expected {self.ranks}: one a rank"
            )
        if parts[self.rank].numel() != sizes_bytes[self.rank]:
            raise InputError(
                f"{what}: got {parts[self.rank].numel()} bytes for rank {self.rank} itself, "
                f"expected {sizes_bytes[self.rank]}; give the sizes of what this rank receives"
            )
        for tensor in (*parts, *(out or ())):
            if tensor.dtype != torch.uint8 or tensor.dim() != 1 or not tensor.is_contiguous():
                got = f"{tensor.dtype} of shape {tuple(tensor.shape)}"
                raise InputError(f"{what}: got {got}, expected dense uint8 of one dimension; flatten it")
        if out is not None:
            wrong = [r for r in range(self.ranks) if r != self.rank and out[r].numel() != sizes_bytes[r]]
            if wrong:
                raise InputError(
                    f"{what}: got a buffer of {out[wrong[0]].numel()} bytes for rank {wrong[0]}, "
                    f"expected {sizes_bytes[wrong[0]]}; allocate that many"
                )
