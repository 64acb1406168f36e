"""What a rank in the link lab needs: its settings, its place among the others, its interface's counters, a way back."""

from __future__ import annotations

import ctypes
import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1


def config() -> dict[str, Any]:
    """What the lab was told to pass on. From here on this process dies with the lab's."""
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
    return int(Path("/sys/class/net", interface, "statistics/tx_bytes").read_text())


def sharing() -> int:
    """How many ranks' bytes `sent_bytes` counts."""
    return int(os.environ["WORLD_SIZE"]) if os.environ["SHOAL_LAB_INTERFACE"] == "lo" else 1
