"""A plan: where every saved storage of a step waits, and what that is predicted to cost."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, get_type_hints

from shoal.core import arguments
from shoal.core.files import write_json
from shoal.core.order import reordered
from shoal.core.records import read_json, read_object, read_value
from shoal.core.residence import (
    Encode,
    Offload,
    Recompute,
    Residence,
    exact_residence,
    residence_from_json,
    residence_to_json,
)
from shoal.core.simulate import simulate
from shoal.core.sizes import format_bytes
from shoal.core.step import StepGraph, Storage
from shoal.core.timeline import Timeline
from shoal.core.validate_plan import check_order, check_plan
from shoal.core.variant import WHOLE, Candidate, Variant
from shoal.errors import InputError, PlanError, brief

FORMAT = "shoal-plan"
# 2: ops are named without their folder; 3: the order of ops, and in which variant the step is computed; 4: which
# convolutions are computed in pieces; 5: what the host takes to launch each op
VERSION = 5
_READABLE = 4, VERSION  # in 4 no launch takes time
_KINDS_IN_PIECES = "convolution", "batch_norm", "group_norm", "prelu"
_OPS_IN_PIECES = tuple(f"shoal.{kind}_pieces." for kind in _KINDS_IN_PIECES)
_REGIONS = "shoal.compiled_region.region_"
_BY_OUR_KERNELS = frozenset({"direct", "encode", "fuse"})
_DIRECT_OPS = "shoal.direct_convolution."
_OF_PART = re.compile(r"_of_\d+$")  # the gradient of a part of what was concatenated
_PLAIN = (
    "planner", "hardware", "budget_bytes", "lower_bound_seconds", "planning_seconds", "errors_measured",
    "stopped_early", "captured_order", "breaks", "checkpoints", "compiled", "kernels", "without_effect", "states_bytes",
)  # fmt: skip
"""What a file has as it stands here."""
_CODEC_OPS = (".encoded_activation.encode", ".encoded_activation.decode")


@dataclass(frozen=True)
class Plan:
    """A residence for every saved storage of one step, and its predicted cost.

    Attributes:
        graph: the step it plans, with the ops that encode and decode what is encoded, in the order in which they run.
        residences: by storage name; a storage that is absent is kept.
        planner: the strategy that made it.
        hardware: what its times are for.
        budget_bytes: the most device bytes in use at once; 0 for no limit.
        lower_bound_seconds: no plan of this step in this variant inside this budget adds less time than this to the
            variant with everything kept, by the same cost model; with the ops in this order and, where storages are
            encoded, none that encodes the same ones.
        planning_seconds: how long planning took.
        exact_graph: the step without those ops; None where nothing is encoded.
        errors: ||decoded - x|| / ||x|| of each encoded storage, by its name.
        options: what the model was compiled with, as plain data; empty where a planner was called by itself.
        errors_measured: whether `errors` come from a step of the training. If not, they are those of normal numbers.
        stopped_early: parts of the search for it that a time limit ended. Planned again, it may be another plan.
        variant: in which variant the step is computed.
        candidates: the variants that were considered; empty where there was no choice. "Plain" and "added" refer to the
            step as the model's author wrote it, which is one of them where it is computed in another variant.
        captured_order: names of the ops in the order in which they were captured; empty where they run in that order.
        breaks: where the model breaks into several graphs, of which this step is joined, and why.
        checkpoints: how many regions of the model stand under `torch.utils.checkpoint`.
        compiled: what of the step is compiled, and what could not be; empty where nothing was to be.
        kernels: those of ours that what it fuses, computes directly or encodes was planned with: "native", "triton";
            empty where it does none of that, where PyTorch's ops do it, and where it was planned for another machine.
        without_effect: a line for each means that was allowed by name and does not apply to the step.
        is_at_most: whether the sizes of the step are the most that those of many calls may be.
        states_bytes: of the random generator's states in which it repeats random ops, which are in the static memory of
            its graphs; plain PyTorch keeps none.
    """

    graph: StepGraph
    residences: Mapping[str, Residence]
    planner: str
    hardware: str = ""
    budget_bytes: int = 0
    lower_bound_seconds: float = 0.0
    planning_seconds: float = field(default=0.0, compare=False)
    exact_graph: StepGraph | None = None
    errors: Mapping[str, float] = field(default_factory=dict, compare=False)
    errors_measured: bool = field(default=False, compare=False)
    options: Mapping[str, Any] = field(default_factory=dict, compare=False)
    stopped_early: tuple[str, ...] = field(default=(), compare=False)
    variant: Variant = WHOLE
    candidates: tuple[Candidate, ...] = field(default=(), compare=False)
    captured_order: tuple[str, ...] = ()
    breaks: tuple[str, ...] = field(default=(), compare=False)
    checkpoints: int = field(default=0, compare=False)
    compiled: tuple[str, ...] = field(default=(), compare=False)
    kernels: tuple[str, ...] = field(default=(), compare=False)
    without_effect: tuple[str, ...] = field(default=(), compare=False)
    is_at_most: bool = field(default=False, compare=False)
    states_bytes: int = field(default=0, compare=False)

    @cached_property
    def captured_graph(self) -> StepGraph:
        """The step with its ops in the order in which they were captured."""
        return reordered(self.graph, self.captured_order) if self.captured_order else self.graph

    @property
    def exact_step(self) -> StepGraph:
        """The step as it was captured, with nothing encoded."""
        return self.exact_graph or self.captured_graph

    @cached_property
    def timeline(self) -> Timeline:
        """The simulated step under this plan."""
        return simulate(self.graph, self.residences, self.budget_bytes)

    @cached_property
    def plain_timeline(self) -> Timeline:
        """The simulated step when everything is kept, nothing is encoded and ops run as they were captured, in the
        variant of this plan.
        """
        step = self.exact_step
        return simulate(replace(step, static_bytes=step.static_bytes - self.states_bytes), {}, self.budget_bytes)

    @property
    def predicted_peak_bytes(self) -> int:
        """Most device bytes in use at once during the step."""
        return self.timeline.peak_bytes

    @property
    def predicted_seconds(self) -> float:
        """How long the step takes by the cost model."""
        return self.timeline.seconds

    @property
    def plain_peak_bytes(self) -> int:
        """The predicted peak of plain PyTorch: everything is kept, in the variant in which the author wrote the step.

        That is before the lossless rewrites, which are in every other figure: see `rewritten_peak_bytes`.
        """
        return self.rewritten_peak_bytes + (self._as_written or self.exact_step).rewrites_save_bytes

    @property
    def rewritten_peak_bytes(self) -> int:
        """The same after the lossless rewrites, which save bytes whatever the plan."""
        return self._as_written.plain_peak_bytes if self._as_written else self.plain_timeline.peak_bytes

    @property
    def plain_peak(self) -> str:
        """Plain PyTorch's peak in words: as written, and rewritten where that is another."""
        written, rewritten = format_bytes(self.plain_peak_bytes), format_bytes(self.rewritten_peak_bytes)
        return written if written == rewritten else f"{written} as written, {rewritten} with lossless rewrites"

    @property
    def plain_seconds(self) -> float:
        """How long plain PyTorch's step takes: everything is kept, in the variant in which the author wrote it."""
        return self._as_written.plain_seconds if self._as_written else self.plain_timeline.seconds

    @property
    def added_seconds(self) -> float:
        """What the plan adds to plain PyTorch's step; negative where another variant is faster."""
        return self.predicted_seconds - self.plain_seconds

    @property
    def least_added_seconds(self) -> float:
        """`lower_bound_seconds` compared with plain PyTorch's step: no plan of this variant and order adds less."""
        return self.lower_bound_seconds + self.plain_timeline.seconds - self.plain_seconds

    @cached_property
    def _as_written(self) -> Candidate | None:
        """The step as its author wrote it; None where it is computed so, or that was not considered."""
        if self.variant == WHOLE:
            return None
        return next((one for one in self.candidates if one.variant == WHOLE and one.n_ops), None)

    @property
    def recomputed(self) -> tuple[Storage, ...]:
        """The storages that are given up and computed again, in the order of their first computation."""
        return tuple(
            s for s in self.graph.storages if isinstance(r := self._exact_residence(s), Recompute) and r.before
        )

    @property
    def offloaded(self) -> tuple[Storage, ...]:
        """The storages that wait on the host, in the order of their first computation."""
        return tuple(s for s in self.graph.storages if isinstance(self._exact_residence(s), Offload))

    @property
    def encoded(self) -> tuple[Storage, ...]:
        """The storages that wait encoded for a backward reader, in the order in which they are encoded."""
        found = (s for s in self.graph.storages if isinstance(self.residences.get(s.name), Encode))
        return tuple(sorted(found, key=lambda s: self.graph.producer[self._payload(s).id]))

    @property
    def payload_bytes(self) -> int:
        """Bytes of the encoded forms of all `encoded`."""
        return sum(self._payload(storage).nbytes for storage in self.encoded)

    @property
    def codec_seconds(self) -> float:
        """Time of the ops that encode and decode, as often as the plan runs them."""
        return sum(m.seconds for m in self.timeline.moments if m.target.endswith(_CODEC_OPS))

    def _payload(self, storage: Storage) -> Storage:
        residence = self.residences[storage.name]
        assert isinstance(residence, Encode)
        return self.graph.storage_called[residence.payload]

    def _exact_residence(self, storage: Storage) -> Residence:
        return exact_residence(self.residences.get(storage.name))

    @property
    def kernel_means(self) -> tuple[str, ...]:
        """Of the means that it uses, those that run by kernels of ours: "direct", "encode", "fuse"."""
        used = self.variant.means | ({"encode"} if self.encoded else set())
        return tuple(sorted(used & _BY_OUR_KERNELS))

    @property
    def n_regions(self) -> int:
        """Compiled regions among its ops."""
        return sum(op.target.startswith(_REGIONS) for op in self.graph.ops)

    @property
    def host_bytes(self) -> int:
        """Bytes in use on the host, in pages: all that is offloaded is on it when the backward pass begins."""
        return sum(storage.host_bytes for storage in self.offloaded)

    @property
    def kept(self) -> tuple[Storage, ...]:
        """The saved storages that stay."""
        storages = (self.graph.storages[i] for i in self.graph.saved)
        return tuple(s for s in storages if not isinstance(self._exact_residence(s), Recompute | Offload))

    @property
    def small_forms(self) -> tuple[Storage, ...]:
        """Saved storages that hold, a byte a value and exactly, all that the backward pass asks of a larger one."""
        storages = (self.graph.storages[i] for i in self.graph.saved)
        return tuple(s for s in storages if self._form(s))

    def explain(self) -> str:
        """The plan as text: what it costs, what fills the peak, and the residences of the largest storages."""
        from shoal.report import explained  # a text is written of a plan, not a plan from a text

        return explained(self)

    @property
    def order(self) -> str:
        """What another order of ops saves, in words; "" where they run as they were captured."""
        if not self.captured_order:
            return ""
        moved = sum(one != other.name for one, other in zip(self.captured_order, self.graph.ops, strict=True))
        try:
            without = simulate(self.captured_graph, self.residences)
        except PlanError:  # it recomputes or fetches for ops that would come too late
            what, before_bytes = "keeping everything", self.plain_timeline.peak_bytes
            now_bytes = simulate(self.graph, {}).peak_bytes
        else:
            what, before_bytes, now_bytes = "this plan", without.peak_bytes, self.predicted_peak_bytes
        now, before = format_bytes(now_bytes), format_bytes(before_bytes)
        if now == before and self.offloaded:
            saved = "copies back have more time until they are read"
        else:
            saved = f"the peak of {what} " + (f"is {now} instead of {before}" if now != before else f"stays {now}")
        return f"{moved} of {len(self.graph.ops)} ops run earlier or later than captured: {saved}"

    def _form(self, storage: Storage) -> str:
        """What a small storage losslessly encodes of a large one; "" where it does not."""
        target = self.graph.ops[self.graph.producer[storage.id]].target
        if storage.dtype == "bool" and target == "aten._to_copy.default":
            return "a ReLU's mask, a byte a value, lossless"
        if storage.dtype == "uint8" and target == "shoal.pooling.forward":
            return "places in pooling windows, a byte each, lossless"
        return ""

    def fate(self, storage: Storage) -> str:
        """The residence of a storage, in words."""
        arguments.instance("storage", storage, Storage, note=", one of plan.graph.storages")
        residence = self.residences.get(storage.name)
        if isinstance(residence, Encode):
            exact = self._fate(residence.exact)
            also = "" if exact == "kept" else f"; exact: {exact}"
            payload = self._payload(storage)
            return f"encoded in {residence.codec}, {format_bytes(payload.nbytes)}, {self.fate(payload)}{also}"
        form = self._form(storage)
        return self._fate(exact_residence(residence)) + (f" ({form})" if form else "")

    def _fate(self, residence: Residence) -> str:
        if isinstance(residence, Offload):
            layer_of = {op.name: op.layer or op.name for op in self.graph.ops}
            leaves, returns = layer_of[residence.free_after], layer_of[residence.fetch_before]
            return f"on the host from after {leaves} until before the backward pass of {returns}"
        if not isinstance(residence, Recompute):
            return "kept"
        if not residence.before:
            return "freed, not needed again"
        layers = [op.layer or op.name for op in self.graph.ops if op.name in residence.before]
        return "recomputed before the backward pass of " + ", then of ".join(dict.fromkeys(layers))

    def save(self, path: str | Path) -> Path:
        """Write the plan and its step as JSON, whole or not at all."""
        plain = {name: getattr(self, name) for name in _PLAIN}
        own = {
            "format": FORMAT,
            "version": VERSION,
            "fingerprint": self.graph.fingerprint,
            "residences": {name: residence_to_json(r) for name, r in self.residences.items()},
            "errors": dict(self.errors),
            "options": dict(self.options),
            "variant": asdict(self.variant),
            "candidates": [asdict(one) for one in self.candidates],
            "step": self.graph.to_json(),
            "exact_step": self.exact_graph and self.exact_graph.to_json(),
        }
        return write_json(path, own | plain)

    def save_html(self, path: str | Path) -> Path:
        """Write the step as one self-contained HTML page; see `shoal.report`."""
        from shoal.report import Report, save_html  # a page is drawn from a plan, not a plan from a page

        return save_html(Report(self.timeline, plan=self), path)

    def save_trace(self, path: str | Path) -> Path:
        """Write the step as a trace that chrome://tracing and ui.perfetto.dev open."""
        from shoal.report import save_trace

        return save_trace(self.timeline, path)

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Read a plan that `save` wrote.

        Raises:
            PlanError: the file is missing, is not a plan, is damaged, or comes from another version.
        """
        try:
            return _plan_of(read_json(arguments.path("path", path)))
        except OSError as error:
            raise PlanError(f"cannot read the plan {path}: {error.strerror or error}; give another file") from error
        except (InputError, PlanError) as error:
            raise PlanError(f"{path} is not a readable plan ({error}); save it again") from error


def _plan_of(value: Any) -> Plan:
    """The plan that `save` wrote as `value`, held against every rule."""
    value = read_object(value, "the file")
    if value.get("format") != FORMAT or value.get("version") not in _READABLE:
        found = f"{brief(value.get('format'))} of version {brief(value.get('version'))}"
        raise PlanError(f"expected a {FORMAT} of version {VERSION}, got {found}")

    def read(hint: Any, name: str) -> Any:
        return read_value(hint, value.get(name), name)

    hints = get_type_hints(Plan)
    absent = {one.name for one in fields(Plan) if one.default is not MISSING} - value.keys()
    exact = read(StepGraph | None, "exact_step")
    plan = Plan(
        graph=read(StepGraph, "step"),
        residences={
            name: residence_from_json(each, f"the residence of {brief(name)}")
            for name, each in read_object(value.get("residences"), "residences").items()
        },
        exact_graph=exact,
        errors={name: _error(name, each) for name, each in read_object(value.get("errors", {}), "errors").items()},
        options=read_object(value.get("options", {}), "options"),
        variant=read(Variant, "variant"),
        candidates=read(tuple[Candidate, ...], "candidates"),
        **{name: read(hints[name], name) for name in _PLAIN if name not in absent},
    )
    if not 0 <= plan.states_bytes <= plan.graph.static_bytes:
        raise PlanError(f"{plan.states_bytes=}: expected 0 to {plan.graph.static_bytes}")
    if min(plan.budget_bytes, plan.planning_seconds, plan.checkpoints) < 0:
        raise PlanError(f"{plan.budget_bytes=}, {plan.planning_seconds=}, {plan.checkpoints=}: expected 0 or more")
    if plan.graph.fingerprint != value.get("fingerprint"):
        raise PlanError("it was changed after it was saved: its step does not match its fingerprint")
    if (exact is None) != (not any(isinstance(residence, Encode) for residence in plan.residences.values())):
        raise PlanError("exact_step is for plans that encode, and for no others")
    in_pieces = sorted(op.name for op in plan.graph.ops if op.target.startswith(_OPS_IN_PIECES))
    direct = {_OF_PART.sub("", op.name) for op in plan.graph.ops if op.target.startswith(_DIRECT_OPS)}
    if (in_pieces, direct) != (
        sorted(cut.op for cut in plan.variant.pieces if not cut.direct and not cut.parts),
        {cut.op for cut in plan.variant.pieces if cut.direct},
    ):
        raise PlanError("variant.pieces names the ops that are computed in pieces or directly, and no others")
    if {op.name for op in plan.graph.ops} & {cut.op for cut in plan.variant.pieces if cut.parts}:
        raise PlanError("variant.pieces names concatenations that are not computed, and are in the step")
    check_plan(plan.graph, plan.residences, plan.budget_bytes)
    check_order(plan.captured_graph, plan.graph)
    check_plan(plan.exact_step, {})
    return plan


def _error(storage: str, value: Any) -> float:
    """What an encoding lost; NaN where the step itself had one, which JSON writes as null."""
    if value is None:
        return math.nan
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InputError(f"errors.{brief(storage)} is {brief(value)}, expected a number")
    return value if isinstance(value, float) else read_value(float, value, "errors")
