"""Operands of matrix products whose rows begin at multiples of 16 bytes, where rows of odd length would not.

Tensor cores are fed 16 bytes at a time. A product whose operand has 50,257 columns in bfloat16, as the gradient of
GPT-2's logits, runs a kernel that loads element by element. Where an op writes that operand anyway, and a region can
take the op in, it writes longer rows, and products read a part of them. `LongerOperands` are operands of other products
(`padded_products`) with zeros after them: those that are written so already, and copies of others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import fx

from shoal.capture.captured import Captured
from shoal.capture.region_ops import can_join
from shoal.capture.step_reader import storage_bytes
from shoal.capture.step_writer import StepWriter
from shoal.graph.fx_nodes import is_view, reaches_output, readers, source
from shoal.kernels.pieces import are_sizes_known
from shoal.rewrites.layouts import values_that_follow

_aten = torch.ops.aten
_PAD = _aten.constant_pad_nd.default
_ON = ("cuda",)
_DTYPES = (torch.float16, torch.bfloat16)
_PERMUTATIONS = (_aten.t.default, _aten.transpose.int, _aten.permute.default)
_MOST_COPIED_BYTES = 256 << 20  # that nothing else has in mind to write: they count in the step's peak
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


class LongerOperands:
    """Writes operands with zeros after them into a joint graph, each once for the whole step.

    Attributes:
        copies: those that were written, in turn.
    """

    def __init__(self, writer: StepWriter) -> None:
        self._writer = writer
        self.copies: list[fx.Node] = []
        self._copies: dict[tuple[fx.Node, int, int, bool], fx.Node] = {}  # of, axis, by, pass

    def longer(self, operand: fx.Node, axis: int, added: int, before: fx.Node) -> fx.Node:
        """An operand with zeros after it.

        Args:
            operand: of a product.
            axis: along which it gets them.
            added: how many; as many as there are where it has some.
            before: the node before which all is written.
        """
        if (rows := _rows_with_zeros(operand, axis)) is not None:
            viewed = self.insert(before, _aten.view.default, (rows.made, list(rows.shape)), operand)
            in_order = rows.order == sorted(rows.order)
            return viewed if in_order else self.insert(before, _aten.permute.default, (viewed, rows.order), operand)
        made_of, of_axis, permutations = _permuted(operand, axis)
        made = self._copy(made_of, of_axis, added, before)
        if made is None:
            pads = [0, 0] * (made_of.meta["val"].dim() - 1 - of_axis) + [0, added]
            backward = before in self._writer.backward
            made = self.insert(self._first_reader(made_of, backward), _PAD, (made_of, pads), made_of)
            self._writer.backward |= {made} if backward else set()
            self._copies[made_of, of_axis, added, backward] = made
            self.copies.append(made)
        for permutation in permutations:
            made = self.insert(before, permutation.target, (made, *permutation.args[1:]), permutation)
        return made

    def zeros_behind(self, operand: fx.Node, axis: int, before: fx.Node) -> int:
        """How many zeros are written after an operand already, for a product of the same pass; arguments as above."""
        if (rows := _rows_with_zeros(operand, axis)) is not None:
            return rows.shape[-1] - int(operand.meta["val"].shape[axis])
        made_of, of_axis, _ = _permuted(operand, axis)
        known = {added for one, its_axis, added, _ in self._copies if one is made_of and its_axis == of_axis}
        return min((n for n in known if self._copy(made_of, of_axis, n, before) is not None), default=0)

    def moved_bytes(self, operand: fx.Node, axis: int, added: int, before: fx.Node) -> float:
        """What `longer` of the same moves beyond what the step moves now; infinite where it cannot be, or is large."""
        if _rows_with_zeros(operand, axis) is not None:
            return 0
        made_of, of_axis, _ = _permuted(operand, axis)
        if self._copy(made_of, of_axis, added, before) is not None:
            return 0
        value = made_of.meta["val"]
        copied = storage_bytes(value)
        if not value.is_contiguous():
            return math.inf
        if can_join(made_of) and not reaches_output(made_of):  # a region writes both, or the longer one only
            return copied
        return 2 * copied if copied <= _MOST_COPIED_BYTES else math.inf

    def insert(
        self,
        before: fx.Node,
        target: Any,
        args: tuple[Any, ...],
        like: fx.Node,
        kwargs: Mapping[str, Any] | None = None,
        name: str | None = None,
    ) -> fx.Node:
        """A call, with the value that it has of its operands' fake tensors, at another node's place in the model."""
        given, named = fx.node.map_arg((args, dict(kwargs or {})), lambda operand: operand.meta["val"])
        return self._writer.call(before, target, args, target(*given, **named), like, name, kwargs)

    def _first_reader(self, node: fx.Node, backward: bool) -> fx.Node:
        """The first op of a pass that reads a node: another product may come to read what is written for one."""
        read = set(readers(node))
        return next(n for n in self._writer.graph.nodes if n in read and (n in self._writer.backward) == backward)

    def _copy(self, made_of: fx.Node, axis: int, added: int, before: fx.Node) -> fx.Node | None:
        """One that already exists: of the same pass, or for the backward pass of the forward one."""
        passes = (False, True) if before in self._writer.backward else (False,)
        found = (self._copies.get((made_of, axis, added, backward)) for backward in passes)
        return next((copy for copy in found if copy is not None), None)


class _LongerOperandsRows(NamedTuple):
    """Longer rows: the op that writes them, their shape in memory, and the order of its axes that the operand has."""

    made: fx.Node
    shape: Sequence[int]
    order: Sequence[int]


def _rows_with_zeros(operand: fx.Node, axis: int) -> _LongerOperandsRows | None:
    """The longer rows that an operand is a part of, an axis of it along them; None where it is no such part."""
    made: Any = source(operand)
    if made is operand or not _appends_zeros(made):
        return None
    value, whole = operand.meta["val"], made.meta["val"]
    columns = made.args[0].meta["val"].shape[-1]
    if value.storage_offset() != 0 or value.stride(axis) != 1 or value.shape[axis] != columns:
        return None
    others = sorted((one for one in range(value.dim()) if one != axis), key=lambda one: -value.stride(one))
    expected = whole.shape[-1]
    for one in reversed(others):
        if value.stride(one) != expected and value.shape[one] != 1:
            return None
        expected *= value.shape[one]
    if expected != whole.numel():
        return None
    in_memory = [*others, axis]
    return _LongerOperandsRows(
        made,
        [*(value.shape[one] for one in others), whole.shape[-1]],
        [in_memory.index(one) for one in range(value.dim())],
    )


def _appends_zeros(node: fx.Node) -> bool:
    """Whether an op writes rows with zeros after each."""
    if node.target is not _PAD or not node.meta["val"].is_contiguous():
        return False
    pads: Any
    _, pads, *fill = node.args
    return len(pads) == 2 and pads[0] == 0 and pads[1] > 0 and fill in ([], [0], [0.0]) and not node.kwargs


def _permuted(operand: fx.Node, axis: int) -> tuple[fx.Node, int, list[fx.Node]]:
    """What an operand is another order of axes of, the axis there, and the views that lead from it to the operand."""
    views: list[fx.Node] = []
    while operand.target in _PERMUTATIONS or _is_the_same_again(operand):
        looked_at: Any = operand.args[0]
        if operand.target in _PERMUTATIONS:
            axis = _order(operand)[axis]
            views.insert(0, operand)
        operand = looked_at
    return operand, axis, views


def _is_the_same_again(view: fx.Node) -> bool:
    """Whether a view changes nothing: products of batches look at their operands through such."""
    if not is_view(view):
        return False
    looked_at: Any = view.args[0]
    value, before = view.meta["val"], looked_at.meta["val"]
    if not isinstance(value, torch.Tensor) or not isinstance(before, torch.Tensor):
        return False
    return (value.shape, value.stride(), value.storage_offset()) == (
        before.shape,
        before.stride(),
        before.storage_offset(),
    )


def _order(view: fx.Node) -> list[int]:
    """Of which axes of what it looks at a permutation makes its own."""
    dims = view.meta["val"].dim()
    order = list(range(dims))
    arguments: Any = view.args[1:]
    if view.target is _aten.permute.default:
        return [one % dims for one in arguments[0]]
    one, other = (0, dims - 1) if view.target is _aten.t.default else (axis % dims for axis in arguments)
    order[one], order[other] = order[other], order[one]
    return order


def erase_views(node: fx.Node) -> None:
    """Erase a view that nothing reads any more, and those that it looks through."""
    while not node.users and is_view(node):
        looked_at: Any = node.args[0]
        node.graph.erase_node(node)
        node = looked_at
