"""Planned addresses on CUDA: once the optimizer has stepped a step is recorded, and later blocks lie as laid out.

PyTorch's allocator reserves more of the device than is in use, where what is free lies in pieces. What it will do is
known once one step was recorded, and fillers make it choose the addresses of a layout without gaps
(`shoal.memory.layout.fillers`). The first step is recorded, too: steps before the placed ones have fillers where they
would reserve far more than the budget. No result depends on any of this: where a step takes another course than the
recorded one, its blocks lie elsewhere.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from shoal.capture.early_gradients import hand_over, handed_over
from shoal.capture.step_reader import storage_bytes
from shoal.core.sizes import format_bytes
from shoal.engine.compile_options import CompileOptions
from shoal.engine.first_run import nodes_in_parts, to_the_end
from shoal.engine.optimizer_steps import watch
from shoal.engine.status import Status
from shoal.lowlevel import cuda_allocator, torch_state
from shoal.lowlevel.torch_versions import CAN_RECORD_ALLOCATIONS
from shoal.memory.layout.caching_allocator import LARGEST_SMALL_BYTES, CachingAllocator
from shoal.memory.layout.fillers import Filled, RecordedStep
from shoal.memory.layout.segment_ages import trimmed_segments
from shoal.memory.layout.steering import Event, Program, carried_out

log = logging.getLogger("shoal")

_FIRST_PLACED = 2  # by the record of this run: the first one has libraries allocate what stays
_LAST_RECORDED = 20  # whatever is still to come
_PAGE_BYTES = 20 << 20  # a page of a segment that grows
_MORE = 0.015  # of a peak: what may be filled above it, or reserved beyond what was planned
_RESERVED = 1.1  # of a budget, before blocks are placed: fillers take bytes too, and are for a step that reserves more
_WORTH = 0.97  # of what is reserved anyway
_SPARE = 0.01  # of a budget: what plans leave to fill holes with at their peaks
_FILLS = "fills a hole"  # marks a filler in the record

Run = Callable[[list[Any]], Any]


class Placement:
    """The addresses of the blocks of a model's training step: of all its passes, the loss and the optimizer.

    Args:
        device: where it runs.
        status: `model.shoal`, whose reserved peak is noted.
        name: the model's, for what is logged.
        awaits_more: whether the optimizer has state to allocate yet, which stays.
        optimizer_bytes: what its next step allocates at most, with what it frees again.
    """

    def __init__(
        self,
        device: torch.device,
        status: Status,
        name: str,
        awaits_more: Callable[[], bool],
        optimizer_bytes: Callable[[], int],
    ) -> None:
        self._device = device
        self._status = status
        self._name = name
        self._awaits_more = awaits_more
        self._optimizer_bytes = optimizer_bytes
        self._is_open = True  # whether the blocks may still be placed
        self._first = ""  # the graph whose forward pass a training step begins with
        self._runs = 0
        self._is_recording = self._records_alone = self._is_over = False
        self._start = 0
        self._first_run: list[Event] = []
        self._awaited: bool | None = None  # whether state was to come when holes were filled last
        self._filled: Filled | None = None  # of steps that are not placed yet
        self._fillers: list[torch.Tensor] = []
        self._graphs: dict[str, tuple[fx.GraphModule, Callable[[fx.GraphModule], Run]]] = {}
        self._placed: dict[str, Run] = {}
        self._expected_bytes = 0
        self._passes_budget = False  # whether more was reserved between two ops
        watch(self)

    def optimizer_stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Its state is allocated: what was filled for it is released."""
        release(self._fillers)

    def follow(self, part: str, module: fx.GraphModule, run: Run, compiled: Callable[[fx.GraphModule], Run]) -> Run:
        """`run`, recorded and placed.

        Args:
            part: no other graph of the model has it.
            module: the graph that `run` runs.
            run: takes a list of arguments, which it empties; returns a generator where the graph hands gradients over.
            compiled: makes a graph such a callable.
        """
        self._graphs[part] = module, compiled
        in_parts = bool(handed_over(module.graph))
        before, has_run = self.before(part), False

        def follow(arguments: list[Any]) -> Any:
            nonlocal has_run
            is_first, has_run = not has_run, True
            if is_first or not self._is_open:
                return self._placed.get(part, run)(arguments)
            running = nodes_in_parts(module, arguments, lambda _, value: value, before)
            return running if in_parts else to_the_end(running)

        return follow

    def before(self, part: str) -> Callable[[fx.Node], None]:
        """What is to be called before each node of a graph that runs node by node: for the record, and to fill holes.

        What happens while gradients are with their hooks is outside the graph.
        """
        is_backward = part.startswith("backward")

        def before(node: fx.Node) -> None:
            release(self._fillers)
            if not self._is_open:
                return
            self._keep_within_budget(node, is_backward=is_backward)
            key = "" if node.op == "output" or node.target is hand_over else _key(part, node)
            if self._filled and (program := self._filled.programs.get(key)):
                self._label(_FILLS)
                self._fillers = fill(self._device, program)
            self._label(key)

        return before

    def _label(self, text: str) -> None:
        if self._is_recording:
            cuda_allocator.label(text)

    def begins(self, graph: str) -> None:
        """Before each forward pass of a graph of the model."""
        release(self._fillers)
        self._first = self._first or graph
        if graph != self._first or self._is_over:
            return
        self._runs += 1
        if self._is_recording:
            recorded = self._stop()
            if not recorded:  # somebody else ended the record
                self._runs = 1
            elif self._first_run:
                self._is_open = False
                self._filled = None
                held_bytes = torch_state.reserved_bytes(self._device)
                self._place(RecordedStep(recorded, trimmed_segments(self._device)))
                self._status.predicted_reserved_bytes = max(self._expected_bytes, held_bytes)  # as this step begins
                return
            else:
                self._first_run = recorded
        if not self._is_open:
            self._look()
            return
        if self._first_run and self._awaited != self._awaits_more():  # other blocks stand than when holes were filled
            self._awaited = self._awaits_more()
            self._fill()
        if self._runs == 1 or self._runs >= (_LAST_RECORDED if self._awaits_more() else _FIRST_PLACED):
            self._record()

    def _record(self) -> None:
        self._records_alone = cuda_allocator.start_record()
        self._start = cuda_allocator.record_length(self._device)
        self._is_recording = True
        cuda_allocator.label("")

    def ends(self) -> None:
        """The plans are not in force any more."""
        if self._is_recording:
            self._stop()
        self._placed.clear()
        self._is_over, self._is_open = True, False

    def _stop(self) -> list[Event]:
        """End the record; what is in it."""
        recorded = cuda_allocator.recorded(self._device, self._start)
        self._is_recording = False
        if self._records_alone:
            cuda_allocator.stop_record()
        return list(_without_fillers(Event(*entry) for entry in recorded))

    def _keep_within_budget(self, node: fx.Node, *, is_backward: bool) -> None:
        """Before a node of a run that is not placed: give cached pages back before more than the budget is reserved.

        Before the output they are given back where that has happened, since what comes next is not of the graph, and
        before the optimizer's state comes, which then lies as low as it can. Where holes are filled all pages stay, as
        long as no more are reserved than was planned.
        """
        budget_bytes = self._status.budget_bytes
        if budget_bytes is None or node.op not in ("call_function", "output"):
            return
        reserved_bytes = torch_state.reserved_bytes(self._device)
        if self._filled and reserved_bytes <= (1 + _MORE) * self._filled.reserved_bytes:
            return
        if self._filled:
            self._says_another_course(reserved_bytes, self._filled.reserved_bytes)
            self._filled = None
        cached_bytes = reserved_bytes - torch.accelerator.memory_allocated(self._device)
        is_output = node.op == "output"
        above = reserved_bytes + (0 if is_output else _result_bytes(node)) > budget_bytes
        if cached_bytes > _PAGE_BYTES and (above or (is_output and self._awaits_more())):
            torch.accelerator.empty_cache()
        self._passes_budget |= reserved_bytes > budget_bytes
        if is_output and is_backward and self._passes_budget and self._awaits_more():
            self._fill_between_gradients(budget_bytes)

    def _fill_between_gradients(self, budget_bytes: int) -> None:
        """Fill holes until the optimizer has stepped, so that its state lies after the gradients, not between them.

        Gradients are freed again, and then one large hole is where they were. Holes of segments from before stay free.
        """
        allocator = CachingAllocator.of_snapshot(cuda_allocator.segments(self._device))
        top = allocator.top
        holes = [hole.size_bytes for hole in allocator.holes(LARGEST_SMALL_BYTES) if hole.grows and hole.end < top]
        in_use_bytes = torch.accelerator.memory_allocated(self._device)
        if in_use_bytes + sum(holes) + self._optimizer_bytes() <= budget_bytes:
            self._label(_FILLS)
            self._fillers = fill(self._device, tuple(sorted(holes, reverse=True)))

    def _fill(self) -> None:
        """Fill holes in a step that is not placed yet, where more than the budget would be reserved."""
        self._filled, budget_bytes = None, self._status.budget_bytes
        if budget_bytes is None or self._status.budget_of == "reserved":  # the allocator has that for its limit
            return
        step = RecordedStep(self._first_run, trimmed_segments(self._device))
        natural = step.as_it_is()
        if natural.reserved_bytes <= _RESERVED * budget_bytes:
            return
        filled = step.filled(self._most_bytes(natural), budget_bytes)
        if filled.reserved_bytes <= _RESERVED * budget_bytes:  # else giving pages back does as well
            release(fill(self._device, filled.mapping))
            self._filled = filled

    def _most_bytes(self, natural: Filled) -> int:
        """What may be in use at the peak of a step, with what fills holes."""
        status = self._status
        left_bytes = max(0, (status.budget_bytes or 0) - (status.predicted_peak_bytes or 0))
        # Where reserved bytes are bounded it does not matter how many of them are in use.
        more_bytes = (
            left_bytes if status.budget_of == "reserved" else min(left_bytes, int(_MORE * natural.allocated_bytes))
        )
        return natural.allocated_bytes + more_bytes

    def _place(self, step: RecordedStep) -> None:
        natural = step.as_it_is()
        if natural.reserved_bytes <= (self._status.budget_bytes or 0):  # fillers take the host 2 to 30 us an op
            self._expects(natural.reserved_bytes)
            return
        filled = step.filled(self._most_bytes(natural))
        if filled.reserved_bytes > _WORTH * natural.reserved_bytes:
            self._expects(natural.reserved_bytes)
            return
        release(fill(self._device, filled.mapping))
        for part, (module, compiled) in self._graphs.items():
            _write(part, module, filled, self._device)
            self._placed[part] = compiled(module)
        self._expects(filled.reserved_bytes)
        log.info(
            "%s: its blocks lie at planned addresses from here on: %s reserved, else %s, for %s in use",
            self._name,
            format_bytes(filled.reserved_bytes),
            format_bytes(natural.reserved_bytes),
            format_bytes(natural.allocated_bytes),
        )

    def _expects(self, reserved_bytes: int) -> None:
        """Predict so much; a limit holds whatever is predicted."""
        limit_bytes = self._status.budget_bytes if self._status.budget_of == "reserved" else None
        self._expected_bytes = min(reserved_bytes, limit_bytes or reserved_bytes)
        self._status.predicted_reserved_bytes = self._expected_bytes

    def _look(self) -> None:
        """Note what is reserved now; let the allocator choose where the step takes another course than it did."""
        if not self._expected_bytes:
            return
        self._status.predicted_reserved_bytes = self._expected_bytes
        reserved_bytes = torch_state.reserved_bytes(self._device)
        self._status.reserved_peak_bytes = reserved_bytes
        if self._placed and reserved_bytes > (1 + _MORE) * self._expected_bytes:
            self._says_another_course(reserved_bytes, self._expected_bytes)
            self._placed.clear()
            torch.accelerator.empty_cache()  # pages that were mapped for addresses which are not taken

    def _says_another_course(self, reserved_bytes: int, planned_bytes: int) -> None:
        log.info(
            "%s: %s are reserved where %s were planned: the step takes another course than was recorded; its "
            "blocks lie where the allocator puts them from here on",
            self._name,
            format_bytes(reserved_bytes),
            format_bytes(planned_bytes),
        )


def spare_bytes(device: torch.device, options: CompileOptions, status: Status) -> int:
    """What a plan had better leave of the budget for what fills holes; none where no blocks are placed."""
    is_placed = bool(status.expandable_segments) and not options.cuda_graphs and CAN_RECORD_ALLOCATIONS
    if device.type != "cuda" or not is_placed or options.budget_of == "reserved":
        return 0
    return int(_SPARE * (options.budget_bytes or 0))


def fill(device: torch.device, program: Program) -> list[torch.Tensor]:
    """Blocks that fill holes; nothing is written to them. None where the device has no more to give."""

    def bytes_of(sizes: Iterable[int]) -> list[torch.Tensor]:
        return torch_state.new_tensors(device, [((size,), (1,), torch.uint8) for size in sizes])

    try:
        if min(program, default=0) > 0:
            return bytes_of(program)
        return carried_out(program, lambda size: bytes_of((size,))[0], lambda _: None)
    except torch.OutOfMemoryError:
        return []


def release(fillers: list[torch.Tensor]) -> None:
    """Release them."""
    fillers.clear()


def _without_fillers(events: Iterable[Event]) -> Iterator[Event]:
    held: set[int] = set()
    for event in events:
        if event.allocated and event.op == _FILLS:
            held.add(event.address)
        elif event.allocated or event.address not in held:
            yield event
        else:
            held.remove(event.address)


def _result_bytes(node: fx.Node) -> int:
    """Bytes of what an op returns, views counted as if they were new."""
    return sum(storage_bytes(value) for value in tree_leaves(node.meta.get("val")) if isinstance(value, torch.Tensor))


def _key(part: str, node: fx.Node) -> str:
    return f"{part} {node.name}"


def _write(part: str, module: fx.GraphModule, filled: Filled, device: torch.device) -> None:
    """Write into the graph what is filled while each of its ops runs."""
    for node in list(module.graph.nodes):
        program = filled.programs.get(_key(part, node))
        if program is not None and node.op == "call_function":
            with module.graph.inserting_before(node):
                fillers = module.graph.call_function(fill, (device, program))
            with module.graph.inserting_after(node):
                module.graph.call_function(release, (fillers,))
