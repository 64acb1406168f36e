"""Ways to average gradients over ranks: plain DDP, PyTorch's communication hooks, and ours.

`Runner` takes steps of one of them on this rank, with their seconds and the bytes that left the rank.
"""

from __future__ import annotations

import argparse
import hashlib
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook, quantization_hooks
from torch.nn.parallel import DistributedDataParallel

from bench import lab_rank
from bench.interleave import turns
from examples.parallel.local_exact import LocalExact
from shoal import codecs
from shoal.distributed import compress_gradients
from shoal.errors import InputError

NONE, NOTHING, AUTO = "none", "nothing sent", "shoal auto"
AGAIN = "none, again"  # how far plain DDP is from itself
PLANNED = "planned"  # plain DDP of a network that shoal.compile plans, and keeps all of
HOOKS = ("fp16 hook", "PowerSGD 1", "PowerSGD 2")
# As found in torch 2.13 on gloo; each is run by itself, since one of them ends its process.
BROKEN = ("quantization per tensor", "quantization per channel", "PowerSGD 1, buckets of 25 MiB")
OURS = tuple(f"shoal {name}" for name in ("dynamic_tree", "linear", "one_bit", "truncate1", "bf16"))
EXACT = "shoal dynamic_tree, own part exact"
CONTENDERS = (NOTHING, NONE, *HOOKS, *OURS, EXACT, AUTO)
EVERY = (*CONTENDERS, AGAIN, PLANNED, *BROKEN, *(f"shoal {name}" for name in codecs.names()))
_OURS = "shoal "
_ONE_BUCKET_MIB = 1 << 20
_POWER_SGD_FROM = 2  # its least with error feedback: two steps of plain all-reduce before


@dataclass(frozen=True)
class Installed:
    """A contender on one DDP model.

    Attributes:
        warm_ups: steps before it does what it does from then on; DDP rebuilds its buckets after the first.
        sent_bytes: what it says it has put on the wire so far, None where it keeps no count.
        close: to be called on all ranks.
        reason: what "auto" decided.
    """

    warm_ups: int = 2
    sent_bytes: Callable[[], int | None] = field(default=lambda: None)
    close: Callable[[], None] = field(default=lambda: None)
    reason: Callable[[], str] = field(default=lambda: "")


def bucket_mib(name: str) -> int | None:
    """DDP's `bucket_cap_mb`: PowerSGD needs all in one bucket on gloo, where the order of several differs by rank.

    >>> bucket_mib("none"), bucket_mib("PowerSGD 1")
    (None, 1048576)
    """
    return _ONE_BUCKET_MIB if name in HOOKS and name.startswith("PowerSGD") else None


def parse_contenders(text: str) -> list[str]:
    """The names of `--contenders`, parted by semicolons since some have commas.

    >>> parse_contenders("none; fp16 hook")
    ['none', 'fp16 hook']
    """
    names = [name.strip() for name in text.split(";") if name.strip()]
    for wrong in set(names) - {*EVERY}:
        raise argparse.ArgumentTypeError(f"{wrong!r}: contenders are {'; '.join(dict.fromkeys(EVERY))}")
    return names


def install(name: str, model: DistributedDataParallel) -> Installed:
    """Make `model` average its gradients as `name` does. A collective call.

    Raises:
        InputError: no such contender.
    """
    if name in (NONE, AGAIN, PLANNED):
        return Installed()
    if name == NOTHING:
        model.register_comm_hook(None, _nothing)
    elif name == "fp16 hook":
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif name.startswith("PowerSGD "):
        state = powerSGD_hook.PowerSGDState(
            process_group=None, matrix_approximation_rank=int(name.split()[1][0]), start_powerSGD_iter=_POWER_SGD_FROM
        )
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        return Installed(warm_ups=_POWER_SGD_FROM + 1)
    elif name == BROKEN[0]:
        model.register_comm_hook(dist.group.WORLD, quantization_hooks.quantization_pertensor_hook)
    elif name == BROKEN[1]:
        model.register_comm_hook(dist.group.WORLD, quantization_hooks.quantization_perchannel_hook)
    elif name == EXACT:
        exact = LocalExact(model, "dynamic_tree")
        return Installed(sent_bytes=lambda: exact.traffic.total("gradients").sent_bytes, close=exact.close)
    elif name.startswith(_OURS) and name in (*EVERY, AUTO):
        return _ours(name, model)
    else:
        raise InputError(f"unknown contender {name!r}; known are {', '.join(EVERY)}")
    return Installed()


def _ours(name: str, model: DistributedDataParallel) -> Installed:
    compressed = compress_gradients(model, name.removeprefix(_OURS))
    return Installed(
        sent_bytes=lambda: compressed.traffic.total("gradients").sent_bytes,
        close=compressed.close,
        reason=compressed.explain,
    )


def install_sharded(name: str, model: torch.nn.Module) -> Installed:
    """The same for a model of `fully_shard`: plain, or ours. Its own count of bytes leaves out the weights.

    Raises:
        InputError: another contender.
    """
    if name in (NONE, AGAIN):
        return Installed()
    if not name.startswith(_OURS) or name == EXACT:
        raise InputError(
            f"{name!r}: with FSDP2 give none or ours, such as shoal dynamic_tree; the others are DDP's hooks"
        )
    compressed = compress_gradients(model, name.removeprefix(_OURS))
    return Installed(close=compressed.close, reason=compressed.explain)


def _nothing(_, bucket):  # type: ignore[no-untyped-def]  # DDP compares annotations, and these would be strings
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


@dataclass
class Runner:
    """One contender.

    Attributes:
        prepare: before each step, outside of its time.
        work: what is timed.
        sent_bytes: of the interface by step; on the loopback, on average over the ranks that share it.
        reported_bytes: by step, by the contender's own count.
    """

    name: str
    prepare: Callable[[], object]
    work: Callable[[], object]
    installed: Installed
    seconds: list[float] = field(default_factory=list)
    sent_bytes: list[int] = field(default_factory=list)
    reported_bytes: list[int | None] = field(default_factory=list)

    def step(self) -> None:
        """Every rank starts at a barrier, and the bytes are those up to another."""
        self.prepare()
        dist.barrier()
        reported, sent = self.installed.sent_bytes(), lab_rank.sent_bytes()
        start = time.perf_counter()
        self.work()
        self.seconds.append(time.perf_counter() - start)
        dist.barrier()
        self.sent_bytes.append((lab_rank.sent_bytes() - sent) // lab_rank.sharing())
        after = self.installed.sent_bytes()
        self.reported_bytes.append(None if reported is None or after is None else after - reported)

    def warm_up(self) -> None:
        """Until the contender does what it does from then on; nothing is counted."""
        for _ in range(self.installed.warm_ups):
            self.step()
        self.seconds.clear()
        self.sent_bytes.clear()
        self.reported_bytes.clear()

    def row(self, result: Iterable[torch.Tensor]) -> dict[str, Any]:
        """The figures, and whether `result` is bit for bit that of every other rank. A collective call."""
        return {
            "seconds": self.seconds,
            "sent_bytes": self.sent_bytes,
            "reported_bytes": self.reported_bytes,
            "same_on_all_ranks": same_on_all_ranks(result),
            "reason": self.installed.reason(),
        }


def same_on_all_ranks(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether every rank holds the same bits. A collective call."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().contiguous().numpy().tobytes())
    digests: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(digests, digest.hexdigest())
    return len(set(digests)) == 1


def step_in_turns(runners: Sequence[Runner], rounds: int) -> None:
    """Steps of all, in turns."""
    for runner, _ in turns(runners, rounds):
        runner.step()
