"""Where weights and gradients are stored and how they are sent: what a step calls, and what a checkpoint holds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shoal.app.training.options import TrainOptions
from shoal.app.training.prepare import compiled
from shoal.app.training.ranks import Ranks
from shoal.app.training.saved_state import Groups
from shoal.core.named import function_named
from shoal.distributed import (
    AdaptivePrecision,
    CompressedGradients,
    HostWeights,
    ShardedWeights,
    compress_gradients,
)
from shoal.distributed.comm.traffic import Sent, Traffic
from shoal.distributed.gradients.sharded_gradients import CompressedShards
from shoal.errors import InputError

_THRESHOLD = -2e-3  # the paper's for VGG


# What sends weights or gradients: its traffic, its own state of this rank, its words and its end.
Carrier = HostWeights | ShardedWeights | CompressedGradients | CompressedShards


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


def strategy_of(options: TrainOptions, network: nn.Module, ranks: Ranks, steps: int) -> Strategy:
    """The network and its optimizer, compiled and among the ranks as asked; every rank calls it.

    Args:
        options: of the run.
        network: on its device, with equal weights on every rank.
        ranks: that train together.
        steps: of an epoch.

    Raises:
        InputError: what was asked for needs ranks that torchrun has not started, or does not fit the network.
    """
    if options.weights == "host":
        return WeightsOnHost(options, network, ranks, steps)
    asked = (
        (f"--parallel {options.parallel}", options.parallel),
        ("--weights sharded", options.weights),
        ("--compress-gradients", options.compress_gradients),
    )
    for flag, given in asked:
        if given and not ranks.grouped:
            raise InputError(f"{flag} is between ranks: start them with torchrun --nproc-per-node 2 -m shoal train ...")
    if options.parallel:
        strategy: Strategy = function_named(options.parallel)(options, network, ranks)
        return strategy
    if options.weights:
        return WeightsInShards(options, network, ranks, steps)
    optimizer = optimizer_of(options, network.parameters())
    network = compiled(options, network, optimizer)
    if not ranks.grouped:
        return Strategy(network, optimizer, ranks)
    return DataParallel(network, optimizer, ranks, options.compress_gradients)


class WeightsOnHost(Strategy):
    """Weights and optimizer on the host; each step's weights reach the device packed (`HostWeights`)."""

    def __init__(self, options: TrainOptions, network: nn.Module, ranks: Ranks, steps: int) -> None:
        optimizer = optimizer_of(options, network.parameters())
        weights = HostWeights(
            network,
            optimizer,
            precision=_precision(options, network, steps),
            one_byte=options.one_byte,
            gradients=options.compress_gradients or "raw",
            rehearse=options.rehearse,
        )
        super().__init__(network, optimizer, ranks, weights)


class WeightsInShards(Strategy):
    """A share of weights, gradients and optimizer on each rank; weights are gathered packed (`ShardedWeights`).

    Gradients are reduced as `compress_gradients` does.
    """

    def __init__(self, options: TrainOptions, network: nn.Module, ranks: Ranks, steps: int) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        # FSDP2 takes no other; images may lie as they do.
        network.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
        device = next(network.parameters()).device
        mesh = init_device_mesh(device.type, (ranks.count,))
        precision = _precision(options, network, steps)
        for block in blocks(network):
            fully_shard(block, mesh=mesh)
        fully_shard(network, mesh=mesh)
        optimizer = optimizer_of(options, network.parameters())
        weights = ShardedWeights(
            network, optimizer, precision=precision, one_byte=options.one_byte, timeout_seconds=ranks.timeout_seconds
        )
        super().__init__(compiled(options, network, optimizer), optimizer, ranks, weights)
        self._weights = weights
        self._gradients = compress_gradients(network, options.compress_gradients, timeout_seconds=ranks.timeout_seconds)
        self._reduced = Sent()
        optimizer.register_step_pre_hook(self._count_gradients)

    def state(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

        whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
        model, optimizer = get_state_dict(self.network, self.optimizer, options=whole)
        return {"model": model, "optimizer": optimizer}

    def load_state(self, state: dict[str, Any]) -> None:
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_state_dict

        set_state_dict(
            self.network,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=StateDictOptions(full_state_dict=True),
        )

    def groups(self) -> Groups:
        names = {parameter: name for name, parameter in self.network.named_parameters()}
        return [[(names[one], one) for one in group["params"]] for group in self.optimizer.param_groups]

    def own_state(self) -> dict[str, Any]:
        return {**self._weights.state_dict(), **self._gradients.state_dict()}

    def load_own_state(self, state: dict[str, Any]) -> None:
        self._weights.load_state_dict(state)
        self._gradients.load_state_dict(state)

    def explain(self) -> str:
        return f"{self._weights.explain()}\n{self._gradients.explain()}"

    def close(self) -> None:
        self._gradients.close()
        self._weights.close()

    def _count_gradients(self, *_: Any) -> None:
        reduced = self._gradients.traffic.total()
        since = reduced - self._reduced
        self._weights.traffic.add("gradients", since.sent_bytes, since.raw_bytes)
        self._reduced = reduced


def blocks(network: nn.Module) -> Iterator[nn.Module]:
    """What is gathered by itself: each module under the network, or under a container of it, that has parameters.

    >>> [type(block).__name__ for block in blocks(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)))]
    ['Linear', 'Linear']
    """
    for child in network.children():
        if isinstance(child, nn.Sequential | nn.ModuleList):
            yield from blocks(child)
        elif any(True for _ in child.parameters()):
            yield child


def optimizer_of(options: TrainOptions, parameters: Iterable[Any]) -> torch.optim.Optimizer:
    """The optimizer that was asked for, over parameters or groups of them."""
    rate, decay = options.lr, options.weight_decay
    if options.optimizer == "adamw":
        return torch.optim.AdamW(parameters, lr=rate, weight_decay=decay)
    return torch.optim.SGD(parameters, lr=rate, momentum=options.momentum, weight_decay=decay)


def _precision(options: TrainOptions, network: nn.Module, steps: int) -> int | str | AdaptivePrecision:
    match options.precision:
        case None:
            return 32
        case "adaptive":
            threshold = _THRESHOLD if options.awp_threshold is None else options.awp_threshold
            return AdaptivePrecision(network, threshold, options.awp_interval or steps)
        case "bf16":
            return "bf16"
        case bits:
            return int(bits)
