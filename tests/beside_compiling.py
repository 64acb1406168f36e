"""What torch.compile does beside each compilation that no test needs: a tenth of the time of a capture.

It writes records for logs, and makes the states of a random generator of its own, which stands in for PyTorch's only
where a setting asks for it.
"""

from __future__ import annotations

from typing import Any

from torch._decomp.decompositions_for_rng import PhiloxStateTracker
from torch._dynamo import guards, utils
from torch._functorch._aot_autograd import graph_compile

_NOTHING: list[tuple[Any, str, Any]] = [
    (guards, "profile_guard_manager", 0.0),  # times the guards of every graph with empty caches
    (utils, "record_compilation_metrics", None),  # every setting of Dynamo, AOTAutograd and Inductor, as JSON
    (graph_compile, "_log_joint_graph", None),  # graphs, printed as code
    (graph_compile, "_log_fw_bw_graphs", (None, None)),
    (PhiloxStateTracker, "reset", None),  # six fake tensors before each, and six behind it
]


def leave_out() -> None:
    """From now on, in this process."""
    PhiloxStateTracker.reset()
    for module, name, result in _NOTHING:
        if hasattr(module, name):  # another version of PyTorch may not have it
            setattr(module, name, lambda *_, result=result: result)
