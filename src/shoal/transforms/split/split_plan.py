"""How each tensor of a split region is cut, for any size of input: extents, lengths and, with halos, what overlaps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from shoal.errors import InputError
from shoal.transforms.split.patches import Region, Span
from shoal.transforms.split.scheme import Cuts, Tie, propagate
from shoal.transforms.split.sliding_window import SlidingWindow
from shoal.transforms.split.spatial_ops import layer_of, padding_mode, windows_of
from shoal.transforms.split.split_region import SplitRegion


@dataclass(frozen=True)
class SplitStep:
    """One op of the region.

    Attributes:
        name: of the layer or op.
        inputs: tensors it reads that are cut, by number; 0 is the region's input, n the result of the n-th op.
        windows: along each dimension; None for ops that tie their operands' cuts together.
        mirrors: whether it pads with rows of its input.
        normalises: whether it is a batch norm.
    """

    name: str
    inputs: tuple[int, ...]
    windows: tuple[SlidingWindow, ...] | None
    mirrors: bool = False
    normalises: bool = False


@dataclass(frozen=True)
class SplitPlan:
    """The region as data.

    Attributes:
        steps: in the order in which they run; step n makes tensor n + 1.
        leaving: tensors that are joined; cuts are given in rows of the last.
        grid: patches along each dimension.
        exact: whether patches overlap so that nothing is lost.
        extents: of each tensor.
        cuts: along each dimension.
    """

    steps: tuple[SplitStep, ...]
    leaving: tuple[int, ...]
    grid: tuple[int, ...]
    exact: bool
    extents: tuple[int, ...]
    cuts: tuple[Cuts, ...]

    @property
    def patches(self) -> tuple[tuple[int, ...], ...]:
        """The index of every patch, the last dimension fastest."""
        found: list[tuple[int, ...]] = [()]
        for parts in self.grid:
            found = [(*index, part) for index in found for part in range(parts)]
        return tuple(found)

    def lengths(self, sizes: Sequence[int]) -> list[tuple[int, ...]]:
        """The spatial sizes of every tensor, for an input of `sizes`."""
        found = [tuple(sizes)]
        for step in self.steps:
            size = found[step.inputs[0]]
            if step.windows is not None:
                size = tuple(w.out_length(n) for w, n in zip(step.windows, size, strict=True))
            found.append(size)
        return found

    def joined(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """The spatial sizes of the tensor in whose cuts all others are given."""
        return self.lengths(sizes)[self.leaving[-1]]

    def even_cuts(self, sizes: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """Inner cuts of the joined tensor into parts that differ by at most one row.

        Raises:
            InputError: it has fewer rows than there are parts.
        """
        joined = self.joined(sizes)
        if any(n < parts for n, parts in zip(joined, self.grid, strict=True)):
            raise InputError(
                f"grid={self.grid} is finer than the feature map at the join ({_times(joined)}); give fewer patches, a "
                "smaller depth or a larger input",
                details={"input": _times(sizes)},
            )
        pairs = zip(joined, self.grid, strict=True)
        return tuple(tuple(i * n // parts for i in range(1, parts)) for n, parts in pairs)

    def cores(self, sizes: Sequence[int], joined: Sequence[Sequence[int]]) -> tuple[Region, ...]:
        """The patches of every tensor, without overlap.

        Args:
            sizes: of the input.
            joined: inner cuts of the joined tensor, along each dimension.

        Raises:
            InputError: a patch would be empty.
        """
        lengths = self.lengths(sizes)
        found: dict[int, Region] = {}
        for tensor, extent in enumerate(self.extents):
            if extent not in found:
                per_dim = zip(self.cuts, lengths[tensor], joined, strict=True)
                found[extent] = tuple(cuts.parts(extent, n, inner) for cuts, n, inner in per_dim)
                if any(begin >= end for spans in found[extent] for begin, end in spans):
                    raise InputError(
                        f"an input of {_times(sizes)} is too small for grid={self.grid}: a patch of "
                        f"{self.name_of(tensor)} would be empty; give fewer patches or a larger input"
                    )
        return tuple(found[extent] for extent in self.extents)

    def regions(self, sizes: Sequence[int], cores: Sequence[Region]) -> tuple[Region, ...]:
        """What the patches of every tensor cover: their cores, and with `exact` all that is read for them."""
        if not self.exact:
            return tuple(cores)
        lengths = self.lengths(sizes)
        covered: list[list[list[Span]]] = [[list(spans) for spans in core] for core in cores]
        for number in reversed(range(len(self.steps))):
            step, made = self.steps[number], covered[number + 1]
            for source in step.inputs:
                for dim, spans in enumerate(made):
                    for part, span in enumerate(spans):
                        window = step.windows[dim] if step.windows is not None else SlidingWindow()
                        first, last = window.reads(span, lengths[source][dim])
                        have = covered[source][dim][part]
                        covered[source][dim][part] = (min(first, have[0]), max(last, have[1]))
        return tuple(tuple(tuple(spans) for spans in one) for one in covered)

    def name_of(self, tensor: int) -> str:
        """The layer that makes a tensor."""
        return self.steps[tensor - 1].name if tensor else "the input"


def plan_split(region: SplitRegion, modules: Mapping[str, nn.Module], grid: Sequence[int], *, exact: bool) -> SplitPlan:
    """Read off a region how its tensors are cut.

    Raises:
        CaptureError: two ways to a tensor have different strides.
    """
    number = {region.source: 0}
    extents = [0]
    steps: list[SplitStep] = []
    ties: list[list[Tie]] = [[] for _ in grid]
    same: dict[int, int] = {0: 0}

    def root(extent: int) -> int:
        while same[extent] != extent:
            extent = same[extent]
        return extent

    for node, kind in region.nodes.items():
        inputs = tuple(number[n] for n in node.all_input_nodes if n in number)
        layer = layer_of(node, modules)
        windows = None
        if kind in ("convolution", "pooling", "padding"):
            assert layer is not None
            windows = windows_of(layer, len(grid))
        name = str(node.target) if node.op == "call_module" else node.name
        made = len(steps) + 1
        if windows is None:
            for other in inputs[1:]:
                same[root(extents[other])] = root(extents[inputs[0]])
            extents.append(extents[inputs[0]])
        else:
            extent = len(same)
            same[extent] = extent
            extents.append(extent)
            for dim, window in enumerate(windows):
                ties[dim].append(Tie(name, extents[inputs[0]], extent, window))
        mirrors = layer is not None and "reflect" in (padding_mode(layer), getattr(layer, "padding_mode", None))
        normalises = kind == "batch norm" and node.op == "call_module"
        steps.append(SplitStep(name, inputs, windows, mirrors, normalises))
        number[node] = made
    settled = tuple(root(extent) for extent in extents)
    leaving = tuple(number[node] for node in region.leaving)
    order = list(dict.fromkeys(settled))
    cuts = tuple(
        propagate([Tie(t.name, root(t.source), root(t.result), t.window) for t in along], settled[leaving[-1]], order)
        for along in ties
    )
    return SplitPlan(tuple(steps), leaving, tuple(grid), exact, settled, cuts)


def _times(sizes: Sequence[int]) -> str:
    return " x ".join(map(str, sizes))
