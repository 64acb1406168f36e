"""Which activations may be kept in 8 bits a value, and how: plain data, as plans hold it."""

from __future__ import annotations

from dataclasses import dataclass

CODECS = ("dynamic_tree", "dynamic_tree_even", "static_tree", "mantissa", "linear")
DEFAULT_CODEC = "dynamic_tree"
EXEMPTIONS = frozenset({"batch_norm", "first_layer"})
DEFAULT_BLOCK_ELEMS = 4096


@dataclass(frozen=True)
class LossyOptions:
    """Convolution inputs may be kept encoded.

    Attributes:
        codec: one of `CODECS`.
        block_elems: values that share a scale; 0 for all of a tensor.
        seed: None rounds to nearest; a number seeds stochastic rounding, which is unbiased.
        exempt: of `EXEMPTIONS`: inputs of batch norms, whose backward pass then reads exact values, and what comes
            before the first convolution.
    """

    codec: str
    block_elems: int = DEFAULT_BLOCK_ELEMS
    seed: int | None = None
    exempt: frozenset[str] = EXEMPTIONS

    def describe(self) -> str:
        """For people: codec, blocks, rounding.

        >>> LossyOptions("dynamic_tree", 2048, seed=1).describe()
        'dynamic_tree in blocks of 2048, rounded stochastically'
        """
        blocks = f"in blocks of {self.block_elems}" if self.block_elems else "with one scale a tensor"
        return f"{self.codec} {blocks}" + ("" if self.seed is None else ", rounded stochastically")
