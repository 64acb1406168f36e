"""Variants cached between runs: which variant of a step trained fastest inside a budget is not searched for again.

To find it, every variant is traced; a later run of the same step on the same machine traces the chosen one only. One
file a step, in the folder `variants` of `shoal.core.files.cache_dir()`, filed under a digest of all that the search
depends on, Shoal's own source included. The plan itself is found by `plan_cache`, and checked: where the variant does
not fit any more, the others are searched. A broken cache costs only time.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from shoal.core.files import cache_dir, json_text, write_text
from shoal.core.records import read_json, read_object, read_record, read_value
from shoal.core.step import StepGraph
from shoal.core.variant import Candidate, Variant
from shoal.cost.measure import measure
from shoal.cost.measurement_cache import describe
from shoal.engine.loop_memory import Basis
from shoal.engine.plan_cache import drop_oldest
from shoal.engine.session import Session
from shoal.engine.step_planning import CompiledVariant
from shoal.errors import InputError

_FORMAT = "shoal-cached-variant 2"  # 2: with the step as its author wrote it

log = logging.getLogger("shoal")


def digest(session: Session, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> str:
    """Tells a step whose variant is searched for from any other; "" where that depends on a function of the caller's.

    Args:
        session: of the model.
        gm, example_inputs: as Dynamo hands them to a backend.
    """
    if not isinstance(session.options.planner, str):
        return ""
    devices = {value.device for value in example_inputs if isinstance(value, torch.Tensor)}
    described = [
        (device.type, describe(device), measure(device)) for device in sorted(devices, key=str) if device.type != "meta"
    ]
    options = {**vars(session.options), "means": sorted(session.options.means), "named": ()}
    known = session.loop
    loop = {**vars(known), "released": sorted(known.released), "let_go": sorted(known.let_go)}
    everything = (
        *(_FORMAT, _source(), torch.__version__, version("highspy")),
        *(described, options, loop, session.static.state_bytes(), session.offloading, session.early),
        *(gm.print_readable(print_output=False), [_described(value) for value in example_inputs]),
    )
    return hashlib.sha256(repr(everything).encode()).hexdigest()[:32]


def recall(digest: str) -> CompiledVariant | None:
    """The variant that was chosen in an earlier run, with what was considered then."""
    try:
        path = cache_dir() / "variants" / f"{digest}.json"
        if not digest or not path.is_file():
            return None
        value = read_object(read_json(path), "the file")
        if value.get("format") != _FORMAT or not isinstance(value.get("candidates"), list):
            raise InputError("it is of another format")
        variant = read_record(Variant, value.get("variant"), "variant")
        candidates = tuple(read_record(Candidate, one, "candidates") for one in value["candidates"])
        compiled_as = CompiledVariant(
            variant, candidates, written=_basis(value["written"]) if value.get("written") else None
        )
        os.utime(path)
    except (OSError, InputError) as error:
        log.debug("ignored the cached variant %s (%s); searching again", digest, error)
        return None
    return compiled_as


def remember(digest: str, compiled_as: CompiledVariant) -> None:
    """Keep which variant was chosen for a later run."""
    if not digest:
        return
    written: dict[str, Any] | None = None
    if compiled_as.written is not None:
        graph, outputs = compiled_as.written.graph, compiled_as.written.outputs
        graphs = [one.to_json() for one in (graph, graph.as_written) if one is not None]
        written = {"graphs": graphs, "places": list(outputs), "names": list(outputs.values())}
    try:
        folder = cache_dir() / "variants"
        folder.mkdir(parents=True, exist_ok=True)
        candidates = [asdict(one) for one in compiled_as.candidates]
        value = {
            "format": _FORMAT,
            "variant": asdict(compiled_as.variant),
            "candidates": candidates,
            "written": written,
        }
        write_text(folder / f"{digest}.json", json_text(value, indent=None))
        drop_oldest(folder.glob("*.json"))
    except (OSError, InputError) as error:
        log.debug("cannot cache a variant: %s", error)


def _basis(value: Any) -> Basis:
    value = read_object(value, "written")
    places = read_value(tuple[int, ...], value.get("places"), "places")
    names = read_value(tuple[str, ...], value.get("names"), "names")
    graph, *as_written = read_value(tuple[StepGraph, ...], value.get("graphs"), "graphs") or (None,)
    if graph is None:
        raise InputError("written has no graph")
    graph = replace(graph, as_written=as_written[0] if as_written else None)
    return Basis(graph, None, dict(zip(places, names, strict=False)), graph.fingerprint)


def _described(value: Any) -> object:
    if not isinstance(value, torch.Tensor):
        return value
    layout = tuple(value.shape), value.stride(), value.dtype, value.device.type
    return (*layout, value.requires_grad, isinstance(value, nn.Parameter))


@cache
def _source() -> str:
    found = hashlib.sha256()
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        found.update(path.read_bytes())
    return found.hexdigest()
