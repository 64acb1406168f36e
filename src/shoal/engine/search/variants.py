"""The forms that a captured step can take: whole, with batch norms fused, on patches. Each is a graph to be traced.

That convolutions are computed in pieces changes the traced step, not the graph: see `shoal.capture.pieces`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol, TypeVar

import torch
from torch import fx
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from shoal.capture.inverted_norms import with_inverted_norms
from shoal.capture.layered import LayeredGraph, Refused, as_dynamo_graph, layered
from shoal.core.means import KERNEL_MEANS
from shoal.core.variant import WHOLE, Variant
from shoal.errors import CaptureError, InputError
from shoal.kernels import direct_convolution
from shoal.kernels.convolution_pieces import WORTH_PIECES_BYTES, may_be_worth_pieces
from shoal.lowlevel.dispatch import allowed
from shoal.transforms.fuse.fuse_graph import fuse_graph, highest_level
from shoal.transforms.fuse.fusion_size import MIN_ELEMS, FusionSize
from shoal.transforms.split.patch_sizes import Measuring, check_patches
from shoal.transforms.split.patches import Region
from shoal.transforms.split.slab_graph import SlabRegion, choose_slabs, slab_graph
from shoal.transforms.split.slice_graph import slice_graph
from shoal.transforms.split.split_graph import split_graph
from shoal.transforms.split.split_plan import SplitPlan, plan_split
from shoal.transforms.split.split_region import SplitRegion, choose_region

_CONVOLUTIONS = (
    *(torch.conv1d, torch.conv2d, torch.conv3d),
    *(torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d),
)
_NORMS = (F.batch_norm, F.group_norm, F.instance_norm)
_PRELUS = (F.prelu, torch.prelu)
_SOFTMAXES = (F.softmax, torch.softmax, torch.special.softmax, "softmax")
_PRODUCTS = (torch.matmul, torch.bmm, torch.baddbmm, operator.matmul, "matmul", "bmm", "__matmul__", torch.einsum)
_MEASURED = "tried on the machine that trains; hardware= is another one"
_CONCATENATIONS = (torch.cat, torch.concat, torch.concatenate)
Graph = TypeVar("Graph")
_Graph = TypeVar("_Graph", covariant=True)
_DEPTHS = (0.5, 0.75)
_MIN_DIMS, _MAX_DIMS = 1, 3  # of images, beside samples and channels
_VOLUME = 5  # dimensions
_PARTS = (2, 3, 4)  # along each dimension
_SLICES = (4, 16)  # of the batch, at most
_SLABS = ((8, False), (8, True), (16, True))  # how many, and whether what norms measure is computed twice
_WORTH_SLABS_BYTES = 16 << 20  # of the largest tensor
_SLICED_DEPTHS = (0.25, 0.5, 0.75, 1.0)
_SMALLER_MAPS = (0.9, 0.5, 0.25)  # of the largest map: up to these, batch norms are fused where all of them do not fit
_SMALL_BEHIND = 1 / 3  # of the largest tensor: behind slices no tensor should be larger


class Forms(Protocol[_Graph]):
    """The forms that a step can take, each with a graph of some kind: see `Variants`."""

    def of_norms(self) -> Iterator[Variant]:
        """With batch norms done by their neighbours, where there are any, and with other norms inverted."""

    def of_smaller_maps(self, fused: Variant) -> Iterator[Variant]:
        """With batch norms fused but for those of the largest maps."""

    def split(self) -> Iterator[Variant]:
        """On slices of the batch, then on slabs, then on patches, the fewest first."""

    def work(self, variant: Variant) -> PatchWork:
        """What a form on slices or patches takes; raises Refused."""

    def graph(self, variant: Variant) -> _Graph:
        """The graph of a form; raises Refused."""


class Variants:
    """The forms of one step as Dynamo captured it.

    Args:
        gm: Dynamo's graph.
        means: what may be used, of `shoal.core.means`.

    Attributes:
        own: that graph, the form in which the model's author wrote the step.
    """

    def __init__(self, gm: fx.GraphModule, means: frozenset[str]) -> None:
        self.own, self._means = gm, means
        self._every_size: FusionSize | None = None

    @property
    def _source(self) -> LayeredGraph | None:
        return self._layered if isinstance(self._layered, LayeredGraph) else None

    @cached_property
    def _layered(self) -> LayeredGraph | str:
        try:
            return layered(self.own)
        except Refused as reason:
            return str(reason)

    @property
    def has_other_graphs(self) -> bool:
        """Whether it has a form with a graph of its own."""
        return next(self.of_norms(), None) is not None or next(self.split(), None) is not None

    def why_not(self, means: str) -> str:
        """Why the step has no use for a means, as far as its graph tells; "" where it may have."""
        convolutions = [node for node in self.own.graph.nodes if node.target in _CONVOLUTIONS]
        if means == "encode":
            return "" if convolutions else "there is no convolution, whose inputs it is for"
        if means == "direct":
            volumes = [values for values in map(_values, convolutions) if values and values[0].dim() == _VOLUME]
            if not any(_may_be_direct(values) for values in volumes) and not self._joins_much:
                return "there is no convolution of volumes on the CPU for which a direct kernel is here"
        if means == "invert":
            try:
                with_inverted_norms(self.own)
            except Refused as reason:
                return str(reason)
        if means == "pieces" and not self._may_cut:
            return "there is no op whose scratch is large enough for pieces"
        if means in ("fuse", "exact_split", "split"):
            if isinstance(self._layered, str):
                return f"{self._layered}, so its layers are not taken apart"
            if means == "fuse":
                if not self._layered.layers(_BatchNorm):
                    return "there is no batch norm"
                return "" if self._level else "there is no batch norm whose work a neighbour can do"
            dims = _spatial_dims(self._layered)
            if not self._layered.layers(_ConvNd) or not _MIN_DIMS <= dims <= _MAX_DIMS:
                return "there is no convolution of images"
        return ""

    def why_not_elsewhere(self, means: str) -> str:
        """The same of one of `KERNEL_MEANS`, for a machine that is not here."""
        if means == "direct" and not self._joins_much:
            return f"there is no large concatenation, and direct convolutions are {_MEASURED}"
        if means == "pieces" and not (self._has_large_prelu or self._has_large_attention or self._has_large_norm):
            return f"there is no norm or attention of large maps, and convolutions in pieces are {_MEASURED}"
        return ""

    @property
    def _has_large_prelu(self) -> bool:
        """Whether there is one whose gradient may be worth pieces, which add up in another order."""
        prelus = (node for node in self.own.graph.nodes if node.target in _PRELUS)
        return "direct" in self._means and any(_large_map(node) is not None for node in prelus)

    @property
    def _has_large_norm(self) -> bool:
        return any(_large_map(node) is not None for node in self.own.graph.nodes)

    @property
    def _has_large_attention(self) -> bool:
        """Whether there is a softmax of what may be scores, large enough for pieces."""
        nodes = self.own.graph.nodes
        if all(node.target not in _PRODUCTS for node in nodes):
            return False
        scores = (node.meta.get("example_value") for node in nodes if node.target in _SOFTMAXES)
        return any(
            isinstance(one, torch.Tensor) and one.dim() > 2 and _bytes(one) >= WORTH_PIECES_BYTES for one in scores
        )

    @property
    def _joins_much(self) -> bool:
        """Whether there is a large concatenation, which convolutions may read the parts of."""
        joined = (node.meta.get("example_value") for node in self.own.graph.nodes if node.target in _CONCATENATIONS)
        return any(isinstance(value, torch.Tensor) and _bytes(value) >= WORTH_PIECES_BYTES for value in joined)

    @property
    def _may_cut(self) -> bool:
        if not KERNEL_MEANS & self._means:
            return False
        if "direct" in self._means and self._joins_much:
            return True
        if "pieces" in self._means and (self._has_large_prelu or self._has_large_attention):
            return True
        for node in self.own.graph.nodes:
            values = _values(node)
            if node.target in _CONVOLUTIONS and values and may_be_worth_pieces(*values):
                return True
            x = _large_map(node) if node.target in _NORMS else None
            if x is not None and x.device.type == "cuda":
                return True
        return False

    def of_norms(self) -> Iterator[Variant]:
        """With batch norms done by their neighbours, where there are any, and with other norms inverted."""
        yield from self._fused()
        if "invert" in self._means:
            yield Variant(invert=True)

    def _fused(self) -> Iterator[Variant]:
        if "fuse" not in self._means or (source := self._source) is None or not source.layers(_BatchNorm):
            return
        if self._level is not None:
            yield from fused_forms(self._level, self.norm_elems)

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
        yield from forms_up_to(fused, self.norm_elems)

    def split(self) -> Iterator[Variant]:
        """On slices of the batch, then on slabs, then on patches, the fewest first."""
        if "exact_split" in self._means:
            yield from self._sliced()
            yield from self._on_slabs()
        kinds = {"exact_split": True, "split": False}
        exact = [exact for name, exact in kinds.items() if name in self._means]
        if not exact or (source := self._source) is None or not source.layers(_ConvNd):
            return
        dims = _spatial_dims(source)
        if _MIN_DIMS <= dims <= _MAX_DIMS:
            for parts in _PARTS:
                for depth in _DEPTHS:
                    for kind in exact:
                        yield Variant(depth=depth, grid=(parts,) * dims, exact=kind)

    def _sliced(self) -> Iterator[Variant]:
        if (samples := self.samples) > 1:
            yield from sliced_forms(self.sliced_depth, samples)

    def _on_slabs(self) -> Iterator[Variant]:
        for slabs, twice in _SLABS:
            region = self._slab_region(self._source, slabs)
            if region is not None and (not twice or any(kind.endswith(" norm") for kind in region.kinds.values())):
                yield Variant(slabs=slabs, twice=twice)

    @cached_property
    def sliced_depth(self) -> float:
        """Of slices of the batch, as deep as it takes for what comes behind them to be small; 0 for none."""
        if "exact_split" not in self._means or (source := self._source) is None or not self.samples:
            return 0.0
        largest = max(_elems(node) for node in source.graph.nodes)
        return next((d for d in _SLICED_DEPTHS if self._elems_behind(d) <= _SMALL_BEHIND * largest), 1.0)

    @property
    def samples(self) -> int:
        """In the batch; 0 where there are no convolutions of images."""
        if (source := self._source) is None or not source.layers(_ConvNd):
            return 0
        images = next(iter(source.graph.nodes)).meta.get("example_value")
        samples = images.shape[0] if isinstance(images, torch.Tensor) and images.dim() > 2 else 0
        return samples if isinstance(samples, int) else 0

    def _slab_region(self, source: LayeredGraph | None, slabs: int) -> SlabRegion | None:
        """The layers of volumes that are worth it; None where there are none."""
        if source is None or _spatial_dims(source) != _VOLUME - 2 or not source.layers(_ConvNd):
            return None
        values = (node.meta.get("example_value") for node in source.graph.nodes)
        largest_bytes = max((_bytes(value) for value in values if isinstance(value, torch.Tensor)), default=0)
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

    def graph(self, variant: Variant) -> fx.GraphModule:
        """A graph with the calling convention of Dynamo's.

        Raises:
            Refused: the step does not have that form.
        """
        if replace(variant, pieces=(), shrunk=False) == WHOLE:
            return self.own
        if variant.invert:
            return with_inverted_norms(self.own)
        source = layered(self.own)  # a copy of its own: transforms change graphs
        if variant.fuse:
            if variant.large_only and self._every_size is not None and self._every_size.all_large:
                raise Refused("all maps are large")
            size = FusionSize("large" if variant.large_only else "always", self._most_elems(variant))
            if not variant.large_only and variant.up_to == 1:
                self._every_size = size  # tells when that graph has been traced
            rewritten, summary = fuse_graph(source.root, source.graph, variant.fuse, size)  # type: ignore[arg-type]
            if not summary.fused:
                raise Refused("no batch norm can be fused")
            return as_dynamo_graph(self.own, source, rewritten)
        if variant.slices:
            return self._slice_graph(source, variant)
        if variant.slabs:
            return self._slab_graph(source, variant)
        return self._split_graph(source, variant)

    def _slice_graph(self, source: LayeredGraph, variant: Variant) -> fx.GraphModule:
        region = _sliced_region(source, variant.depth)
        if region is None:
            raise Refused("nothing in it can run on slices of the batch")
        images = next(iter(source.graph.nodes)).meta["example_value"]
        rewritten = slice_graph(source.root, source.graph, region, int(images.shape[0]), variant.slices)
        return as_dynamo_graph(self.own, source, rewritten)

    def _slab_graph(self, source: LayeredGraph, variant: Variant) -> fx.GraphModule:
        region = self._slab_region(source, variant.slabs)
        if region is None:
            raise Refused("no large layer of it can run on slabs")
        return as_dynamo_graph(self.own, source, slab_graph(source.root, source.graph, region, twice=variant.twice))

    def _split_graph(self, source: LayeredGraph, variant: Variant) -> fx.GraphModule:
        cut = _cut(source, variant)
        rewritten = split_graph(source.root, source.graph, cut.region, cut.plan, joint=variant.exact)
        return as_dynamo_graph(self.own, source, rewritten, (cut.regions, cut.cores))

    def work(self, variant: Variant) -> PatchWork:
        """What a form on patches takes, known before it is captured.

        Raises:
            Refused: the step does not have that form.
        """
        source = self._source
        assert source is not None
        if variant.slices:
            region = _sliced_region(source, variant.depth)
            return PatchWork(0.0, variant.slices * len(region.nodes if region is not None else ()))
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


def fused_forms(level: str, norm_elems: Sequence[int]) -> Iterator[Variant]:
    """Everything fused at a level, and what pays by itself alone where the batch norms' sizes tell them apart."""
    yield Variant(fuse=level)
    if any(elems >= MIN_ELEMS for elems in norm_elems) and any(elems < MIN_ELEMS for elems in norm_elems):
        yield Variant(fuse=level, large_only=True)


def forms_up_to(fused: Variant, norm_elems: Sequence[int]) -> Iterator[Variant]:
    """With batch norms of the largest maps left as they are and the others fused: each fuses fewer than the last."""
    before, largest = len(norm_elems), max(norm_elems, default=0)
    for up_to in _SMALLER_MAPS:
        n_fused = sum(elems <= up_to * largest for elems in norm_elems)
        if 0 < n_fused < before:
            before = n_fused
            yield replace(fused, up_to=up_to)


def sliced_forms(depth: float, samples: int) -> Iterator[Variant]:
    """On few slices of the batch, then on more, each about as large as the others; none where the depth is 0."""
    for slices in dict.fromkeys(-(-samples // -(-samples // most)) for most in _SLICES):
        if depth and slices > 1:
            yield Variant(depth=depth, slices=slices)


@dataclass(frozen=True)
class PatchWork:
    """What patches take.

    Attributes:
        more_share: how much more the convolutions of the network compute, for what overlaps.
        n_calls: layers that are called, times patches.
    """

    more_share: float
    n_calls: int


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
        region = choose_region(source.graph, modules, dims=len(variant.grid), depth=variant.depth, join="auto")
        if region is None:
            raise Refused("nothing in it can run patch by patch")
        plan = plan_split(region, modules, variant.grid, exact=variant.exact)
        cores = plan.cores(sizes, plan.even_cuts(sizes))
        regions = plan.regions(sizes, cores)
        measuring = Measuring()
        if images.shape[0] == 1 and not variant.exact:
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


def _bytes(value: torch.Tensor) -> int:
    """The bytes of a traced tensor, whose sizes may be symbols that are guarded as numbers."""
    return int(value.numel()) * value.element_size()


def _values(node: fx.Node) -> list[torch.Tensor]:
    """The first two operands of a node and its result; nothing where one of them is no tensor."""
    operands = (*node.all_input_nodes[:2], node)
    values = [value for one in operands if isinstance(value := one.meta.get("example_value"), torch.Tensor)]
    return values if len(values) == len(operands) else []


def _large_map(node: fx.Node) -> torch.Tensor | None:
    """What a norm or a PReLU is of, where its gradient may be worth pieces."""
    known = node.target in _NORMS or node.target in _PRELUS
    x = node.args[0].meta.get("example_value") if known else None  # type: ignore[union-attr]
    return x if isinstance(x, torch.Tensor) and _bytes(x) >= WORTH_PIECES_BYTES else None


def _may_be_direct(values: Sequence[torch.Tensor]) -> bool:
    kernels = allowed().kinds
    return "native" in kernels and direct_convolution.applies(*values)


def _spatial_dims(source: LayeredGraph) -> int:
    images = next(iter(source.graph.nodes)).meta.get("example_value")
    return images.dim() - 2 if isinstance(images, torch.Tensor) else 0


def _elems(node: fx.Node) -> int:
    value = node.meta.get("example_value")
    return int(value.numel()) if isinstance(value, torch.Tensor) else 0


def _batch_norms(source: LayeredGraph) -> list[Any]:
    calls = source.graph.find_nodes(op="call_module")
    return [node for node in calls if isinstance(source.root.get_submodule(str(node.target)), _BatchNorm)]


def _flops(node: fx.Node, source: LayeredGraph) -> float:
    """Of a convolution's forward pass; 0 for any other op."""
    layer = source.root.get_submodule(str(node.target)) if node.op == "call_module" else None
    result = node.meta.get("example_value")
    if not isinstance(layer, _ConvNd) or not isinstance(result, torch.Tensor):
        return 0.0
    return 2.0 * result.numel() * layer.in_channels // layer.groups * math.prod(layer.kernel_size)
