"""Containers of torch.nn as functions in which Dynamo begins a graph, and goes on after a layer that ends one."""

from __future__ import annotations

import linecache
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

from torch import nn

from shoal.lowlevel.torch_state import has_global_hooks, has_hooks

_numbers = count()


def entered(module: nn.Module) -> Callable[..., Any]:
    """The module's call as a function of ours, where Dynamo may begin a graph.

    That of an `nn.Sequential` is without its loop: Dynamo leaves out all of a function whose loop breaks.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        return type(module)._call_impl(module, *args, **kwargs)

    if not in_a_row(module):
        return call
    run, names = _one_by_one(module), tuple(module._modules)

    def call_layers(*args: Any, **kwargs: Any) -> Any:
        is_as_it_was = tuple(module._modules) == names and not has_hooks(module) and not has_global_hooks()
        return run(module._modules, *args) if is_as_it_was and len(args) == 1 and not kwargs else call(*args, **kwargs)

    return call_layers


def containers(module: nn.Module) -> Iterator[nn.Module]:
    """The outermost containers of torch.nn that a module holds; of those whose layers are called in a row also those
    within. Dynamo takes their calls into a graph, but begins none there."""
    for child in module.children():
        forward = type(child).forward
        is_container = (
            getattr(forward, "__module__", "").startswith("torch.nn.")
            and forward is not nn.ModuleList.forward  # it is not called
            and next(child.children(), None) is not None
        )
        if is_container and child._compiled_call_impl is None:
            yield child
        if not is_container or in_a_row(child):
            yield from containers(child)


def in_a_row(module: nn.Module) -> bool:
    """Whether it calls its layers one after another, each with what the one before returns."""
    kind = type(module)
    return kind.forward is nn.Sequential.forward and kind.__iter__ is nn.Sequential.__iter__  # type: ignore[attr-defined]


def _one_by_one(module: nn.Module) -> Callable[..., Any]:
    """A function of an `nn.Sequential`'s layers, by name, and its input: with a line for each layer."""
    lines = [f"    x = layers[{name!r}](x)  # {type(layer).__name__}" for name, layer in module._modules.items()]
    source = "\n".join(["def run(layers, x):", *lines, "    return x", ""])
    file = f"<{type(module).__name__} {next(_numbers)}>"
    linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file  # a graph break names its line
    made: dict[str, Any] = {}
    exec(compile(source, file, "exec"), made)
    run: Callable[..., Any] = made["run"]
    return run
