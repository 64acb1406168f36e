"""What a rank in the link lab needs: its settings, its place among the others, its interface's counters, a way back.

Run by itself it is a probe of plain sockets.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1
_SENT_BYTES = 8  # after eight counters of what was received


def config() -> dict[str, Any]:
    """The configuration that the lab passes on. From here on this process dies with the lab's."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(os.environ["SHOAL_LAB_PARENT"]):
        raise SystemExit("the lab is gone")
    return json.loads(os.environ["SHOAL_LAB_CONFIG"])


def report(result: Any) -> None:
    """Give the lab this rank's result."""
    Path(os.environ["SHOAL_LAB_RESULT"]).write_text(json.dumps(result))


@contextmanager
def joined(timeout_seconds: float = 300.0) -> Iterator[int]:
    """Among the other ranks, over gloo. Yields the rank."""
    import torch.distributed as dist  # seconds to load: a probe does without

    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_seconds))
    try:
        yield dist.get_rank()
    finally:
        dist.destroy_process_group()


def sent_bytes() -> int:
    """Bytes that have left through this rank's interface since it was made; of all ranks together on the loopback.

    Headers included: of IP and TCP for each frame, or for each 64 KB where the kernel passes larger pieces on.
    """
    interface = os.environ["SHOAL_LAB_INTERFACE"]
    for line in Path("/proc/net/dev").read_text().splitlines():  # of this process's own namespace
        name, _, counters = line.partition(":")
        if name.strip() == interface:
            return int(counters.split()[_SENT_BYTES])
    raise SystemExit(f"there is no interface {interface}")


def sharing() -> int:
    """How many ranks' bytes `sent_bytes` counts."""
    return int(os.environ["WORLD_SIZE"]) if os.environ["SHOAL_LAB_INTERFACE"] == "lo" else 1


_PORT = 29_600
_PIECE_BYTES = 1 << 20
_WARM_UP_SHARE = 0.2  # until TCP has found the rate


def main() -> None:
    """A probe of plain sockets: each rank sends to the next and receives from the one before, all at once; the bytes
    that come in are timed after the first fifth."""
    payload_bytes = config()["payload_bytes"]
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    loopback = os.environ["SHOAL_LAB_INTERFACE"] == "lo"
    first = os.environ["MASTER_ADDR"]
    after = (rank + 1) % ranks
    address = first if loopback else f"{first.rsplit('.', 1)[0]}.{after + 1}"
    with socket.create_server(("", _PORT + rank)) as server, _connect(address, _PORT + after) as to_next:
        from_previous, _ = server.accept()
        with from_previous:
            sender = threading.Thread(target=_send, args=(to_next, payload_bytes))
            sender.start()
            goodput_gbps = _receive(from_previous, payload_bytes)
            sender.join()
    report({"goodput_gbps": goodput_gbps})


def _connect(address: str, port: int) -> socket.socket:
    until = time.monotonic() + 30
    while True:
        try:
            return socket.create_connection((address, port), timeout=60)
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.02)


def _send(to: socket.socket, payload_bytes: int) -> None:
    piece = bytes(_PIECE_BYTES)
    while payload_bytes > 0:
        to.sendall(piece[:payload_bytes])
        payload_bytes -= _PIECE_BYTES


def _receive(source: socket.socket, payload_bytes: int) -> float:
    buffer = bytearray(_PIECE_BYTES)
    got = counted = 0
    start = 0.0
    while got < payload_bytes:
        count = source.recv_into(buffer)
        if not count:
            raise SystemExit(f"the rank before closed after {got} of {payload_bytes} bytes")
        got += count
        if start:
            counted += count
        elif got >= _WARM_UP_SHARE * payload_bytes:
            start = time.perf_counter()
    return 8 * counted / (time.perf_counter() - start) / 1e9


if __name__ == "__main__":
    main()
