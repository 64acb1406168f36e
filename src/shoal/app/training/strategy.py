"""Where weights and gradients are stored and how they are sent: what a step calls, and what a checkpoint holds."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shoal.app.training.ranks import Ranks
from shoal.app.training.saved_state import Groups
from shoal.distributed.comm.traffic import Traffic


class Carrier(Protocol):
    """What sends weights or gradients, such as `HostWeights`."""

    traffic: Traffic

    def state_dict(self) -> dict[str, Any]:
        """What this rank by itself has of it, such as the residuals of error feedback."""

    def load_state_dict(self, state: Any) -> None:
        """Put back what `state_dict` gave."""

    def explain(self) -> str:
        """How things are sent and why, for people."""

    def close(self) -> None:
        """Give back what it holds."""


class Strategy:
    """One process with all of the network; the others change what differs.

    Args:
        network: by whose names a checkpoint is written; what `shoal.compile` compiled, if it did.
        optimizer: steps after each backward pass.
        ranks: that train together.
        carrier: of what is sent, if anything does.

    Attributes:
        called: what a step calls.
        tested: what a test calls.
    """

    def __init__(
        self, network: nn.Module, optimizer: torch.optim.Optimizer, ranks: Ranks, carrier: Carrier | None = None
    ) -> None:
        self.network = network
        self.called = self.tested = network
        self.optimizer = optimizer
        self._ranks = ranks
        self._carrier = carrier

    @property
    def traffic(self) -> Traffic | None:
        """Bytes on the wire; None where nothing is sent."""
        return None if self._carrier is None else self._carrier.traffic

    def state(self) -> dict[str, Any]:
        """The weights and the optimizer's state, whole; every rank calls it."""
        return {"model": self.network.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Put back what `state` gave; every rank calls it."""
        self.network.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def groups(self) -> Groups:
        """The optimizer's parameters, by the keys that `state` has for them."""
        numbered = enumerate(parameter for group in self.optimizer.param_groups for parameter in group["params"])
        return [[next(numbered) for _ in group["params"]] for group in self.optimizer.param_groups]

    def own_state(self) -> dict[str, Any]:
        """What this rank by itself has, such as the residuals of error feedback."""
        return {} if self._carrier is None else self._carrier.state_dict()

    def load_own_state(self, state: dict[str, Any]) -> None:
        """Put back what `own_state` gave."""
        if self._carrier is not None:
            self._carrier.load_state_dict(state)

    def begin_test(self) -> None:
        """Make the network the same on every rank; each calls it."""
        self._ranks.share_buffers(self.network)

    def explain(self) -> str:
        """How things are sent and why, for people; empty where nothing is sent."""
        return "" if self._carrier is None else self._carrier.explain()

    def close(self) -> None:
        """Give back what the strategy holds."""
        if self._carrier is not None:
            self._carrier.close()


class DataParallel(Strategy):
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
        from shoal.distributed import compress_gradients

        wrapped = DistributedDataParallel(network, gradient_as_bucket_view=True)
        if ranks.count > 2 or codec is not None:
            build_buckets(wrapped)
        gradients = compress_gradients(wrapped, codec, timeout_seconds=ranks.timeout_seconds)
        super().__init__(network, optimizer, ranks, gradients)
        self.called = wrapped


def build_buckets(wrapped: DistributedDataParallel) -> None:
    """Let DDP build its buckets for good, before the first step; a collective call.

    It would rebuild them after the first step, in the order in which gradients came. A sum over three ranks or more is
    rounded by the place of a number in its bucket, and so is a code. So a resumed run, whose first step is another one,
    would differ in last bits. Zero gradients from the last parameter to the first stand in for that step.
    """
    wrapped.reducer.prepare_for_backward([])
    for parameter in reversed(list(wrapped.module.parameters())):
        if parameter.requires_grad:
            (parameter * 0).sum().backward()
    wrapped.zero_grad()  # after all of them: the last makes every gradient a view of its bucket
