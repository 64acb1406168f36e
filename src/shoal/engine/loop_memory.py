"""Memory that the training loop around a model holds, learnt from metered steps, and a step with that counted."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from shoal.capture.accumulation import ACCUMULATE
from shoal.capture.early_gradients import HAND_OVER, HAND_OVER_TO_HOOK
from shoal.core.order import in_order_of, op_names
from shoal.core.plan import Plan
from shoal.core.simulate import rewritten, simulate
from shoal.core.step import Op, StepGraph, Storage, StorageKind
from shoal.core.variant import WHOLE, Candidate

HELD_RESULTS = "results_of_the_step_before"
HELD_GRADIENTS = "gradients_of_the_step_before"
KEPT_OF_LOSS = "kept_of_the_loss"
GRADIENTS_TO_COME = "gradients_of_results_to_come"


@dataclass(frozen=True)
class LoopMemory:
    """What is known of the memory that a training loop holds.

    Attributes:
        learnt: whether a step has been metered; before that, the worst case is assumed, which is what a minimum that is
            named has to hold.
        held_result_bytes: outputs of the step before that the loop holds until the forward pass returns new ones. None:
            not known yet, and taken for as many as the step's own.
        held_gradient_bytes: gradients of the step before, where they are dropped between the two passes. None: not
            known yet, and taken for as many as the step's own.
        drops_late: whether gradients that the optimizer has used are dropped after the next forward pass, not kept.
        released: places, among the forward graph's outputs, of those that nothing holds when the backward pass begins.
        let_go: places of those that nothing holds when it ends: what is saved of them dies with its last reader.
        tangents_pass: whether the gradients of outputs die with their last reader, not with the step.
        gradients_given: whether results from which the model computes its loss have gradients of another loss, too (see
            `StepGraph.undefined_gradients`); if not, the step allocates zeros just before it reads them.
        small_bytes: room for the loss itself and other small tensors of the loop, all step.
        hooks_free: whether gradients that are handed over to hooks while the backward pass runs are freed there, as
            by an optimizer that steps in them.
        replays: whether the step is replayed as CUDA graphs, in a pool of its own: what lies outside of it, as the
            loss's own memory, never takes what is free in the pool, so that it counts all step.
        kept_share: what the loss keeps for the whole backward pass, as a multiple of what it is computed from (see
            `StepGraph.loss_operand_bytes`). 1 is `F.mse_loss`, whose mean lies in the storage of all squares.
        loss_share: its workspace in addition, as a multiple of the outputs' gradients (see
            `StepGraph.loss_gradient_bytes`). 3, with 1 kept, is `((y - t) ** 2).mean()`, as most losses that are
            written out; few of PyTorch's own take more (`F.multilabel_soft_margin_loss`: 7).
        given_share: what the loss reads in addition to the outputs, such as targets and class weights, as a multiple of
            the outputs' gradients; alive during the whole step. 1 is a target of regression; a label map of two
            classes is as large.
    """

    learnt: bool = False
    held_result_bytes: int | None = None
    held_gradient_bytes: int | None = None
    drops_late: bool = True
    released: frozenset[int] = frozenset()
    let_go: frozenset[int] = frozenset()
    tangents_pass: bool = False
    gradients_given: bool = False
    small_bytes: int = 512
    loss_share: float = 3.0
    kept_share: float = 1.0
    given_share: float = 1.0
    hooks_free: bool = False
    replays: bool = False


@dataclass(frozen=True)
class Basis:
    """The step that a plan was made for, without the loop around it.

    Attributes:
        graph, exact_graph: as of `Plan`, with costs.
        outputs: names of the storages that the caller gets, by their places among the outputs.
        fingerprint: of the step as it was captured.
        written: that of the step in the variant in which its author wrote it, if that is another.
    """

    graph: StepGraph
    exact_graph: StepGraph | None
    outputs: Mapping[int, str]
    fingerprint: str
    written: Basis | None = None

    def of(self, plan: Plan, loop: LoopMemory) -> Plan:
        """The plan's residences in such a loop."""
        before = plan.graph

        def now(graph: StepGraph) -> StepGraph:
            found = in_loop(graph, loop, self.outputs)
            return replace(found, static_bytes=found.static_bytes + plan.states_bytes)

        graph, exact_graph = now(self.graph), self.exact_graph and now(self.exact_graph)
        plan = replace(plan, graph=graph, exact_graph=exact_graph, candidates=self.candidates(plan.candidates, loop))
        if not plan.captured_order:
            return plan
        ordered = now(in_order_of(self.graph, op_names(before)))
        # The step as written is held against the captured order.
        ordered = replace(ordered, rewrites_save_bytes=graph.rewrites_save_bytes)
        return replace(plan, graph=ordered, captured_order=op_names(graph))

    def candidates(self, candidates: tuple[Candidate, ...], loop: LoopMemory) -> tuple[Candidate, ...]:
        """The table of variants with what plain PyTorch takes in such a loop."""
        if self.written is None:
            return candidates
        graph = in_loop(self.written.graph, loop, self.written.outputs)
        peak_bytes, save_bytes = simulate(graph, {}).peak_bytes, graph.rewrites_save_bytes
        return tuple(
            replace(one, plain_peak_bytes=peak_bytes, rewrites_save_bytes=save_bytes) if one.variant == WHOLE else one
            for one in candidates
        )

    def resized(self, nbytes: Mapping[str, int]) -> Basis:
        """With storages of these sizes, by name: a step whose sizes vary, in one of its calls."""

        def now(graph: StepGraph) -> StepGraph:
            return replace(
                graph, storages=tuple(replace(s, nbytes=nbytes.get(s.name, s.nbytes)) for s in graph.storages)
            )

        return replace(self, graph=now(self.graph), exact_graph=self.exact_graph and now(self.exact_graph))

    def with_static(self, more_bytes: int) -> Basis:
        """With that many more bytes in use all step."""

        def more(graph: StepGraph) -> StepGraph:
            return replace(graph, static_bytes=graph.static_bytes + more_bytes)

        return replace(
            self,
            graph=more(self.graph),
            exact_graph=self.exact_graph and more(self.exact_graph),
            written=self.written and self.written.with_static(more_bytes),
        )


def best_case(loop: LoopMemory, places: Collection[int]) -> LoopMemory:
    """The loop that holds least: it drops every output when the loss is known, as
    `F.cross_entropy(model(x), y).backward()` does, whose workspace is as large as those outputs, or more where that is
    known."""
    return replace(
        loop,
        released=frozenset(places),
        let_go=frozenset(places),
        held_result_bytes=0,
        held_gradient_bytes=0,
        tangents_pass=True,
        loss_share=_usual_share(loop),
        kept_share=0.0,
        given_share=0.0,
        hooks_free=True,
    )


def usual_case(loop: LoopMemory) -> LoopMemory:
    """The loop whose loss takes what `F.mse_loss` and `F.cross_entropy` do."""
    return replace(loop, loss_share=_usual_share(loop), kept_share=1.0)


def _usual_share(loop: LoopMemory) -> float:
    """1, unless a loss that ran out of memory has shown that it takes more than is assumed at the worst."""
    return 1.0 if loop.loss_share <= LoopMemory.loss_share else loop.loss_share


def possible_loops(loop: LoopMemory, places: Collection[int]) -> tuple[LoopMemory, ...]:
    """The loops that a step may turn out to be in before one of its steps was metered, from the most that one holds to
    the least."""
    return loop, usual_case(loop), best_case(loop, places)


def step_alone(*, replays: bool = False) -> LoopMemory:
    """A loop that holds nothing: what a given plan, which is run as it is, was made for."""
    return LoopMemory(
        held_result_bytes=0,
        held_gradient_bytes=0,
        small_bytes=0,
        loss_share=2.0,
        kept_share=0.0,
        given_share=0.0,
        replays=replays,
    )


def in_loop(graph: StepGraph, loop: LoopMemory, outputs: Mapping[int, str], *, is_eager: bool = False) -> StepGraph:
    """The step with the memory that the loop holds.

    Args:
        graph: the step by itself.
        loop: what the loop holds.
        outputs: names of the storages that the caller gets, by their places among the outputs.
        is_eager: whether it is the step of eager PyTorch, which allocates no zeros for undefined gradients.
    """
    released = {outputs[place] for place in loop.released if place in outputs}
    let_go = {outputs[place] for place in loop.let_go if place in outputs}
    saved = {graph.storages[storage].name for storage in graph.saved}
    tangent_bytes = sum(s.nbytes for s in graph.storages if s.kind == "tangent")
    to_hooks = {s for op in graph.ops if op.target == HAND_OVER_TO_HOOK for s in op.reads}
    loss_bytes, operand_bytes = (of(outputs.values()) for of in (graph.loss_gradient_bytes, graph.loss_operand_bytes))
    late: dict[int, int] = {}  # id of a gradient that the step allocates itself → its bytes
    if not (loop.gradients_given or loop.replays):
        undefined = graph.undefined_gradients(outputs.values())
        late = {s.id: s.nbytes for s in graph.storages if s.name in undefined}

    def seen(storage: Storage) -> Storage:
        if storage.id in late:
            return replace(storage, nbytes=0)
        if storage.kind == "output" and storage.name in released - saved:
            return replace(storage, kind="activation")
        if storage.kind == "output" and storage.name in let_go & saved and not loop.replays:
            return replace(storage, kind="crossing")
        if storage.kind == "tangent" and loop.tangents_pass and not loop.replays:
            return replace(storage, kind="activation_gradient")
        if storage.id in to_hooks and loop.hooks_free:
            return replace(storage, kind="activation_gradient")
        return storage

    storages = list(map(seen, graph.storages))
    scratch_bytes = math.ceil(loop.loss_share * loss_bytes)
    kept_bytes = math.ceil(loop.kept_share * operand_bytes)
    if operand_bytes > loss_bytes and not loop.learnt:
        # Results that share a gradient are read one after another: what is kept of each takes room of the workspace.
        largest_bytes = max(s.nbytes for s in graph.storages if s.kind == "tangent")
        free_bytes = scratch_bytes - math.ceil(loop.kept_share * (operand_bytes - loss_bytes))
        scratch_bytes = max(math.ceil(loop.loss_share * largest_bytes), free_bytes)
    outside_bytes = 0
    if loop.replays:
        # A loss that drops a result takes as much more outside: the result's block stays in the pool.
        dropped = sum(s.nbytes for s in graph.storages if s.kind == "output" and s.name in released - saved)
        outside_bytes, scratch_bytes, kept_bytes = scratch_bytes + kept_bytes + dropped, 0, 0
    tangents = {s.id for s in graph.storages if s.kind == "tangent"}

    def run(op: Op) -> Op:
        if op.phase == "loss":
            return replace(op, workspace_bytes=scratch_bytes)
        if op.overwrites in tangents:  # a hook of the caller's may hold it
            op = replace(op, overwrites=-1)
        own_bytes = 0 if is_eager else sum(late.get(s, 0) for s in op.reads)
        return replace(op, workspace_bytes=op.workspace_bytes + own_bytes) if own_bytes else op

    ops = list(map(run, graph.ops))
    if kept_bytes and any(op.phase == "loss" for op in ops):
        # Like a parameter's gradient it is alive until the step ends, whichever op a plan runs last.
        kept = Storage(len(storages), KEPT_OF_LOSS, kept_bytes, "gradient", "", (kept_bytes,), "uint8", (KEPT_OF_LOSS,))
        ops = [replace(op, writes=(*op.writes, kept.id)) if op.phase == "loss" else op for op in ops]
        storages.append(kept)
    gradient_bytes = loop.held_gradient_bytes
    if gradient_bytes is None:
        freed = to_hooks if loop.hooks_free else set()
        gradient_bytes = sum(s.nbytes for s in graph.storages if s.kind == "gradient" and s.id not in freed)
    if ops and gradient_bytes:
        last = next((op for op in reversed(ops) if op.phase != "backward"), ops[0])
        ops, storages = _with_held(ops, storages, HELD_GRADIENTS, gradient_bytes, last)
    result_bytes = loop.held_result_bytes
    if result_bytes is None:
        names = set(outputs.values())
        result_bytes = sum(s.nbytes for s in graph.storages if s.kind == "output" and s.name in names)
    if ops and result_bytes:
        last = next((op for op in reversed(ops) if op.phase == "forward"), ops[0])
        ops, storages = _with_held(ops, storages, HELD_RESULTS, result_bytes, last)
    if ops and loop.replays and tangent_bytes:  # they are outside of the pool, too: there all step
        last = next((op for op in reversed(ops) if op.phase == "forward"), ops[0])
        ops, storages = _with_held(ops, storages, GRADIENTS_TO_COME, tangent_bytes, last)
    given_bytes = math.ceil(loop.given_share * loss_bytes)
    static_bytes = graph.static_bytes + loop.small_bytes + outside_bytes + given_bytes
    found = replace(graph, ops=tuple(ops), storages=tuple(storages), static_bytes=static_bytes)
    if graph.as_written is None:
        return found
    as_written = replace(graph.as_written, static_bytes=graph.static_bytes)
    return rewritten(found, in_loop(as_written, loop, outputs, is_eager=True))


def by_itself(graph: StepGraph) -> StepGraph:
    """The step without what a loop holds and without what becomes of its gradients: only what is computed."""
    handing = (HAND_OVER, HAND_OVER_TO_HOOK)
    others = (HELD_RESULTS, HELD_GRADIENTS, GRADIENTS_TO_COME, ACCUMULATE)
    ops = [op for op in graph.ops if op.name not in others and op.target not in handing]
    held = {s.id for s in graph.storages if s.name in (HELD_RESULTS, HELD_GRADIENTS, GRADIENTS_TO_COME, KEPT_OF_LOSS)}
    kinds: dict[int, StorageKind] = {s: "gradient" for op in graph.ops if op.target in handing for s in op.reads}
    for op in ops:
        if op.phase == "loss":
            kinds |= dict.fromkeys(op.reads, "output")
            kinds |= dict.fromkeys(op.writes, "tangent")

    def own(storages: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(s for s in storages if s not in held)

    def own_storage(storage: Storage) -> Storage:
        kind = kinds.get(storage.id, storage.kind)
        # `in_loop` may have taken a result's gradient for undefined: it has its result's size.
        return replace(storage, kind=kind, nbytes=0 if kind == "tangent" else storage.nbytes)

    return replace(
        graph,
        ops=tuple(replace(op, id=place, reads=own(op.reads), writes=own(op.writes)) for place, op in enumerate(ops)),
        storages=tuple(own_storage(s) for s in graph.storages if s.id not in held),
    )


def dropped_bytes(graph: StepGraph) -> int:
    """Bytes that are free once the loss is known: outputs, and gradients of the step before."""
    loss = [op.id for op in graph.ops if op.phase == "loss"]
    return sum(
        s.nbytes
        for s in graph.storages
        if s.kind == "activation" and graph.readers[s.id] and graph.readers[s.id][-1] in loss
    )


def waiting_bytes(plan: Plan) -> int:
    """Bytes that a call has in use between its two passes while another one runs, its inputs included.

    Until backward() is called its outputs wait, and from then on their gradients: in addition to them if the loop still
    holds them, in their place if nothing does.
    """
    graph = plan.graph
    at_loss = next(moment for moment in plan.timeline.moments if moment.phase == "loss")
    held = graph.storage_called.get(HELD_GRADIENTS)
    held_bytes = held.nbytes if held is not None else 0
    gradient_bytes = sum(graph.storages[s].nbytes for s in by_itself(graph).op_called[at_loss.op].writes)
    input_bytes = sum(s.nbytes for s in graph.storages if s.kind == "input")
    more_bytes = max(0, gradient_bytes - (dropped_bytes(graph) - held_bytes))
    return input_bytes + at_loss.kept_bytes - held_bytes + more_bytes


def most_waiting_bytes(plan: Plan) -> int:
    """What `waiting_bytes` is at most, under whatever plan of the same step; more where this plan has another variant
    than the author's, whose own graph is not at hand."""
    if plan.variant == WHOLE:
        return max(waiting_bytes(plan), waiting_bytes(replace(plan, residences={})))
    graph = plan.graph
    input_bytes = sum(s.nbytes for s in graph.storages if s.kind == "input")
    return max(waiting_bytes(plan), plan.plain_peak_bytes - graph.resident_bytes + input_bytes)


def _with_held(
    ops: list[Op], storages: list[Storage], name: str, nbytes: int, last_reader: Op
) -> tuple[list[Op], list[Storage]]:
    """An op before all others "writes" what is held from the step before, and `last_reader` is the last to read it."""
    held = Storage(len(storages), name, nbytes, "activation", "", (nbytes,), "uint8", (name,))
    first = Op(0, name, name, "forward", "", (), (held.id,), recomputable=False)
    later = [replace(op, id=op.id + 1, reads=(*op.reads, held.id) if op is last_reader else op.reads) for op in ops]
    return [first, *later], [*storages, held]
