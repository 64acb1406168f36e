"""The variants of a step whose first layers run in tiles: slices of the batch, slabs of volumes, patches."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import fx
from torch.nn.modules.conv import _ConvNd

from shoal.capture.layered import LayeredGraph, Refused
from shoal.core.variant import Variant
from shoal.engine.search.pieces_of_a_graph import VOLUME, bytes_of
from shoal.errors import CaptureError, InputError
from shoal.graph.symbolic_sizes import expression_of
from shoal.transforms.split.patch_sizes import Measuring, check_patches
from shoal.transforms.split.patches import Region
from shoal.transforms.split.slab_graph import SlabRegion, choose_slabs, slab_graph
from shoal.transforms.split.slice_graph import slice_graph
from shoal.transforms.split.split_graph import split_graph
from shoal.transforms.split.split_plan import SplitPlan, plan_split
from shoal.transforms.split.split_region import SplitRegion, choose_region

_DEPTHS = (0.5, 0.75)
MIN_DIMS, MAX_DIMS = 1, 3  # of images, other than samples and channels
_PARTS = (2, 3, 4)  # along each dimension
_SLICES = (4, 16)  # of the batch, at most
_SLABS = ((8, False), (8, True), (16, True))  # how many, and whether what norms measure is computed twice
_WORTH_SLABS_BYTES = 16 << 20  # of the largest tensor
_SLICED_DEPTHS = (0.25, 0.5, 0.75, 1.0)
_OF_FULL_DEPTH = (0.5, 0.25)  # of the layers that are cut to save most bytes: half as many take half the ops
_SMALL_BEHIND = 1 / 3  # of the largest tensor: after slices no tensor should be larger


@dataclass(frozen=True)
class PatchWork:
    """What patches take.

    Attributes:
        more_share: how much more the convolutions of the network compute, for what overlaps.
        n_calls: layers that are called, times patches.
    """

    more_share: float
    n_calls: int


class SplitVariants:
    """Those of one step.

    Args:
        source: its layers; None where they cannot be taken apart.
        means: what may be used, of `shoal.core.means`.
    """

    def __init__(self, source: LayeredGraph | None, means: frozenset[str]) -> None:
        self._source, self._means = source, means

    def __iter__(self) -> Iterator[Variant]:
        """On slices of the batch, then on slabs, then on patches, the fewest first."""
        if "exact_split" in self._means:
            yield from self._sliced()
            yield from self._on_slabs()
        kinds = {"exact_split": True, "split": False}
        exact = [exact for name, exact in kinds.items() if name in self._means]
        if not exact or (source := self._source) is None or not source.layers(_ConvNd):
            return
        dims = spatial_dims(source)
        if MIN_DIMS <= dims <= MAX_DIMS:
            for parts in _PARTS:
                for depth in _DEPTHS:
                    for kind in exact:
                        yield Variant(depth=depth, grid=(parts,) * dims, exact=kind)

    def _sliced(self) -> Iterator[Variant]:
        if (samples := self.samples) > 1:
            yield from sliced_variants(self.sliced_depth, samples)

    def _on_slabs(self) -> Iterator[Variant]:
        for slabs, twice in _SLABS:
            region = self._slab_region(self._source, slabs)
            if region is not None and (not twice or any(kind.endswith(" norm") for kind in region.kinds.values())):
                yield Variant(slabs=slabs, twice=twice)

    @cached_property
    def sliced_depth(self) -> float:
        """Of slices of the batch, as deep as it takes for what comes after them to be small; 0 for none."""
        if "exact_split" not in self._means or (source := self._source) is None or not self.samples:
            return 0.0
        largest = max(_elems(node) for node in source.graph.nodes)
        return next((d for d in _SLICED_DEPTHS if self._elems_behind(d) <= _SMALL_BEHIND * largest), 1.0)

    def of_fewer_layers(self, sliced: Variant) -> Iterator[Variant]:
        """On as many slices with fewer and fewer layers cut: less is slowed down, and fewer bytes are saved."""
        n_before = self._n_cut(sliced.depth)
        for share in _OF_FULL_DEPTH:
            n_cut = self._n_cut(share * sliced.depth)
            if 0 < n_cut < n_before:
                n_before = n_cut
                yield replace(sliced, depth=share * sliced.depth)

    def _n_cut(self, depth: float) -> int:
        region = None if self._source is None else _sliced_region(self._source, depth)
        return 0 if region is None else len(region.nodes)

    @property
    def samples(self) -> int:
        """In the batch; 0 where there are no convolutions of images."""
        if (source := self._source) is None or not source.layers(_ConvNd):
            return 0
        images = next(iter(source.graph.nodes)).meta.get("example_value")
        samples = images.shape[0] if isinstance(images, torch.Tensor) and images.dim() > 2 else 0
        return int(samples) if _is_a_number(samples) else 0

    def _slab_region(self, source: LayeredGraph | None, slabs: int) -> SlabRegion | None:
        """The layers of volumes that are worth it; None where there are none."""
        if source is None or spatial_dims(source) != VOLUME - 2 or not source.layers(_ConvNd):
            return None
        values = (node.meta.get("example_value") for node in source.graph.nodes)
        largest_bytes = max((bytes_of(value) for value in values if isinstance(value, torch.Tensor)), default=0)
        if largest_bytes < _WORTH_SLABS_BYTES:
            return None
        return choose_slabs(source.graph, dict(source.root.named_modules()), slabs)

    def _elems_behind(self, depth: float) -> float:
        """Of the largest tensor that would not be cut into slices."""
        source = self._source
        assert source is not None
        region = _sliced_region(source, depth)
        if region is None:
            return math.inf
        behind = [node for node in source.graph.nodes if node not in region.nodes and node.op != "placeholder"]
        return max(map(_elems, [*behind, *region.leaving]), default=0)

    def graph(self, source: LayeredGraph, variant: Variant) -> tuple[fx.GraphModule, tuple[Any, ...]]:
        """The layers of the step in a variant, and the values that its graph takes before its inputs.

        Args:
            source: the layers, a copy that may be changed.
            variant: one of `split`, or with fewer layers.

        Raises:
            Refused: the step does not have that variant.
        """
        if variant.slices:
            region = _sliced_region(source, variant.depth)
            if region is None:
                raise Refused("nothing in it can run on slices of the batch")
            images = next(iter(source.graph.nodes)).meta["example_value"]
            return slice_graph(source.root, source.graph, region, int(images.shape[0]), variant.slices), ()
        if variant.slabs:
            slabs = self._slab_region(source, variant.slabs)
            if slabs is None:
                raise Refused("no large layer of it can run on slabs")
            return slab_graph(source.root, source.graph, slabs, twice=variant.twice), ()
        cut = _cut(source, variant)
        rewritten = split_graph(source.root, source.graph, cut.region, cut.plan, joint=variant.exact)
        return rewritten, (cut.regions, cut.cores)

    def work(self, variant: Variant) -> PatchWork:
        """What a variant on patches takes, known before it is captured.

        Raises:
            Refused: the step does not have that variant.
        """
        source = self._source
        assert source is not None
        if variant.slices:
            return PatchWork(0.0, variant.slices * self._n_cut(variant.depth))
        if variant.slabs:
            slabs = self._slab_region(source, variant.slabs)
            return PatchWork(0.0, variant.slabs * len(slabs.kinds if slabs is not None else ()))
        cut = _cut(source, variant)
        nodes = list(cut.region.nodes)
        all_flops = sum(_flops(node, source) for node in source.graph.nodes)
        more_flops = 0.0
        for node, whole, patches in zip(nodes, cut.plan.lengths(cut.sizes)[1:], cut.regions[1:], strict=True):
            areas = math.prod(sum(end - begin for begin, end in spans) for spans in patches)
            more_flops += _flops(node, source) * (areas / math.prod(whole) - 1)
        return PatchWork(more_flops / max(1, all_flops), len(nodes) * math.prod(variant.grid))


def sliced_variants(depth: float, samples: int) -> Iterator[Variant]:
    """On few slices of the batch, then on more, each about as large as the others; none where the depth is 0."""
    for slices in dict.fromkeys(-(-samples // -(-samples // most)) for most in _SLICES):
        if depth and slices > 1:
            yield Variant(depth=depth, slices=slices)


@dataclass(frozen=True)
class _Cut:
    sizes: tuple[int, ...]
    region: SplitRegion
    plan: SplitPlan
    regions: tuple[Region, ...]
    cores: tuple[Region, ...]


def _cut(source: LayeredGraph, variant: Variant) -> _Cut:
    modules = dict(source.root.named_modules())
    images = next(iter(source.graph.nodes)).meta["example_value"]
    sizes = tuple(int(size) for size in images.shape[2:])
    try:
        dims, exact = len(variant.grid), variant.exact
        region = choose_region(source.graph, modules, dims=dims, depth=variant.depth, join="auto", exact=exact)
        if region is None:
            raise Refused("nothing in it can run patch by patch")
        plan = plan_split(region, modules, variant.grid, exact=exact)
        cores = plan.cores(sizes, plan.even_cuts(sizes))
        regions = plan.regions(sizes, cores)
        measuring = Measuring()
        if images.shape[0] == 1 and not exact:
            measuring = Measuring(tuple(n for n, step in enumerate(plan.steps) if step.normalises))
        check_patches(plan, sizes, regions, measuring)
    except (CaptureError, InputError) as error:
        raise Refused(str(error)) from None
    return _Cut(sizes, region, plan, regions, cores)


def _sliced_region(source: LayeredGraph, depth: float) -> SplitRegion | None:
    try:
        return choose_region(source.graph, dict(source.root.named_modules()), dims=None, depth=depth, join="auto")
    except CaptureError:
        return None


def spatial_dims(source: LayeredGraph) -> int:
    """Of the images, other than samples and channels."""
    images = next(iter(source.graph.nodes)).meta.get("example_value")
    return images.dim() - 2 if isinstance(images, torch.Tensor) else 0


def _is_a_number(size: int | torch.SymInt) -> bool:
    """Whether a size is one; what Dynamo took for a symbol, as another call had another size, may be by now."""
    return isinstance(size, int) or bool(expression_of(size).is_number)


def _elems(node: fx.Node) -> int:
    value = node.meta.get("example_value")
    return int(value.numel()) if isinstance(value, torch.Tensor) else 0


def _flops(node: fx.Node, source: LayeredGraph) -> float:
    """Of a convolution's forward pass; 0 for any other op."""
    layer = source.root.get_submodule(str(node.target)) if node.op == "call_module" else None
    result = node.meta.get("example_value")
    if not isinstance(layer, _ConvNd) or not isinstance(result, torch.Tensor):
        return 0.0
    return 2.0 * result.numel() * layer.in_channels // layer.groups * math.prod(layer.kernel_size)
