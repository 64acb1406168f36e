"""Captured step + residences → the forward graph and the backward graph that run exactly that plan.

Both graphs follow `schedule` op by op. The generated code drops each name after its last use, so a storage is freed
when the schedule says; inputs are handed over in a list that is emptied, so nothing else holds them.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from shoal.capture.captured import Captured
from shoal.capture.early_gradients import HAND_OVER, HAND_OVER_TO_HOOK, hand_over
from shoal.core.residence import Offload, Residence, exact_residence
from shoal.core.schedule import Run, schedule
from shoal.core.shares import NO_OTHERS, Other, OtherTransfers
from shoal.core.step import RETURNS, StepGraph, Storage
from shoal.errors import PlanError
from shoal.graph import inplace
from shoal.graph.fx_nodes import is_view
from shoal.graph.rerun import second_call
from shoal.graph.symbolic_sizes import is_size
from shoal.kernels.generator import generator_state, replaying

if TYPE_CHECKING:
    from shoal.offload.transfers import Transfers


def lower(
    captured: Captured,
    residences: Mapping[str, Residence],
    *,
    in_place: bool = True,
    transfers: Transfers | None = None,
    others: OtherTransfers = NO_OTHERS,
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Build the two graphs.

    Args:
        captured: the step.
        residences: by storage name; an absent storage is kept.
        in_place: let ops write over operands that die there; False allocates every result.
        transfers: carries what is offloaded; it has one slot for each storage of `offloaded_storages`, in that order.
        others: what the graphs do for storages of other graphs, and others for theirs.

    Returns:
        The forward module, whose outputs are the step's forward outputs, the saved tensors and the saved sizes, and the
        backward module, whose inputs are those sizes, those tensors and the tangents.

    Raises:
        PlanError: the residences do not fit the step.
    """
    offloads = _Offloads(captured, residences, transfers, others)
    runs = schedule(captured.graph, residences)
    n_forward = captured.graph.n_forward
    forward_runs, backward_runs = (
        [run for run in part if _is_node(captured, run)] for part in (runs[:n_forward], runs[n_forward:])
    )
    released, fetched = _places_of_others(captured, runs, others)
    replayed = {run.op for run in backward_runs if run.again and captured.graph.ops[run.op].random}

    backward = _LowerWriter(captured, in_place, replayed, offloads)
    tangents = [n for n in captured.joint.graph.find_nodes(op="placeholder") if n.name.startswith("tangents")]
    for node in tangents:
        backward.copy_input(node)
    backward.saves_before = next(iter(backward.out.nodes))
    leaving = _Leaving(captured, backward_runs)
    for number, run in enumerate(backward_runs):
        backward.write(run, fetched.get(number, ()))
        for places in leaving.after(number):
            backward.hand_over(places)
    backward.fetch_of_others(fetched.get(len(backward_runs), ()))
    backward.finish(leaving.others())

    forward = _LowerWriter(captured, in_place, replayed, offloads)
    for node in captured.joint.graph.find_nodes(op="placeholder"):
        if node not in tangents:
            forward.copy_input(node)
    if backward.receipt is not None or released:
        forward.begin_transfers()
    forward.release_of_others(released.get(-1, ()))
    for number, run in enumerate(forward_runs):
        forward.write(run, released.get(number, ()))
    forward.finish([*captured.forward_outputs, *backward.saved, *backward.saved_sizes])
    return forward.module(), backward.module()


def offloaded_storages(graph: StepGraph, residences: Mapping[str, Residence]) -> tuple[Storage, ...]:
    """What leaves for the host during the step, in the order of `graph.storages`."""
    return tuple(s for s in graph.storages if isinstance(exact_residence(residences.get(s.name)), Offload))


def _places_of_others(
    captured: Captured, runs: Sequence[Run], others: OtherTransfers
) -> tuple[dict[int, tuple[Other, ...]], dict[int, tuple[Other, ...]]]:
    """Of the runs that are nodes, by number: after which ones of the forward pass storages of others are released (-1:
    before all), and before which ones of the backward pass they are fetched."""
    ops, n_forward = captured.graph.ops, captured.graph.n_forward
    released: dict[int, tuple[Other, ...]] = {}
    fetched: dict[int, tuple[Other, ...]] = {}

    def add(found: dict[int, tuple[Other, ...]], number: int, more: tuple[Other, ...]) -> None:
        if more:
            found[number] = (*found.get(number, ()), *more)

    number = -1
    for run in runs[:n_forward]:
        number += _is_node(captured, run)
        add(released, number, others.releases.get(ops[run.op].name, ()))
    add(released, number, others.releases.get(f"forward.{RETURNS}", ()))
    number = begins = 0  # of the recomputations for an op, or the op
    for run in runs[n_forward:]:
        add(fetched, begins, () if run.again else others.fetches.get(ops[run.op].name, ()))
        number += _is_node(captured, run)
        begins = begins if run.again else number
    add(fetched, number, others.fetches.get(f"backward.{RETURNS}", ()))
    return released, fetched


class _Offloads:
    """Which slot on the host each offloaded storage has, and what carries it there.

    Attributes:
        slot_of: the slots. stay: storages whose copies to the host end in the pass of another graph.
    """

    def __init__(
        self,
        captured: Captured,
        residences: Mapping[str, Residence],
        transfers: Transfers | None,
        others: OtherTransfers,
    ) -> None:
        leaving = offloaded_storages(captured.graph, residences)
        if (leaving or others) and transfers is None:
            raise PlanError(
                f"the plan offloads {len(leaving)} storages, but nothing was given to carry them; give offload_to= to "
                "shoal.compile"
            )
        self._transfers = transfers
        self.slot_of = {storage.id: slot for slot, storage in enumerate(leaving)}
        self.stay = {storage.id for storage in leaving if storage.name in others.released_by_others}

    @property
    def transfers(self) -> Transfers:
        assert self._transfers is not None  # checked when it was made, and only called for what leaves
        return self._transfers


class _Leaving:
    """Which gradients leave the backward graph early: each group after the op that completes it."""

    def __init__(self, captured: Captured, runs: Sequence[Run]) -> None:
        graph, storage_of = captured.graph, captured.storage_of
        self._outputs = captured.backward_outputs
        self._after: dict[int, list[tuple[int, ...]]] = {}
        inputs = [n for n in captured.joint.graph.find_nodes(op="placeholder") if not n.name.startswith("tangents")]
        touches: dict[int, int] = {}  # storage → place of the last run that reads or writes it
        for number, run in enumerate(runs):
            touches |= dict.fromkeys((*run.of(graph).reads, *run.writes), number)
        for op in graph.ops:
            if op.target in (HAND_OVER, HAND_OVER_TO_HOOK):
                places = tuple(p for p, node in enumerate(self._outputs) if storage_of.get(node) in op.reads)
                own = {*op.reads, *(storage_of[inputs[place]] for place in places)}
                self._after.setdefault(max(touches[s] for s in own if s in touches), []).append(places)

    def after(self, number: int) -> list[tuple[int, ...]]:
        """Places of the gradients, group by group, that leave after this run."""
        return self._after.get(number, [])

    def others(self) -> list[Any]:
        """What the backward graph returns: None for those that have left."""
        gone = {place for groups in self._after.values() for places in groups for place in places}
        return [None if place in gone else node for place, node in enumerate(self._outputs)]


def _is_node(captured: Captured, run: Run) -> bool:
    return captured.graph.ops[run.op].name in captured.node_of


class _LowerWriter:
    """Writes one of the two graphs, run by run."""

    def __init__(self, captured: Captured, in_place: bool, replayed: set[int], offloads: _Offloads) -> None:
        self.captured = captured
        self.offloads = offloads
        self.receipt: fx.Node | None = None
        self.in_place = in_place
        self.replayed = replayed
        self.out = fx.Graph(captured.joint)
        self.saved: list[fx.Node | _State | _LoweredReceipt] = []
        self.saved_sizes: list[fx.Node] = []
        self.saves_before: fx.Node | None = None  # backward only: where inputs for saved tensors go
        self._written: dict[fx.Node, fx.Node] = {}
        self._states: dict[str, fx.Node] = {}
        self._tensors: dict[int, list[fx.Node]] = {storage.id: [] for storage in captured.graph.storages}
        for node, storage in captured.storage_of.items():
            self._tensors[storage].append(node)

    def copy_input(self, node: fx.Node) -> None:
        self._written[node] = _same_name(self.out.node_copy(node))

    def begin_transfers(self) -> None:
        self.receipt = self.out.call_function(self.offloads.transfers.begin)
        self.receipt.meta["val"] = _fake_receipt(self.captured)

    def write(self, run: Run, others: Sequence[Other] = ()) -> None:
        """Write a run, and the transfers of storages of other graphs that begin before it or end after it."""
        for storage in run.fetches:
            self._fetch(storage)
        if self.saves_before is not None:
            self.fetch_of_others(others)
        for storage in run.awaits:
            self.out.call_function(self.offloads.transfers.finish_fetch, self._slot(storage))
        self._write_op(run)
        for storage in run.offloads:
            value = self._written[self._first_tensor(storage)]
            self.out.call_function(self.offloads.transfers.start_offload, (*self._slot(storage), value))
        if self.saves_before is None:
            self.release_of_others(others)
        for storage in run.releases:
            if storage not in self.offloads.stay:
                self.out.call_function(self.offloads.transfers.finish_offload, self._slot(storage))

    def fetch_of_others(self, others: Sequence[Other]) -> None:
        for other in others:
            self.out.call_function(self.offloads.transfers.start_fetch_of, (self._receipt(), *other))

    def release_of_others(self, others: Sequence[Other]) -> None:
        for other in others:
            self.out.call_function(self.offloads.transfers.finish_offload_of, (self._receipt(), *other))

    def _fetch(self, storage: int) -> None:
        node = self._first_tensor(storage)
        fetched = self.out.call_function(self.offloads.transfers.start_fetch, self._slot(storage))
        fetched.meta = dict(node.meta)
        self._written[node] = fetched

    def _slot(self, storage: int) -> tuple[fx.Node, int]:
        return self._receipt(), self.offloads.slot_of[storage]

    def _receipt(self) -> fx.Node:
        if self.receipt is None:
            self.saved.append(_LoweredReceipt())
            with self.out.inserting_before(self.saves_before):
                self.receipt = _same_name(self.out.placeholder("offload_receipt"))
            self.receipt.meta["val"] = _fake_receipt(self.captured)
        return self.receipt

    def _first_tensor(self, storage: int) -> fx.Node:
        """The tensor that first fills a storage: every other one is a view of it."""
        name = self.captured.graph.storages[storage].tensors[0]
        return next(node for node in self._tensors[storage] if node.name == name)

    def _write_op(self, run: Run) -> None:
        op = self.captured.graph.ops[run.op]
        node = self.captured.node_of[op.name]
        if op.random and run.op in self.replayed and not run.again:
            self._states[op.name] = self._write_state(node)
        target, args = second_call(node) if run.again else (node.target, node.args)
        # A second call may leave out operands of the first, such as running statistics that have moved since.
        args, kwargs = fx.node.map_arg((args, dict(node.kwargs)), self._value)
        if self.in_place and run.takes_over >= 0:
            operand = next(n for n in inplace.operands(node) if self.captured.storage_of[n] == run.takes_over)
            target, kwargs = inplace.overwriting(target, kwargs, self._written[operand])
        if run.again and op.random:
            state = self._states.get(op.name) or self._read_state(op.name)
            target, args = replaying(target), (state, _device(node), *args)
        copy = self.out.create_node("call_function", target, args, kwargs, node.name)
        copy.meta = dict(node.meta)
        for storage in run.writes:
            for stale in self._tensors[storage]:
                self._written.pop(stale, None)
        if node in self.captured.storage_of:
            self._written[node] = copy
        for item in node.users:
            if item.target is operator.getitem and self.captured.storage_of.get(item) in run.writes:
                alone = run.again and op.again is not None  # the second run returns the first result by itself
                self._written[item] = copy if alone else self.out.node_copy(item, lambda _: copy)
                copy.meta = dict(item.meta) if alone else copy.meta

    def hand_over(self, places: tuple[int, ...]) -> None:
        """Let these gradients leave."""
        gradients = [self._value(self.captured.backward_outputs[place]) for place in places]
        self.out.call_function(hand_over, (places, gradients))

    def finish(self, outputs: Sequence[Any]) -> None:
        self.out.output(tuple(self._output(value) for value in outputs))

    def module(self) -> fx.GraphModule:
        self.out.lint()
        return fx.GraphModule(self.captured.joint, self.out)

    def _output(self, value: Any) -> Any:
        if isinstance(value, _State):
            return self._states[value.op]
        if isinstance(value, _LoweredReceipt):
            return self.receipt
        return self._value(value) if isinstance(value, fx.Node) else value

    def _value(self, node: fx.Node) -> fx.Node:
        """The node's most recent tensor in this graph; views are looked up again, kept tensors become inputs."""
        if node in self._written:
            return self._written[node]
        if node.op == "get_attr":
            self._written[node] = self.out.node_copy(node)
        elif is_size(node) and node.op == "placeholder":
            self._written[node] = self._read_size(node)
        elif is_size(node):
            self._written[node] = self.out.node_copy(node, self._value)
        elif is_view(node) or (node.target is operator.getitem and is_view(node.args[0])):  # type: ignore[arg-type]
            for operand in node.all_input_nodes:
                self._value(operand)
            self._written[node] = self.out.node_copy(node, self._written.__getitem__)
        elif self.saves_before is not None:
            self.saved.append(node)
            with self.out.inserting_before(self.saves_before):
                self._written[node] = _same_name(self.out.placeholder(node.name))
            self._written[node].meta = dict(node.meta)
        else:
            raise PlanError(f"{node.name} is needed before it is computed; this is a mistake in the plan's schedule")
        return self._written[node]

    def _read_size(self, node: fx.Node) -> fx.Node:
        """A size as an input of the backward graph: AOTAutograd hands sizes over before tensors."""
        after = {saved.name for saved in self.saved_sizes}
        with self.out.inserting_before(next(n for n in self.out.nodes if n.name not in after)):
            size = _same_name(self.out.placeholder(node.name))
        size.meta = dict(node.meta)
        self.saved_sizes.append(node)
        return size

    def _write_state(self, node: fx.Node) -> fx.Node:
        state = self.out.call_function(generator_state, (_device(node),))
        state.meta["val"] = _fake_state(node)
        return state

    def _read_state(self, op_name: str) -> fx.Node:
        self.saved.append(_State(op_name))
        node = self.captured.node_of[op_name]
        with self.out.inserting_before(self.saves_before):
            state = _same_name(self.out.placeholder(f"{op_name}_generator_state"))
        state.meta["val"] = _fake_state(node)
        self._states[op_name] = state
        return state


class _State:
    """Stands among the saved tensors for the generator's state before a random op."""

    def __init__(self, op: str) -> None:
        self.op = op


class _LoweredReceipt:
    """Stands among the saved tensors for the receipt by which the backward pass finds what this step offloaded."""


def _same_name(placeholder: fx.Node) -> fx.Node:
    """Call the argument what its node is called: where the two differ, the generated code assigns one to the other, and
    such an assignment may overwrite an argument that is not read yet."""
    placeholder.target = placeholder.name
    return placeholder


def _device(node: fx.Node) -> torch.device:
    value = node.meta["val"]
    device: torch.device = (value[0] if isinstance(value, (tuple, list)) else value).device
    return device


def _fake_state(node: fx.Node) -> torch.Tensor:
    value = node.meta["val"]
    value = value[0] if isinstance(value, (tuple, list)) else value
    state = generator_state(value.device)
    return value.new_empty(state.shape, dtype=state.dtype, device="cpu")


def _fake_receipt(captured: Captured) -> torch.Tensor:
    like = next(node.meta["val"] for node in captured.storage_of if isinstance(node.meta["val"], torch.Tensor))
    return like.new_empty((1,), dtype=torch.int64, device="cpu")
