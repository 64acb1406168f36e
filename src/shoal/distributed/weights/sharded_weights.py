"""FSDP2's all-gathers of weights, packed into 1 to 4 bytes a value, the same width on all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from struct import Struct
from typing import Any

import torch
from torch import nn

from shoal.codecs.codec import Codec, Encoded
from shoal.core import arguments
from shoal.distributed.comm.agreement import agree, fingerprint
from shoal.distributed.comm.exchange import Exchange
from shoal.distributed.comm.silent_ranks import lost_in
from shoal.distributed.comm.traffic import Traffic
from shoal.distributed.weights.precision import AdaptivePrecision
from shoal.distributed.weights.weight_codecs import RAW_BYTES, WeightCodecs, explained
from shoal.errors import InputError
from shoal.lowlevel.process_groups import (
    all_gather_of,
    forget_gathered,
    local_shard,
    padded_shard,
    parameter_groups,
    replace_local_shard,
    set_all_gather,
    sharded_modules,
    unsharded_elems,
)
from shoal.lowlevel.torch_state import no_torch_function


class ShardedWeights:
    """Packs the weights that FSDP2 gathers; the shards, which the optimizer works on, stay float32.

    Call it on every rank after `fully_shard` and after the optimizer was made. The training loop is unchanged. Norms
    for AWP are those of the whole weights: shards' sums are exchanged once a step, so all ranks choose one width.

    Args:
        model: to whose modules, and to itself, `torch.distributed.fsdp.fully_shard` was applied.
        optimizer: over its parameters.
        precision: 8, 16, 24 or 32 bits, a codec's name such as "bf16", or an `AdaptivePrecision` of this model. 32
            trains as plain FSDP2, bit for bit. Biases and normalisations are always sent uncompressed.
        rounding: of 8, 16 and 24 bits: "cut" as in the paper, or "nearest".
        one_byte: the codec that stands in for 8 bits, such as "dynamic_tree", which has a scale for each 4096 weights.
        timeout_seconds: until the exchange of norms gives a silent rank up.

    Attributes:
        traffic: bytes that this rank sends in a ring's all-gather, as "weights".
        adaptive: the `AdaptivePrecision`, if there is one.

    Raises:
        InputError: the model is not sharded, or in a way that cannot be packed.
        TransferError: ranks differ in precision, rounding, AWP's numbers, model or version of Shoal: on every rank.

    Example, on every rank:
        fully_shard(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        weights = ShardedWeights(model, optimizer, precision=AdaptivePrecision(model, -2e-3, 4000))

    Limits: shards along dimension 0; no CPU offload, no tensor parallel parameters, no second mesh after the forward
    pass. A rank that dies in an all-gather ends the others with a `TransferError` on gloo; NCCL's watchdog ends them
    itself. Uses FSDP2's records of its parameters, which torch does not document.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        precision: int | str | AdaptivePrecision = 32,
        rounding: str = "cut",
        one_byte: str | None = None,
        timeout_seconds: float = 600.0,
    ) -> None:
        arguments.instance("model", model, nn.Module)
        arguments.instance("optimizer", optimizer, torch.optim.Optimizer)
        self._weight_codecs = WeightCodecs(model, precision, rounding, one_byte)
        self.adaptive = self._weight_codecs.adaptive
        self.traffic = Traffic()
        self._model = model
        _gather_nothing(model)
        self._sharded = _sharded_of(model)
        meshes = {sharded.sharded_param.device_mesh for sharded in self._sharded.values()}
        if len(meshes) != 1:
            raise InputError(f"the model is sharded over {len(meshes)} meshes, expected one; use one mesh throughout")
        mesh = meshes.pop()
        self._group = mesh.get_group(mesh.ndim - 1)
        self._ranks = mesh.size(mesh.ndim - 1)
        exchange = Exchange(self._group, timeout_seconds=timeout_seconds)
        parameters = [(name, sharded.sharded_param) for name, sharded in self._sharded.items()]
        agree(exchange, "ShardedWeights", **self._weight_codecs.settings(), model=fingerprint(parameters))
        self._exchange: Exchange | None = exchange
        if self.adaptive is None:  # nothing is exchanged later
            exchange.close()
            self._exchange = None
        self._state_loaded = False
        self._install()
        self._handles = [
            model.register_forward_pre_hook(self._before_forward, prepend=True),
            optimizer.register_step_post_hook(self._after_step),
        ]

    def state_dict(self) -> dict[str, Any]:
        """What the model's and the optimizer's states do not hold: AWP's, plain numbers, the same on all ranks."""
        return self._weight_codecs.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was called.

        Raises:
            InputError: the state is of other layers, or of a run with another kind of precision.
        """
        self._weight_codecs.load_state_dict(state)
        self._state_loaded = True
        _gather_nothing(self._model)

    def explain(self) -> str:
        """In a few lines: the width of each weight, and the bytes of the last step."""
        weights = ((self._weight_codecs.codec(name), unsharded_elems(one)) for name, one in self._sharded.items())
        return explained(weights, self.traffic, ("weights",))

    def close(self) -> None:
        """Put plain FSDP2 back. Call it on every rank; twice is once."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        _gather_nothing(self._model)
        for sharded in self._sharded.values():
            local = local_shard(sharded)
            if isinstance(local, PackedShard):
                replace_local_shard(sharded, local.as_subclass(torch.Tensor))
        for group in _groups(self._model):
            if isinstance(all_gather_of(group), CheckedAllGather):
                set_all_gather(group, all_gather_of(group).comm)
        if self._exchange is not None:
            self._exchange.close()
            self._exchange = None

    def _install(self) -> None:
        for name, sharded in self._sharded.items():
            local = local_shard(sharded)
            if not isinstance(local, PackedShard):
                codec = partial(self._weight_codecs.codec, name)
                replace_local_shard(sharded, packed(local, ShardWire(sharded, codec, self.traffic, self._ranks)))
        for group in _groups(self._model):
            if not isinstance(all_gather_of(group), CheckedAllGather):
                set_all_gather(group, CheckedAllGather(all_gather_of(group)))
        if self.adaptive is not None:
            shards = {name: local_shard(sharded) for name, sharded in self._sharded.items()}
            self.adaptive.watch(shards, self._sum_up)

    def _before_forward(self, model: nn.Module, inputs: Any) -> None:
        if self._state_loaded and self._exchange is not None:
            self._state_loaded = False
            agree(self._exchange, "the loaded state of ShardedWeights", **self._weight_codecs.settings())
        # Loading with assign=True puts other tensors there.
        if not all(isinstance(local_shard(sharded), PackedShard) for sharded in self._sharded.values()):
            _gather_nothing(model)
            self._install()

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self.traffic.end_step()
        if self.adaptive is not None:
            self.adaptive.update()

    def _sum_up(self, sums: list[float]) -> list[float]:
        """Over the shards of all ranks, added in the order of the ranks: the same bits everywhere."""
        assert self._exchange is not None
        numbers = Struct(f"<{len(sums)}d")
        parts = self._exchange.all_gather_bytes(
            numbers.pack(*sums), [numbers.size] * self._ranks, what="norms of shards"
        )
        return [math.fsum(of_ranks) for of_ranks in zip(*map(numbers.unpack, parts), strict=True)]


def _gather_nothing(model: nn.Module) -> None:
    """Have every parameter sharded: what was gathered before is not looked at again."""
    for _, module in sharded_modules(model):
        module.reshard()


def _groups(model: nn.Module) -> Iterator[Any]:
    """FSDP2's records of what is gathered together."""
    for _, module in sharded_modules(model):
        yield from parameter_groups(module)


def _sharded_of(model: nn.Module) -> dict[str, Any]:
    """By the name of the parameter, its record."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = {names[id(record.sharded_param)]: record for group in _groups(model) for record in group.fsdp_params}
    if not found:
        raise InputError("the model is not sharded; apply torch.distributed.fsdp.fully_shard to it first")
    for name, record in found.items():
        wrong = ""
        if record.sharded_param.dtype != torch.float32:
            wrong = f"is {record.sharded_param.dtype}, expected float32"
        elif record.fsdp_placement.dim != 0:
            wrong = f"is sharded along dimension {record.fsdp_placement.dim}, expected 0"
        elif record.offload_to_cpu:
            wrong = "is offloaded to the CPU, expected shards on the device; leave offload_policy out"
        elif record.is_dtensor:
            wrong = "is a DTensor before it is sharded, expected a plain parameter"
        elif record.post_forward_mesh_info not in (None, record.mesh_info):
            wrong = "is sharded over another mesh after the forward pass, expected reshard_after_forward=True or False"
        if wrong:
            raise InputError(f"{name} {wrong}")
    return found


class ShardWire:
    """How one parameter's shards are packed; belongs to this rank's shard.

    Args:
        sharded: FSDP2's own record of the parameter.
        codec: returns the current codec, the same on all ranks; None for plain float32.
        traffic: where bytes are counted.
        ranks: that the parameter is sharded over.

    Attributes:
        elems: of the whole parameter.
    """

    def __init__(self, sharded: Any, codec: Callable[[], Codec | None], traffic: Traffic, ranks: int) -> None:
        self._sharded = sharded
        self._codec = codec
        self._traffic = traffic
        self._ranks = ranks
        self.elems = unsharded_elems(sharded)
        self._sent_bytes = -1

    def pack(self) -> tuple[torch.Tensor, Codec | None]:
        """This rank's shard as bytes, as many on every rank, and what encoded them."""
        padded = padded_shard(self._sharded)
        codec = self._codec()
        payload = padded.view(torch.uint8) if codec is None else codec.encode(padded).payload
        others = self._ranks - 1
        self._traffic.add("weights", others * payload.numel(), others * RAW_BYTES * padded.numel())
        if payload.numel() != self._sent_bytes:
            # Another width takes other buffers.
            forget_gathered(self._sharded)
            self._sent_bytes = payload.numel()
        return payload, codec

    def unpack(self, gathered: torch.Tensor, codec: Codec | None, out: torch.Tensor) -> None:
        """The whole parameter from the bytes of all ranks, in their order, into (elems,) of any floating dtype."""
        each = padded_shard(self._sharded).numel()
        for rank, payload in enumerate(gathered.view(self._ranks, -1)):
            wanted = out[rank * each : (rank + 1) * each]
            if not wanted.numel():
                break
            if codec is None:
                wanted.copy_(payload.view(torch.float32)[: wanted.numel()])
            elif wanted.numel() == each and wanted.dtype == torch.float32:
                Encoded(codec, torch.float32, (each,), (1,), payload).decode(wanted)
            else:
                wanted.copy_(Encoded(codec, torch.float32, (each,), (1,), payload).decode()[: wanted.numel()])


class PackedShard(torch.Tensor):
    """A float32 shard that FSDP2 gathers in packed form; made by `packed`.

    FSDP2 asks a sharded parameter's local tensor for `fsdp_pre_all_gather` (what to send) and
    `fsdp_post_all_gather` (the whole parameter from what arrived). Everything else that is done to it, the
    optimizer's step included, sees the same float32 memory as before.
    """

    __torch_function__ = no_torch_function  # type: ignore[assignment]
    wire: ShardWire

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[torch.Tensor, ...], Any]:
        """What FSDP2 sends, and what it hands to `fsdp_post_all_gather`."""
        payload, codec = self.wire.pack()
        return (payload,), codec

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[torch.Tensor, ...],
        metadata: Codec | None,
        param_dtype: torch.dtype,
        *,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None:
        """The whole parameter: a new one the first time, into `out` from then on."""
        (gathered,) = all_gather_outputs
        if out is not None:
            self.wire.unpack(gathered, metadata, out.data.view(-1))  # data: autograd may hold the same values
            return None
        whole = torch.empty(self.wire.elems, dtype=param_dtype, device=gathered.device)
        self.wire.unpack(gathered, metadata, whole)
        return whole, (whole,)


class CheckedAllGather:
    """FSDP2's own all-gather of a module's weights, whose failure names who failed and what to do.

    Args:
        comm: what FSDP2 gathers with.
    """

    def __init__(self, comm: Any) -> None:
        self.comm = comm

    def allocate(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As `comm` does."""
        return self.comm.allocate(*args, **kwargs)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False
    ) -> Any:
        """As `comm` does.

        Raises:
            TransferError: a rank died, sent nothing in time, or sent something else.
        """
        try:
            return self.comm(output_tensor=output_tensor, input_tensor=input_tensor, group=group, async_op=async_op)
        except RuntimeError as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise lost_in(
                group,
                f"rank {group.rank()} of {group.size()}: the all-gather of {input_tensor.nbytes} bytes of weights a "
                f"rank failed ({reason})",
                "a rank died, stalled or has other weights: resume from the last checkpoint",
            ) from error


def packed(shard: torch.Tensor, wire: ShardWire) -> PackedShard:
    """The same memory, gathered over `wire`."""
    found = shard.as_subclass(PackedShard)
    found.wire = wire
    return found
