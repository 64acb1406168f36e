"""How a run's weights and gradients lie and travel: what is called in each step, and what a checkpoint holds of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shoal import codecs
from shoal.distributed.traffic import Traffic
from shoal.training.ranks import Ranks


class Arrangement:
    """One process with all of the network; the others change what differs.

    Attributes:
        network: by whose names a checkpoint is written; what `shoal.compile` compiled, if it did.
        called: what a step calls.
        tested: what a test calls.
        optimizer: steps after each backward pass.
        traffic: bytes on the wire; None where nothing travels.
    """

    def __init__(self, network: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.network = network
        self.called = self.tested = network
        self.optimizer = optimizer
        self.traffic: Traffic | None = None

    def state(self) -> dict[str, Any]:
        """The weights and the optimizer's state, whole; every rank calls it."""
        return {"model": self.network.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Put back what `state` gave; every rank calls it."""
        self.network.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def own_state(self) -> dict[str, Any]:
        """What this rank alone has of the way things travel, such as what earlier roundings left."""
        return {}

    def load_own_state(self, state: dict[str, Any]) -> None:
        """Put back what `own_state` gave."""

    def begin_test(self) -> None:
        """Make the network the same on every rank; each calls it."""

    def explain(self) -> str:
        """How things travel and why, for people; empty where there is nothing to tell."""
        return ""

    def close(self) -> None:
        """Give back what the arrangement holds."""


class DataParallel(Arrangement):
    """Each rank has all of the network and a share of the batch; gradients are averaged.

    Args:
        network: with equal weights on every rank.
        optimizer: over its parameters.
        ranks: that train together.
        codec: as of `shoal.distributed.compress_gradients`; None for plain float32.
    """

    def __init__(
        self, network: nn.Module, optimizer: torch.optim.Optimizer, ranks: Ranks, codec: str | None = None
    ) -> None:
        super().__init__(network, optimizer)
        from shoal.distributed import compress_gradients

        self._ranks = ranks
        self.called = wrapped = DistributedDataParallel(network, gradient_as_bucket_view=True)
        if ranks.count > 2 or codec is not None:
            settle_buckets(wrapped)
        self._gradients = compress_gradients(wrapped, codec, timeout_seconds=ranks.timeout_seconds)
        wrapped.hook_bytes = hook_bytes(network, codec)  # type: ignore[assignment]
        self.traffic = self._gradients.traffic

    def own_state(self) -> dict[str, Any]:
        return self._gradients.state_dict()

    def load_own_state(self, state: dict[str, Any]) -> None:
        self._gradients.load_state_dict(state)

    def begin_test(self) -> None:
        self._ranks.share_buffers(self.network)

    def explain(self) -> str:
        return self._gradients.explain()

    def close(self) -> None:
        self._gradients.close()


def hook_bytes(network: nn.Module, codec: str | None) -> int:
    """What an exchange of gradients as codes holds from step to step, rounded up: payloads, and what is owed.

    >>> [hook_bytes(nn.Linear(1000, 1000, bias=False), codec) for codec in (None, "dynamic_tree", "one_bit")]
    [0, 1501470, 6390440]
    """
    if codec is None:
        return 0
    elems = sum(p.numel() for p in network.parameters() if p.requires_grad)
    # Of all that "auto" may choose, bf16 is the widest.
    payload_bytes = codecs.get("bf16" if codec == "auto" else codec).bytes_for((elems,))
    owed_bytes = 6.2 * elems if codec == "one_bit" else 0  # a value each, and a rank's share of the means
    return int(1.5 * payload_bytes + owed_bytes)


def settle_buckets(wrapped: DistributedDataParallel) -> None:
    """Let the wrapper group its gradients for good, before the first step; a collective call.

    It would group them anew after the first step, in the order in which gradients came. A sum over three ranks or more
    is rounded by the place of a number in its group, and so is a code, so a resumed run, whose first step is another
    one, would differ in last bits. Zeros in the order of the last parameter to the first stand in for that step.
    """
    wrapped.reducer.prepare_for_backward([])
    for parameter in reversed(list(wrapped.module.parameters())):
        if parameter.requires_grad:
            (parameter * 0).sum().backward()
    wrapped.zero_grad()  # after all of them: the last makes every gradient a view of its group
