"""Which nodes of an aten graph only look at a storage that another node made."""

from __future__ import annotations

import torch
from torch import fx

_aten = torch.ops.aten
_ALIASES_UNDECLARED = frozenset({_aten._unsafe_view.default, _aten._reshape_alias.default})


def is_view(node: fx.Node) -> bool:
    """Whether the node only looks at its first operand's storage."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return False
    if node.target in _ALIASES_UNDECLARED:
        return True
    returns = node.target._schema.returns
    return len(returns) >= 1 and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)
