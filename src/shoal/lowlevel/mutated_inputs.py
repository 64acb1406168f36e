"""What AOTAutograd does with inputs that a forward pass changes, where our graphs have changed them in place already.

Its functional graph returns each input's new value, which autograd gets as a result of the step and which is copied
over the input afterwards. Where the graph writes into the input itself, as batch norms do into their running
statistics, that copies tensors over themselves: 159 results and copies in each step of a ResNet-50.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import fx
from torch._guards import TracingContext
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def are_plain(values: Iterable[object]) -> bool:
    """Whether none of a step's inputs and results is made of other tensors, as a DTensor is.

    AOTAutograd keeps two records of the inputs of a step that has such: of its own, and of the graph's.
    """
    return not any(map(is_traceable_wrapper_subclass, values))


def leave_in_place(forward: fx.GraphModule) -> None:
    """Return None for each input that the forward graph changes in place, and let AOTAutograd copy nothing there.

    Called while AOTAutograd has the forward graph of a step compiled whose inputs and results `are_plain`.

    Args:
        forward: returns the new values of changed inputs first; edited.
    """
    context = TracingContext.try_get()
    notes: Any = context.fw_metadata if context is not None else None
    inputs, end = forward.graph.find_nodes(op="placeholder"), forward.graph.output_node()
    if notes is None or len(inputs) != len(notes.input_info):
        return
    outputs: Any = list(end.args[0])  # type: ignore[arg-type]
    for place, changed in enumerate(notes.mutated_inp_runtime_indices):
        note = notes.input_info[changed]
        if outputs[place] is inputs[changed] and note.mutates_data and not note.mutates_metadata:
            outputs[place] = None
            note.mutation_type  # noqa: B018 (kept: the number of results stays)
            object.__setattr__(note, "mutates_data", False)
    end.args = (tuple(outputs),)
