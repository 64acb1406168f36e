"""What torch.compile does in addition to each compilation that no test needs: a tenth of the time of a capture.

It writes records for logs, makes the states of a random generator of its own, which stands in for PyTorch's only where
a setting asks for it, and looks up the module of a setting that is another name for one whenever it is read.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

from torch._decomp.decompositions_for_rng import PhiloxStateTracker
from torch._dynamo import guards, utils
from torch._functorch._aot_autograd import graph_compile
from torch.utils._config_module import ConfigModule

_NOTHING: list[tuple[Any, str, Any]] = [
    (guards, "profile_guard_manager", 0.0),  # times the guards of every graph with empty caches
    (utils, "record_compilation_metrics", None),  # every setting of Dynamo, AOTAutograd and Inductor, as JSON
    (graph_compile, "_log_joint_graph", None),  # graphs, printed as code
    (graph_compile, "_log_fw_bw_graphs", (None, None)),
    (PhiloxStateTracker, "reset", None),  # six fake tensors before each, and six after it
]


@cache
def _place(alias: str) -> tuple[ModuleType, str]:
    module, _, name = alias.rpartition(".")
    return import_module(module), name


def _place_of(_: ConfigModule, entry: Any) -> tuple[ModuleType, str] | None:
    return None if entry.alias is None else _place(entry.alias)


def leave_out() -> None:
    """From now on, in this process."""
    PhiloxStateTracker.reset()
    if hasattr(ConfigModule, "_get_alias_module_and_name"):
        ConfigModule._get_alias_module_and_name = _place_of  # type: ignore[method-assign]
    for module, name, result in _NOTHING:
        if hasattr(module, name):  # another version of PyTorch may not have it
            setattr(module, name, lambda *_, result=result: result)
