"""`shoal.Options`: the rarer arguments of `shoal.compile`, `shoal.plan`, `shoal.fit` and `shoal.frontier`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from numbers import Integral
from typing import Any

from shoal import codecs, planners
from shoal.core import arguments, presets
from shoal.core.hardware import Hardware
from shoal.core.lossy import CODECS, DEFAULT_BLOCK_ELEMS, DEFAULT_CODEC, EXEMPTIONS, LossyOptions
from shoal.core.plan import Plan
from shoal.core.sizes import parse_bytes
from shoal.errors import CodecError, InputError, brief
from shoal.offload.policy import AUTO

DEFAULT_PLANNER = "joint"
KERNELS = (AUTO, "eager", "compiled")
BUDGETS_OF = ("allocated", "reserved")


@dataclass(frozen=True, kw_only=True)
class Options:
    """The rarer arguments of `shoal.compile`, `shoal.plan`, `shoal.fit` and `shoal.frontier`.

    Pass it as `options=`. `torch.compile(model, backend="shoal", options={...})` takes the same names, except `plan`
    and `strict`, as keys.

    Args:
        planner: "joint" (default), "chain", "keep_all", or a function (StepGraph, Hardware, budget_bytes) →
            Plan, as such or as "MODULE:FUNCTION", whose plans are validated by `shoal.core.validate` before they run
            (PlanError).
        kernels: what runs the planned step. "eager": PyTorch's kernels and ours one by one, with PyTorch's bits.
            "compiled": chains of pointwise ops, normalisations and reductions are joined into regions that Inductor
            compiles, if they are faster so (docs/explain/compiled-regions.md). "auto" (default): "compiled" on CUDA,
            "eager" on the CPU.
        plan: for `shoal.compile`: a saved plan to run instead of planning: of `shoal.plan`, or `model.shoal.plan` of a
            model that has trained, of one graph or several, or of models that share a `shoal.Budget` (the same plan for
            each of them). PlanError at the first step if it is of another step, or exceeds `budget` if that is given
            too.
        host_budget: the most bytes that may be offloaded, an int or a text such as "16GiB". None (default): half of the
            host memory, or of the disk, that is available now.
        rehearse: on the CPU, a preset's name ("p100-nvlink") or a `Hardware`. Copies to the host are slowed down to the
            speed of its link, scaled by how much slower this machine computes. None (default): as fast as they go.
        codec: with "encode" in `allow`, how convolution inputs are encoded in 8 bits a value: "dynamic_tree" (default),
            "dynamic_tree_even", "static_tree", "mantissa" or "linear". CodecError if it is none of these.
        codec_block: the number of values that share a scale, at least 1 (default 4096); None for one scale a tensor.
        codec_seed: the seed of stochastic rounding, from 0 to 2**63 - 1; None (default) rounds to nearest.
        codec_exempt: some of "batch_norm" and "first_layer" (default: both), or () for none: what stays exact. Without
            "batch_norm" the backward pass of batch norms reads decoded values, and the error reaches earlier layers;
            with it only weight gradients of convolutions change.
        budget_of: for `shoal.compile`, what `budget` bounds. "allocated" (default): bytes in use, as
            `torch.cuda.max_memory_allocated` reads them. "reserved": the bytes that CUDA's caching allocator holds,
            which may not grow from the first step on, as under `torch.cuda.set_per_process_memory_fraction`. CUDA only,
            models of one graph.
        cuda_graphs: for `shoal.compile` on CUDA, whether the forward and backward pass are recorded as CUDA graphs
            after the first steps, and replayed. Results are valid until the model is called again; nothing is
            offloaded. What else is refused: docs/explain/cuda-graphs.md.
        strict: for `shoal.compile`, whether the model must be one graph (CaptureError with the line where it breaks).
            By default a model that breaks is planned as several graphs, and what crosses between them is kept.

    Raises:
        InputError: a name is unknown, or a value is none of what is listed above.
        CodecError: `codec` is unknown or not for activations.

    Example:
        >>> import shoal
        >>> shoal.Options(planner="chain", host_budget="16GiB").planner
        'chain'
        >>> shoal.Options(planer="chain")
        Traceback (most recent call last):
        shoal.errors.InputError: shoal.Options has no 'planer'; type 'planner'
    """

    planner: str | planners.Planner = DEFAULT_PLANNER
    kernels: str = AUTO
    plan: Plan | None = None
    host_budget: int | str | None = None
    rehearse: str | Hardware | None = None
    codec: str = DEFAULT_CODEC
    codec_block: int | None = DEFAULT_BLOCK_ELEMS
    codec_seed: int | None = None
    codec_exempt: Collection[str] = EXEMPTIONS
    budget_of: str = "allocated"
    cuda_graphs: bool = False
    strict: bool = False

    def __new__(cls, **given: Any) -> Options:
        """Names are checked here, for a `TypeError` does not say what to type."""
        reject_unknown(given, [field.name for field in fields(cls)], "shoal.Options")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        planners.get(self.planner)
        for name, known in (("kernels", KERNELS), ("budget_of", BUDGETS_OF)):
            arguments.one_of(name, getattr(self, name), known)
        if self.plan is not None and not isinstance(self.plan, Plan):
            raise InputError(f"plan is a {type(self.plan).__name__}; type plan=shoal.Plan.load(path)")
        for name in ("cuda_graphs", "strict"):
            object.__setattr__(self, name, arguments.switch(name, getattr(self, name)))
        if self.host_budget is not None:
            parse_bytes(self.host_budget, "host_budget")
        if not isinstance(self.rehearse, Hardware | str | None):
            raise InputError(f"rehearse={brief(self.rehearse)}: expected a preset's name or a Hardware")
        if isinstance(self.rehearse, str):
            presets.get(self.rehearse, "rehearse")
        _check_codec(self.codec)
        self._check_number("codec_block", 1, "the number of values that share a scale, or None for all")
        self._check_number("codec_seed", 0, "a seed from 0 to 2**63 - 1, or None to round to nearest")
        exempt = self.codec_exempt
        try:
            is_known = not isinstance(exempt, str | Mapping) and EXEMPTIONS.issuperset(exempt)
        except TypeError:  # not iterable, or of values without a hash
            is_known = False
        if not is_known:
            raise InputError(
                f"codec_exempt={brief(exempt)}; expected some of {', '.join(sorted(EXEMPTIONS))}, or () for none"
            )

    @property
    def encoding(self) -> LossyOptions:
        """How convolution inputs are encoded, where that is allowed."""
        return LossyOptions(
            self.codec,
            0 if self.codec_block is None else int(self.codec_block),
            None if self.codec_seed is None else int(self.codec_seed),
            frozenset(self.codec_exempt),
        )

    @property
    def given(self) -> dict[str, Any]:
        """What differs from the defaults, by name."""
        values = ((field, getattr(self, field.name)) for field in fields(self))
        return {field.name: value for field, value in values if value != field.default}

    def _check_number(self, name: str, least: int, expected: str) -> None:
        value = getattr(self, name)
        if value is None:
            return
        if not isinstance(value, Integral) or isinstance(value, bool) or not least <= int(value) < 2**63:
            raise InputError(f"{name}={brief(value)}; expected {expected}")


def options_of(options: object) -> Options:
    """`options=` as an `Options`.

    Raises:
        InputError: it is something else.

    >>> options_of({"planner": "chain"})
    Traceback (most recent call last):
    shoal.errors.InputError: options is a dict; type options=shoal.Options(planner='chain')
    """
    if options is None:
        return Options()
    if isinstance(options, Options):
        return options
    pairs = options.items() if isinstance(options, Mapping) else ()
    typed = ", ".join(f"{name}={brief(value)}" for name, value in pairs) or "..."
    raise InputError(f"options is a {type(options).__name__}; type options=shoal.Options({typed})")


def name_of(name: object, model: object) -> str:
    """`name=` as the name of a model: its class where none is given.

    Raises:
        InputError: it is no text.
    """
    if name is not None and not isinstance(name, str):
        raise InputError(
            f"name is a {type(name).__name__}; type a text such as name={type(model).__name__!r}, or leave it out"
        )
    return name or type(model).__name__


def reject_unknown(given: Mapping[str, Any], known: Collection[str], where: str) -> None:
    """Names that there are not.

    Raises:
        InputError: with the closest name, or all of them.
    """
    for name in given:
        if name not in known:
            close = get_close_matches(str(name), known, 1)
            said = repr(close[0]) if close else f"one of {', '.join(known)}"
            raise InputError(f"{where} has no {brief(name)}; type {said}")


def _check_codec(name: object) -> None:
    if not isinstance(name, str) or name not in CODECS:
        what = "is not for activations" if isinstance(name, str) and name in codecs.names() else "is unknown"
        raise CodecError(f"codec={brief(name)} {what}; type one of {', '.join(CODECS)}")
