"""What a step is planned with, resolved: `budget=`, `allow=`, `offload_to=` and `shoal.Options` together."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from shoal import planners
from shoal.core import presets
from shoal.core.hardware import Hardware
from shoal.core.lossy import LossyOptions
from shoal.core.means import BITWISE, EXACT, KERNEL_MEANS, means_of, single_means
from shoal.core.sizes import parse_bytes
from shoal.cost.measure import measure
from shoal.engine.options import DEFAULT_PLANNER, Options, options_of, reject_unknown
from shoal.errors import InputError, brief
from shoal.memory.optimizer_state import Declared, declared_optimizer
from shoal.offload.policy import AUTO, OFFERED, Offloading, offloading, rehearsed

WITHOUT_LINK = ("chain", "keep_all")  # planners that offload nothing
# Keys of the options of torch.compile. Its step runs no given plan, and its model has to come as one graph.
_OF_A_BACKEND = (
    *("budget", "optimizer", "allow", "offload_to"),
    *(each.name for each in fields(Options) if each.name not in ("plan", "strict")),
)


@dataclass(frozen=True)
class OffloadOptions:
    """Where saved tensors may wait other than on the device.

    Attributes:
        to: "host", a folder on a local disk, "auto" for "host" where the device has memory of its own, None for
            nowhere.
        host_budget_bytes: most bytes there; None for half of what is available.
        rehearse: on the CPU, the machine whose link copies are slowed down to; None for as fast as they go.
    """

    to: str | None = AUTO
    host_budget_bytes: int | None = None
    rehearse: Hardware | None = None

    @property
    def given(self) -> tuple[str, ...]:
        """Those that somebody asked for, as written."""
        written: dict[str, Any] = {
            "offload_to": None if self.to == AUTO else self.to,
            "host_budget": self.host_budget_bytes,
            "rehearse": self.rehearse and self.rehearse.name,
        }
        return tuple(f"{name}={value!r}" for name, value in written.items() if value is not None)

    def on(self, device_type: str) -> Offloading | None:
        """The same for a device; None where nothing leaves it.

        Raises:
            InputError: the folder is not there, or the device has a link of its own to rehearse another one's on.
        """
        pace = None
        if self.rehearse is not None:
            if device_type != "cpu":
                raise InputError(
                    f"rehearse={self.rehearse.name!r}: a rehearsal runs on the CPU; the model is on {device_type}"
                )
            pace = rehearsed(self.rehearse, measure("cpu"))
        return offloading(self.to, self.host_budget_bytes, device_type=device_type, pace=pace)


@dataclass(frozen=True)
class CompileOptions:
    """What `shoal.compile`, the backend "shoal", `shoal.plan` and `shoal train` are asked for; see `shoal.compile`.

    Attributes:
        budget_bytes: device bytes at the peak of a step; None keeps everything and only reports.
        planner: a name, or a function with the planners' signature.
        kernels: what runs the planned graphs: "eager", kernels one by one; "compiled", what a compiler joins into
            regions; "auto", the latter on CUDA.
        offload: where saved tensors may wait.
        lossy: which of them may be encoded, and how; None for none.
        means: by which means the step may be brought into its budget, of `shoal.core.means`.
        named: those of them that were asked for by name and not in a set, for what does not apply is then said.
        budget_of: what the budget bounds, "allocated" bytes (in use) or those that the allocator has "reserved".
        cuda_graphs: whether the two passes of a step are replayed as CUDA graphs.
    """

    budget_bytes: int | None = None
    planner: str | planners.Planner = DEFAULT_PLANNER
    kernels: str = AUTO
    offload: OffloadOptions = field(default_factory=OffloadOptions)
    lossy: LossyOptions | None = None
    means: frozenset[str] = BITWISE
    budget_of: str = "allocated"
    cuda_graphs: bool = False
    named: frozenset[str] = field(default=frozenset(), compare=False)

    def __post_init__(self) -> None:
        offloads = self.offload.given
        if self.offload.to is None and offloads:
            raise InputError(
                f"{offloads[0]} is for what is offloaded, and offload_to=None offloads nothing; leave one out"
            )

    @classmethod
    def of(
        cls,
        *,
        budget: int | str | None = None,
        allow: str | Iterable[str] | None = None,
        offload_to: str | Path | None = AUTO,
        options: Options | None = None,
    ) -> CompileOptions:
        """What a caller's arguments stand for.

        Raises:
            InputError: one is none of what `shoal.compile` lists, or two contradict each other.

        >>> CompileOptions.of(budget="2GiB", allow="exact, encode").lossy.block_elems
        4096
        """
        if not isinstance(offload_to, str | os.PathLike | None):
            raise InputError(f"offload_to is a {type(offload_to).__name__}; {OFFERED}")
        asked = options_of(options)
        planner, has_plan = asked.planner, asked.plan is not None
        offload = OffloadOptions(
            None if offload_to is None else str(offload_to),
            None if asked.host_budget is None else parse_bytes(asked.host_budget, "host_budget"),
            presets.get(asked.rehearse) if isinstance(asked.rehearse, str) else asked.rehearse,
        )
        budget_bytes = None if budget is None else parse_bytes(budget)
        means, single = _means(allow, budget_bytes, planner, has_plan=has_plan)
        if offload.to not in (AUTO, None) and allow is None:  # a keyword goes before SHOAL_ALLOW
            means |= {"offload"}
        if offload.to not in (AUTO, None) and "offload" not in means and budget_bytes is not None and not has_plan:
            raise InputError(
                f"offload_to={offload.to!r} needs 'offload', which allow={brief(allow)} leaves out; add it, or leave "
                "out offload_to="
            )
        if offload.given and "offload" in means and not has_plan:
            single |= {"offload"}
        encodes = "encode" in means and budget_bytes is not None
        for name in (name for name in asked.given if name.startswith("codec") and not encodes):
            raise InputError(
                f"{name}= is for convolution inputs that are encoded; type allow='exact, encode' and budget="
            )
        if asked.cuda_graphs:
            offload, means = _without_offload(offload, means, single), means - {"offload"}
            if asked.budget_of != "allocated":
                raise InputError(
                    "cuda_graphs=True keeps a pool of its own; give budget_of='allocated', or leave it out"
                )
        if asked.budget_of == "reserved" and (budget is None or has_plan):
            raise InputError("budget_of='reserved' says what a budget bounds; give budget=, and no plan=")
        if has_plan and planner != DEFAULT_PLANNER:
            raise InputError(f"planner={_named(planner)} beside plan=, which is run as it is; leave out one of the two")
        if budget is None and not has_plan:
            if planner not in (DEFAULT_PLANNER, "keep_all"):
                raise InputError(f"planner={_named(planner)} plans for a budget; give budget= too")
            if offload.given:
                raise InputError(f"{offload.given[0]} is for what a budget leaves no room for; give budget= too")
        return cls(
            budget_bytes,
            planner,
            asked.kernels,
            offload,
            asked.encoding if encodes else None,
            means,
            asked.budget_of,
            asked.cuda_graphs,
            single,
        )

    @classmethod
    def of_backend(cls, options: Mapping[str, Any], mode: str | None = None) -> tuple[CompileOptions, Declared | None]:
        """What `options=` and `mode=` of `torch.compile(backend="shoal")` stand for, and the optimizer among them.

        Raises:
            InputError, CodecError: as `of` and `Options`; a key is unknown, or a mode is given.
        """
        if mode not in (None, "default"):
            raise InputError(
                f"mode={mode!r}: the backend 'shoal' has no modes; choose options={{'kernels': 'compiled'}}"
            )
        reject_unknown(options, _OF_A_BACKEND, "options= of the backend 'shoal'")
        given = dict(options)
        optimizer = declared_optimizer(given.pop("optimizer", None))
        ours = {name: given.pop(name) for name in ("budget", "allow", "offload_to") if name in given}
        return cls.of(**ours, options=Options(**given)), optimizer

    def check_device(self, device_type: str) -> None:
        """Whether a device has what is asked for.

        Raises:
            InputError: reserved bytes are bounded, or CUDA graphs replayed, of another device than a CUDA one.

        >>> CompileOptions.of(budget="1GiB", options=Options(budget_of="reserved")).check_device("cpu")
        Traceback (most recent call last):
        shoal.errors.InputError: budget_of='reserved' needs a CUDA device; the model is on cpu
        """
        for given, asked in (
            ("budget_of='reserved'", self.budget_of == "reserved"),
            ("cuda_graphs=True", self.cuda_graphs),
        ):
            if asked and device_type != "cuda":
                raise InputError(f"{given} needs a CUDA device; the model is on {device_type}")

    @property
    def variant_means(self) -> frozenset[str]:
        """The means that the variants of a step may use: only `joint` chooses how ops are computed."""
        return self.means if self.planner == DEFAULT_PLANNER else self.means - KERNEL_MEANS

    def offloading(self, device_type: str) -> Offloading | None:
        """Where saved tensors may wait on a device; None for nowhere."""
        return self.offload.on(device_type)

    def compiles(self, device_type: str) -> bool:
        """Whether the regions of a step are compiled on a device."""
        return self.kernels == "compiled" or (self.kernels == AUTO and device_type == "cuda")

    def to_json(self) -> dict[str, Any]:
        """The same as plain data, as plan files hold it."""
        lossy, offload = self.lossy, self.offload
        return {
            "budget_bytes": self.budget_bytes,
            "planner": self.planner if isinstance(self.planner, str) else getattr(self.planner, "__name__", "yours"),
            "kernels": self.kernels,
            "offload_to": offload.to,
            "host_budget_bytes": offload.host_budget_bytes,
            "rehearse": offload.rehearse and offload.rehearse.name,
            "codec": lossy
            and {"name": lossy.codec, "block": lossy.block_elems, "seed": lossy.seed, "exempt": sorted(lossy.exempt)},
            "means": sorted(self.means),
            "budget_of": self.budget_of,
            "cuda_graphs": self.cuda_graphs,
        }


def _without_offload(offload: OffloadOptions, means: Collection[str], single: Collection[str]) -> OffloadOptions:
    """Nowhere, for a step that is replayed: copies to the host wait for each other there."""
    asked = offload.given or (("allow='offload'",) if "offload" in {*single} & {*means} else ())
    if asked:
        raise InputError(
            f"cuda_graphs=True replays a step without work on the host, and {asked[0]} is such; leave one out"
        )
    return OffloadOptions(to=None)


def _means(
    allow: str | Iterable[str] | None, budget_bytes: int | None, planner: str | planners.Planner, *, has_plan: bool
) -> tuple[frozenset[str], frozenset[str]]:
    """What `allow=`, or SHOAL_ALLOW where it is not given, stands for; and what of that is named by itself."""
    if allow is not None and (budget_bytes is None or has_plan):
        raise InputError("allow= says what a plan for a budget may use; give budget=, and no plan=")
    if has_plan:
        return BITWISE, frozenset()
    named = "allow"
    if allow is None and (of_environment := os.environ.get("SHOAL_ALLOW")):
        named, allow = "SHOAL_ALLOW", of_environment
    if allow is None:
        return (EXACT if planner == DEFAULT_PLANNER else BITWISE), frozenset()
    means = means_of(allow, named)
    if planner != DEFAULT_PLANNER and "encode" in means and budget_bytes is not None:
        raise InputError(
            f"{named}={brief(allow)} may encode, which needs planner={DEFAULT_PLANNER!r}; {_named(planner)} does not "
            "look for what to encode: leave out one of the two"
        )
    return means, single_means(allow, named)


def _named(planner: str | planners.Planner) -> str:
    return repr(planner) if isinstance(planner, str) else getattr(planner, "__name__", "yours")
