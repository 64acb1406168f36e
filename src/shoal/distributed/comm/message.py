"""Messages from every rank to every other, each checked against its header: length, number and checksum.

The header is a message of its own, of a fixed size: a receiver learns of another length before it opens a buffer for
it (gloo ends the process where lengths differ). `docs/distributed.md` has the bytes.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist

from shoal.errors import TransferError

_FIXED = struct.Struct("<4sIQQI")
_MAGIC = b"SHMS"
_DATA, _GAVE_UP = 1, 2
HEADER_BYTES = 256
_MAX_TEXT_BYTES = HEADER_BYTES - _FIXED.size
_ROW = 1024  # words that are summed before the CRC-32 sees them
HEADER_TAG = 1
# In gloo's errors where a peer has ended.
_GONE = ("closed by peer", "reset by peer", "Broken pipe", "Connection refused", "Socket closed")
_Message = tuple[int, torch.Tensor, int]  # peer, bytes, tag


@dataclass(frozen=True)
class MessageHeader:
    """
    Attributes:
        sequence: how many messages of this exchange came before.
        length_bytes: of the message.
        checksum: of the message.
        text: what the message is; what went wrong where the sender gave up.
        gave_up: no message follows, ever: the sender met an error.
    """

    sequence: int
    length_bytes: int
    checksum: int
    text: str
    gave_up: bool = False

    def to_tensor(self) -> torch.Tensor:
        """(HEADER_BYTES,) uint8 on the CPU."""
        kind = _GAVE_UP if self.gave_up else _DATA
        text = fitting(self.text).encode().ljust(_MAX_TEXT_BYTES, b"\0")
        fixed = _FIXED.pack(_MAGIC, kind, self.sequence, self.length_bytes, self.checksum)
        return torch.frombuffer(bytearray(fixed + text), dtype=torch.uint8)


def body_tag(sequence: int, length_bytes: int) -> int:
    """Of the message that follows a header: another number or length has, but for one in 2**31, another tag.

    Never 0 or 1.
    """
    return crc32(struct.pack("<QQ", sequence, length_bytes)) & 0x7FFFFFFF | 2


def fitting(text: str) -> str:
    """As much of a text as a header holds."""
    return text.encode()[:_MAX_TEXT_BYTES].decode(errors="ignore")


def read_header(received: torch.Tensor) -> MessageHeader | None:
    """The header in (HEADER_BYTES,) uint8 bytes, or None where they are none.

    >>> read_header(MessageHeader(3, 100, 7, "bucket 0").to_tensor())
    MessageHeader(sequence=3, length_bytes=100, checksum=7, text='bucket 0', gave_up=False)
    """
    data = received.cpu().numpy().tobytes()
    magic, kind, sequence, length_bytes, checksum = _FIXED.unpack_from(data)
    if magic != _MAGIC or kind not in (_DATA, _GAVE_UP):
        return None
    text = data[_FIXED.size :].rstrip(b"\0").decode(errors="replace")
    return MessageHeader(sequence, length_bytes, checksum, text, kind == _GAVE_UP)


def checksum(message: torch.Tensor) -> int:
    """Of (n,) uint8: sums of rows of 1024 words of 64 bits, modulo 2**64, and the CRC-32 of them and of the rest.

    Any change within 8 bytes is found, and all but one in 2**32 of the others. A CRC-32 by itself takes 30 times as
    long.

    >>> a = torch.arange(20_000).to(torch.uint8)
    >>> b = a.clone(); b[7] += 1
    >>> checksum(a) == checksum(a.clone()), checksum(a) == checksum(b)
    (True, False)
    """
    if message.storage_offset() % 8 or message.data_ptr() % 8:
        message = message.clone()
    rows = message.numel() // (8 * _ROW)
    split = rows * 8 * _ROW
    sums = message[:split].view(torch.int64).view(rows, _ROW).sum(1)
    crc = crc32(sums.cpu().numpy().data)
    return crc32(message[split:].cpu().numpy().data, crc)


class LostRankError(TransferError):
    """A message did not come. The rank that should have sent it need not be the cause: `Exchange` asks who is silent.

    Attributes:
        peers: the ranks that were waited for in vain, the one of the message first.
        timed_out: whether this rank's own time was up; otherwise it was notified, or a connection was closed.
    """

    def __init__(self, message: str, peers: tuple[int, ...], *, timed_out: bool = False) -> None:
        super().__init__(message)
        self.peers = peers
        self.timed_out = timed_out


@dataclass(eq=False)
class CheckedAllToAll:
    """
    Attributes:
        group, members: the process group, and its ranks' numbers in the world.
        rank: of this process in the group.
        sequence: the round's number, the same on every rank.
        what: is exchanged.
        received: where each rank's message goes to, of the expected lengths; `rank`'s own is left unchanged.
        timeout_seconds: for all that is left when `finish` is called.
        host_headers: whether headers are sent between hosts, wherever the messages are.
        parts: what goes to each rank, once it is sent.
        peers: all ranks but this one.
    """

    group: Any
    members: list[int]
    rank: int
    sequence: int
    what: str
    received: list[torch.Tensor]
    timeout_seconds: float
    host_headers: bool
    parts: list[torch.Tensor] = field(default_factory=list)
    peers: list[int] = field(init=False)
    # Whatever is being read or written must outlive an error.
    _kept: list[Any] = field(default_factory=list)
    _coming: dict[int, torch.Tensor] = field(default_factory=dict)  # headers, by rank
    _headers: dict[int, Any] = field(default_factory=dict)  # what to wait for, by rank
    _bodies: dict[int, Any] = field(default_factory=dict)
    _sending: list[tuple[int, Any]] = field(default_factory=list)
    _waited: set[int] = field(default_factory=set)  # ids of works that have ended
    _deadline: float = 0.0

    def __post_init__(self) -> None:
        self.peers = [r for r in range(len(self.members)) if r != self.rank]

    @property
    def sent_bytes(self) -> int:
        """What this rank puts on the wire."""
        return sum(HEADER_BYTES + self.parts[r].numel() for r in self.peers)

    @property
    def _tagged(self) -> bool:
        """Whether tags keep messages of another length out of the buffers, and checksums are taken of them. NCCL has no
        tags: there headers are read first, nothing is under way before `finish`, and no checksum is taken.
        """
        return self.received[self.rank].device.type == "cpu"

    def expect(self) -> None:
        """Start to receive. A sender on gloo waits until the receiver has announced a buffer: the sooner the better.

        Raises:
            TransferError: a rank died.
        """
        device = "cpu" if self.host_headers else self.received[self.rank].device
        self._coming = {r: torch.empty(HEADER_BYTES, dtype=torch.uint8, device=device) for r in self.peers}
        if self._tagged:
            self._headers = self._start(self._incoming_headers(), [])
            self._bodies = self._start(self._messages(self.received), [])

    def send(self, parts: list[torch.Tensor]) -> None:
        """Start to send what goes to each rank.

        Raises:
            TransferError: a rank died.
        """
        self.parts = parts
        if self._tagged:
            self._start([], self._outgoing_headers())
            self._start([], self._messages(parts))

    def finish(self) -> None:
        """
        Raises:
            TransferError: a rank died, gave up, sent nothing in time, or sent something else than was expected.
        """
        self._deadline = time.monotonic() + self.timeout_seconds
        if not self._tagged:
            self._headers = self._start(self._incoming_headers(), self._outgoing_headers())
        found = {r: self._header_of(r, self._headers[r], self._coming[r]) for r in self.peers}
        if not self._tagged:
            self._bodies = self._start(self._messages(self.received), self._messages(self.parts))
        for r in self.peers:
            self._wait(self._bodies.get(r), r)
            self._check(r, found[r])
        for r, work in self._sending:
            self._wait(work, r)

    def _incoming_headers(self) -> list[_Message]:
        return [(r, self._coming[r], HEADER_TAG) for r in self.peers]

    def _outgoing_headers(self) -> list[_Message]:
        sums: dict[int, int] = {}  # a part that goes to all is summed once
        headers = []
        for r in self.peers:
            part = self.parts[r]
            if id(part) not in sums:
                sums[id(part)] = checksum(part) if self._tagged else 0
            header = MessageHeader(self.sequence, part.numel(), sums[id(part)], fitting(self.what)).to_tensor()
            headers.append((r, header.to(self._coming[r].device), HEADER_TAG))
        return headers

    def _messages(self, of: list[torch.Tensor]) -> list[_Message]:
        return [(r, of[r], body_tag(self.sequence, of[r].numel())) for r in self.peers if of[r].numel()]

    def _start(self, receives: list[_Message], sends: list[_Message]) -> dict[int, Any]:
        """Start messages; what to wait for, by the rank that sends."""
        messages = receives + sends
        self._kept.append(messages)
        if not messages:
            return {}
        peers = [r for r, _, _ in messages]
        if all(data.device.type == "cpu" for _, data, _ in messages):
            works = [self._begin(self.group.recv, message) for message in receives]
            works += [self._begin(self.group.send, message) for message in sends]
        else:
            works = self._start_together(receives, sends)
        self._kept.append(works)
        self._sending += zip(peers[len(receives) :], works[len(receives) :], strict=True)
        return dict(zip(peers[: len(receives)], works, strict=False))

    def _begin(self, call: Callable[..., Any], message: _Message) -> Any:
        peer, data, tag = message
        try:
            return call([data], peer, tag)
        except RuntimeError as error:
            raise self._lost(peer, error) from error

    def _start_together(self, receives: list[_Message], sends: list[_Message]) -> list[Any]:
        """NCCL needs all of them in one group; for gloo this takes longer than starting each."""
        ops = [dist.P2POp(dist.irecv, data, self.members[r], self.group, tag) for r, data, tag in receives]
        ops += [dist.P2POp(dist.isend, data, self.members[r], self.group, tag) for r, data, tag in sends]
        try:
            works = dist.batch_isend_irecv(ops)
        except RuntimeError as error:
            raise self._lost(None, error) from error
        return works if len(works) == len(ops) else works[:1] * len(ops)  # one of them

    def _header_of(self, peer: int, work: Any, data: torch.Tensor) -> MessageHeader:
        self._wait(work, peer)
        header = read_header(data)
        if header is None:
            raise TransferError(
                f"{self.what}: got bytes from rank {peer} that are no header, expected one; "
                "run the same version of Shoal on every rank"
            )
        if header.gave_up:
            raise LostRankError(f"{self.what}: {header.text}", (peer,))
        expected_bytes = self.received[peer].numel()
        expected = (self.sequence, expected_bytes, fitting(self.what))
        if (header.sequence, header.length_bytes, header.text) != expected:
            raise TransferError(
                f"{self.what}: got another message from rank {peer} than expected; give every rank the same model, "
                "codec and options",
                details={
                    "got": f"message {header.sequence} ({header.text}) of {header.length_bytes} bytes",
                    "expected": f"message {self.sequence} of {expected_bytes} bytes",
                },
            )
        return header

    def _check(self, peer: int, header: MessageHeader) -> None:
        if not self._tagged:  # the host would have to wait for the device, for each message
            return
        found = checksum(self.received[peer])
        if found != header.checksum:
            raise TransferError(
                f"{self.what}: bytes from rank {peer} are damaged; check the link, then start from the last checkpoint",
                details={"bytes": header.length_bytes, "checksum": f"{found:08x}, expected {header.checksum:08x}"},
            )

    def _wait(self, work: Any, peer: int) -> None:
        if work is None:
            return
        left_seconds = max(self._deadline - time.monotonic(), 0.001)
        try:
            work.wait(timedelta(seconds=left_seconds))
        except RuntimeError as error:
            raise self._lost(peer, error) from error
        self._waited.add(id(work))

    def _arrived(self, peer: int) -> bool:
        """Whether all that `peer` sends to this rank has come; asked after a timeout, which ends what is under way."""
        for work in (self._headers.get(peer), self._bodies.get(peer)):
            if work is None or id(work) in self._waited:  # gloo waits for each message only once
                continue
            try:
                work.wait(timedelta(seconds=0.001))
            except RuntimeError:
                return False
        return True

    def _lost(self, peer: int | None, error: RuntimeError) -> LostRankError:
        who = "a rank" if peer is None else f"rank {peer}"
        lost = list(self.peers) if peer is None else [peer]
        closed = any(words in str(error) for words in _GONE)
        timed_out = not closed and ("imed out" in str(error) or "timeout" in str(error))
        if closed:
            reason = f"got a closed connection from {who}, expected its message {self.sequence}: it ended or was killed"
        elif timed_out:
            lost += [r for r in self.peers if r != peer and not self._arrived(r)] if self._tagged else []
            reason = (
                f"got nothing from {who} for {self.timeout_seconds:g} seconds, expected its message {self.sequence}: "
                "it or the link hangs"
            )
        else:
            reason = f"got an error of the link to {who}: {str(error).splitlines()[0]}"
        message = f"{self.what}: {reason}; see its log, then start all ranks from the last checkpoint"
        return LostRankError(message, tuple(lost), timed_out=timed_out)
