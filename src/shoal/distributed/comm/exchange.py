"""Bytes between ranks, checked: every rank gets what every other sent for it, or an error that names who failed.

Replaces `torch.distributed.all_to_all_single` and `all_gather_into_tensor` on uint8, where a peer's other size ends
the process (gloo) or hangs (NCCL), and a damaged or late message is taken for the right one. Of messages that NCCL
sends from device to device, number, length and name are checked; their bytes are not: a checksum of each would have the
host wait for the device.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from datetime import timedelta
from threading import Lock
from typing import Any

import torch
import torch.distributed as dist

from shoal.distributed.comm import silent_ranks
from shoal.distributed.comm.message import HEADER_TAG, CheckedAllToAll, LostRankError, MessageHeader
from shoal.errors import InputError, TransferError

# After an error: what the backend may still read or write, whatever becomes of the exchange.
_in_flight: list[Any] = []


class Exchange:
    """A process group of its own over the ranks of another, so that its messages meet no others.

    Making one is a collective call. All exchanges are made by one thread at a time, in the same order on every rank.
    After an error an exchange is spent: every later call raises it again. The other ranks are notified, so that they
    raise at their next exchange instead of when their time is up (not where NCCL is the only backend).

    Args:
        group: whose ranks; None: all.
        timeout_seconds: for each exchange.

    Attributes:
        rank, ranks: of this process in the group, and how many.
        sent_bytes: put on the wire so far, headers and all.
        host_sends: whether messages may lie on the host (not where NCCL is the only backend).

    Raises:
        InputError: torch.distributed was not initialised, or the timeout is not positive.
        TransferError: a rank did not make it in time.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, *, timeout_seconds: float = 600.0) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise InputError("got no process group, expected one; call torch.distributed.init_process_group first")
        if not timeout_seconds > 0:
            raise InputError(f"got timeout_seconds={timeout_seconds}, expected more than 0")
        backends = dist.get_backend_config(group)
        kinds = {place.partition(":")[2] for place in backends.split(",")}
        self._members: list[int] = dist.get_process_group_ranks(group)
        try:
            self._group: Any = dist.new_group(
                self._members,
                timeout=timedelta(seconds=timeout_seconds),
                backend=kinds.pop() if len(kinds) == 1 else backends,
                use_local_synchronization=len(self._members) < dist.get_world_size(),
            )
        except RuntimeError as error:
            raise TransferError(
                f"got no exchange with all of the ranks {self._members} within {timeout_seconds:g} seconds "
                f"({str(error).splitlines()[0][:160]}); make it on every rank, and see the others' logs"
            ) from error
        silent_ranks.count_exchange(self._members)
        self.host_sends = "cpu:" in backends
        self._device_sends = "cuda:nccl" in backends
        self.rank: int = dist.get_rank(group)
        self.ranks: int = len(self._members)
        self.timeout_seconds = timeout_seconds
        self.sent_bytes = 0
        self._sequence = 0
        self._failure: TransferError | None = None
        self._open: dict[int, CheckedAllToAll] = {}  # by sequence
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
        self._check_parts(parts, sizes_bytes, what)
        expected = self.expect(sizes_bytes, what=what, out=out, device=parts[self.rank].device)
        expected.send(parts)
        return expected.receive()

    def all_gather(self, part: torch.Tensor, sizes_bytes: Sequence[int], *, what: str) -> list[torch.Tensor]:
        """Send one part to every rank and return what each rank sent; arguments and errors as for `all_to_all`."""
        return self.all_to_all([part] * self.ranks, sizes_bytes, what=what)

    def all_gather_bytes(self, data: bytes, sizes_bytes: Sequence[int], *, what: str) -> list[bytes]:
        """`all_gather` of a few bytes that are no tensor, such as settings or a count."""
        device = "cpu" if self.host_sends else f"cuda:{torch.accelerator.current_device_index()}"
        part = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
        return [one.cpu().numpy().tobytes() for one in self.all_gather(part, sizes_bytes, what=what)]

    def expect(
        self,
        sizes_bytes: Sequence[int],
        *,
        what: str,
        out: Sequence[torch.Tensor] | None = None,
        device: torch.device | str = "cpu",
    ) -> Expected:
        """`all_to_all` in three parts: this, then `send` of what is returned, then `receive`.

        Several exchanges may be under way at once, so that the link does not idle between them: with gloo and tensors
        on the host, an exchange is under way once both sides have announced and sent it. Each rank must expect, send
        and receive in the same order; each of the three may have a thread of its own.

        Args:
            sizes_bytes, what, out: as of `all_to_all`.
            device: of the parts.

        Raises:
            TransferError, InputError: as `all_to_all`.
        """
        sizes_bytes, place = list(sizes_bytes), torch.device(device)
        self._check_out(sizes_bytes, what, out)
        staged = place.type != "cpu" and not self._device_sends  # gloo sends from the host
        received = [
            out[r]
            if out is not None and not staged and r != self.rank
            else torch.empty(size_bytes if r != self.rank else 0, dtype=torch.uint8, device="cpu" if staged else place)
            for r, size_bytes in enumerate(sizes_bytes)
        ]
        with self._lock:
            messages = CheckedAllToAll(
                self._group,
                self._members,
                self.rank,
                self._sequence,
                what,
                received,
                self.timeout_seconds,
                host_headers=self.host_sends,
            )
            self._sequence += 1
            self._open[messages.sequence] = messages
        self._run(messages, messages.expect)
        return Expected(self, messages, sizes_bytes, place if staged else None, out)

    def _run(self, messages: CheckedAllToAll, stage: Callable[[], None]) -> None:
        if self.ranks == 1:
            return
        if self._failure is not None:
            raise copy.copy(self._failure)
        try:
            stage()
        except LostRankError as lost:
            error = self._cause(lost, messages.what)
            self._give_up(error)
            raise error from lost.__cause__
        except TransferError as error:
            self._give_up(error)
            raise

    def _cause(self, lost: LostRankError, what: str) -> TransferError:
        """The error that names who is silent, which need not be the rank whose connection was closed."""
        silent_ranks.sign(self._members, self.rank, lost.peers, str(lost))
        found = silent_ranks.follow(self._members, self.rank, lost.peers)
        if found is None:  # the store does not answer
            return TransferError(str(lost))
        if found.silent and lost.peers[0] in found.reasons:
            return TransferError(
                f"{what}: got no sign of life from {silent_ranks.ranks_named(found.silent)}; "
                "see the log there, then start all ranks from the last checkpoint",
                silent_ranks=found.silent,
            )
        if not found.silent and not lost.timed_out:
            return TransferError(f"{what}: rank {lost.peers[0]} gave up: {found.reasons[lost.peers[0]]}")
        return TransferError(str(lost), silent_ranks=found.silent)

    def _finish(self, messages: CheckedAllToAll) -> None:
        self._run(messages, messages.finish)
        self.sent_bytes += messages.sent_bytes
        with self._lock:
            del self._open[messages.sequence]

    def give_up(self, reason: str) -> None:
        """Raise TransferError(reason) from now on, here and at the others' next exchange; any thread may call it."""
        self._give_up(TransferError(reason))

    def _give_up(self, error: TransferError) -> None:
        reason = str(error)
        silent_ranks.sign(self._members, self.rank, (), reason)  # for those that no connection leads to any more
        with self._lock:
            if self._failure is not None:
                return
            self._failure = error
            _in_flight.extend(self._open.values())
            if not self.host_sends:
                return
            header = MessageHeader(
                self._sequence, 0, 0, f"rank {self.rank} gave up: {reason}", gave_up=True
            ).to_tensor()
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

    def _check_parts(self, parts: Sequence[torch.Tensor], sizes_bytes: Sequence[int], what: str) -> None:
        if not len(parts) == len(sizes_bytes) == self.ranks:
            raise InputError(
                f"{what}: got {len(parts)} parts and {len(sizes_bytes)} sizes, expected {self.ranks}: one a rank"
            )
        if parts[self.rank].numel() != sizes_bytes[self.rank]:
            raise InputError(
                f"{what}: got {parts[self.rank].numel()} bytes for rank {self.rank} itself, "
                f"expected {sizes_bytes[self.rank]}; give the sizes of what this rank receives"
            )
        _check_bytes(parts, what)

    def _check_out(self, sizes_bytes: Sequence[int], what: str, out: Sequence[torch.Tensor] | None) -> None:
        if self._group is None:
            raise InputError(f"{what}: got a closed exchange, expected an open one; make another")
        if len(sizes_bytes) != self.ranks:
            raise InputError(f"{what}: got {len(sizes_bytes)} sizes, expected {self.ranks}: one a rank")
        if out is None:
            return
        _check_bytes(out, what)
        wrong = [r for r in range(self.ranks) if r != self.rank and out[r].numel() != sizes_bytes[r]]
        if wrong:
            raise InputError(
                f"{what}: got a buffer of {out[wrong[0]].numel()} bytes for rank {wrong[0]}, "
                f"expected {sizes_bytes[wrong[0]]}; allocate that many"
            )


class Expected:
    """An exchange that was announced with `Exchange.expect`, which makes it."""

    def __init__(
        self,
        exchange: Exchange,
        messages: CheckedAllToAll,
        sizes_bytes: Sequence[int],
        staged_for: torch.device | None,
        out: Sequence[torch.Tensor] | None,
    ) -> None:
        self._exchange = exchange
        self._messages = messages
        self._sizes_bytes = sizes_bytes
        self._staged_for = staged_for  # where received bytes belong, if they come to the host
        self._out = out
        self._own: torch.Tensor | None = None

    def send(self, parts: Sequence[torch.Tensor]) -> None:
        """Start to send parts[r] to each rank r; nothing may change them before `receive` has returned.

        Args, raises: as of `Exchange.all_to_all`.
        """
        exchange, messages = self._exchange, self._messages
        exchange._check_parts(parts, self._sizes_bytes, messages.what)
        self._own = parts[exchange.rank]
        host = [part.cpu() for part in parts] if self._staged_for is not None else list(parts)
        exchange._run(messages, lambda: messages.send(host))

    def receive(self) -> list[torch.Tensor]:
        """Wait for what each rank sent to this one, and for what this one sent to be on its way.

        Raises:
            TransferError: as `Exchange.all_to_all`.
        """
        assert self._own is not None, "receive() before send()"
        rank, received = self._exchange.rank, list(self._messages.received)
        self._exchange._finish(self._messages)
        if self._staged_for is not None and self._out is not None:
            received = [data if r == rank else self._out[r].copy_(data) for r, data in enumerate(received)]
        elif self._staged_for is not None:
            received = [data.to(self._staged_for) for data in received]
        received[rank] = self._own
        return received


def _check_bytes(tensors: Sequence[torch.Tensor], what: str) -> None:
    for tensor in tensors:
        if tensor.dtype != torch.uint8 or tensor.dim() != 1 or not tensor.is_contiguous():
            got = f"{tensor.dtype} of shape {tuple(tensor.shape)}"
            raise InputError(f"{what}: got {got}, expected dense uint8 of one dimension; flatten it")
