"""Gradients of FSDP2 in fewer bytes: what `compress_gradients` sets up on modules that `fully_shard` was applied to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shoal.codecs.codec import Codec
from shoal.distributed.comm.agreement import agree, described, short_hash
from shoal.distributed.comm.exchange import Exchange
from shoal.distributed.comm.traffic import Traffic, ring_all_gather_bytes
from shoal.distributed.gradients.bucket_segments import (
    ParameterGrad,
    Segment,
    Segments,
    add,
    message_bytes,
    pack,
    parts_of,
)
from shoal.distributed.gradients.choose_codec import Chooser, Decision, decide, explained
from shoal.distributed.gradients.error_feedback import ErrorFeedback
from shoal.distributed.gradients.measure_rates import measure_choice
from shoal.errors import InputError
from shoal.lowlevel.process_groups import parameter_groups, reduce_scatter_of, sharded_modules
from shoal.lowlevel.torch_state import call_at_end_of_backward


def is_sharded(model: nn.Module) -> bool:
    """Whether `fully_shard` was applied to the model or to modules of it."""
    return next(sharded_modules(model), None) is not None


@dataclass(frozen=True, eq=False)
class Unit:
    """What one call of `fully_shard` shards.

    Attributes:
        name: of its module.
        module: that takes a custom reduce-scatter.
        group: FSDP2's record of its parameters.
        ranks_group: the process group of its shards.
        gradients: of one rank's shard, padded, in FSDP2's order.
        dtype: gradients are reduced in.
    """

    name: str
    module: Any
    group: Any
    ranks_group: Any
    gradients: tuple[ParameterGrad, ...]
    dtype: torch.dtype


def units(model: nn.Module) -> Iterator[Unit]:
    """What `fully_shard` made of the model, in the order of its modules.

    Raises:
        InputError: one module's parameters lie on several meshes.
    """
    seen: set[int] = set()  # one call of `fully_shard` on several modules makes one record
    names = {id(parameter): name for name, parameter in model.named_parameters(remove_duplicate=False)}
    for name, module in sharded_modules(model):
        groups = [group for group in parameter_groups(module) if id(group) not in seen]
        seen.update(map(id, groups))
        if len(groups) > 1:
            raise InputError(
                f"got {name or 'a model'} with parameters on {len(groups)} meshes, expected one mesh a module"
            )
        for group in groups:
            if not hasattr(group.mesh_info, "shard_process_group"):
                continue  # replicated
            trained = [one for one in group.fsdp_params if one.sharded_param.requires_grad]
            gradients = tuple(
                ParameterGrad(
                    names.get(id(one.sharded_param), name),
                    one.padded_sharded_param_size.numel(),
                    one.sharded_param.dim() >= 2,
                )
                for one in trained
            )
            policy = group.mp_policy
            if gradients:
                dtype = policy.reduce_dtype or policy.param_dtype or trained[0].sharded_param.dtype
                yield Unit(name or "the root", module, group, group.mesh_info.shard_process_group, gradients, dtype)


class CompressedShards:
    """What `compress_gradients` set up on a sharded model: encode, all-to-all, decode and sum in float32.

    Attributes:
        traffic: bytes put on the wire by this rank, of kind "gradients"; each backward pass that reduces is a step.
        rank, ranks: of this process among those that hold the shards of the first sharded module, and how many.
        decisions: how each sharded module's gradients are sent, by its name.
    """

    def __init__(
        self, model: nn.Module, codec: Codec | str | None, error_feedback: bool, timeout_seconds: float
    ) -> None:
        self.traffic = Traffic()
        self.decisions: dict[str, Decision] = {}
        self._units = list(units(model))
        if not self._units:
            raise InputError(f"got a {type(model).__name__} without sharded parameters, expected some that are trained")
        self._exchanges: dict[Any, Exchange] = {}
        self._step_under_way = False
        for unit in self._units:
            if unit.ranks_group not in self._exchanges:
                self._exchanges[unit.ranks_group] = Exchange(unit.ranks_group, timeout_seconds=timeout_seconds)
        first = self._exchanges[self._units[0].ranks_group]
        self.rank, self.ranks = first.rank, first.ranks
        self._feedback = ErrorFeedback(self.ranks, self.rank) if error_feedback else None
        for group, exchange in self._exchanges.items():
            agree(exchange, "compress_gradients of shards", **self._settings(group, codec))
        choosers = self._measured() if codec == "auto" else {}
        for unit in self._units:
            exchange = self._exchanges[unit.ranks_group]
            whole = tuple(gradient.of_all(exchange.ranks) for gradient in unit.gradients)
            asked = codec if isinstance(codec, Codec) else None
            decision, taken = decide(whole, unit.dtype, exchange.ranks, asked, choosers.get(unit.ranks_group))
            self.decisions[unit.name] = decision
            plain = reduce_scatter_of(unit.group)
            comm = CodedReduceScatter(
                unit.name, unit.gradients, taken, plain, exchange, self._feedback, self.traffic, self._count_step
            )
            unit.module.set_custom_reduce_scatter(comm)
        if choosers:
            for group, exchange in self._exchanges.items():
                agree(exchange, "compress_gradients of shards", measured=short_hash(str(choosers[group])))

    def explain(self) -> str:
        """The bytes of the last step, and for each sharded module how its gradients are sent and why, a line each."""
        lines = (f"{name}, {d.elems} values: {d.reason}" for name, d in self.decisions.items())
        return explained(self.traffic, self.ranks, lines)

    def state_dict(self) -> dict[str, Any]:
        """Residuals of this rank; to be saved by every rank in addition to the model's."""
        return {"feedback": None if self._feedback is None else self._feedback.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """
        Args:
            state: of `state_dict`, of the same rank.

        Raises:
            InputError: it is of another rank, of another number of ranks, or of another model.
        """
        if self._feedback is None or state["feedback"] is None:
            return
        elems = {
            gradient.name: self._exchanges[unit.ranks_group].ranks * gradient.elems
            for unit in self._units
            for gradient in unit.gradients
        }
        self._feedback.load_state_dict(state["feedback"], elems, self._units[0].group.device)

    def close(self) -> None:
        """Put FSDP2's own reduce-scatters back and free the process groups. A collective call."""
        for unit in self._units:
            comm = reduce_scatter_of(unit.group)
            if isinstance(comm, CodedReduceScatter):
                unit.module.set_custom_reduce_scatter(comm.plain)
        for exchange in self._exchanges.values():
            exchange.close()
        self._exchanges.clear()

    def _settings(self, group: Any, codec: Codec | str | None) -> dict[str, object]:
        """What all ranks that hold shards of the same modules must have alike."""
        mine = [unit for unit in self._units if unit.ranks_group is group]
        facts = [
            (
                unit.name,
                str(unit.dtype),
                [(gradient.name, gradient.elems, gradient.encoded) for gradient in unit.gradients],
            )
            for unit in mine
        ]
        return {
            "codec": described(codec),
            "error_feedback": self._feedback is not None,
            "model": f"{len(mine)} sharded modules, hash {short_hash(facts)}",
        }

    def _measured(self) -> dict[Any, Chooser]:
        largest: dict[Any, int] = {}
        for unit in self._units:
            elems = self._exchanges[unit.ranks_group].ranks * sum(gradient.elems for gradient in unit.gradients)
            largest[unit.ranks_group] = max(elems, largest.get(unit.ranks_group, 0))
        device = self._units[0].group.device
        return {
            group: measure_choice(exchange, group, device=device, way="reduce_scatter", largest_elems=largest[group])
            for group, exchange in self._exchanges.items()
        }

    def _count_step(self) -> None:
        """At the end of the backward pass in which something was reduced, the step ends."""
        if self._step_under_way:
            return
        self._step_under_way = True

        def end() -> None:
            self._step_under_way = False
            self.traffic.end_step()

        call_at_end_of_backward(end)


def shard_segments(gradients: Sequence[ParameterGrad], rank: int) -> Segments:
    """What a rank's shard is made of: its part of every parameter, one after another, in parts that fit the caches.

    Args:
        gradients: of one rank's shard; every rank's has the same lengths, with padding.
        rank: whose.

    >>> gradients = [ParameterGrad("weight", 100, True), ParameterGrad("bias", 3, False)]
    >>> shard_segments(gradients, 1)  # doctest: +NORMALIZE_WHITESPACE
    (Segment(name='weight', start=100, first=0, elems=100, encoded=True),
     Segment(name='bias', start=3, first=100, elems=3, encoded=False))
    """
    segments: list[Segment] = []
    first = 0
    for gradient in gradients:
        segments += parts_of(gradient, rank * gradient.elems, (rank + 1) * gradient.elems, first)
        first += gradient.elems
    return tuple(segments)


@dataclass(eq=False)
class CodedReduceScatter:
    """What `FSDPModule.set_custom_reduce_scatter` takes: it has `allocate` and is called.

    FSDP2's reduce-scatter on codes: encode, all-to-all of bytes, decode and sum in float32, with one rounding.

    Attributes:
        name: of the module, for errors.
        gradients: of one rank's shard, in FSDP2's order.
        codec: of the encoded ones; None: all are sent uncompressed.
        plain: FSDP2's own, which allocates, and reduces what does not hold all of the gradients.
        exchange: over the ranks that hold shards.
        feedback: residuals, or None to keep none.
        traffic: where bytes are counted.
        reduced: called after each.
    """

    name: str
    gradients: tuple[ParameterGrad, ...]
    codec: Codec | None
    plain: Any
    exchange: Exchange
    feedback: ErrorFeedback | None
    traffic: Traffic
    reduced: Callable[[], None]

    def __post_init__(self) -> None:
        self._shards = [shard_segments(self.gradients, rank) for rank in range(self.exchange.ranks)]
        self._shard_elems = sum(gradient.elems for gradient in self.gradients)
        self._added = False

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """As FSDP2 does."""
        return self.plain.allocate(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        """Reduce (ranks * n,) to (n,), both float32, bfloat16 or float16.

        Raises:
            TransferError: another rank died, sent nothing in time, or sent something else.
            InputError: the reduction is no sum and no mean.
        """
        ranks = self.exchange.ranks
        raw_bytes = ring_all_gather_bytes(input_tensor.nbytes, ranks)
        work = None
        if self.codec is None or input_tensor.numel() != ranks * self._shard_elems:
            work = self.plain(output_tensor, input_tensor, group=group, op=op, async_op=async_op)
            self.traffic.add("gradients", raw_bytes, raw_bytes)
        else:
            divisor = _divisor(op, ranks, self.name)
            before = self.exchange.sent_bytes
            self._reduce(output_tensor, input_tensor.float().view(ranks, -1), divisor, self.codec)
            self.traffic.add("gradients", self.exchange.sent_bytes - before, raw_bytes)
        self.reduced()
        return work

    def _reduce(self, output: torch.Tensor, shards: torch.Tensor, divisor: int, codec: Codec) -> None:
        rank = self.exchange.rank
        if self.feedback is not None and not self._added:
            self.feedback.add([gradient.of_all(len(shards)) for gradient in self.gradients], (), shards.device)
            self._added = True
        size_bytes = message_bytes(self._shards[rank], codec)
        sizes = [0 if r == rank else size_bytes for r in range(len(shards))]
        messages = [torch.empty(size, dtype=torch.uint8, device=shards.device) for size in sizes]
        residual_of = None if self.feedback is None else self.feedback.of_gradient
        for r, message in enumerate(messages):
            if r != rank:
                pack(shards[r], self._shards[r], codec, message, residual_of)
        received = self.exchange.all_to_all(messages, sizes, what=f"gradients of {self.name}")
        total = shards[rank]  # the rank's own values are not encoded
        for r, message in enumerate(received):
            if r != rank:
                add(message, self._shards[rank], codec, total)
        output.copy_(total.div_(divisor) if divisor > 1 else total)


def _divisor(op: Any, ranks: int, name: str) -> int:
    if op == dist.ReduceOp.SUM:
        return 1
    if op == dist.ReduceOp.AVG:
        return ranks
    raise InputError(
        f"gradients of {name}: got the reduction {op}, expected a sum or a mean; call "
        "set_force_sum_reduction_for_comms(True) on the sharded modules"
    )
