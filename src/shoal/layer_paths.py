"""Which layer of the model a node of a graph comes from, by the notes Dynamo leaves on it."""

from __future__ import annotations

import re

from torch import fx


def layer_path(node: fx.Node) -> str:
    """Module path of the layer a node belongs to, such as "layer1.0.conv1"; for backward nodes the forward layer's."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    if not stack:
        return ""
    return module_path(str(next(reversed(stack.values()))[0]))


def module_path(source: str) -> str:
    """A module's path in its model from how Dynamo writes it, or how it writes a parameter or a buffer of it.

    >>> module_path("L['model']._modules['layer1']._modules['0']._parameters['weight']")
    'layer1.0'
    """
    source = re.sub(r"\._(parameters|buffers)\['[^']*'\]$", "", source)
    source = re.sub(r"^L\['\w+'\]\.?", "", source)
    source = re.sub(r"_modules\['([^']*)'\]", r"\1", source)
    source = re.sub(r"\[(\d+)\]|\['([^']*)'\]", lambda m: f".{m.group(1) or m.group(2)}", source)
    while source != (source := re.sub(r"getattr\(([^(),]+), '([^']*)'\)", r"\1.\2", source)):
        pass  # how torch.fx writes the children of a Sequential, one in the other
    # Transforms call the network's layers under their names.
    source = re.sub(r"^.*\b_((split|fused|network)\.0|rewritten\.[01])\b", "", source)
    return source.replace("._modules", "").strip(".")
