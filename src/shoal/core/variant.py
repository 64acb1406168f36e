"""In which form a step is computed: as the model says it, with batch norms fused, or on patches of the image."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.core.sizes import format_bytes


@dataclass(frozen=True)
class Variant:
    """A form of a step. The default is the model's own.

    Attributes:
        fuse: the level at which batch norms are done by their neighbours (`shoal.fuse_batchnorm`); "" for not at all.
        large_only: whether small maps are left to PyTorch's own layers there.
        depth: share of the convolutions that run patch by patch (`shoal.split`); 0 for none.
        grid: patches along each spatial dimension.
        exact: whether patches overlap, so that the function stays the same.

    >>> print(Variant(), Variant(fuse="icf"), Variant(depth=0.5, grid=(2, 2)), sep="; ")
    as it is; batch norm fused (icf); 50 % of the convolutions in 2 x 2 overlapping patches
    """

    fuse: str = ""
    large_only: bool = False
    depth: float = 0.0
    grid: tuple[int, ...] = ()
    exact: bool = True

    def __str__(self) -> str:
        if self.fuse:
            return f"batch norm fused ({self.fuse}{', large maps' if self.large_only else ''})"
        if not self.depth:
            return "as it is"
        patches = f"{' x '.join(map(str, self.grid))} {'overlapping' if self.exact else 'independent'} patches"
        return f"{self.depth:.0%} of the convolutions in {patches}".replace("%", " %")

    @property
    def means(self) -> frozenset[str]:
        """What has to be allowed for it."""
        if self.fuse:
            return frozenset({"fuse"})
        return frozenset({"exact_split" if self.exact else "split"}) if self.depth else frozenset()


WHOLE = Variant()


@dataclass(frozen=True)
class Candidate:
    """A form of a step that was considered, and what came of it.

    Attributes:
        variant: the form.
        n_ops: of the step; 0 where it was not captured.
        plain_seconds, plain_peak_bytes: with everything kept; 0 likewise.
        bound_seconds: the lower bound of its step inside the budget, for the orders of ops that were considered; None
            where nothing fits by it, or the form was not priced.
        seconds, peak_bytes: of its plan; None where none was made, or none fits.
        outcome: why it was taken, or not.
    """

    variant: Variant
    n_ops: int
    plain_seconds: float
    plain_peak_bytes: int
    bound_seconds: float | None
    seconds: float | None
    peak_bytes: int | None
    outcome: str

    def cells(self) -> tuple[str, ...]:
        """A row of the table of candidates, for people; `COLUMNS` heads it."""
        return (
            str(self.variant),
            str(self.n_ops or "-"),
            f"{1e3 * self.plain_seconds:.1f}" if self.n_ops else "-",
            format_bytes(self.plain_peak_bytes) if self.n_ops else "-",
            "-" if self.bound_seconds is None else f"{1e3 * self.bound_seconds:.1f}",
            "-" if self.seconds is None else f"{1e3 * self.seconds:.1f}",
            "-" if self.peak_bytes is None else format_bytes(self.peak_bytes),
            self.outcome,
        )


COLUMNS = ("variant", "ops", "plain ms", "plain peak", "bound ms", "step ms", "peak", "outcome")
