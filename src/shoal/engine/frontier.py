"""`shoal.frontier`: step time against bytes, over all means that are allowed."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from numbers import Integral
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import fx, nn

from shoal import planners
from shoal.capture.capture_step import in_dynamo
from shoal.core.files import write_json
from shoal.core.frontier import FrontierData
from shoal.core.hardware import Hardware
from shoal.engine.pricing import Pricing
from shoal.engine.search.frontier_points import Found, frontier_points
from shoal.engine.search.variants import Variants
from shoal.errors import InputError, brief
from shoal.offload.policy import AUTO

_MAX_POINTS = 100


@dataclass(frozen=True)
class Frontier(FrontierData):
    """Step time against bytes, of one model's step: plain data, and ways to look at it."""

    def to_json(self) -> dict[str, Any]:
        """Plain values, for `json.dump`."""
        return asdict(self)

    def save(self, path: str | Path) -> Path:
        """Write it as JSON, whole or not at all."""
        return write_json(path, self.to_json())

    def table(self) -> Table:
        """The points as a table, for `rich.print`."""
        from shoal.report.frontier_table import table  # what draws it is imported once it is drawn

        return table(self)

    def save_html(self, path: str | Path) -> Path:
        """Write it as one self-contained HTML page, whole or not at all."""
        from shoal.report.frontier_page import save_html

        return save_html(self, path)

    def save_svg(self, path: str | Path) -> Path:
        """Write the chart as an SVG image that stands on light and dark pages, whole or not at all."""
        from shoal.report.frontier_svg import save_svg

        return save_svg(self, path)


def frontier(
    model: nn.Module,
    example: torch.Tensor | Sequence[Any],
    *,
    budget: int | str | None = None,
    hardware: str | Hardware | None = None,
    allow: str | Collection[str] | None = None,
    planner: str | planners.Planner = "joint",
    optimizer: torch.optim.Optimizer | None = None,
    offload_to: str | Path | None = AUTO,
    host_budget: int | str | None = None,
    lossy: str | Mapping[str, Any] | None = None,
    points: int = 10,
    name: str | None = None,
    trying: Callable[[str], object] = lambda what: None,
) -> Frontier:
    """What a training step takes inside each budget, from the smallest that works to keeping everything.

    It replaces trying budgets one by one: forms of the step are captured and priced once, then planned inside budgets
    that are evenly spaced in the share of plain PyTorch's peak, up to where the fastest form keeps everything; the last
    budget is that peak itself. Nothing of the model is run.

    Args:
        model, example: as for `shoal.plan`.
        budget: where you stand, in bytes as for `shoal.plan`: one more point, and a line in the charts.
        hardware, allow, planner, optimizer, offload_to, host_budget, lossy: as for `shoal.plan`.
        points: how many budgets, 2 to 100.
        name: the model's name in tables and charts; by default its class.
        trying: called with what is done next, in words.

    Returns:
        A `Frontier`, plain data: `points` by increasing budget, each with its predicted step and peak, the lower bound
        of both, the form of the step and what is kept, recomputed, offloaded and encoded. `table()` is for
        `rich.print`, `save_html(path)` a page, `save_svg(path)` an image, `save(path)` JSON. More bytes are never
        slower.

    Raises:
        InputError: an argument is none of what is listed above.
        CodecError: `lossy` names no codec for activations.
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
        ['715632 bytes, +56 %', '975440 bytes, +8 %', '1235248 bytes, +0 %']
        >>> made.save_svg("frontier.svg").name
        'frontier.svg'

    Known limits: the bound is that of the forms of the step that were considered; `left_out` lists the others.
    """
    if isinstance(points, bool) or not isinstance(points, Integral) or not 2 <= points <= _MAX_POINTS:
        raise InputError(f"points={brief(points)}: expected an int from 2 to {_MAX_POINTS}")
    pricing = Pricing.of(
        model,
        budget,
        hardware=hardware,
        optimizer=optimizer,
        name=name,
        many_budgets=True,
        planner=planner,
        offload_to=offload_to,
        host_budget=host_budget,
        lossy=lossy,
        allow=allow,
    )
    started = time.perf_counter()
    means = pricing.options.means

    def read(gm: fx.GraphModule, inputs: Sequence[Any]) -> Found:
        price = pricing.prices(gm, inputs)
        return frontier_points(Variants(gm, means), price, int(points), pricing.budget_bytes, trying)

    found = in_dynamo(model, example, read, name=pricing.name)
    return Frontier(
        pricing.name,
        "this machine" if pricing.target is None else pricing.target.name,
        tuple(sorted(means)),
        found.points,
        found.plain_seconds,
        found.plain_peak_bytes,
        pricing.budget_bytes,
        found.left_out,
        time.perf_counter() - started,
    )
