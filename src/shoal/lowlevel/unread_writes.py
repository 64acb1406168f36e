"""Writes in place whose results nothing reads stay in Dynamo's graphs.

Where a float64 tensor without dimensions is an input, as such a buffer of a model in double precision is, Dynamo may
trace a second time and then removes inputs that it knows as numbers. It removes every node of that kind that nothing
reads: of `self.count.add_(mean)` too, so that the buffer stays as it was, and all that depends on it is wrong.

PyTorch does not guarantee this name; 2.13 and 2.15 have it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from torch._dynamo.output_graph import OutputGraph

from shoal.lowlevel.asked import Asked

_METHOD = "remove_tensorify_specialized_graphargs"
_asked = Asked("keeping_unread_writes")


@contextmanager
def keeping_unread_writes() -> Iterator[None]:
    """Around a call that Dynamo may capture."""
    _let_dynamo_ask()
    with _asked.within():
        yield


@cache
def _let_dynamo_ask() -> None:
    """From here on, in this process; without effect outside of `keeping_unread_writes`."""
    remove = getattr(OutputGraph, _METHOD, None)
    if remove is not None:  # a PyTorch without it may remove them elsewhere, or not at all: the tests tell
        setattr(OutputGraph, _METHOD, _of_inputs(remove))


def _of_inputs(remove: Callable[[Any], None]) -> Callable[[Any], None]:
    def remove_inputs(output: Any) -> None:
        unread = [node for node in output.graph.nodes if _asked and node.op != "placeholder" and not node.users]
        for node in unread:
            node.users[node] = None  # what is read stays
        remove(output)
        for node in unread:
            node.users.pop(node, None)

    return remove_inputs
