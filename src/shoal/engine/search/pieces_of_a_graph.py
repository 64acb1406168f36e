"""Whether ops of a graph of Dynamo's may be computed in pieces or directly, as far as its shapes tell."""

from __future__ import annotations

import operator

import torch
from torch import fx
from torch.nn import functional as F

from shoal.core.means import KERNEL_MEANS
from shoal.kernels import direct_convolution
from shoal.kernels.convolution_pieces import may_be_worth_pieces
from shoal.kernels.pieces import WORTH_PIECES_BYTES
from shoal.lowlevel.dispatch import allowed

_CONVOLUTIONS = (
    *(torch.conv1d, torch.conv2d, torch.conv3d),
    *(torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d),
)
_NORMS = (F.batch_norm, F.group_norm, F.instance_norm)
_PRELUS = (F.prelu, torch.prelu)
_SOFTMAXES = (F.softmax, torch.softmax, torch.special.softmax, "softmax")
_PRODUCTS = (torch.matmul, torch.bmm, torch.baddbmm, operator.matmul, "matmul", "bmm", "__matmul__", torch.einsum)
_CONCATENATIONS = (torch.cat, torch.concat, torch.concatenate)
_MEASURED = "tried on the machine that trains; hardware= is another one"
VOLUME = 5  # dimensions


class PiecesOfAGraph:
    """What of a graph may be computed so.

    Args:
        graph: Dynamo's.
        means: what may be used, of `shoal.core.means`.
    """

    def __init__(self, graph: fx.Graph, means: frozenset[str]) -> None:
        self._graph, self._means = graph, means

    @property
    def has_convolutions(self) -> bool:
        """Whether there is a convolution, of whatever size."""
        return any(node.target in _CONVOLUTIONS for node in self._graph.nodes)

    @property
    def any(self) -> bool:
        """Whether there is an op for which that may be worth it."""
        if not KERNEL_MEANS & self._means:
            return False
        if "direct" in self._means and self._joins_much:
            return True
        if "pieces" in self._means and (self._has_large_prelu or self._has_large_attention):
            return True
        for node in self._graph.nodes:
            values = _values(node)
            if node.target in _CONVOLUTIONS and values and may_be_worth_pieces(*values):
                return True
            x = _large_map(node) if node.target in _NORMS else None
            if x is not None and x.device.type == "cuda":
                return True
        return False

    def why_not(self, means: str) -> str:
        """Why there is no use for one of `KERNEL_MEANS`; "" where there may be one."""
        if means == "direct" and not self._has_direct_volumes and not self._joins_much:
            return "there is no convolution of volumes on the CPU for which a direct kernel is here"
        if means == "pieces" and not self.any:
            return "there is no op whose scratch is large enough for pieces"
        return ""

    def why_not_elsewhere(self, means: str) -> str:
        """The same for a machine that is not here."""
        if means == "direct" and not self._joins_much:
            return f"there is no large concatenation, and direct convolutions are {_MEASURED}"
        if means == "pieces" and not (self._has_large_prelu or self._has_large_attention or self._has_large_norm):
            return f"there is no norm or attention of large maps, and convolutions in pieces are {_MEASURED}"
        return ""

    @property
    def _has_direct_volumes(self) -> bool:
        """Whether there is a convolution of volumes for which a direct kernel is here."""
        if "native" not in allowed().kinds:
            return False
        found = (_values(node) for node in self._graph.nodes if node.target in _CONVOLUTIONS)
        volumes = (values for values in found if values and values[0].dim() == VOLUME)
        return any(direct_convolution.applies(*values) for values in volumes)

    @property
    def _has_large_prelu(self) -> bool:
        """Whether there is one whose gradient may be worth pieces, which add up in another order."""
        prelus = (node for node in self._graph.nodes if node.target in _PRELUS)
        return "direct" in self._means and any(_large_map(node) is not None for node in prelus)

    @property
    def _has_large_norm(self) -> bool:
        return any(_large_map(node) is not None for node in self._graph.nodes)

    @property
    def _has_large_attention(self) -> bool:
        """Whether there is a softmax of what may be scores, large enough for pieces."""
        nodes = self._graph.nodes
        if all(node.target not in _PRODUCTS for node in nodes):
            return False
        scores = (node.meta.get("example_value") for node in nodes if node.target in _SOFTMAXES)
        return any(
            isinstance(one, torch.Tensor) and one.dim() > 2 and bytes_of(one) >= WORTH_PIECES_BYTES for one in scores
        )

    @property
    def _joins_much(self) -> bool:
        """Whether there is a large concatenation, which convolutions may read the parts of."""
        joined = (node.meta.get("example_value") for node in self._graph.nodes if node.target in _CONCATENATIONS)
        return any(isinstance(value, torch.Tensor) and bytes_of(value) >= WORTH_PIECES_BYTES for value in joined)


def bytes_of(value: torch.Tensor) -> int:
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
    return x if isinstance(x, torch.Tensor) and bytes_of(x) >= WORTH_PIECES_BYTES else None
