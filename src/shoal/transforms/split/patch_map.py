"""Where the patches of a split network lie in its input, as data: for the report."""

from __future__ import annotations

from dataclasses import dataclass

Span = tuple[int, int]


@dataclass(frozen=True)
class PatchMap:
    """The patches of one input size; everything by dimension, in elements of the input.

    Attributes:
        sizes: of the input.
        cores: from..to of each patch, without overlap; with drawn cuts, at the even ones.
        reads: from..to of what each patch reads; more than the core where patches overlap.
        drawn: between which places each inner cut is drawn; empty where cuts are fixed.
        joined_behind: name of the layer after which the patches are joined.
        joined_sizes: of the tensor that they are joined to.
    """

    sizes: tuple[int, ...]
    cores: tuple[tuple[Span, ...], ...]
    reads: tuple[tuple[Span, ...], ...]
    drawn: tuple[tuple[Span, ...], ...]
    joined_behind: str
    joined_sizes: tuple[int, ...]

    @property
    def overlap_share(self) -> float:
        """How many input elements are read more than once, as a share of the input: 0 without overlap."""
        read = 1.0
        for spans, size in zip(self.reads, self.sizes, strict=True):
            read *= sum(end - begin for begin, end in spans) / size
        return read - 1.0
