"""One training step as plain data: ops in the order they run, and the storages they read and write.

A *storage* is a contiguous block of device bytes that one or more tensors share (the papers' TSO: tensor storage
object). Lifetimes belong to storages, never to tensors: views, detached tensors and in-place results are tensors of
the storage they look at. Views are not ops: they move no bytes and are made again wherever they are needed.

Nothing here knows torch.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from typing import Any, Literal

from shoal.core.hardware import Link
from shoal.core.sizes import in_pages
from shoal.errors import CaptureError

Phase = Literal["forward", "loss", "backward"]
StorageKind = Literal[
    "parameter",  # resident all step
    "buffer",  # resident all step
    "input",  # the batch: resident all step, its owner holds it
    "constant",  # a tensor the graph carries along: resident all step
    "activation",  # written by a forward op
    "crossing",  # written by a forward op and handed to eager code or another graph of the model: it cannot be given up
    "output",  # written by a forward op and handed to the caller, who holds it until the step ends
    "tangent",  # the gradient of an output, made by the loss, held by autograd until the step ends
    "activation_gradient",  # written by a backward op and read by another (the papers call it an error term)
    "gradient",  # written by a backward op and handed to the optimizer: alive until the step ends
]
STRETCH = "eager"  # the target of an op that stands for eager code between the graphs of a joined step
RETURNS = "returns"  # of one that stands for the end of one of their passes
RESIDENT: frozenset[str] = frozenset({"parameter", "buffer", "input", "constant"})
_NEVER_FREED = RESIDENT | {"output", "tangent", "gradient"}


@dataclass(frozen=True)
class Storage:
    """A block of device bytes.

    Attributes:
        id: its place in `StepGraph.storages`.
        name: the tensor that first fills it, unique in the step.
        nbytes: what the device allocator gives for it.
        kind: see `StorageKind`.
        layer: the module path of its producer, such as "layer1.0.conv1" ("" at the top level).
        shape, dtype: of the tensor that first fills it.
        tensors: every tensor that lives in it, views included.
    """

    id: int
    name: str
    nbytes: int
    kind: StorageKind
    layer: str
    shape: tuple[int, ...]
    dtype: str
    tensors: tuple[str, ...] = ()

    @property
    def is_floating_point(self) -> bool:
        """Whether it may have a gradient: floating point numbers, real or complex."""
        return self.dtype.startswith(("float", "bfloat", "complex"))

    @property
    def is_scalar(self) -> bool:
        """Whether it is a single number, as a loss is."""
        return math.prod(self.shape) == 1

    @property
    def host_bytes(self) -> int:
        """What it takes on the host."""
        return in_pages(self.nbytes)


@dataclass(frozen=True)
class Again:
    """The second run of an op for which that is a cheaper call, which writes the op's first storage only.

    Attributes: as of `Op`.
    """

    target: str
    reads: tuple[int, ...]
    overwrites: int = -1
    signature: str = ""
    flops: int = 0
    moved_bytes: int = 0
    seconds: float = 0.0
    workspace_bytes: int = 0
    launch_seconds: float = 0.0


@dataclass(frozen=True)
class Op:
    """A node of the serialised step.

    Attributes:
        id: its place in `StepGraph.ops`; ops run in that order.
        name: unique in the step.
        target: what it computes, such as "aten.convolution.default".
        phase: "forward", "loss" (everything between the two graphs, outside the captured model) or "backward".
        layer: module path of the layer it belongs to, also for backward ops.
        reads, writes: storage ids. An op writes only storages that nothing wrote before it.
        overwrites: a read storage of the same size whose block its first written storage may take over if the read
            storage dies here (in-place execution); -1 for none.
        recomputable: False where running it twice would change the training (it is then kept).
        random: it draws from the generator; a recomputation replays the state it drew from.
        signature: equal for ops that cost the same (target, shapes, dtypes, layouts, options).
        flops: floating-point operations. moved_bytes: least bytes read and written.
        seconds: how long it runs on the planned hardware. workspace_bytes: scratch it holds while it runs.
        again: how it runs the second time, None if just as the first time.
        launch_seconds: how long the host takes to launch it, while the device may run earlier ops; 0 where ops run on
            the host itself.
    """

    id: int
    name: str
    target: str
    phase: Phase
    layer: str
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    overwrites: int = -1
    recomputable: bool = True
    random: bool = False
    signature: str = ""
    flops: int = 0
    moved_bytes: int = 0
    seconds: float = 0.0
    workspace_bytes: int = 0
    again: Again | None = None
    launch_seconds: float = 0.0

    @property
    def longer_seconds(self) -> float:
        """The longer of its time on the device and on the host: what it costs, before a whole step is simulated."""
        return max(self.seconds, self.launch_seconds)

    @property
    def is_outside(self) -> bool:
        """Whether it stands for what happens outside the captured graphs: the loss, eager code between graphs, memory
        that a training loop holds. No other op runs earlier or later than captured across it."""
        return self.target == self.name or self.target in (STRETCH, RETURNS)

    @cached_property
    def second(self) -> Op:
        """The op as it runs when its result is recomputed."""
        if self.again is None:
            return self
        differing = {f.name: getattr(self.again, f.name) for f in fields(self.again)}
        return replace(self, **differing, writes=self.writes[:1])


@dataclass(frozen=True)
class StepGraph:
    """The serialised step of one model at one input shape.

    Attributes:
        model: the model's name, for tables and errors.
        ops: forward ops, then at most one "loss" op, then backward ops.
        storages: every storage of the step; `storages[i].id == i`.
        static_bytes: device bytes that stay in use all step and belong to no storage: optimizer state, gradients
            accumulated by earlier steps.
        link: the way to the host, by which storages may be offloaded; None where nothing may leave the device.
        as_written: the step before the lossless rewrites; None if they changed nothing, and in a plan that was loaded.
        rewrites_save_bytes: with everything kept, its peak is higher by this than that of the step itself.
        shared_result_bytes: of results that are views of one storage with one gradient, in addition to the gradient:
            the loss may keep something of each.
    """

    model: str
    ops: tuple[Op, ...]
    storages: tuple[Storage, ...]
    static_bytes: int = 0
    link: Link | None = None
    as_written: StepGraph | None = field(default=None, compare=False, repr=False)
    rewrites_save_bytes: int = field(default=0, compare=False, repr=False)
    shared_result_bytes: int = 0

    @cached_property
    def n_forward(self) -> int:
        """How many ops run before the loss or the backward pass: `ops[:n_forward]` is the forward pass."""
        return sum(op.phase == "forward" for op in self.ops)

    @cached_property
    def op_called(self) -> Mapping[str, Op]:
        """Name → op."""
        return {op.name: op for op in self.ops}

    @cached_property
    def storage_called(self) -> Mapping[str, Storage]:
        """Name → storage."""
        return {storage.name: storage for storage in self.storages}

    @cached_property
    def producer(self) -> Mapping[int, int]:
        """Storage id → id of the op that writes it."""
        return {storage: op.id for op in self.ops for storage in op.writes}

    @cached_property
    def readers(self) -> Mapping[int, tuple[int, ...]]:
        """Storage id → ids of the ops that read it, in order."""
        found: dict[int, list[int]] = {storage.id: [] for storage in self.storages}
        for op in self.ops:
            for storage in op.reads:
                found[storage].append(op.id)
        return {storage: tuple(ops) for storage, ops in found.items()}

    @cached_property
    def first_runs(self) -> tuple[tuple[int, bool, tuple[int, ...]], ...]:
        """(id, False, writes) of every op, in order; `shoal.core.schedule` puts recomputations between them."""
        return tuple((op.id, False, op.writes) for op in self.ops)

    @cached_property
    def never_freed(self) -> frozenset[int]:
        """Ids of the storages that nothing in the step frees."""
        return frozenset(s.id for s in self.storages if s.kind in _NEVER_FREED)

    @cached_property
    def resident_bytes(self) -> int:
        """Bytes in use at every position: parameters, buffers, the input batch, constants and static memory."""
        return self.static_bytes + sum(s.nbytes for s in self.storages if s.kind in RESIDENT)

    @cached_property
    def saved(self) -> tuple[int, ...]:
        """Ids of the saved storages: a forward op writes them, a backward op reads them."""
        return tuple(
            s.id
            for s in self.storages
            if s.kind in ("activation", "crossing", "output")
            and any(self.ops[reader].phase == "backward" for reader in self.readers[s.id])
        )

    def loss_gradient_bytes(self, results: Collection[str]) -> int:
        """Bytes of the gradients that the loss computes.

        A model that computes its loss itself returns it with the tensors that it is computed from, as those of
        transformers do when they are given labels. Only the gradient of such a scalar counts.

        Args:
            results: names of the storages that the caller gets.
        """
        only_scalars = self._returns_its_loss(results)
        tangents = (s for s in self.storages if s.kind == "tangent")
        return sum(s.nbytes for s in tangents if not only_scalars or s.is_scalar)

    def loss_operand_bytes(self, results: Collection[str]) -> int:
        """Bytes of the results that the loss is computed from.

        Args:
            results: as of `loss_gradient_bytes`.
        """
        return self.loss_gradient_bytes(results) + (0 if self._returns_its_loss(results) else self.shared_result_bytes)

    def undefined_gradients(self, results: Collection[str]) -> frozenset[str]:
        """Names of gradients of results that `backward()` on the model's own loss does not compute, each read once.

        Args:
            results: as of `loss_gradient_bytes`.
        """
        if not self._returns_its_loss(results):
            return frozenset()
        tangents = (s for s in self.storages if s.kind == "tangent" and not s.is_scalar)
        return frozenset(s.name for s in tangents if len(self.readers[s.id]) == 1)

    def _returns_its_loss(self, results: Collection[str]) -> bool:
        """Whether one of the results is a scalar with a gradient, and all others are what scalars are computed from."""
        returned = {s.id for s in self.storages if s.name in results and s.is_floating_point}
        scalars = {s for s in returned if self.storages[s].is_scalar}
        if not scalars or not any(s.kind == "tangent" and s.is_scalar for s in self.storages):
            return False
        return returned <= self._computed_from(scalars)

    def _computed_from(self, storages: Collection[int]) -> set[int]:
        """Ids of these storages and of all that they depend on, integers and booleans excluded."""
        found, left = set(storages), list(storages)
        while left:
            producer = self.producer.get(left.pop())
            read = self.ops[producer].reads if producer is not None else ()
            new = {s for s in read if self.storages[s].is_floating_point} - found
            found |= new
            left += new
        return found

    @cached_property
    def has_launches(self) -> bool:
        """Whether the host takes time of its own to launch ops, so that the device may wait for it."""
        return any(op.launch_seconds or op.second.launch_seconds for op in self.ops)

    @cached_property
    def plain_seconds(self) -> float:
        """How long the step takes with everything kept."""
        if not self.has_launches:
            return sum(op.seconds for op in self.ops)
        now = launched = 0.0
        for op in self.ops:
            launched += op.launch_seconds
            now = max(now, launched) + op.seconds
        return now

    @cached_property
    def fingerprint(self) -> str:
        """Equal for steps on which the same plan is valid: ops, storages and sizes, not times."""
        shape = [(op.name, op.target, op.phase, op.reads, op.writes, op.second.reads) for op in self.ops]
        blocks = [(s.name, s.nbytes, s.kind) for s in self.storages]
        return hashlib.sha256(json.dumps([shape, blocks]).encode()).hexdigest()[:16]

    def with_costs(
        self,
        seconds: Mapping[str, float],
        workspace_bytes: Mapping[str, int],
        launch_seconds: Mapping[str, float] | None = None,
    ) -> StepGraph:
        """The same step with times and workspaces filled in by op signature; unnamed signatures keep theirs."""
        launches = launch_seconds or {}

        def cost(run: Op | Again) -> dict[str, Any]:
            return {
                "seconds": seconds.get(run.signature, run.seconds),
                "workspace_bytes": workspace_bytes.get(run.signature, run.workspace_bytes),
                "launch_seconds": launches.get(run.signature, run.launch_seconds),
            }

        ops = [replace(op, **cost(op), again=op.again and replace(op.again, **cost(op.again))) for op in self.ops]
        return replace(self, ops=tuple(ops))

    def without_launches(self) -> StepGraph:
        """The same step where the host launches no op by itself, as when a recorded CUDA graph is replayed."""

        def replayed(op: Op) -> Op:
            return replace(op, launch_seconds=0.0, again=op.again and replace(op.again, launch_seconds=0.0))

        return replace(self, ops=tuple(map(replayed, self.ops))) if self.has_launches else self

    def with_min_workspaces(self, first: Mapping[str, int], second: Mapping[str, int]) -> StepGraph:
        """The same step with workspaces of at least that many bytes, by op name: of first runs and of second ones."""

        def raised(op: Op) -> Op:
            again = op.again and replace(
                op.again, workspace_bytes=max(op.again.workspace_bytes, second.get(op.name, 0))
            )
            return replace(op, workspace_bytes=max(op.workspace_bytes, first.get(op.name, 0)), again=again)

        return replace(self, ops=tuple(map(raised, self.ops)))

    @cached_property
    def never_given_up(self) -> frozenset[int]:
        """Storages that cannot be given up, whatever their kind.

        Those that only the first run of an op writes, if the second makes the first of them by itself: it may read
        them, and nothing makes them again. And those that the loss reads: the forward pass has handed them to the
        caller, so that nothing may be written over them, or computed again, before.
        """
        first_alone = {s for op in self.ops if op.again for s in op.writes[1:]}
        return frozenset(first_alone.union(*(op.reads for op in self.ops if op.phase == "loss")))

    @cached_property
    def can_leave(self) -> frozenset[int]:
        """Ids of the activations of the forward pass that a plan may free before their last reader."""
        return frozenset(
            s.id
            for s in self.storages
            if s.kind == "activation"
            and self.ops[self.producer[s.id]].phase == "forward"
            and s.id not in self.never_given_up
        )

    @cached_property
    def can_be_recomputed(self) -> frozenset[int]:
        """Ids of those of `can_leave` whose op may run twice."""
        return frozenset(s for s in self.can_leave if self.ops[self.producer[s]].recomputable)

    def to_json(self) -> dict[str, Any]:
        """Plain lists and dicts, for `json.dump`; `read_record` reads them."""
        return {key: each for key, each in asdict(replace(self, as_written=None)).items() if key != "as_written"}


def at_largest(usual: StepGraph, others: Sequence[StepGraph]) -> StepGraph:
    """A step whose sizes vary, with the most that each storage takes: `usual` has the costs, `others` larger storages.

    Raises:
        CaptureError: they are not one step at several sizes.
    """
    if not others:
        return usual
    every = (usual, *others)
    if len({tuple((op.name, op.reads, op.writes) for op in graph.ops) for graph in every}) > 1:
        raise CaptureError("the step is another one at other cuts; split it without stochastic=")

    def op_of(ops: Sequence[Op]) -> Op:
        again = ops[0].again
        if again is not None and len({op.second.overwrites for op in ops}) > 1:
            again = replace(again, overwrites=-1)
        overwrites = ops[0].overwrites if len({op.overwrites for op in ops}) == 1 else -1
        workspace_bytes = max(op.workspace_bytes for op in ops)
        return replace(ops[0], overwrites=overwrites, workspace_bytes=workspace_bytes, again=again)

    def largest(storages: Sequence[Storage]) -> Storage:
        return max(storages, key=lambda storage: storage.nbytes)

    ops = tuple(map(op_of, zip(*(graph.ops for graph in every), strict=True)))
    storages = tuple(map(largest, zip(*(g.storages for g in every), strict=True)))
    shared_result_bytes = max(graph.shared_result_bytes for graph in every)
    return replace(usual, ops=ops, storages=storages, shared_result_bytes=shared_result_bytes)
