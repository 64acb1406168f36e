"""The variants that a captured step can take: whole, with batch norms fused, on patches. Each is a graph to be traced.

That convolutions are computed in pieces changes the traced step, not the graph: see `shoal.capture.pieces`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Protocol, TypeVar

from torch import fx
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from shoal.capture.inverted_norms import with_inverted_norms
from shoal.capture.layered import LayeredGraph, Refused, as_dynamo_graph, layered
from shoal.core.means import KERNEL_MEANS
from shoal.core.variant import WHOLE, Variant
from shoal.engine.search.pieces_of_a_graph import PiecesOfAGraph
from shoal.engine.search.split_variants import MAX_DIMS, MIN_DIMS, PatchWork, SplitVariants, spatial_dims
from shoal.transforms.fuse.fuse_graph import fuse_graph, highest_level
from shoal.transforms.fuse.fusion_size import MIN_ELEMS, FusionSize

Graph = TypeVar("Graph")
_Graph = TypeVar("_Graph", covariant=True)
_SMALLER_MAPS = (0.9, 0.5, 0.25)  # of the largest map: up to these, batch norms are fused where all of them do not fit


class AnyVariants(Protocol[_Graph]):
    """The variants that a step can take, each with a graph of some kind: see `Variants`."""

    def of_norms(self) -> Iterator[Variant]:
        """With batch norms done by their neighbours, where there are any, and with other norms inverted."""

    def of_smaller_maps(self, fused: Variant) -> Iterator[Variant]:
        """With batch norms fused but for those of the largest maps."""

    def split(self) -> Iterator[Variant]:
        """On slices of the batch, then on slabs, then on patches, the fewest first."""

    def of_fewer_layers(self, sliced: Variant) -> Iterator[Variant]:
        """On as many slices of the batch with fewer and fewer layers cut."""

    def work(self, variant: Variant) -> PatchWork:
        """What a variant on slices or patches takes; raises Refused."""

    def graph(self, variant: Variant) -> _Graph:
        """The graph of a variant; raises Refused."""


class OwnVariant:
    """A step as its author wrote it, and no other variant: see `Variants`."""

    def __init__(self, gm: fx.GraphModule) -> None:
        self._own = gm

    def of_norms(self) -> Iterator[Variant]:
        return iter(())

    def of_smaller_maps(self, fused: Variant) -> Iterator[Variant]:
        return iter(())

    def split(self) -> Iterator[Variant]:
        return iter(())

    def of_fewer_layers(self, sliced: Variant) -> Iterator[Variant]:
        return iter(())

    def work(self, variant: Variant) -> PatchWork:
        raise Refused(f"no {variant} is asked for")

    def graph(self, variant: Variant) -> fx.GraphModule:
        return self._own


class Variants:
    """The variants of one step as Dynamo captured it.

    Args:
        gm: Dynamo's graph.
        means: what may be used, of `shoal.core.means`.

    Attributes:
        own: that graph, the variant in which the model's author wrote the step.
    """

    def __init__(self, gm: fx.GraphModule, means: frozenset[str]) -> None:
        self.own, self._means = gm, means
        self._pieces = PiecesOfAGraph(gm.graph, means)
        self._every_size: FusionSize | None = None
        self._graphs: dict[Variant, fx.GraphModule] = {}  # one search asks for what another did

    @property
    def _source(self) -> LayeredGraph | None:
        return self._layered if isinstance(self._layered, LayeredGraph) else None

    @cached_property
    def _layered(self) -> LayeredGraph | str:
        try:
            return layered(self.own)
        except Refused as reason:
            return str(reason)

    @cached_property
    def _splits(self) -> SplitVariants:
        return SplitVariants(self._source, self._means)

    @property
    def has_other_graphs(self) -> bool:
        """Whether it has a variant with a graph of its own."""
        return next(self.of_norms(), None) is not None or next(self.split(), None) is not None

    @property
    def has_others(self) -> bool:
        """Whether it may have any variant but its own."""
        return self.has_other_graphs or self._pieces.any

    def why_not(self, means: str) -> str:
        """Why the step has no use for a means, as far as its graph tells; "" where it may have."""
        if means == "encode":
            return "" if self._pieces.has_convolutions else "there is no convolution, whose inputs it is for"
        if means in KERNEL_MEANS:
            return self._pieces.why_not(means)
        if means == "invert":
            try:
                with_inverted_norms(self.own)
            except Refused as reason:
                return str(reason)
        if means in ("fuse", "exact_split", "split"):
            if isinstance(self._layered, str):
                return f"{self._layered}, so its layers are not taken apart"
            if means == "fuse":
                if not self._layered.layers(_BatchNorm):
                    return "there is no batch norm"
                return "" if self._level else "there is no batch norm whose work a neighbour can do"
            dims = spatial_dims(self._layered)
            if not self._layered.layers(_ConvNd) or not MIN_DIMS <= dims <= MAX_DIMS:
                return "there is no convolution of images"
        return ""

    def why_not_elsewhere(self, means: str) -> str:
        """The same of one of `KERNEL_MEANS`, for a machine that is not here."""
        return self._pieces.why_not_elsewhere(means)

    def of_norms(self) -> Iterator[Variant]:
        """With batch norms done by their neighbours, where there are any, and with other norms inverted."""
        yield from self._fused()
        if "invert" in self._means:
            yield Variant(invert=True)

    def _fused(self) -> Iterator[Variant]:
        if "fuse" not in self._means or (source := self._source) is None or not source.layers(_BatchNorm):
            return
        if self._level is not None:
            yield from fused_variants(self._level, self.norm_elems)

    @property
    def norm_elems(self) -> tuple[int, ...]:
        """Elements that each batch norm normalises."""
        if (source := self._source) is None:
            return ()
        return tuple(node.args[0].meta["example_value"].numel() for node in _batch_norms(source))

    def _most_elems(self, variant: Variant) -> int | None:
        if variant.up_to == 1:
            return None
        most_elems = int(variant.up_to * max(self.norm_elems))
        if min(self.norm_elems) > most_elems:
            raise Refused("all maps are larger")
        return most_elems

    @cached_property
    def _level(self) -> str | None:
        source = layered(self.own)
        return highest_level(source.root, source.graph)

    def of_smaller_maps(self, fused: Variant) -> Iterator[Variant]:
        """With batch norms fused but for those of the largest maps."""
        yield from variants_up_to(fused, self.norm_elems)

    def graph(self, variant: Variant) -> fx.GraphModule:
        """A graph with the calling convention of Dynamo's; the same one when it is asked for again.

        Raises:
            Refused: the step does not have that variant.
        """
        if variant not in self._graphs:
            self._graphs[variant] = self._graph(variant)
        return self._graphs[variant]

    def _graph(self, variant: Variant) -> fx.GraphModule:
        own = with_inverted_norms(self.own) if variant.invert else self.own
        is_in_parts = variant.parts != WHOLE
        if not (variant.fuse or is_in_parts):
            return own
        source = layered(own)  # a copy of its own: transforms change graphs
        rewritten, first = fx.GraphModule(source.root, source.graph), ()
        if is_in_parts:
            rewritten, first = self._splits.graph(source, variant.parts)
        if variant.fuse:
            rewritten = self._fused_graph(rewritten, variant)
        return as_dynamo_graph(own, source, rewritten, first)

    def _fused_graph(self, layers: fx.GraphModule, variant: Variant) -> fx.GraphModule:
        if variant.large_only and self._every_size is not None and self._every_size.all_large:
            raise Refused("all maps are large")
        size = FusionSize("large" if variant.large_only else "always", self._most_elems(variant))
        if variant == Variant(fuse=variant.fuse):
            self._every_size = size  # tells when that graph has been traced
        rewritten, summary = fuse_graph(layers, layers.graph, variant.fuse, size)  # type: ignore[arg-type]
        # In parts a ReLU may be left to convolutions with no batch norm before it.
        if not any(one.statistics or variant.parts == WHOLE for one in summary.fused):
            raise Refused("no batch norm can be fused")
        return rewritten

    def split(self) -> Iterator[Variant]:
        """On slices of the batch, then on slabs, then on patches, the fewest first."""
        if {"exact_split", "split"} & self._means:
            yield from self._splits

    def of_fewer_layers(self, sliced: Variant) -> Iterator[Variant]:
        """On as many slices of the batch with fewer and fewer layers cut."""
        yield from self._splits.of_fewer_layers(sliced)

    def work(self, variant: Variant) -> PatchWork:
        """What one of these takes, known before it is captured.

        Raises:
            Refused: the step does not have that variant.
        """
        return self._splits.work(variant)

    @property
    def sliced_depth(self) -> float:
        """Of slices of the batch; 0 for none."""
        return self._splits.sliced_depth

    @property
    def samples(self) -> int:
        """In the batch; 0 where there are no convolutions of images."""
        return self._splits.samples


def fused_variants(level: str, norm_elems: Sequence[int]) -> Iterator[Variant]:
    """Everything fused at a level, and what pays by itself where the batch norms' sizes tell them apart."""
    yield Variant(fuse=level)
    if any(elems >= MIN_ELEMS for elems in norm_elems) and any(elems < MIN_ELEMS for elems in norm_elems):
        yield Variant(fuse=level, large_only=True)


def variants_up_to(fused: Variant, norm_elems: Sequence[int]) -> Iterator[Variant]:
    """With batch norms of the largest maps left as they are and the others fused: each fuses fewer than the last."""
    before, largest = len(norm_elems), max(norm_elems, default=0)
    for up_to in _SMALLER_MAPS:
        n_fused = sum(elems <= up_to * largest for elems in norm_elems)
        if 0 < n_fused < before:
            before = n_fused
            yield replace(fused, up_to=up_to)


def _batch_norms(source: LayeredGraph) -> list[Any]:
    calls = source.graph.find_nodes(op="call_module")
    return [node for node in calls if isinstance(source.root.get_submodule(str(node.target)), _BatchNorm)]
