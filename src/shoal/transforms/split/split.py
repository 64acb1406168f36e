"""Split-CNN: the first layers of a network on independent patches of the image (Jin and Hong, ASPLOS'19, section 3)."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import fx, nn

from shoal.core import arguments
from shoal.core.columns import aligned
from shoal.errors import InputError, brief
from shoal.kernels.batch_norm_vectors import measures
from shoal.transforms.invert.inverted_graph import inverted_layers
from shoal.transforms.split import drawn_cuts
from shoal.transforms.split.patch_map import PatchMap
from shoal.transforms.split.patch_sizes import Measuring, all_min_rows, check_patches
from shoal.transforms.split.patches import Region, Span
from shoal.transforms.split.split_graph import split_graph
from shoal.transforms.split.split_plan import SplitPlan, plan_split
from shoal.transforms.split.split_region import SplitRegion, choose_region
from shoal.transforms.stand_in import StandIn, check_network
from shoal.transforms.tracing import traced

_log = logging.getLogger("shoal")

BatchNormMode = Literal["patch", "joint"]
CUTS_ARGUMENT = "shoal_cuts"  # of `SplitModule.forward`
_REMEMBERED = 64  # sizes of inputs, or drawn cuts


def split(
    model: nn.Module,
    depth: float = 0.5,
    grid: Sequence[int] = (2, 2),
    stochastic: float | None = None,
    batch_norm: BatchNormMode = "patch",
    join: str | None = None,
    halo: Literal["exact"] | None = None,
) -> SplitModule:
    """Split the first layers of a network into patches that are computed one after the other.

    Replaces, in plain PyTorch, a rewrite of the network's `forward` by hand: the image is cut into patches, the layers
    run on one patch after the other, and the results are joined. Each patch pads its borders as the image would be
    padded, so the function computed is another one (section 3; opt-in), unless `halo="exact"`. Workspaces and saved
    activations come in small pieces, which `shoal.compile` keeps, moves or recomputes one by one.

    Args:
        model: a network that torch.fx can trace. Its parameters, buffers and modules are shared, not copied, under
            their names; so are state dicts and the hooks on the network itself.
        depth: share of the convolutional layers to split, 0 to 1, from the first on; joined at the next block boundary.
        grid: patches along each spatial dimension, as many numbers as the convolutions have dimensions.
        stochastic: omega of Stochastic Split-CNN (section 3.3), 0 or more and less than 0.5; 0.2 is the paper's. Every
            training forward draws the cuts of the joined tensor from torch's global generator of the CPU, within omega
            of the even ones and such that every patch is large enough for its layers. `shoal.compile` makes one plan
            for all draws, which takes some times as long to capture.
        batch_norm: "patch" normalises each patch by itself, and running statistics see every patch (the paper);
            "joint" normalises by the statistics of all patches, as the unsplit network does.
        join: name of the module to join after, instead of `depth`; "auto" for the last possible place where an op that
            cannot run patch by patch comes first.
        halo: "exact" for overlapping patches with joint batch norm statistics that reproduce the unsplit network to
            rounding; what overlaps is computed twice, and dropout runs on whole images.

    Returns:
        A module that runs split while it trains, and as the unsplit network in eval mode.

    Raises:
        InputError: an argument is out of range, or the model is fused or split; in a forward pass: the input is too
            small for the grid or for a layer, which mirrors more rows than a patch has or normalises one element.
        CaptureError: torch.fx cannot trace the model, or an op before the join cannot run patch by patch; it is named.

    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1))
    >>> divided = split(net, depth=1.0, grid=(2, 2))
    >>> divided(torch.ones(1, 3, 8, 8)).shape
    torch.Size([1, 8, 8, 8])
    >>> list(divided.state_dict()) == list(net.state_dict())
    True
    >>> print(divided.describe((8, 8)))
    4 patches (2 x 2) of 8 x 8, joined at 8 x 8; batch norm by patch
    layer  dim  patches   padding   of the layer
    0      0    0:4, 4:8  1+1, 1+1  1+1
    0      1    0:4, 4:8  1+1, 1+1  1+1
    2      0    0:4, 4:8  1+1, 1+1  1+1
    2      1    0:4, 4:8  1+1, 1+1  1+1

    Limits: normalisations over space other than batch norm, adaptive pooling, transposed convolutions, circular padding
    and reshapes cannot run patch by patch. If the joined tensor has few rows, omega leaves few cuts, or only the even
    ones, which is logged.
    """
    arguments.instance("model", model, nn.Module)
    if not arguments.is_number(depth) or not 0 <= depth <= 1:
        raise InputError(f"depth={brief(depth)}: expected a share of the convolutional layers, 0 to 1")
    is_grid = isinstance(grid, Sequence) and all(isinstance(n, int) and n > 0 for n in grid)
    if not is_grid or not 1 <= len(grid) <= 3:
        raise InputError(
            f"grid={brief(grid)}: expected one to three numbers of patches, each at least 1, such as (2, 2)"
        )
    if stochastic is not None and not (arguments.is_number(stochastic) and 0 <= stochastic < 0.5):
        raise InputError(f"stochastic={brief(stochastic)}: expected omega, at least 0 and less than 0.5, or None")
    arguments.one_of("batch_norm", batch_norm, ("patch", "joint"))
    if not isinstance(join, str | None):
        raise InputError(f"join={brief(join)}: expected the name of a module, such as 'layer2', or None")
    arguments.one_of("halo", halo, ("exact", None))
    if halo == "exact" and stochastic is not None:
        raise InputError(
            "stochastic moves the cuts, and with halo='exact' the cuts change nothing; give one of the two"
        )
    return SplitModule(model, float(depth), tuple(grid), stochastic, batch_norm, join, exact=halo == "exact")


class SplitModule(StandIn):
    """A network that trains split; made by `split`, whose arguments it keeps.

    Attributes:
        grid, stochastic, batch_norm: as for `split`.
        split_in_eval: whether it is split in eval mode too, at the even cuts; False unless set. What a model gives
            to `F.dropout` as `training=self.training` stays as it was in training.
    """

    made_by = "shoal.split"

    def __init__(
        self,
        model: nn.Module,
        depth: float,
        grid: tuple[int, ...],
        stochastic: float | None,
        batch_norm: BatchNormMode,
        join: str | None,
        *,
        exact: bool,
    ) -> None:
        super().__init__(model)
        self.grid, self.stochastic, self.batch_norm = grid, stochastic, "joint" if exact else batch_norm
        self.split_in_eval = False
        self._plan: SplitPlan | None = None
        self._split: tuple[fx.GraphModule, ...] = ()
        self._drawn_sizes: set[tuple[int, ...]] = set()
        self._known: dict[Any, tuple[tuple[Region, ...], tuple[Region, ...]]] = {}
        check_network(model, ", which cannot run patch by patch; give the network it was made from")
        graph = traced(model, fx.Tracer(), training=True, instead="split a part of it")
        modules = dict(model.named_modules())
        region = choose_region(
            graph, modules, dims=len(grid), depth=depth, join=join, exact=exact, before_pooling=stochastic is not None
        )
        if region is not None and any(parts > 1 for parts in grid):
            self._plan = plan_split(region, modules, grid, exact=exact)
            joint = self.batch_norm == "joint"
            if joint:
                _refuse_inverted(graph, region)
            self._split = (split_graph(model, graph, region, self._plan, joint=joint),)

    @property
    def unsplit(self) -> nn.Module:
        """The network it was made from, with the same parameters."""
        return self.source

    @property
    def plan(self) -> SplitPlan | None:
        """What is split and how; None where nothing is."""
        return self._plan

    def forward(self, *args: Any, shoal_cuts: Any = None, **kwargs: Any) -> Any:
        """As the network's own; split in training mode, at `shoal_cuts` of `draw` where they are given."""
        plan = self._plan
        if plan is None or not (self.training or self.split_in_eval):
            return self.source.forward(*args, **kwargs)
        if not torch.compiler.is_compiling():
            self.reject_sharded_parts()
        sizes = self._sizes_of(args)
        cuts_are_drawn = shoal_cuts is not None or (self.stochastic is not None and self.training)
        if shoal_cuts is not None:
            cuts = drawn_cuts.from_sizes(shoal_cuts)
        elif self.stochastic is not None and self.training:
            self._warn_of_even_cuts(sizes)
            cuts = drawn_cuts.draw(plan, sizes, self.stochastic, self._measuring(args))
        else:
            cuts = plan.even_cuts(sizes)
        regions, cores = self._regions(sizes, cuts, self._measuring(args), drawn=cuts_are_drawn)
        return self._split[0](regions, cores, *args, **kwargs)

    def draw(self, *args: Any) -> tuple[tuple[drawn_cuts.Carrier, ...], ...] | None:
        """The cuts of the next step, to be given to `forward` as `shoal_cuts`; None where none are drawn.

        Args:
            args: what the step will be called with.

        Raises:
            InputError: the input is too small for the grid or for a layer.
        """
        if self._plan is None or not self.training:
            return None
        sizes = self._sizes_of(args)
        if self.stochastic is None:  # raised here, where no compiler is between the error and the caller
            self._regions(sizes, self._plan.even_cuts(sizes), self._measuring(args), drawn=False)
            return None
        self._warn_of_even_cuts(sizes)
        how = (self._plan, sizes, self.stochastic, self._measuring(args))
        return drawn_cuts.as_sizes(drawn_cuts.draw(*how), *drawn_cuts.limits(*how))

    def check(self, sizes: Sequence[int], images: int | None = None) -> None:
        """Whether an input of this spatial size can be split, without running anything.

        Args:
            sizes: of the input, such as (224, 224).
            images: how many there are in a batch; None for more than one.

        Raises:
            InputError: it is too small for the grid or for a layer, or has another number of dimensions.
        """
        sizes = arguments.sizes("sizes", sizes, len(self.grid))
        images = None if images is None else arguments.positive("images", images)
        if self._plan is not None:
            cores = self._plan.cores(sizes, self._plan.even_cuts(sizes))
            measuring = self._measuring_of(images)
            check_patches(self._plan, sizes, self._plan.regions(sizes, cores), measuring)
            if self.stochastic is not None:
                all_min_rows(self._plan, sizes, measuring)

    def patch_map(self, sizes: Sequence[int]) -> PatchMap | None:
        """Where the patches lie in an input of this spatial size; None where nothing is split.

        Raises:
            InputError: it is too small for the grid, or has another number of dimensions.
        """
        plan = self._plan
        if plan is None:
            return None
        self.check(sizes)
        cores = plan.cores(sizes, plan.even_cuts(sizes))
        drawn: tuple[tuple[Span, ...], ...] = ()
        if self.stochastic is not None:
            ends = [plan.cores(sizes, cuts)[0] for cuts in drawn_cuts.limits(plan, sizes, self.stochastic)]
            drawn = tuple(
                tuple((low[1], high[1]) for low, high in zip(lowest[:-1], highest[:-1], strict=True))
                for lowest, highest in zip(*ends, strict=True)
            )
        return PatchMap(
            tuple(sizes),
            cores[0],
            plan.regions(sizes, cores)[0],
            drawn,
            plan.name_of(plan.leaving[-1]),
            plan.joined(sizes),
        )

    def describe(self, sizes: Sequence[int]) -> str:
        """A table of every split layer: where each of its patches begins and ends, and how it is padded.

        Args:
            sizes: the spatial size of an input, such as (224, 224). With drawn cuts, the even ones are listed, and
                between which rows of the joined tensor each is drawn.

        Raises:
            InputError: it is too small for the grid or for a layer, or has another number of dimensions.
        """
        if self._plan is None:
            return "nothing is split"
        self.check(sizes)
        table = _described(self._plan, tuple(sizes), self.batch_norm, in_eval=bool(self.split_in_eval))
        return table if self.stochastic is None else f"{table}\n{_drawn(self._plan, tuple(sizes), self.stochastic)}"

    def extra_repr(self) -> str:
        drawn = "" if self.stochastic is None else f", stochastic={self.stochastic}"
        halo = ", halo='exact'" if self._plan is not None and self._plan.exact else ""
        in_eval = ", split_in_eval=True" if self.split_in_eval else ""
        return f"grid={self.grid}, batch_norm={self.batch_norm!r}{drawn}{halo}{in_eval}"

    def _warn_of_even_cuts(self, sizes: tuple[int, ...]) -> None:
        """Warn once for a size of which omega leaves only one row for every cut, so that nothing is drawn."""
        if self._plan is None or not self.stochastic or torch.compiler.is_compiling() or sizes in self._drawn_sizes:
            return
        self._drawn_sizes.add(sizes)
        low, high = drawn_cuts.limits(self._plan, sizes, self.stochastic)
        if low == high:
            joined = " x ".join(map(str, self._plan.joined(sizes)))
            _log.warning(
                "stochastic=%s draws nothing: at the join of %s rows only the even cuts are within omega; give a "
                "smaller depth or a greater omega",
                self.stochastic,
                joined,
            )

    def _sizes_of(self, args: Sequence[Any]) -> tuple[int, ...]:
        dims = len(self.grid)
        if not args or not isinstance(args[0], torch.Tensor) or args[0].dim() < dims + 1:
            got = type(args[0]).__name__ if args else "keyword arguments only"
            shape = f" of shape {tuple(args[0].shape)}" if args and isinstance(args[0], torch.Tensor) else ""
            raise InputError(
                f"a split network was called with {got}{shape}; expected a tensor of {dims + 2} dimensions first: "
                "batch, channels, the split ones"
            )
        return tuple(args[0].shape[-dims:])

    def _measuring(self, args: Sequence[Any]) -> Measuring:
        return self._measuring_of(args[0].shape[0])

    def _measuring_of(self, images: int | None) -> Measuring:
        """The batch norms that take statistics of each patch of one image, by number."""
        if self._plan is None or self.batch_norm != "patch" or images != 1:
            return Measuring()
        source: Any = self.source
        numbers = (n for n, s in enumerate(self._plan.steps) if s.normalises and measures(source.get_submodule(s.name)))
        return Measuring(tuple(numbers))

    def _regions(
        self, sizes: tuple[int, ...], cuts: tuple[tuple[int, ...], ...], measuring: Measuring, *, drawn: bool
    ) -> tuple[tuple[Region, ...], tuple[Region, ...]]:
        assert self._plan is not None
        key = (sizes, cuts, measuring)
        compiling = torch.compiler.is_compiling()
        if not compiling and key in self._known:
            return self._known[key]
        cores = self._plan.cores(sizes, cuts)
        regions = self._plan.regions(sizes, cores)
        if not drawn:  # where all patches are large enough
            check_patches(self._plan, sizes, regions, measuring)
        if compiling:
            return regions, cores
        if len(self._known) >= _REMEMBERED:
            self._known.pop(next(iter(self._known)))
        self._known[key] = regions, cores
        return regions, cores


def _refuse_inverted(graph: fx.Graph, region: SplitRegion) -> None:
    """An inverted batch norm has the statistics of what it is called with."""
    inside = [layer for node, layer in inverted_layers(graph).items() if node in region.nodes]
    if inside:
        raise InputError(
            f"the inverted batch norm {inside[0]} normalises each patch by itself; give batch_norm='patch' and no "
            "halo, or the network as it was before shoal.invert_norm"
        )


def _drawn(plan: SplitPlan, sizes: tuple[int, ...], omega: float) -> str:
    """Between which rows of the joined tensor cuts are drawn."""
    rows = all_min_rows(plan, sizes, Measuring())
    lines = []
    for dim, ends in enumerate(zip(*drawn_cuts.limits(plan, sizes, omega), strict=True)):
        between = ", ".join(f"{low} to {high}" for low, high in zip(*ends, strict=True))
        if between:
            needed = ", ".join(map(str, rows[dim]))
            lines.append(
                f"cuts of dim {dim} are drawn from {between} of the join, where its patches need {needed} rows"
            )
    return "\n".join(lines)


def _described(plan: SplitPlan, sizes: tuple[int, ...], batch_norm: str, *, in_eval: bool) -> str:
    cores = plan.cores(sizes, plan.even_cuts(sizes))
    regions = plan.regions(sizes, cores)
    rows = [("layer", "dim", "patches", "padding", "of the layer")]
    for number, step in enumerate(plan.steps, 1):
        if step.windows is None:
            continue
        for dim, window in enumerate(step.windows):
            inputs, outputs = regions[step.inputs[0]][dim], regions[number][dim]
            pads = [window.padding(*pair) for pair in zip(inputs, outputs, strict=True)]
            spans = ", ".join(f"{begin}:{end}" for begin, end in inputs)
            padding = ", ".join(f"{begin}+{end}" for begin, end in pads)
            rows.append((step.name, str(dim), spans, padding, f"{window.begin}+{window.end}"))
    times = " x ".join(map(str, plan.grid)), " x ".join(map(str, sizes)), " x ".join(map(str, plan.joined(sizes)))
    count = len(plan.patches)
    mode = (
        "overlapping, batch norm over all"
        if plan.exact
        else f"batch norm {'by patch' if batch_norm == 'patch' else 'over all'}"
    )
    head = f"{count} patches ({times[0]}) of {times[1]}, joined at {times[2]}; {mode}"
    if in_eval:
        head += "; split in eval mode too"
    return "\n".join([head, *aligned(rows)])
