"""In which variant a step is computed: as the model says it, with batch norms fused, on patches, in pieces, or several.

How norms are computed and which layers run part by part combine: what is not cut has its norms fused or inverted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from shoal.core.columns import aligned
from shoal.core.sizes import format_bytes
from shoal.errors import InputError


@dataclass(frozen=True)
class Pieces:
    """An op that is computed for less scratch, such as a convolution or a norm's gradient: in pieces, or directly.

    Pieces have the bits of the whole but where they are `reordered`.

    Attributes:
        op: its name in the step.
        dim: along which dimension of the result: 0, samples; 2, the first spatial one; of a weight's gradient: 0 or 1;
            of a PReLU's: 0, all its elements; 1, channels; of attention, called by its softmax: 0, windows.
        count: how many pieces.
        direct: whether it is computed as a whole by a kernel that takes no scratch and sums in another order.
        parts: whether it is a concatenation that is not computed: convolutions that read it are sums over its parts.
        reordered: whether its pieces add up in another order than the whole.
    """

    op: str
    dim: int = 0
    count: int = 1
    direct: bool = False
    parts: bool = False
    reordered: bool = False

    def __post_init__(self) -> None:
        if self.dim not in (0, 1, 2) or self.count < 1:
            raise InputError(f"{self.op} in {self.count} pieces along {self.dim}: expected 1 or more along 0, 1 or 2")


@dataclass(frozen=True)
class Variant:
    """A variant of a step. The default is the model's own.

    Attributes:
        fuse: the level at which batch norms are done by their neighbours (`shoal.fuse_batchnorm`); "" for not at all.
            Of a step whose first layers run part by part, it is said of the others.
        large_only: whether small maps are left to PyTorch's own layers there.
        up_to: share of the largest map that a batch norm normalises: maps larger than that are left to them too.
        invert: whether instance and group norms save only the result of the activation after them.
        depth: share of the convolutions that run patch by patch (`shoal.split`); 0 for none.
        grid: patches along each spatial dimension.
        exact: whether patches overlap, so that the function stays the same.
        slices: of the batch, on which those layers run one after another instead of on patches; 0 for none.
        slabs: of the first spatial dimension, on which large layers run one after another; 0 for none.
        twice: whether what norms measure there is computed again to be normalised, and not held until then.
        shrunk: whether what waits within the backward pass is shrunk there: results of ReLUs to masks, for one.
        pieces: convolutions that are computed in pieces there, or directly.

    >>> print(Variant(), Variant(fuse="icf"), Variant(depth=0.5, grid=(2, 2)), sep="; ")
    unmodified; batch norm fused (icf); 50 % of the convolutions in 2 x 2 overlapping patches
    >>> print(Variant(depth=0.25, slices=4).with_norms(Variant(fuse="bnff")))
    batch norm fused (bnff), 25 % of the convolutions on 4 slices of the batch
    """

    fuse: str = ""
    large_only: bool = False
    up_to: float = 1.0
    invert: bool = False
    depth: float = 0.0
    grid: tuple[int, ...] = ()
    exact: bool = True
    slices: int = 0
    slabs: int = 0
    twice: bool = False
    shrunk: bool = False
    pieces: tuple[Pieces, ...] = ()

    def __str__(self) -> str:
        if self.pieces:
            others = replace(self, pieces=())
            cut_ops = [one.op for one in self.pieces if not one.direct and not one.parts]
            kinds = dict.fromkeys(map(_kind_of, cut_ops))
            counts = (
                (sum(one.direct for one in self.pieces), "direct convolutions"),
                (sum(one.parts for one in self.pieces), "concatenations left out"),
                (len(cut_ops), f"{' and '.join(sorted(kinds, reverse=True))} in pieces"),
            )
            cut = ", ".join(f"{count} {kind}" for count, kind in counts if count)
            return cut if others == WHOLE else f"{others}, {cut}"
        if self.shrunk:
            return f"{replace(self, shrunk=False)}, compact saved tensors"
        said = []
        if self.fuse:
            maps = ", large maps" if self.large_only else ""
            if self.up_to < 1:
                maps += f", maps up to {_percent(self.up_to)} of the largest"
            said.append(f"batch norm fused ({self.fuse}{maps})")
        if self.invert:
            said.append("instance and group norms inverted")
        if self.slabs:
            said.append(f"large layers on {self.slabs} slabs{', measured first' if self.twice else ''}")
        elif self.slices:
            said.append(f"{_percent(self.depth)} of the convolutions on {self.slices} slices of the batch")
        elif self.depth:
            patches = f"{' x '.join(map(str, self.grid))} {'overlapping' if self.exact else 'independent'} patches"
            said.append(f"{_percent(self.depth)} of the convolutions in {patches}")
        return ", ".join(said) or "unmodified"

    @property
    def means(self) -> frozenset[str]:
        """What has to be allowed for it."""
        used = {"direct" if one.direct or one.parts or one.reordered else "pieces" for one in self.pieces}
        if self.fuse:
            used.add("fuse")
        if self.invert:
            used.add("invert")
        if self.depth or self.slabs:
            used.add("exact_split" if self.exact else "split")
        return frozenset(used)

    @property
    def norms(self) -> Variant:
        """How it computes norms, and nothing else of it."""
        return Variant(fuse=self.fuse, large_only=self.large_only, up_to=self.up_to, invert=self.invert)

    @property
    def parts(self) -> Variant:
        """What of it runs part by part, and nothing else."""
        return replace(self, fuse="", large_only=False, up_to=1.0, invert=False, shrunk=False, pieces=())

    def with_norms(self, norms: Variant) -> Variant:
        """The same with norms computed as in another."""
        return replace(self, fuse=norms.fuse, large_only=norms.large_only, up_to=norms.up_to, invert=norms.invert)


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"


def _kind_of(op: str) -> str:
    """What an op that is cut belongs to, in the plural."""
    if "prelu" in op:
        return "PReLUs"
    if "softmax" in op:
        return "attentions"
    return "norms" if "norm" in op else "convolutions"


WHOLE = Variant()


@dataclass(frozen=True)
class Candidate:
    """A variant of a step that was considered, and what came of it.

    Attributes:
        variant: which.
        n_ops: of the step; 0 where it was not captured.
        plain_seconds, plain_peak_bytes: with everything kept; 0 likewise.
        bound_seconds: the lower bound of its step inside the budget, for the orders of ops that were considered; None
            where nothing fits by it, or the variant was not priced.
        seconds, peak_bytes: of its plan; None where none was made, or none fits.
        outcome: why it was taken, or not.
        rewrites_save_bytes: as of `StepGraph`; the step as written takes `plain_peak_bytes` and these.
    """

    variant: Variant
    n_ops: int
    plain_seconds: float
    plain_peak_bytes: int
    bound_seconds: float | None
    seconds: float | None
    peak_bytes: int | None
    outcome: str
    rewrites_save_bytes: int = 0

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


def describe_candidates(variant: Variant, candidates: Sequence[Candidate]) -> list[str]:
    """The variant of a step, and the table of those that were considered, each column as wide as its widest cell."""
    if not candidates:
        return [] if variant == WHOLE else [f"computed        {variant}"]
    lines = aligned([COLUMNS, *(one.cells() for one in candidates)])
    return [f"computed        {variant}; considered were", *(f"  {line}" for line in lines)]
