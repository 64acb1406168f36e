"""A captured step with the ops that this machine is to launch: compiled regions, padded products, casts of several.

What is planned has the same ops as what runs, so whoever prices a step for this machine rewrites it here first.
"""

from __future__ import annotations

from shoal.capture.aligned_rows import with_aligned_rows
from shoal.capture.captured import Captured
from shoal.capture.gathered_casts import with_gathered_casts
from shoal.core.plan import Plan
from shoal.engine.compile_options import CompileOptions
from shoal.engine.compiled_regions import in_compiled_regions
from shoal.engine.faster_products import in_faster_products


def as_launched(captured: Captured, options: CompileOptions, plan: Plan | None = None) -> Captured:
    """The step in compiled regions, where the options let it be compiled, and with the casts that are left gathered.

    Args:
        captured: the step, to be run on this machine.
        options: whether it is compiled there.
        plan: one that was made for it: see `in_compiled_regions`.
    """
    if options.compiles(captured.device.type):
        captured = in_compiled_regions(in_faster_products(with_aligned_rows(captured), plan), plan)
    return with_gathered_casts(captured)
