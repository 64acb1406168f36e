"""What a model is compiled with, read and validated in one place: keywords, text, a mapping of `torch.compile`."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from numbers import Integral
from pathlib import Path
from typing import Any

from shoal import codecs, planners
from shoal.core import presets
from shoal.core.hardware import Hardware
from shoal.core.lossy import CODECS, DEFAULT_BLOCK_ELEMS, EXEMPTIONS, LossyOptions
from shoal.core.means import BITWISE, EXACT, KERNEL_MEANS, means_of, single_means
from shoal.core.sizes import parse_bytes
from shoal.cost.measure import measure
from shoal.errors import CodecError, InputError, brief
from shoal.memory.optimizer_state import Declared, declared_optimizer
from shoal.offload.policy import AUTO, Offloading, offloading, rehearsed

_ENCODING_PLANNER = "joint"  # the one that looks for what to encode
_ALLOWED_CODEC = "dynamic_tree"  # of allow="encode" without lossy=
WITHOUT_LINK = ("chain", "keep_all")  # planners that offload nothing
_LOSSY_OPTIONS = ("codec", "block", "stochastic", "exempt")
KERNELS = (AUTO, "eager", "compiled")
_OF_A_BACKEND = (
    "budget",
    "budget_of",
    "planner",
    "kernels",
    "cuda_graphs",
    "optimizer",
    "offload_to",
    "host_budget",
    "lossy",
    "allow",
)


@dataclass(frozen=True)
class OffloadOptions:
    """Where saved tensors may wait beside the device.

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
    planner: str | planners.Planner = _ENCODING_PLANNER
    kernels: str = AUTO
    offload: OffloadOptions = field(default_factory=OffloadOptions)
    lossy: LossyOptions | None = None
    means: frozenset[str] = BITWISE
    budget_of: str = "allocated"
    cuda_graphs: bool = False
    named: frozenset[str] = field(default=frozenset(), compare=False)

    def __post_init__(self) -> None:
        planners.get(self.planner)
        if self.kernels not in KERNELS:
            raise InputError(f"kernels={brief(self.kernels)} is unknown; give 'eager', 'compiled' or 'auto'")
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
        planner: str | planners.Planner = _ENCODING_PLANNER,
        kernels: str = AUTO,
        offload_to: str | Path | None = AUTO,
        host_budget: int | str | None = None,
        rehearse: str | Hardware | None = None,
        lossy: str | Mapping[str, Any] | LossyOptions | None = None,
        allow: str | Iterable[str] | None = None,
        budget_of: str = "allocated",
        cuda_graphs: bool | str = False,
        has_plan: bool = False,
    ) -> CompileOptions:
        """The options that a caller's keywords stand for, each an object or a text.

        Args:
            has_plan: whether a plan is given beside them, which is run as it is.

        Raises:
            InputError: one is none of what `shoal.compile` lists, or two contradict each other.
            CodecError: `lossy` names no codec for activations.

        >>> CompileOptions.of(budget="2GiB", lossy="dynamic_tree").lossy.block_elems
        4096
        """
        permitted = lossy_options(lossy, planner)
        if permitted is not None and not has_plan and budget is None:
            raise InputError("lossy encodes what a budget leaves no room for; give budget= too")
        target = presets.get(rehearse) if isinstance(rehearse, str) else rehearse
        if target is not None and not isinstance(target, Hardware):
            raise InputError(f"rehearse={brief(rehearse)}: expected a preset's name or a Hardware")
        offload = OffloadOptions(
            None if offload_to is None else str(offload_to),
            None if host_budget is None else parse_bytes(host_budget, "host_budget"),
            target,
        )
        budget_bytes = None if budget is None else parse_bytes(budget)
        means, single = _means(allow, budget_bytes, planner, has_plan=has_plan)
        if permitted is not None:
            if allow is not None and "encode" not in means:
                raise InputError(f"lossy= needs 'encode', which allow={brief(allow)} leaves out; add it to allow=")
            means |= {"encode"}
            single |= {"encode"} if not has_plan else frozenset()
        if offload.to not in (AUTO, None) and allow is None:  # a keyword goes before SHOAL_ALLOW
            means |= {"offload"}
        if offload.to not in (AUTO, None) and "offload" not in means and budget_bytes is not None and not has_plan:
            raise InputError(
                f"offload_to={offload.to!r} needs 'offload', which allow={brief(allow)} leaves out; add it, or leave "
                "out offload_to="
            )
        if permitted is None and "encode" in means and budget_bytes is not None:
            permitted = lossy_options(_ALLOWED_CODEC, planner)
        if offload.given and "offload" in means and not has_plan:
            single |= {"offload"}
        if replays := _switch("cuda_graphs", cuda_graphs):
            offload, means = _without_offload(offload, means, single), means - {"offload"}
            if budget_of != "allocated":
                raise InputError(
                    "cuda_graphs=True keeps a pool of its own; give budget_of='allocated', or leave it out"
                )
        options = cls(budget_bytes, planner, kernels, offload, permitted, means, budget_of, replays, single)
        if budget_of != "allocated":
            options._check_reserved(has_plan=has_plan)
        if has_plan and planner != _ENCODING_PLANNER:
            raise InputError(f"planner={_named(planner)} beside plan=, which is run as it is; leave out one of the two")
        if budget is None and not has_plan:
            if planner not in (_ENCODING_PLANNER, "keep_all"):
                raise InputError(f"planner={_named(planner)} plans for a budget; give budget= too")
            if offload.given:
                raise InputError(f"{offload.given[0]} is for what a budget leaves no room for; give budget= too")
        return options

    @classmethod
    def of_backend(cls, options: Mapping[str, Any], mode: str | None = None) -> tuple[CompileOptions, Declared | None]:
        """What `options=` and `mode=` of `torch.compile(backend="shoal")` stand for, and the optimizer among them.

        Raises:
            InputError: as `of`; an option is unknown, or a mode is given.
        """
        if mode not in (None, "default"):
            raise InputError(
                f"mode={mode!r}: the backend 'shoal' has no modes; choose options={{'kernels': 'compiled'}}"
            )
        given = dict(options)
        if unknown := sorted(given.keys() - set(_OF_A_BACKEND), key=str):
            raise InputError(f"options {unknown} are unknown; there are {', '.join(_OF_A_BACKEND)}")
        optimizer = declared_optimizer(given.pop("optimizer", None))
        return cls.of(**given), optimizer

    def _check_reserved(self, *, has_plan: bool) -> None:
        if self.budget_of != "reserved":
            raise InputError(f"budget_of={brief(self.budget_of)}: expected 'allocated' or 'reserved'")
        if self.budget_bytes is None or has_plan:
            raise InputError("budget_of='reserved' says what a budget bounds; give budget=, and no plan=")

    def check_device(self, device_type: str) -> None:
        """Whether a device has what is asked for.

        Raises:
            InputError: reserved bytes are bounded, or CUDA graphs replayed, of another device than a CUDA one.

        >>> CompileOptions.of(budget="1GiB", budget_of="reserved").check_device("cpu")
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
    def form_means(self) -> frozenset[str]:
        """The means that the forms of a step may use: `joint` alone chooses how ops are computed."""
        return self.means if self.planner == _ENCODING_PLANNER else self.means - KERNEL_MEANS

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
            "lossy": lossy
            and {
                "codec": lossy.codec,
                "block": lossy.block_elems,
                "stochastic": lossy.seed,
                "exempt": sorted(lossy.exempt),
            },
            "means": sorted(self.means),
            "budget_of": self.budget_of,
            "cuda_graphs": self.cuda_graphs,
        }


def _switch(keyword: str, value: bool | str) -> bool:
    """A switch, as an object or as text."""
    if value in (True, False):
        return bool(value)
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    raise InputError(f"{keyword}={brief(value)}: expected True or False")


def _without_offload(offload: OffloadOptions, means: Collection[str], single: Collection[str]) -> OffloadOptions:
    """Nowhere, for a step that is replayed: copies to the host wait for each other there."""
    asked = offload.given or (("allow='offload'",) if "offload" in {*single} & {*means} else ())
    if asked:
        raise InputError(
            f"cuda_graphs=True replays a step without work on the host, and {asked[0]} is such; leave one out"
        )
    return OffloadOptions(to=None)


def _means(
    allow: str | Iterable[str] | None,
    budget_bytes: int | None,
    planner: str | planners.Planner,
    *,
    has_plan: bool,
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
        return (EXACT if planner == _ENCODING_PLANNER else BITWISE), frozenset()
    means = means_of(allow, named)
    if planner != _ENCODING_PLANNER and "encode" in means and budget_bytes is not None:
        raise InputError(
            f"{named}={brief(allow)} may encode, which needs planner={_ENCODING_PLANNER!r}; {_named(planner)} does not "
            "look for what to encode: leave out one of the two"
        )
    return means, single_means(allow, named)


def _named(planner: str | planners.Planner) -> str:
    return repr(planner) if isinstance(planner, str) else getattr(planner, "__name__", "yours")


def lossy_options(
    value: str | Mapping[str, Any] | LossyOptions | None, planner: Any = _ENCODING_PLANNER
) -> LossyOptions | None:
    """What `lossy=` of `shoal.compile` and `shoal.plan` stands for; None permits nothing.

    Args:
        value: a codec's name, or a mapping with "codec" and, where wanted, "block" (values that share a scale; None for
            all of a tensor), "stochastic" (a seed) and "exempt" (which of "batch_norm", "first_layer" stay exact; by
            default both).
        planner: who will plan.

    Raises:
        CodecError: no codec of that name is for activations.
        InputError: an option is none of these, or the planner does not look for what to encode.

    >>> lossy_options({"codec": "dynamic_tree", "block": 2048}).block_elems
    2048
    """
    if value is None:
        return None
    if planner != _ENCODING_PLANNER:
        name = planner if isinstance(planner, str) else getattr(planner, "__name__", "yours")
        raise InputError(
            f"lossy needs planner={_ENCODING_PLANNER!r}; {name!r} does not look for what to encode: leave out one of "
            "the two"
        )
    if isinstance(value, LossyOptions):
        return value
    if isinstance(value, str):
        value = {"codec": value}
    if not isinstance(value, Mapping) or "codec" not in value:
        raise InputError(
            f"lossy={brief(value)}: expected a codec's name, or a mapping with 'codec' and options; codecs for "
            f"activations are {', '.join(CODECS)}"
        )
    if unknown := sorted(set(value) - set(_LOSSY_OPTIONS), key=str):
        raise InputError(f"lossy has no options {brief(unknown)}; there are {', '.join(_LOSSY_OPTIONS)}")
    return LossyOptions(
        _codec(value["codec"]),
        _block_elems(value.get("block", DEFAULT_BLOCK_ELEMS)),
        _seed(value.get("stochastic")),
        _exempt(value.get("exempt", EXEMPTIONS)),
    )


def _codec(name: Any) -> str:
    if isinstance(name, str) and name in CODECS:
        return str(name)
    what = "is not for activations" if isinstance(name, str) and name in codecs.names() else "is unknown"
    raise CodecError(f"lossy: the codec {brief(name)} {what}; give one of {', '.join(CODECS)}")


def _block_elems(block: Any) -> int:
    if block is None:
        return 0
    if not isinstance(block, Integral) or isinstance(block, bool) or not 1 <= int(block) < 2**63:
        raise InputError(f"lossy: block={brief(block)}; expected a number of values of at least 1, or None for all")
    return int(block)


def _seed(seed: Any) -> int | None:
    if seed is None:
        return None
    if not isinstance(seed, Integral) or isinstance(seed, bool) or not 0 <= int(seed) < 2**63:
        raise InputError(f"lossy: stochastic={brief(seed)}; expected a seed from 0 to 2**63 - 1, or None to round")
    return int(seed)


def _exempt(names: Any) -> frozenset[str]:
    listed = isinstance(names, (list, tuple, set, frozenset)) and all(isinstance(name, str) for name in names)
    if not listed or not EXEMPTIONS.issuperset(names):
        raise InputError(f"lossy: exempt={brief(names)}; expected some of {', '.join(sorted(EXEMPTIONS))}, or none: ()")
    return frozenset(names)
