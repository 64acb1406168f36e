"""Which sizes of a model's inputs vary from call to call, and how large a step is planned for.

The first shape is captured with numbers. Where another one differs from it only in sizes, Dynamo makes those sizes
symbols. Here each gets a most that it can be, as a guard: up to there one captured graph and one plan serve every call.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves
from torch.utils._sympy.functions import Mod, PythonMod

from shoal.capture.captured import Captured
from shoal.graph.symbolic_sizes import Numbers, at_numbers, expression_of, is_input_size
from shoal.lowlevel.torch_state import allocated_bytes
from shoal.transforms.split.split import CUTS_ARGUMENT

GROWTHS = (2.0, 1.3)
"""A size that was seen to grow is planned for as far as the inputs get that many times the elements of the largest: by
the first of these that fits the budget."""
_LESS_THAN_NEEDED = 0.98
_MOST_WITH_NUMBERS = 3  # shapes, each larger than those before: the first may be no more than a trial
Shape = frozenset[tuple[str, int]]


@dataclass(eq=False)
class SizesSeen:
    """The sizes of the inputs with which the steps of one model were captured.

    Attributes:
        fixed: why sizes stay numbers; empty where they may vary.
        most_growth: the most that may fit, of what `GROWTHS` says.
        wander: whether they depend on values, so that the next may be the largest, however they came so far.
        has_variants: whether a step that is captured with numbers can take other variants than the one with symbols.
    """

    fixed: str = ""
    most_growth: float = GROWTHS[0]
    wander: bool = False
    has_variants: bool = False
    _seen: dict[str, set[int]] = field(default_factory=dict)  # by the name of the size, as Dynamo words it
    _expected: bool = False
    _is_refused: bool = False
    _captured: set[Shape] = field(default_factory=set)

    def note(self, shape: Shape) -> None:
        """A call has inputs of these sizes."""
        self._is_refused = False
        for name, number in shape:
            self._seen.setdefault(name, set()).add(number)

    def refuse(self, needed_share: float) -> None:
        """The plan made for the sizes seen so far does not fit: they are captured again, and planned less far.

        The first time as far as what it needs lets expect, then no further than what was seen, then by its numbers.

        Args:
            needed_share: what it needs, in budgets.
        """
        if self.most_growth == 1.0:
            self.fixed = "no plan fits at the largest sizes so far, with symbols for them"
        expected = self.most_growth / needed_share * _LESS_THAN_NEEDED
        self.most_growth = 1.0 if self._expected else max(1.0, min(expected, self.most_growth))
        self._expected = self._is_refused = True

    def note_captured(self, shape: Shape) -> None:
        """A step was captured with these sizes as numbers."""
        self._captured.add(shape)

    def has_its_own(self, shape: Shape) -> bool:
        """Whether a step was captured with these sizes as numbers."""
        return shape in self._captured

    def deserves_numbers(self, shape: Shape) -> bool:
        """Whether a shape is captured with numbers, though others were: it is larger, and may have a faster variant so.

        The first shape may be no more than a trial, or the last batch of an epoch in a run that is resumed.
        """
        if not self.has_variants or self.wander or not 0 < len(self._captured) < _MOST_WITH_NUMBERS:
            return False
        largest = {name: max(numbers) for name, numbers in self._seen.items()}
        growth = [number - largest.get(name, number) for name, number in shape]
        return max(growth, default=0) > 0 and min(growth) >= 0

    def is_another(self, shape: Shape) -> bool:
        """Whether the inputs were of other sizes whenever they were noted."""
        return any(number not in self._seen.get(name, {number}) for name, number in shape)

    def forget_captured(self) -> None:
        """No step is captured any more; the sizes stay known."""
        self._captured.clear()

    def captured(self) -> list[Shape]:
        """The shapes that were captured as numbers."""
        return list(self._captured)

    def bounds(self, names: Mapping[Any, str], now: Mapping[Any, int]) -> list[dict[Any, int]]:
        """The most that each size is to be planned for, and what comes next where nothing fits at that.

        Args:
            names: the name of each symbol's size.
            now: what it is in the call at hand, which `note` has not been told of.
        """
        before = {symbol: self._seen.get(name, set()) for symbol, name in names.items()}
        seen = {symbol: max(before[symbol] | {now[symbol]}) for symbol in names}
        any_grows = self._is_refused or self.wander
        growing = [s for s in names if any_grows or now[s] > max(before[s], default=0)]
        if not growing:
            return [seen]
        # Where every size was a multiple of some number, as of a network's total stride, others will be.
        multiples = {symbol: math.gcd(*before[symbol], now[symbol]) for symbol in growing}

        def grown(symbol: Any, growth: float) -> int:
            most = int(seen[symbol] * growth ** (1 / len(growing)))
            return max(seen[symbol], most // multiples[symbol] * multiples[symbol])

        growths = sorted({min(growth, self.most_growth) for growth in (*GROWTHS, 1.0)}, reverse=True)
        choices = [{**seen, **{symbol: grown(symbol, growth) for symbol in growing}} for growth in growths]
        return [choice for place, choice in enumerate(choices) if choice not in choices[:place]]


def shape_of(gm: fx.GraphModule) -> Shape:
    """The sizes of a call's inputs, by names such as "args[0].size()[1]"; symbols as they are in the call at hand."""
    found = set()
    for node in gm.graph.find_nodes(op="placeholder"):
        value, source = node.meta.get("example_value"), getattr(node, "_dynamo_source", None)
        if isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter) and source is not None:
            name = _in_words(source.name)
            found |= {(f"{name}.size()[{dim}]", _now(size)) for dim, size in enumerate(value.shape)}
    return frozenset(found)


def varying(gm: fx.GraphModule) -> dict[Any, torch.SymInt]:
    """The sizes of the inputs of a graph of Dynamo's that are symbols, by symbol; without the cuts that are drawn."""
    found: dict[Any, torch.SymInt] = {}
    for node in gm.graph.find_nodes(op="placeholder"):
        value = node.meta.get("example_value")
        for size in value.shape if isinstance(value, torch.Tensor) else ():
            if isinstance(size, torch.SymInt) and is_input_size(expression := expression_of(size), size.node.shape_env):
                found[expression] = size
    return found


def names_of(sizes: Mapping[Any, torch.SymInt]) -> dict[Any, str]:
    """The name of each size, as in `shape_of`: also of one for which the symbol of another stands by now."""
    return {s: _in_words(size.node.shape_env.var_to_sources[size.node._expr][0].name) for s, size in sizes.items()}


def now(sizes: Mapping[Any, torch.SymInt]) -> dict[Any, int]:
    """What each size is in the call at hand."""
    return {symbol: _now(size) for symbol, size in sizes.items()}


def declared(gm: fx.GraphModule) -> dict[Any, int]:
    """The most that sizes can be, by symbol, where the user told it: `torch._dynamo.mark_dynamic(x, dim, max=...)`."""
    found: dict[Any, int] = {}
    for node in gm.graph.find_nodes(op="placeholder"):
        value, given = node.meta.get("example_value"), getattr(node.meta.get("grapharg"), "example", None)
        for span in getattr(given, "_dynamo_dynamic_range", ()):
            size = value.shape[span.dim] if isinstance(value, torch.Tensor) else None
            if span.max is not None and isinstance(size, torch.SymInt):
                found[expression_of(size)] = span.max
    return found


def restrict(sizes: Mapping[Any, torch.SymInt], most: Mapping[Any, int]) -> None:
    """Guard that no size is more than so much: a larger one is captured again."""
    for symbol, size in sizes.items():
        bool(size <= most[symbol])


def tie_storages(gm: fx.GraphModule) -> None:
    """Guard that what an input is a view of, such as what an LSTM returns, is as large as the input.

    Dynamo gives it sizes of its own, of which nothing else is known; from here on either may have the other's symbol.
    Where it is larger now, it stays as large.
    """
    for node in gm.graph.find_nodes(op="placeholder"):
        value = node.meta.get("example_value")
        held = value.untyped_storage().nbytes() if isinstance(value, torch.Tensor) else 0
        if isinstance(held, torch.SymInt) and not bool(held == value.numel() * value.element_size()):
            int(held)


def leave_out(sizes: Mapping[Any, torch.SymInt], names: Mapping[Any, str], shapes: Sequence[Shape]) -> None:
    """Guard that the sizes are not those of a shape that has a graph of its own, which may be of a faster variant."""
    for shape in shapes:
        numbers = dict(shape)
        differ: Any = False
        for symbol, size in sizes.items():
            if names[symbol] not in numbers:
                break
            differ = (size != numbers[names[symbol]]) | differ
        else:
            bool(differ)


def pinned(sizes: Mapping[Any, torch.SymInt]) -> str:
    """What an op of the captured step needs as a number, so that few other sizes may come; empty where nothing is."""
    if not any(expression_of(size).free_symbols for size in sizes.values()):
        return "an op of the step needs them as numbers"
    names = names_of(sizes)
    for guard in next(iter(sizes.values())).node.shape_env.guards:
        told = guard.expr
        is_of_ours = told.is_Relational and told.rel_op == "==" and told.free_symbols & set(sizes)
        if is_of_ours and told.rhs.is_number and not told.lhs.has(Mod, PythonMod):  # many are multiples of a number
            needed = str(told.lhs)
            for symbol, name in names.items():
                needed = needed.replace(str(symbol), name)
            return f"an op of the step needs {needed} as a number"
    return ""


def bytes_at(captured: Captured, numbers: Numbers) -> dict[str, int]:
    """What each storage of a step takes where the sizes are these numbers, by name."""
    nodes = {node.name: node for node in captured.joint.graph.nodes}
    found = {}
    for storage in captured.graph.storages:
        name, _, place = storage.name.partition(".")
        value = nodes[name].meta.get("val") if name in nodes else None
        value = value[int(place)] if place and isinstance(value, (tuple, list)) else value
        if isinstance(value, torch.Tensor):
            size = at_numbers((value.untyped_storage().nbytes(),), numbers)
            found[storage.name] = allocated_bytes(size[0], value.device) if size else storage.nbytes
    return found


def make_static(gm: fx.GraphModule, but: Collection[Any] = ()) -> None:
    """Ask for the number after each symbolic size: Dynamo then guards on it, and every shape gets its own plan.

    The cuts that `shoal.split` draws stay symbols: one plan is for all of them. So do numbers that shape no tensor,
    such as a counter.

    Args:
        gm: a graph of Dynamo's.
        but: symbols that stay.
    """
    sizes = [
        size
        for node in gm.graph.nodes
        for value in tree_leaves(node.meta.get("example_value"))
        if isinstance(value, torch.Tensor)
        for size in (*value.shape, *value.stride(), value.storage_offset())
        if isinstance(size, torch.SymInt) and not _is_drawn(size) and not _is_of(size, but)
    ]
    shaping = {symbol for size in sizes for symbol in expression_of(size).free_symbols} - set(but)
    # A number that a module has, such as its classes: that 15 // k is 3 does not say what k is.
    numbers = [node.meta.get("example_value") for node in gm.graph.find_nodes(op="placeholder")]
    given = [one for one in numbers if isinstance(one, torch.SymInt) and expression_of(one) in shaping]
    for size in (*given, *sizes):
        int(size)


def _in_words(source: str) -> str:
    """How a caller would write what Dynamo calls "L['x']"."""
    return re.sub(r"^[LG]\['(\w+)'\]", r"\1", source)


def _is_of(size: torch.SymInt, symbols: Collection[Any]) -> bool:
    return bool(expression_of(size).free_symbols <= set(symbols))


def _now(size: int | torch.SymInt) -> int:
    if not isinstance(size, torch.SymInt):
        return size
    return int(expression_of(size).xreplace(size.node.shape_env.backed_var_to_val))


def _is_drawn(size: torch.SymInt) -> bool:
    sources = size.node.shape_env.var_to_sources
    return all(
        any(CUTS_ARGUMENT in source.name for source in sources.get(symbol, ()))
        for symbol in size.node.expr.free_symbols
    )
