"""Matrix products of odd sizes, computed with zeros after them: 50,257 words as 50,304.

Where a dimension of a product in half precision is not a multiple of 16 bytes, the kernel that runs loads or stores
element by element, however the rows lie in memory. There are three ways out, each for other products:

- *The dimension that is summed over*, as of the gradient of a head's input: both operands get zeros, which add nothing.
- *The columns of the result*, as of a head's logits: the operand that they come from gets zeros, and whoever reads the
  result reads a part of it, or a copy of that part.
- *Its rows*, as of the gradient of a head's weight, where an operand has or gets zeros after it: so has the result.

An operand whose longer rows are written anyway (`aligned_rows`) has zeros there. Of others a copy is made; of large
ones, as the gradient of logits that the caller's loss makes, in the product, piece by piece (`kernels.odd_products`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from shoal.capture.aligned_rows import OPERANDS, LongerOperands, added_elements, erase_views, is_little, is_odd
from shoal.capture.captured import Captured
from shoal.capture.region_ops import can_join
from shoal.capture.step_reader import storage_bytes
from shoal.capture.step_writer import StepWriter
from shoal.graph.fx_nodes import is_handed_out, reaches_output, readers
from shoal.graph.op_counts import flops
from shoal.kernels.odd_products import odd_product, odd_rows_product, odd_sum_product
from shoal.kernels.pieces import are_sizes_known
from shoal.rewrites.layouts import values_that_follow

_aten = torch.ops.aten
_ON = ("cuda",)
_DTYPES = (torch.float16, torch.bfloat16)
_LEAST_FLOPS = 4e9  # some 50 us of an H100 with odd sizes
# An H100 computes 95 to 140 TFLOP/s with odd sizes, 700 to 830 without, and copies 3 TB/s: a copied byte is paid for by
# some 20 to 30 floating-point operations. The rest is for GPUs whose kernels differ less.
_FLOPS_OF_A_BYTE = 100


@dataclass(frozen=True)
class PaddedProducts:
    """A step with padded products.

    Attributes:
        captured: the step.
        products: name of a padded product's op → the node that it stands for, in the step before; and what is in use
            instead: its own, and the copies of operands that no product before it has.
    """

    captured: Captured
    products: Mapping[str, tuple[fx.Node, Sequence[fx.Node]]]


def with_padded_products(captured: Captured, left_out: Collection[str] = ()) -> PaddedProducts:
    """The step with padded products where sizes say that they pay, on CUDA; the step as it is where there are none.

    Args:
        captured: the step, to be run on this machine in compiled regions, with aligned rows where these are.
        left_out: names of products that stay as they are.
    """
    if captured.device.type not in _ON:
        return PaddedProducts(captured, {})
    before = {node.name: node for node in captured.joint.graph.nodes}
    step = StepWriter(captured)
    writer = _PaddedProductsWriter(step)
    for ways in ((_pad_sum, _pad_columns), (_pad_rows,)):  # which looks at what the others have written
        for node in list(step.graph.nodes):
            if node.name in before and node.name not in left_out and _is_large_product(node):
                any(way(writer, node) for way in ways)  # the first that fits
    if not writer.products:
        return PaddedProducts(captured, {})
    return PaddedProducts(
        step.read(), {nodes[0].name: (before[plain], nodes) for plain, nodes in writer.products.items()}
    )


def _is_large_product(node: fx.Node) -> bool:
    if node.target not in OPERANDS or node.meta["val"].dtype not in _DTYPES:
        return False
    values = [node.meta["val"], *(operand.meta["val"] for operand in node.all_input_nodes)]
    return are_sizes_known(*values) and flops(node) >= _LEAST_FLOPS


class _PaddedProductsWriter:
    """Writes padded products into a joint graph.

    Attributes:
        operands: their operands.
        products: name of a product → what stands for it, and the copies that were made for it.
    """

    def __init__(self, step: StepWriter) -> None:
        self._step = step
        self.operands = LongerOperands(step)
        self.products: dict[str, Sequence[fx.Node]] = {}
        self._n_copies = 0

    def product(self, node: fx.Node, args: tuple[Any, ...]) -> fx.Node:
        """A product of other operands, before the plain one."""
        return self.operands.insert(node, node.target, args, node, node.kwargs, _name(node))

    def call(self, node: fx.Node, target: Callable[..., torch.Tensor], args: tuple[Any, ...]) -> fx.Node:
        """Another function that returns what a product does, before it."""
        product = self._step.call(node, target, args, node.meta["val"], node, _name(node))
        product.meta["flops"] = flops(node)
        return product

    def replace(self, node: fx.Node, product: fx.Node, part: tuple[int, int] | None = None) -> None:
        """Let a product stand for a plain one, whole; or that many elements of it along an axis."""
        result = product
        if part is not None:
            axis, length = part
            result = self.operands.insert(node, _aten.slice.Tensor, (product, axis, 0, length), node)
        self.products[node.name] = product, *self.operands.copies[self._n_copies :]
        self._n_copies = len(self.operands.copies)
        read = node.all_input_nodes
        self._step.replace(node, result)
        for operand in read:
            erase_views(operand)


def _pad_sum(writer: _PaddedProductsWriter, node: fx.Node) -> bool:
    """Put zeros after both operands where the dimension that is summed over is odd."""
    places = OPERANDS[node.target]
    a, b = (_operand(node, place) for place in places)
    axes = {a: a.meta["val"].dim() - 1, b: b.meta["val"].dim() - 2}
    value = a.meta["val"]
    size, element_bytes = value.shape[-1], value.element_size()
    there = {writer.operands.zeros_behind(one, axis, node) for one, axis in axes.items()} - {0}
    added = min(there, default=added_elements(size, element_bytes))
    if len(axes) < 2 or len(there) > 1 or not is_odd(size, element_bytes) or not is_little(added, size):
        return False
    moved_a, moved_b = (writer.operands.moved_bytes(one, axis, added, node) for one, axis in axes.items())
    if math.isinf(moved_a) and _has_odd_rows(node, a, 1) and _pays(node, moved_b + 2 * storage_bytes(value)):
        writer.replace(node, writer.call(node, odd_sum_product, (a, writer.operands.longer(b, 0, added, node))))
        return True
    if not _pays(node, moved_a + moved_b):
        return False
    args = list(node.args)
    for place, (one, axis) in zip(places, axes.items(), strict=True):
        args[place] = writer.operands.longer(one, axis, added, node)
    writer.replace(node, writer.product(node, tuple(args)))
    return True


def _pad_columns(writer: _PaddedProductsWriter, node: fx.Node) -> bool:
    """Put zeros after the second operand, and the bias, where the result's rows are odd."""
    if node.target not in (_aten.mm.default, _aten.addmm.default) or any(value != 1 for value in node.kwargs.values()):
        return False
    a, b = (_operand(node, place) for place in OPERANDS[node.target])
    biases = [_operand(node, 0)] if node.target is _aten.addmm.default else []
    value = node.meta["val"]
    n_rows, columns = value.shape
    added = added_elements(columns, value.element_size())
    if any(tuple(bias.meta["val"].shape) != (columns,) for bias in biases) or not value.is_contiguous():
        return False
    if not is_little(added, columns) or is_odd(a.meta["val"].shape[1], value.element_size()):
        return False
    part = value.new_empty((n_rows, columns + added))[:, :columns]
    read_in_part = _may_be_read_in_part(node, part)
    copied = 0 if read_in_part else 2 * storage_bytes(value)
    if not _pays(node, writer.operands.moved_bytes(b, 1, added, node) + copied):
        return False
    longer = writer.operands.longer(b, 1, added, node)
    longer_biases = [writer.operands.longer(bias, 0, added, node) for bias in biases]
    if read_in_part:
        changed = values_that_follow(node, part)
        for one, new in changed.items():
            one.meta["val"] = new
        writer.replace(node, writer.product(node, (*longer_biases, a, longer)), (1, columns))
        return True
    writer.replace(node, writer.call(node, odd_product, (a, longer, columns, *longer_biases)))
    return True


def _pad_rows(writer: _PaddedProductsWriter, node: fx.Node) -> bool:
    """Take the zeros after the first operand along, where the result has an odd number of rows."""
    if node.target is not _aten.mm.default:
        return False
    a, b = (_operand(node, place) for place in OPERANDS[node.target])
    value = node.meta["val"]
    added = writer.operands.zeros_behind(a, 0, node)
    if not is_odd(value.shape[0], value.element_size()) or not value.is_contiguous():
        return False
    if not added and _has_odd_rows(node, a, 0) and _pays(node, 2 * storage_bytes(a.meta["val"])):
        writer.replace(node, writer.call(node, odd_rows_product, (a, b)))
        return True
    if not added or is_handed_out(node):
        return False
    product = writer.product(node, (writer.operands.longer(a, 0, added, node), b))
    writer.replace(node, product, (0, value.shape[0]))
    return True


def _has_odd_rows(node: fx.Node, operand: fx.Node, axis: int) -> bool:
    """Whether a product's operand is contiguous with an axis as the last, in odd rows that a few zeros would align."""
    value = operand.meta["val"]
    rows = value if axis == 1 else value.t()
    little = is_little(added_elements(rows.shape[1], value.element_size()), rows.shape[1])
    return node.target is _aten.mm.default and rows.is_contiguous() and little


def _operand(node: fx.Node, place: int) -> fx.Node:
    operand: Any = node.args[place]
    return operand


def _name(node: fx.Node) -> str:
    return f"{node.name}_padded"


def _pays(node: fx.Node, moved_bytes: float) -> bool:
    return flops(node) >= _FLOPS_OF_A_BYTE * moved_bytes


def _may_be_read_in_part(node: fx.Node, part: torch.Tensor) -> bool:
    """Whether all who read a result may read a part of longer rows: ops of regions, which sweep over either."""
    changed = values_that_follow(node, part)
    return bool(changed) and not any(map(reaches_output, changed)) and all(map(can_join, readers(node)))
