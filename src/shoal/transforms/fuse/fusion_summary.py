"""What `shoal.fuse_batchnorm` fused, what it left and why: data, and a table of it."""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table

from shoal.core.columns import aligned
from shoal.transforms.stand_in import Left


@dataclass(frozen=True)
class Fused:
    """A batch norm or a ReLU that others do now.

    Attributes:
        layer: its name in the network.
        statistics: what measures its input; empty for a ReLU.
        applied: what normalises or applies a ReLU.
    """

    layer: str
    statistics: str
    applied: str


@dataclass(frozen=True)
class FusionSummary:
    """What was fused at which level, and what was left; printable as text and as a rich table.

    Attributes:
        level: of the paper.
        fused, left: layer by layer.
        blocks: dense blocks that are one buffer and one op: first and last convolution.

    >>> print(FusionSummary("bnff", (Fused("bn1", "conv1", "conv2"),), (Left("bn2", "it has forward hooks"),)))
    level bnff: 1 fused, 1 left
    bn1  statistics by conv1, applied by conv2
    bn2  left: it has forward hooks
    """

    level: str
    fused: tuple[Fused, ...]
    left: tuple[Left, ...]
    blocks: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        rows = [
            (one.layer, f"statistics by {one.statistics}, " * bool(one.statistics) + f"applied by {one.applied}")
            for one in self.fused
        ]
        rows += [(one.layer, f"left: {one.reason}") for one in self.left]
        head = f"level {self.level}: {len(self.fused)} fused, {len(self.left)} left"
        return "\n".join([head, *aligned(rows), *(f"{first} to {last}: one buffer" for first, last in self.blocks)])

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        table = Table(title=f"fuse_batchnorm, level {self.level}: {len(self.fused)} fused, {len(self.left)} left")
        for column in ("layer", "statistics by", "applied by", "left because"):
            table.add_column(column)
        for one in self.fused:
            table.add_row(one.layer, one.statistics, one.applied, "")
        for other in self.left:
            table.add_row(other.layer, "", "", other.reason)
        for first, last in self.blocks:
            table.add_row(f"{first} to {last}", "", "one buffer", "")
        yield table
