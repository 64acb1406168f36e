"""One capture and one plan for many shapes of a model's inputs, where the step can be captured with symbolic sizes.

The first shape is captured with numbers, in the variant that trains fastest, and so are the next two that are larger
than all before, where a step can take other variants than its author's. Of all others, the sizes that differ are
symbols, and the variant is the author's own. Such a plan is made at the most that each size may be: every storage of a
smaller call is at most as large, so the plan bounds its peak. What cannot be captured so is captured shape by shape.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import fx
from torch._dynamo.exc import RestartAnalysis

from shoal.capture import varying_sizes
from shoal.capture.varying_sizes import GROWTHS, SizesSeen
from shoal.engine.session import Session
from shoal.errors import BudgetError, TransferError, brief

log = logging.getLogger("shoal")
Result = TypeVar("Result")
_NO_ROOM = (BudgetError, TransferError, torch.OutOfMemoryError, MemoryError)


def compile_for_shapes(
    session: Session,
    gm: fx.GraphModule,
    symbolic: Callable[[], Result],
    static: Callable[[], Result],
    seen: SizesSeen | None = None,
) -> Result:
    """Compile a graph of Dynamo's for as many shapes of its inputs as one plan can bound.

    Args:
        session: of the model.
        gm: the graph, with symbols for the sizes that have changed since an earlier call.
        symbolic: compiles it with these symbols.
        static: compiles it with numbers for all sizes.
        seen: the sizes with which this graph was captured before; None: those of the model.

    Raises:
        BudgetError: no plan fits: at this shape, or at the most that the user declared.
    """
    name, started = session.name or "model", time.perf_counter()
    shape, seen = varying_sizes.shape_of(gm), session.sizes if seen is None else seen
    has_numbers = seen.has_its_own(shape) or seen.deserves_numbers(shape)
    if varying_sizes.varying(gm) and not (seen.fixed or has_numbers):
        varying_sizes.tie_storages(gm)
        sizes = varying_sizes.varying(gm)
        varying_sizes.make_static(gm, but=sizes)
        names, now = varying_sizes.names_of(sizes), varying_sizes.now(sizes)
        declared = {s: most for s, most in varying_sizes.declared(gm).items() if most >= now.get(s, most + 1)}
        varying_sizes.leave_out(sizes, names, seen.captured())
        plans = session.status.plans
        choices = seen.bounds(names, now)
        for number, bounds in enumerate(choices):
            most = {**bounds, **declared}
            varying_sizes.restrict(sizes, most)
            try:
                made = symbolic()
            except _NO_ROOM as error:
                if declared:
                    raise
                session.go_back_to(plans)
                if number + 1 < len(choices):
                    seen.most_growth = max((growth for growth in GROWTHS if growth < seen.most_growth), default=1.0)
                log.info("%s: no plan fits at sizes up to %s: %s", name, _words(names, most), error)
                continue
            except RestartAnalysis:
                session.go_back_to(plans)
                raise  # Dynamo traces again, with a number that it took for a symbol, and asks again
            except Exception as error:
                seen.fixed = f"{type(error).__name__}: {error}".splitlines()[0]
                break
            seen.fixed = varying_sizes.pinned(sizes)
            if seen.fixed:
                break
            seen.note(shape)
            log.info(
                "%s: one plan for all sizes up to %s, made in %.1f s",
                name,
                _words(names, most),
                time.perf_counter() - started,
            )
            return made
        else:
            seen.fixed = "no plan fits at the largest sizes so far, with symbols for them"
        session.go_back_to(plans)
        log.warning(
            "%s: every shape of its inputs is captured and planned by itself, for sizes cannot be symbols: %s",
            name,
            brief(seen.fixed),
        )
    varying_sizes.make_static(gm)
    made = static()
    seen.note(shape)
    seen.note_captured(shape)
    return made


def _words(names: Mapping[Any, str], most: Mapping[Any, int]) -> str:
    return ", ".join(f"{names[symbol]} = {most[symbol]}" for symbol in names)
