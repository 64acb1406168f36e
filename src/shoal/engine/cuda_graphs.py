"""A planned step as two CUDA graphs, one for each pass: recorded when its plan has been metered, replayed from then on.

A graph reads and writes the same addresses in every replay. Parameters and buffers stay where they are; the batch and
the gradients of results are copied to where the graphs read them; all else lies in a pool that the two graphs share,
where the backward pass frees, while it is recorded, what the forward pass has saved, as the plan says.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import fx

from shoal.core.sizes import format_bytes
from shoal.engine.calls import Calls
from shoal.engine.status import Status
from shoal.errors import CaptureError
from shoal.graph.symbolic_sizes import expression_of
from shoal.kernels.generator import generator_state
from shoal.kernels.memory_format import is_writable
from shoal.lowlevel.cuda_calls import keeps_graph
from shoal.lowlevel.cuda_graphs import Graph, GraphPool, Results, invalidate
from shoal.memory.static_memory import StaticMemory
from shoal.memory.storage_bytes import WeakStorage

log = logging.getLogger("shoal")

Run = Callable[[list[Any]], Any]
OVERWRITTEN = (
    "a result of a step with cuda_graphs=True, which a later step has overwritten: copy what is needed for longer with "
    ".clone()"
)
HELD_GRADIENTS = (
    "cuda_graphs=True: gradients of the step before are still there, and a replay writes over them: call "
    "optimizer.zero_grad() (set_to_none=True, the default) before the model; leave out cuda_graphs to accumulate "
    "gradients"
)
TWO_CALLS = (
    "cuda_graphs=True: the model is called while an earlier call waits for its backward pass, and a replay writes over "
    "what that has saved; leave out cuda_graphs"
)


def refuse(reason: str) -> CaptureError:
    """A step that cannot be replayed."""
    return CaptureError(f"cuda_graphs=True: {reason}; leave out cuda_graphs")


class ReplayedSteps:
    """The CUDA graphs of one model: of one step at a time, whose pool counts in the budget.

    Args:
        status: `model.shoal`.
        static: static memory outside the step, where copies of its inputs count.
        calls: those of the model that are not over.
        name: the model's.
    """

    def __init__(self, status: Status, static: StaticMemory, calls: Calls, name: str) -> None:
        self.status, self.static, self.calls, self.name = status, static, calls, name
        self._now: GraphedStep | None = None
        static.copies_inputs = True

    def check_call(self, gradients: Sequence[torch.Tensor]) -> None:
        """Before a call of the model.

        Raises:
            CaptureError: there are gradients, or an earlier call waits for its backward pass.
        """
        if gradients:
            raise CaptureError(HELD_GRADIENTS)
        if self.calls.under_way():
            raise CaptureError(TWO_CALLS)

    def runs(self, step: GraphedStep) -> None:
        """A step runs: what another one's graphs hold is given back, such as of other sizes, or of an earlier plan."""
        if self._now is not None and self._now is not step:
            self._now.release()
        self._now = step

    def release(self) -> None:
        """Give back what the graphs hold."""
        if self._now is not None:
            self._now.release()
            self._now = None


class GraphedStep:
    """One planned step.

    Args:
        of: the graphs of its model.
        modules: its forward and its backward graph.
        device: where it runs.
        batch: names of the forward graph's inputs that are neither parameters nor buffers.
        n_outputs: how many results the forward graph returns, before what it saves.

    Raises:
        CaptureError: it cannot be replayed.
    """

    def __init__(
        self,
        of: ReplayedSteps,
        modules: tuple[fx.GraphModule, fx.GraphModule],
        device: torch.device,
        batch: Collection[str],
        n_outputs: int,
    ) -> None:
        self._of, self._device, self._n_outputs = of, device, n_outputs
        if any(node.target is generator_state for node in modules[0].graph.nodes):
            raise refuse("the plan draws the random numbers of an op a second time, from a state kept on the host")
        inputs, saved = (module.graph.find_nodes(op="placeholder") for module in modules)
        self._copied = _copied(inputs, batch, device), _copied(saved, None, device)
        self._buffers: dict[tuple[int, int], torch.Tensor] = {}  # by pass and place
        self._held: list[torch.UntypedStorage] = []
        self._pool: GraphPool | None = None
        self._graphs: list[Graph] = []
        self._results: list[Results] = []
        self._fixed: list[tuple[int, int]] = []  # addresses of parameters and buffers, by place
        self._given_out: list[WeakStorage] = []
        self._gradients: list[WeakStorage] = []

    def begins(self) -> None:
        """Before the forward pass is run, and metered: what stands for as long as the step is in force is allocated."""
        self._of.runs(self)
        if self._of.calls.under_way():
            raise CaptureError(TWO_CALLS)
        if any(gradient.is_alive for gradient in self._gradients):
            raise CaptureError(HELD_GRADIENTS)
        if not self._buffers:
            for which, nodes in enumerate(self._copied):
                for place, value in nodes.items():
                    self._buffers[which, place] = torch.empty_strided(
                        value.shape, value.stride(), dtype=value.dtype, device=value.device
                    )
            self._of.static.input_copies = list(self._buffers.values())

    def forward(self, run: Run, arguments: list[Any], *, ready: bool) -> Any:
        """Run the forward pass, or replay it.

        Args:
            run: what runs it, kernel by kernel.
            arguments: of this call; the list is emptied.
            ready: whether it is metered and checked no longer.
        """
        given = self._at_fixed_addresses(0, arguments)
        if not ready:
            outputs = run(given)
            self._hold(outputs)
            return outputs
        for held in self._given_out:
            if held.is_alive:
                invalidate(held.key, OVERWRITTEN)
        if len(self._graphs) == 2 and all(given[place].data_ptr() == address for place, address in self._fixed):
            self._graphs[0].replay()
            results, saved = self._results[0], range(self._n_outputs, self._results[0].length)
            outputs = results.again(given, [*range(self._n_outputs), *results.largest(saved)])
        else:
            self._forget()
            buffers = {place for which, place in self._buffers if which == 0}
            self._fixed = [
                (place, value.data_ptr())
                for place, value in enumerate(given)
                if isinstance(value, torch.Tensor) and place not in buffers
            ]
            self._pool = GraphPool(self._device)
            arguments = list(given)  # the list is emptied
            outputs = self._record("forward", run, given)
            self._hold(outputs)
            given = arguments
        self._given_out = _storages_of(outputs[: self._n_outputs], given)
        return outputs

    def backward(self, run: Run, arguments: list[Any]) -> Any:
        """Run the backward pass of the last call, or replay it."""
        if self._graphs and keeps_graph():
            raise refuse(
                "backward(retain_graph=True): a second backward pass would read what the first has written over"
            )
        given = self._at_fixed_addresses(1, arguments)
        if not self._graphs:
            gradients = run(given)
        elif len(self._graphs) == 2:
            self._graphs[1].replay()
            gradients = self._results[1].again(given, range(self._results[1].length))
        else:
            gradients = self._record("backward", run, given)
            self._note()
        if self._graphs:
            self._gradients = _storages_of(gradients, self._of.static.input_copies)
        self._held = []
        return gradients

    def release(self) -> None:
        """Give back the graphs, their pool and the copies of inputs."""
        self._forget()
        self._buffers, self._of.static.input_copies = {}, []

    def _forget(self) -> None:
        if self._pool is not None:
            self._pool.release(self._graphs)
        self._graphs, self._results, self._pool, self._held = [], [], None, []
        self._of.status.graph_bytes = None

    def _at_fixed_addresses(self, which: int, arguments: list[Any]) -> list[Any]:
        given = list(arguments)
        arguments.clear()
        for (owner, place), buffer in self._buffers.items():
            if owner == which:
                given[place] = buffer.copy_(given[place])
        return given

    def _hold(self, outputs: Sequence[Any]) -> None:
        """Keep the results' blocks until the backward pass is over: a caller may read them then, in any later step."""
        results = outputs[: self._n_outputs]
        self._held = [value.untyped_storage() for value in results if isinstance(value, torch.Tensor)]

    def _record(self, part: str, run: Run, given: list[Any]) -> Any:
        """Record a pass, and replay it: nothing was done yet.

        Args:
            part: "forward" or "backward".
            run: what runs it.
            given: its arguments; the list is emptied, so that what the forward pass has saved is freed while the
                backward pass is recorded.
        """
        assert self._pool is not None
        arguments = list(given) if part == "forward" else []
        fixed = arguments or list(self._buffers.values())
        try:
            graph, values = self._pool.record(lambda: run(given))
        except Exception as error:
            self._forget()
            first = error.__context__ or error
            reason = (str(first).splitlines() or [type(first).__name__])[0]
            raise refuse(f"the {part} pass cannot be recorded: {reason}") from error
        self._graphs.append(graph)
        self._results.append(Results(values, arguments, fixed, self._device))
        graph.replay()
        return values

    def _note(self) -> None:
        """Both passes are recorded: say what their pool takes."""
        assert self._pool is not None
        status = self._of.status
        status.graph_bytes = self._pool.reserved_bytes()
        log.info(
            "%s: its step is two CUDA graphs from here on, which keep %s of the device all the time",
            self._of.name,
            format_bytes(status.graph_bytes),
        )


def _copied(inputs: Sequence[fx.Node], names: Collection[str] | None, device: torch.device) -> dict[int, torch.Tensor]:
    """By their places the inputs of a graph that are copied to fixed addresses, as traced: those of these names; of the
    backward pass, without names, the gradients of results.

    Raises:
        CaptureError: one cannot be copied there.
    """
    found: dict[int, torch.Tensor] = {}
    for place, node in enumerate(inputs):
        value: Any = node.meta.get("val")
        if not isinstance(value, torch.Tensor):
            if isinstance(value, torch.SymInt) and expression_of(value).free_symbols:
                raise refuse(f"the input {node.name} is a number that varies, and a graph holds it as it is recorded")
            continue
        if value.device.type != device.type:
            raise refuse(f"the input {node.name} lies in host memory")
        if node.name in names if names is not None else node.name.startswith("tangents"):
            if not is_writable(value.shape, value.stride()):
                raise refuse(f"elements of the input {node.name} share addresses; give its .contiguous()")
            found[place] = value
    return found


def _storages_of(values: Sequence[Any], others: Sequence[Any]) -> list[WeakStorage]:
    """The storages of some tensors, except those of others."""
    known = {value.untyped_storage()._cdata for value in others if isinstance(value, torch.Tensor)}
    held = (WeakStorage(value) for value in values if isinstance(value, torch.Tensor))
    return [one for one in held if one.key not in known]
