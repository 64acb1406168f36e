"""Hybrid parallelism in one call: convolutions data parallel, dense layers model parallel (Dettmers 2016, section 2.4).

model = hybrid(AlexNet())
optimizer = torch.optim.SGD(model.parameter_groups(), lr=0.01, momentum=0.9)
F.cross_entropy(model(images), labels).backward()  # of this rank's images
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import fx, nn
from torch.nn import functional as F

from examples.parallel.activation_exchange import ActivationExchange, activation_codec
from examples.parallel.dense_border import Border, find_border
from examples.parallel.dense_layers import DenseLayers
from examples.parallel.shares import Share
from examples.parallel.sub_batches import SubBatches
from shoal.codecs import Codec
from shoal.distributed.comm.agreement import agree, fingerprint
from shoal.distributed.comm.exchange import Exchange
from shoal.distributed.comm.traffic import Traffic
from shoal.distributed.gradients.compress_gradients import CompressedGradients, compress_gradients
from shoal.errors import InputError, ShoalError

SAME = "same"


def hybrid(
    model: nn.Module,
    codec: str | Codec | None = "dynamic_tree",
    *,
    gradient_codec: str | Codec | None = SAME,
    group: dist.ProcessGroup | None = None,
    timeout_seconds: float = 600.0,
) -> Hybrid:
    """Make a network such as AlexNet or VGG hybrid parallel; a collective call.

    Replaces, in plain PyTorch, `DistributedDataParallel(model)`: the same gradients (codec None: up to the order of
    summation in float32), but of the dense layers, which hold most parameters, each rank keeps only its share, and
    sends activations of them instead of gradients. Everything up to the first linear (or local) layer after the last
    convolution is data parallel. From there on every rank computes its share of each layer's output features for all
    ranks' images, in as many rounds as there are ranks: while 1/N of the batches is computed, the next is under way.

    Args:
        model: on its device, float32; its dense layers become shares, in place. Rank 0's parameters count.
        codec: for activations of the dense layers and their gradients; None: raw float32.
        gradient_codec: for gradients of the convolutions (see `compress_gradients`); None: plain
            DistributedDataParallel; "same": as `codec`.
        group: whose ranks; None: all.
        timeout_seconds: for each wait for a peer.

    Returns:
        The network; every rank gives it its own images, also in eval mode, as often as the others.

    Raises:
        InputError: the model has no linear layer after a convolution, or is not a chain from there on.
        TransferError: ranks differ in model, codecs or version of Shoal, on every rank; in training, that one failed.

    Limits: batch norm among the dense layers is refused. Dropout among them draws other masks than one process would.
    """
    border = find_border(model)
    chosen = activation_codec(codec)
    gradient_codec = codec if gradient_codec == SAME else gradient_codec
    exchanges = [Exchange(group, timeout_seconds=timeout_seconds) for _ in range(2)]
    agree(exchanges[0], "hybrid", model=fingerprint(model.named_parameters()), dense_layers=", ".join(border.layers))
    channels = [ActivationExchange(exchange, chosen) for exchange in exchanges]
    return Hybrid(model, border, channels[0], channels[1], gradient_codec, group, timeout_seconds)


class Hybrid(nn.Module):
    """What `hybrid` makes: the model's own children under their own names, of which the dense layers' are shares.

    Attributes:
        traffic: bytes that this rank sent, of kinds "gradients" and "activations".
        gradients: of the convolutions, for `explain()` and, with error feedback, `state_dict()`; None:
            no convolution is trained.
    """

    _parts: tuple[nn.Module, SubBatches, nn.Module]  # convolutions, dense layers, tail

    def __init__(
        self,
        model: nn.Module,
        border: Border,
        layers: ActivationExchange,
        ahead: ActivationExchange,
        gradient_codec: str | Codec | None,
        group: dist.ProcessGroup | None,
        timeout_seconds: float,
    ) -> None:
        super().__init__()
        self._shard(model, border, layers, group)
        for name, child in model.named_children():
            self.add_module(name, child)
        for name, parameter in model.named_parameters(recurse=False):
            self.register_parameter(name, parameter)
        for name, buffer in model.named_buffers(recurse=False):
            self.register_buffer(name, buffer)
        self.gradients: CompressedGradients | None = None
        dense = DenseLayers(model, border, layers)
        self._sharded = [id(parameter) for parameter in dense.parameters]
        head = _data_parallel(fx.GraphModule(model, border.convolutions, "Convolutions"), group)
        # Out of reach of nn.Module: these hold the same layers under other names.
        self.__dict__["_parts"] = (head, SubBatches(dense, ahead), fx.GraphModule(model, border.tail, "Tail"))
        self._exchanges = [layers.exchange, ahead.exchange]
        self._border = border
        if isinstance(head, nn.parallel.DistributedDataParallel):
            self.gradients = compress_gradients(head, gradient_codec, timeout_seconds=timeout_seconds)
        # A step of theirs ends with the backward pass of the convolutions, after all activations of the batch.
        self.traffic = Traffic() if self.gradients is None else self.gradients.traffic
        layers.traffic = ahead.traffic = self.traffic

    def _shard(
        self, model: nn.Module, border: Border, layers: ActivationExchange, group: dist.ProcessGroup | None
    ) -> None:
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.tensor.parallel import parallelize_module

        from examples.parallel.tensor_parallel import ColumnParallel

        device = next(model.parameters()).device
        whole = group if group is not None else dist.group.WORLD
        assert whole is not None
        mesh = DeviceMesh.from_group(whole, device.type)
        parallelize_module(model, mesh, {name: ColumnParallel(layers) for name in border.layers})

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """(N, C, H, W) of this rank → what the model gives for them."""
        _, rounds, tail = self._parts
        return tail(rounds(self._before(images), _locals(rounds.layers.parameters)))

    def _before(self, images: torch.Tensor) -> torch.Tensor:
        """The input of the dense layers."""
        head, rounds, _ = self._parts
        rounds.announce(len(images))
        try:
            return head(images)
        except RuntimeError as error:
            rounds.stop(error)
            raise

    def step(
        self,
        images: torch.Tensor,
        labels: torch.Tensor,
        loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = F.cross_entropy,
        *,
        dense_optimizer: torch.optim.Optimizer | None = None,
    ) -> torch.Tensor:
        """Forward and backward pass of one batch as the paper has them: round by round through the dense layers.

        Replaces `loss(model(images), labels).backward()`, which does all rounds forward, then all backward. A round's
        activations are freed before the next round's are there: 1/N of the bytes.

        Args:
            images, labels: of this rank; at least one.
            loss: a mean over the images.
            dense_optimizer: of the dense layers, `parameter_groups()[1]`: takes a step after each sub-batch, with that
                sub-batch's mean gradient (the paper's option); their gradients are None afterwards. None: gradients of
                all parameters are added to `.grad`, for a step after the batch.

        Returns:
            This rank's loss, without a graph.
        """
        _, rounds, tail = self._parts
        count = len(images)
        h = self._before(images)

        def loss_of(out: torch.Tensor, rows: Share) -> torch.Tensor:
            start, stop = rows
            return loss(tail(out), labels[start:stop]) * ((stop - start) / count) if stop > start else out.sum() * 0

        def after_round(gradients: list[torch.Tensor | None]) -> None:
            for parameter, gradient in zip(rounds.layers.parameters, gradients, strict=True):
                if gradient is not None:
                    # A sub-batch is one of as many as there are ranks, and its loss has that share of the batch's.
                    _add_gradient(parameter, gradient if dense_optimizer is None else gradient * rounds.ahead.ranks)
            if dense_optimizer is not None:
                dense_optimizer.step()
                dense_optimizer.zero_grad()

        try:
            total, of_h = rounds.train(h, lambda: _locals(rounds.layers.parameters), loss_of, after_round)
        except ShoalError:
            raise
        except BaseException as error:
            rounds.give_up(error)
            raise
        if of_h is not None:
            h.backward(of_h)
        return total

    def train(self, mode: bool = True) -> Hybrid:
        """As `nn.Module.train`."""
        super().train(mode)
        if "_parts" in self.__dict__:
            self._parts[0].train(mode)
        return self

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """As DistributedDataParallel's: gradients of the convolutions are added up on each rank, and are sent later."""
        head = self._parts[0]
        if not isinstance(head, nn.parallel.DistributedDataParallel):
            yield
            return
        with head.no_sync():
            yield

    def parameter_groups(self) -> list[dict[str, Any]]:
        """For an optimizer: what every rank has whole, and what it has a share of; one step cannot mix them."""
        parameters = list(self.parameters())
        whole = [parameter for parameter in parameters if id(parameter) not in self._sharded]
        sharded = [parameter for parameter in parameters if id(parameter) in self._sharded]
        return [{"params": part} for part in (whole, sharded) if part]

    def full_state_dict(self) -> dict[str, Any]:
        """The plain model's state dict, whole, on every rank: `model.load_state_dict` of the plain model takes it.

        A collective call.
        """
        return {name: _whole(value) for name, value in self.state_dict().items()}

    def load_full_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the plain model's state dict; every rank gives the same.

        Raises:
            InputError: names or shapes are others.
        """
        own = self.state_dict()
        if own.keys() != state.keys():
            wrong = sorted(own.keys() ^ state.keys())
            raise InputError(f"got a state dict that differs in {', '.join(wrong[:5])}; expected this model's names")
        with torch.no_grad():
            for name, value in own.items():
                if value.shape != state[name].shape:
                    raise InputError(
                        f"got {name} of shape {tuple(state[name].shape)}, expected {tuple(value.shape)}; "
                        "take a state dict of this model"
                    )
                value.copy_(_like(state[name], value))

    def full_optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """The optimizer's state dict with whole tensors, on every rank; a collective call."""
        found = optimizer.state_dict()
        state = {key: {name: _whole(value) for name, value in of.items()} for key, of in found["state"].items()}
        return {**found, "state": state}

    def load_full_optimizer_state(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        """Take over what `full_optimizer_state` gave, for an optimizer over the same groups."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        shared = {
            key: {
                name: _like(value, parameters[int(key)])
                if isinstance(value, torch.Tensor) and value.shape == parameters[int(key)].shape
                else value
                for name, value in of.items()
            }
            for key, of in state["state"].items()
        }
        optimizer.load_state_dict({**state, "state": shared})

    def explain(self) -> str:
        """What is where, and how it is sent."""
        layers, rank = self._parts[1].layers, self._parts[1].ahead.rank
        codec = layers.activations.codec
        whole = sum(parameter.numel() for parameter in self.parameters() if id(parameter) not in self._sharded)
        lines = [
            f"data parallel: {whole:,} parameters",
            *([] if self.gradients is None else ["  " + line for line in self.gradients.explain().splitlines()]),
            f"model parallel in {layers.activations.ranks} rounds a step; activations and their gradients "
            + ("float32" if codec is None else str(codec)),
        ]
        for name in self._border.layers:
            weight = self.get_parameter(f"{name}.weight")
            lines.append(f"  {name}: {tuple(weight.shape)}, {_local(weight).shape[0]} of its features on rank {rank}")
        return "\n".join(lines)

    def close(self) -> None:
        """End the thread, and free the process groups. The layers stay shares."""
        if self.gradients is not None:
            self.gradients.close()
        self._parts[1].close()
        for exchange in self._exchanges:
            exchange.close()


def _data_parallel(head: nn.Module, group: dist.ProcessGroup | None) -> nn.Module:
    if any(parameter.requires_grad for parameter in head.parameters()):
        return nn.parallel.DistributedDataParallel(head, process_group=group)
    return head  # frozen: nothing to add up


def _local(value: torch.Tensor) -> torch.Tensor:
    from torch.distributed.tensor import DTensor

    return value.to_local() if isinstance(value, DTensor) else value


def _locals(parameters: list[nn.Parameter]) -> list[torch.Tensor]:
    return [_local(parameter) for parameter in parameters]


def _add_gradient(parameter: nn.Parameter, gradient: torch.Tensor) -> None:
    from torch.distributed.tensor import DTensor

    if isinstance(parameter, DTensor):
        gradient = DTensor.from_local(
            gradient,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
    parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


def _whole(value: Any) -> Any:
    from torch.distributed.tensor import DTensor

    if isinstance(value, DTensor):
        value = value.full_tensor()
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _like(value: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """A whole tensor, laid out over the ranks as another."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    if isinstance(own, DTensor):
        whole = value.to(own.device, own.dtype)
        return distribute_tensor(whole, own.device_mesh, own.placements, src_data_rank=None)
    return value
