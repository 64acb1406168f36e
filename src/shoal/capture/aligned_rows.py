"""Operands of matrix products whose rows begin at multiples of 16 bytes, where rows of odd length would not.

Tensor cores are fed 16 bytes at a time. A product whose operand has 50,257 columns in bfloat16, as the gradient of
GPT-2's logits, runs a kernel that loads element by element. Where an op writes that operand anyway, and a region can
take the op in, it writes longer rows, and products read a part of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from shoal.capture.captured import Captured
from shoal.capture.region_ops import can_join
from shoal.capture.step_reader import storage_bytes
from shoal.capture.step_writer import StepWriter
from shoal.graph.fx_nodes import is_view, reaches_output
from shoal.kernels.pieces import are_sizes_known
from shoal.rewrites.layouts import values_that_follow

_aten = torch.ops.aten
_PAD = _aten.constant_pad_nd.default
_ON = ("cuda",)
_DTYPES = (torch.float16, torch.bfloat16)
OPERANDS: dict[Any, tuple[int, int]] = {
    _aten.mm.default: (0, 1),
    _aten.bmm.default: (0, 1),
    _aten.addmm.default: (1, 2),
    _aten.baddbmm.default: (1, 2),
}
"""Of matrix products: places of the two matrices."""
_CHUNK_BYTES, _LINE_BYTES = 16, 128
_MOST_ADDED = 1 / 50  # of a row
_LEAST_BYTES = 1 << 20


@dataclass(frozen=True)
class _AlignedRows:
    """Rows to be made longer: whose, what the longer ones are made of, and how many elements they get."""

    node: fx.Node
    made_of: fx.Node
    added: int


def with_aligned_rows(captured: Captured) -> Captured:
    """The step with operands of its matrix products in aligned rows, on CUDA; the step as it is where none is odd.

    Args:
        captured: the step, to be run on this machine in compiled regions.
    """
    if captured.device.type not in _ON:
        return captured
    writer = StepWriter(captured)
    found = False
    for node in list(writer.graph.nodes):
        rows = _rows(node)
        if rows is not None and _write_longer(writer, rows):
            found = True
            if rows.made_of is not node:  # the copy that the longer rows are in place of
                writer.graph.erase_node(node)
    return writer.read() if found else captured


def _rows(node: fx.Node) -> _AlignedRows | None:
    value = node.meta.get("val")
    if node.op != "call_function" or not isinstance(value, torch.Tensor) or value.dtype not in _DTYPES:
        return None
    if not are_sizes_known(value) or value.dim() < 2:
        return None
    if not value.is_contiguous() or storage_bytes(value) < _LEAST_BYTES or not can_join(node):
        return None
    columns, added = value.shape[-1], added_elements(value.shape[-1], value.element_size())
    if not is_little(added, columns) or reaches_output(node) or not _feeds_product(node):
        return None
    made_of = node
    if node.target is _aten.clone.default and (source := node.all_input_nodes[0]).meta["val"].dtype == value.dtype:
        made_of = source  # copied once, into the longer rows
    return _AlignedRows(node, made_of, added)


def added_elements(columns: int, element_bytes: int) -> int:
    """How many elements a row gets: up to a whole cache line where that is little, else up to a whole load.

    >>> added_elements(50257, 2), added_elements(197, 2), added_elements(768, 2)
    (47, 3, 0)
    """
    if not is_odd(columns, element_bytes):
        return 0
    in_lines = -columns % (_LINE_BYTES // element_bytes)
    return in_lines if is_little(in_lines, columns) else -columns % (_CHUNK_BYTES // element_bytes)


def is_odd(columns: int, element_bytes: int) -> bool:
    """Whether rows of that many elements, one after the other, do not all begin at multiples of 16 bytes."""
    return columns * element_bytes % _CHUNK_BYTES != 0


def is_little(added: int, columns: int) -> bool:
    """Whether that many elements more are few compared with a row, and any at all."""
    return 0 < added <= _MOST_ADDED * columns


def _feeds_product(node: fx.Node) -> bool:
    """Whether a matrix product reads the rows, through views."""
    for user in node.users:
        places = OPERANDS.get(user.target)
        if places is not None and any(user.args[place] is node for place in places):
            return True
        if is_view(user) and isinstance(user.meta["val"], torch.Tensor) and _feeds_product(user):
            return True
    return False


def _write_longer(writer: StepWriter, rows: _AlignedRows) -> bool:
    """Write the longer rows after the op, and have all its readers read a part of them; False where that cannot be."""
    node, value = rows.node, rows.node.meta["val"]
    columns = value.shape[-1]
    whole = _PAD(rows.made_of.meta["val"], [0, rows.added])
    part = whole[..., :columns]
    changed = values_that_follow(node, part) if whole.is_contiguous() else {}
    if not changed or any(reaches_output(one) for one in changed):
        return False
    after = node.next
    longer = writer.call(after, _PAD, (rows.made_of, [0, rows.added]), whole, node)
    taken = writer.call(after, _aten.slice.Tensor, (longer, value.dim() - 1, 0, columns), part, node)
    node.replace_all_uses_with(taken, delete_user_cb=lambda user: user is not longer)
    for one, new in changed.items():
        if one is not node:
            one.meta["val"] = new
    return True
