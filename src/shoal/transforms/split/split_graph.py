"""The graph of a split network: the region once for each patch, its leaving tensors joined, the rest as it was.

Patches run depth-first: one is through before the next begins, so that what it needs comes and goes with it. Where a
batch norm has joint statistics all patches meet in it, and are depth-first in between.
"""

from __future__ import annotations

import operator

from torch import fx, nn

from shoal.transforms.split.joint_batch_norm import joint_batch_norm
from shoal.transforms.split.part_graph import PartGraphBuilder, between_batch_norms
from shoal.transforms.split.patches import convolve, crop, cut, join, pad, pool
from shoal.transforms.split.spatial_ops import layer_of
from shoal.transforms.split.split_plan import SplitPlan
from shoal.transforms.split.split_region import SplitRegion

_WINDOW_OPS = {"convolution": convolve, "pooling": pool, "padding": pad}


def split_graph(
    root: nn.Module, graph: fx.Graph, region: SplitRegion, plan: SplitPlan, *, joint: bool
) -> fx.GraphModule:
    """Build it.

    Args:
        root: the network, whose layers the result calls.
        graph: of the whole network.
        region: what is split.
        plan: how.
        joint: whether batch norms have the statistics of all patches.

    Returns:
        A module called with what `SplitPlan.regions` and `cores` give, then with the network's own inputs.
    """
    return _SplitGraphBuilder(root, graph, region, plan, joint).build()


class _SplitGraphBuilder(PartGraphBuilder):
    def __init__(self, root: nn.Module, graph: fx.Graph, region: SplitRegion, plan: SplitPlan, joint: bool) -> None:
        super().__init__(root, graph)
        self.region = region
        self.plan = plan
        self.joint = joint
        self.outside: dict[fx.Node, fx.Node] = {}
        self.patch_of: dict[tuple[fx.Node, tuple[int, ...]], fx.Node] = {}
        self.number = {region.source: 0, **{node: n for n, node in enumerate(region.nodes, 1)}}
        self.have: dict[int, fx.Node] = {}
        self.core: dict[int, fx.Node] = {}

    def build(self) -> fx.GraphModule:
        regions, cores = self.out.placeholder("shoal_regions"), self.out.placeholder("shoal_cores")
        order = list(self.graph.nodes)
        for node in order:
            if node.op in ("placeholder", "get_attr"):
                self.outside[node] = self.out.node_copy(node)
        for tensor in range(len(self.plan.steps) + 1):
            self.have[tensor] = self.out.call_function(operator.getitem, (regions, tensor))
            if self.joint or tensor in self.plan.leaving:
                self.core[tensor] = self.out.call_function(operator.getitem, (cores, tensor))
        inside = self.region.nodes
        for stretch in between_batch_norms(inside) if self.joint else [list(inside)]:
            if self.joint and self.region.nodes[stretch[0]] == "batch norm":
                self._normalise_jointly(stretch[0])
                continue
            for patch in self.plan.patches:
                for node in stretch:
                    self._copy(node, patch)
        for node, tensor in zip(self.region.leaving, self.plan.leaving, strict=True):
            patches = [
                self.out.call_function(crop, (self.patch_of[node, p], self.have[tensor], self.core[tensor], p))
                for p in self.plan.patches
            ]
            self.outside[node] = self.out.call_function(join, (patches, self.plan.grid))
        for node in order:
            if node.op not in ("placeholder", "get_attr") and node not in self.region.nodes:
                self.outside[node] = self.out.node_copy(node, self.outside.__getitem__)
        for node in [*self.have.values(), *self.core.values()]:
            if not node.users:
                self.out.erase_node(node)
        return self.module("SplitGraph")

    def _copy(self, node: fx.Node, patch: tuple[int, ...]) -> None:
        kind, tensor = self.region.nodes[node], self.number[node]

        def operand(needed: fx.Node) -> fx.Node:
            if needed not in self.number:
                return self.outside[needed]
            source = self.number[needed]
            have = self.have[source]
            x = self.patch_of.get((needed, patch))
            if x is None:  # the region's input
                x = self.patch_of[needed, patch] = self.out.call_function(cut, (self.outside[needed], have, patch))
            if kind in _WINDOW_OPS or not self.plan.exact:
                return x
            return self.out.call_function(crop, (x, have, self.have[tensor], patch))

        if kind in _WINDOW_OPS:
            x = operand(self._source_of(node))
            arguments = (
                x,
                self._layer_of(node),
                self.have[self.number[self._source_of(node)]],
                self.have[tensor],
                patch,
            )
            self.patch_of[node, patch] = self.out.call_function(_WINDOW_OPS[kind], arguments)
        else:
            self.patch_of[node, patch] = self.out.node_copy(node, operand)

    def _normalise_jointly(self, node: fx.Node) -> None:
        source = self._source_of(node)
        at, tensor = self.number[source], self.number[node]
        patches = [self.patch_of[source, patch] for patch in self.plan.patches]
        arguments = (patches, self._layer_of(node), self.have[at], self.core[at], self.plan.patches)
        results = self.out.call_function(joint_batch_norm, arguments)
        for place, patch in enumerate(self.plan.patches):
            y = self.out.call_function(operator.getitem, (results, place))
            if self.plan.exact:
                y = self.out.call_function(crop, (y, self.have[at], self.have[tensor], patch))
            self.patch_of[node, patch] = y

    def _source_of(self, node: fx.Node) -> fx.Node:
        return next(n for n in node.all_input_nodes if n in self.number)

    def _layer_of(self, node: fx.Node) -> fx.Node:
        if node.op == "call_module":
            return self.layer(str(node.target))
        pooling = layer_of(node, self.modules)  # in place of a function
        assert pooling is not None
        name = f"shoal_{node.name}"
        self.added[name] = pooling
        return self.layer(name)
