"""What plain sockets reach in the link lab: each rank sends to the next and hears from the one before, all at once."""

from __future__ import annotations

import os
import socket
import threading
import time

from bench import lab_rank

_PORT = 29_600
_PIECE_BYTES = 1 << 20
_WARM_UP_SHARE = 0.2  # until TCP has found the rate


def main() -> None:
    """Time the bytes that come in, after the first fifth."""
    payload_bytes = lab_rank.config()["payload_bytes"]
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
    lab_rank.report({"goodput_gbps": goodput_gbps})


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
