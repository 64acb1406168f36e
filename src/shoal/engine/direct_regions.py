"""Compiled regions of a graph that has run, each called by the launches of its kernels."""

from __future__ import annotations

from torch import fx

from shoal.capture.fx_nodes import copied_joint
from shoal.kernels.compiled_region import CompiledRegion


def with_direct_regions(module: fx.GraphModule) -> fx.GraphModule:
    """The graph with its regions called as `CompiledRegion.launches` has them; `module` itself where none has.

    Args:
        module: a graph whose regions have run.
    """
    known = {node.target for node in module.graph.nodes if _launches(node) is not None}
    if not known:
        return module
    direct = copied_joint(module)
    for node in direct.graph.nodes:
        if node.target in known and (launches := _launches(node)) is not None:
            node.target = launches
    return direct


def _launches(node: fx.Node) -> object:
    return node.target.launches() if isinstance(node.target, CompiledRegion) and not node.kwargs else None
