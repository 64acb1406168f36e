"""`shoal.frontier`: step time against bytes, or images per second against batch, over all means that are allowed."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from numbers import Integral
from pathlib import Path
from typing import Any, TypedDict, Unpack, overload

import torch
from rich.table import Table
from torch import fx, nn

from shoal.capture.call_arguments import Example
from shoal.capture.capture_step import in_dynamo
from shoal.core import arguments
from shoal.core.columns import as_text
from shoal.core.files import write_json, write_text
from shoal.core.frontier import BatchFrontierData, FrontierData
from shoal.core.hardware import Hardware
from shoal.engine.options import Options
from shoal.engine.plans_by_batch import MakeExample, PlansByBatch
from shoal.engine.pricing import Pricing
from shoal.engine.search.batch_points import batch_points
from shoal.engine.search.frontier_points import FoundPoints, frontier_points
from shoal.engine.search.max_batch import MAX_IMAGES
from shoal.engine.search.variants import Variants
from shoal.errors import InputError, brief
from shoal.offload.policy import AUTO

_MAX_POINTS = 100


class _Shown(ABC):
    """Ways to look at plain data."""

    @abstractmethod
    def to_json(self) -> dict[str, Any]:
        """Plain values, for `json.dump`."""

    @abstractmethod
    def _drawings(self) -> Any:
        """The module that makes a table, a page and an image of it; imported once it is drawn."""

    def save(self, path: str | Path) -> Path:
        """Write it as JSON, whole or not at all."""
        return write_json(path, self.to_json())

    def table(self) -> Table:
        """The points as a table, for `rich.print`."""
        made: Table = self._drawings().table(self)
        return made

    def __str__(self) -> str:
        return as_text(self.table())

    def save_html(self, path: str | Path) -> Path:
        """Write it as one self-contained HTML page, whole or not at all."""
        return write_text(path, self._drawings().render(self))

    def save_svg(self, path: str | Path) -> Path:
        """Write the chart as an SVG image that stands on light and dark pages, whole or not at all."""
        return write_text(path, self._drawings().render_svg(self))


@dataclass(frozen=True)
class Frontier(FrontierData, _Shown):
    """Step time against bytes, of one model's step: plain data, and ways to look at it."""

    def to_json(self) -> dict[str, Any]:
        """Plain values, for `json.dump`."""
        return asdict(self)

    def _drawings(self) -> Any:
        from shoal.report import frontiers

        return frontiers


@dataclass(frozen=True)
class BatchFrontier(BatchFrontierData, _Shown):
    """Images per second against batch inside one budget, of one model: plain data, and ways to look at it."""

    def to_json(self) -> dict[str, Any]:
        """Plain values, for `json.dump`."""
        figures = asdict(self)
        for row, point in zip(figures["points"], self.points, strict=True):
            row["images_per_second"] = point.images_per_second
        return figures | {"best_batch": self.best.batch, "largest_batch": self.largest.batch, "too_many": self.too_many}

    def _drawings(self) -> Any:
        from shoal.report import batches

        return batches


class _Keywords(TypedDict, total=False):
    budget: int | str | None
    hardware: str | Hardware | None
    allow: str | Collection[str] | None
    optimizer: torch.optim.Optimizer | str | None
    offload_to: str | Path | None
    options: Options | None
    points: int
    max_batch: int | None
    name: str | None
    trying: Callable[[str], object]


@overload
def frontier(model: nn.Module, example: Example, **keywords: Unpack[_Keywords]) -> Frontier: ...
@overload
def frontier(model: nn.Module, example: MakeExample, **keywords: Unpack[_Keywords]) -> BatchFrontier: ...
def frontier(
    model: nn.Module,
    example: Example | MakeExample,
    *,
    budget: int | str | None = None,
    hardware: str | Hardware | None = None,
    allow: str | Collection[str] | None = None,
    optimizer: torch.optim.Optimizer | str | None = None,
    offload_to: str | Path | None = AUTO,
    options: Options | None = None,
    points: int = 10,
    max_batch: int | None = None,
    name: str | None = None,
    trying: Callable[[str], object] = lambda what: None,
) -> Frontier | BatchFrontier:
    """What a training step takes inside each budget, from the smallest that works to keeping everything.

    It replaces trying budgets one by one: variants of the step are captured and priced once, then planned inside
    budgets that are evenly spaced in the share of plain PyTorch's peak, up to where the fastest variant keeps
    everything; the last budget is that peak itself. Nothing of the model is run.

    Where `example` is a function of a batch size, as for `shoal.fit`, it is images per second against batch inside
    `budget` instead: from one image to the largest batch that fits, with the best.

    Args:
        model: the network.
        example: as for `shoal.plan`; or an int → that, which is `make_example` of `shoal.fit`.
        budget: where you stand, in bytes as for `shoal.plan`: one more point, and a line in the charts; with a
            function, what every batch has to fit in. None for SHOAL_BUDGET of the environment, if that is set.
        hardware, allow, optimizer, offload_to, options: as for `shoal.plan`.
        points: how many budgets, 2 to 100; with a function about how many batches, in addition to those around the
            best.
        max_batch: with a function, the batch to stop at; 65,536 if None.
        name: the model's name in tables and charts; by default its class.
        trying: called with what is done next, in words.

    Returns:
        A `Frontier`, plain data: `points` by increasing budget, each with its predicted step and peak, the lower bound
        of both, the variant of the step and what is kept, recomputed, offloaded and encoded. `usable` is the one of the
        smallest budget whose step takes at most twice plain PyTorch's. `table()` is for `rich.print`, `save_html(path)`
        a page, `save_svg(path)` an image, `save(path)` JSON. More bytes are never slower. With a function a
        `BatchFrontier`, with the same methods: `points` by increasing batch, each as `shoal.plan` plans it inside the
        budget; `best` is the one of the most images per second, `largest` the last.

    Raises:
        InputError: an argument is none of what is listed above, or `example` is a function and there is no budget.
        BudgetError: `example` is a function, and not even one image fits.
        CaptureError: the model is not one graph.
        PlanError: a planner of your own returned no plan, or one that breaks a rule of `shoal.core.validate`.

    Example:
        >>> import shoal
        >>> block = lambda channels: [nn.Conv2d(channels, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()]
        >>> with torch.device("meta"):
        ...     model = nn.Sequential(*block(3), *block(8), *block(8), nn.Flatten())
        ...     images = torch.empty(4, 3, 32, 32)
        >>> made = shoal.frontier(model, images, hardware="p100-nvlink", allow="recompute", points=3)
        >>> [f"{point.budget_bytes} bytes, +{100 * made.added_share(point):.0f} %" for point in made.points]
        ['1011864 bytes, +73 %', '1339544 bytes, +12 %', '1667224 bytes, +0 %']
        >>> made.save_svg("frontier.svg").name
        'frontier.svg'
        >>> def example(batch):
        ...     return torch.empty(batch, 3, 32, 32, device="meta")
        >>> made = shoal.frontier(model, example, budget="2MiB", hardware="p100-nvlink", allow="recompute", points=2)
        >>> made.best.batch, made.largest.batch, made.too_many
        (7, 8, 9)

    Known limits: the bound is that of the variants of the step that were considered; `left_out` lists the others.
    """
    if isinstance(points, bool) or not isinstance(points, Integral) or not 2 <= points <= _MAX_POINTS:
        raise InputError(f"points={brief(points)}: expected an int from 2 to {_MAX_POINTS}")
    arguments.callback("trying", trying)
    is_by_batch = callable(example)
    if max_batch is not None and not is_by_batch:
        raise InputError("max_batch= is for example= that is a function of a batch size; leave it out")
    pricing = Pricing.of(
        model,
        budget,
        hardware=hardware,
        optimizer=optimizer,
        name=name,
        many_budgets=not is_by_batch,
        offload_to=offload_to,
        allow=allow,
        options=options,
    )
    started = time.perf_counter()
    means = pricing.options.means
    where = "this machine" if pricing.target is None else pricing.target.name
    if is_by_batch:
        most = MAX_IMAGES if max_batch is None else arguments.positive("max_batch", max_batch)
        plans = PlansByBatch(pricing, example, most)
        batches = batch_points(plans, int(points), trying)
        return BatchFrontier(
            pricing.name,
            where,
            tuple(sorted(means)),
            plans.budget_bytes,
            batches.points,
            batches.unfit,
            time.perf_counter() - started,
        )

    def read(gm: fx.GraphModule, inputs: Sequence[Any]) -> FoundPoints:
        price, variants = pricing.prices(gm, inputs), Variants(gm, means)
        pricing.say_without_effect(variants)
        return frontier_points(variants, price, int(points), pricing.budget_bytes, trying)

    found = in_dynamo(model, example, read, name=pricing.name)
    return Frontier(
        pricing.name,
        where,
        tuple(sorted(means)),
        found.points,
        found.plain_seconds,
        found.plain_peak_bytes,
        pricing.budget_bytes,
        found.left_out,
        time.perf_counter() - started,
    )
