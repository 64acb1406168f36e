"""Measurements of this machine, cached between runs: one JSON file per subject, device and PyTorch settings.

A missing or damaged file is measured again.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from shoal.core.files import cache_dir, json_text, write_text
from shoal.core.records import read_json, read_object
from shoal.errors import InputError
from shoal.lowlevel import cuda_calls, dispatch
from shoal.lowlevel.cuda_allocator import allocator_settings
from shoal.lowlevel.native import fingerprint, vector_flags
from shoal.memory import cpu_allocator

_MAX_DEPTH = 8  # of lists and objects in a cached value
_FORMAT = 8
_MOST_ENTRIES = 20_000  # of a subject: 2.5 MB, of which json makes text in 27 ms (EPYC); the oldest are dropped
# What the files had when they were last read, and by which they are known to be the same still. They have every op that
# was ever measured here, and each step asks for some 50 of them.
_read: dict[Path, tuple[object, dict[str, Any]]] = {}


def device_of(name: str | torch.device) -> torch.device:
    """The device of that name, with its index.

    Raises:
        InputError: it is not a CPU or CUDA device, or not available.
    """
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InputError(f"device={name!r} is not a device; give 'cpu' or 'cuda'") from None
    if device.type not in ("cpu", "cuda"):
        raise InputError(f"device={str(name)!r} is not supported; give 'cpu' or 'cuda'")
    if device.type == "cuda" and not cuda_calls.is_available():
        raise InputError(f"device={str(name)!r} is not here; give 'cpu', or plan for a preset: hardware='a100-pcie4'")
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.accelerator.current_device_index())
    return device


def device_name(device: torch.device) -> str:
    """The processor's name, such as "AMD EPYC 9B14" or "NVIDIA H200"."""
    if device.type == "cuda":
        return cuda_calls.device_name(device)
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine() or "CPU"


def _instructions() -> list[str]:
    """The instruction sets that kernels choose by, as PyTorch, oneDNN and the system name them. Virtual machines on
    different processors may have one name, and both libraries can be told to use fewer."""
    return [torch.backends.cpu.get_cpu_capability(), os.environ.get("ONEDNN_MAX_CPU_ISA", ""), *vector_flags()]


def describe(device: torch.device) -> dict[str, Any]:
    """Everything that decides how fast an op runs, as plain values."""
    return {
        "format": _FORMAT,
        "torch": torch.__version__,
        "kernels": [fingerprint(), *dispatch.allowed().words()],
        "device": device_name(device),
        "instructions": _instructions() if device.type == "cpu" else [],
        "threads": torch.get_num_threads() if device.type == "cpu" else 0,
        "cores": os.cpu_count() or 1,
        "float32_precision": _float32_precision(),  # what the earlier names say raises where the new ones were set
        "onednn": torch.backends.mkldnn.enabled,
        "cudnn": [
            torch.backends.cudnn.enabled,
            torch.backends.cudnn.benchmark,
            torch.backends.cudnn.deterministic,
            torch.backends.cudnn.version() if device.type == "cuda" else None,
        ],
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "allocator": allocator_settings() if device.type == "cuda" else cpu_allocator.active(),
    }


def _float32_precision() -> list[str]:
    cudnn: Any = torch.backends.cudnn  # modules that replace themselves, which mypy does not see
    onednn: Any = torch.backends.mkldnn
    kinds = torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn, onednn.matmul, onednn.conv
    return [kind.fp32_precision for kind in kinds]


def recall(subject: str, device: torch.device, keys: Iterable[str]) -> dict[str, Any]:
    """The cached entries of `subject` ("costs", "rates") under some keys; none if the file is damaged.

    Only the depth of the values is checked; the caller validates them.

    Raises:
        InputError: SHOAL_KERNELS is none of its values.
    """
    machine = describe(device)
    try:
        path = _path(subject, machine, device)
    except InputError:  # no writable cache folder
        return {}
    entries = _entries(path, machine)
    return {key: entries[key] for key in keys if key in entries}


def _entries(path: Path, machine: dict[str, Any]) -> dict[str, Any]:
    try:
        if not path.is_file():  # to read a FIFO waits for whoever writes to it
            return {}
        stamp = _stamp(path)
        if path not in _read or _read[path][0] != stamp:
            value = read_object(read_json(path), "it")
            entries = read_object(value.get("entries"), "entries")
            known = {key: each for key, each in entries.items() if _is_shallow(each, _MAX_DEPTH)}
            _read[path] = stamp, known if value.get("machine") == machine else {}
        return _read[path][1]
    except OSError:
        return {}
    except InputError as error:
        warnings.warn(f"ignored {path}, which is not a cache file of Shoal ({error}); measuring again", stacklevel=4)
        return {}


def remember(subject: str, device: torch.device, entries: dict[str, Any]) -> bool:
    """Add `entries` to the cached ones of `subject`; False if they cannot be written."""
    machine = describe(device)
    try:
        path = _path(subject, machine, device)
        path.parent.mkdir(parents=True, exist_ok=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warned already, when the file was first read
            known = _entries(path, machine)
        now = dict([*known.items(), *entries.items()][-_MOST_ENTRIES:])
        write_text(path, json_text({"machine": machine, "entries": now}, indent=None))
        _read[path] = _stamp(path), now
    except (OSError, InputError):
        return False
    return True


def _stamp(path: Path) -> tuple[int, ...]:
    status = path.stat()
    return status.st_mtime_ns, status.st_size, status.st_ino


def _is_shallow(value: Any, levels: int) -> bool:
    """Whether JSON is nested at most `levels` deep: json can read a deeper value that it cannot write."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return not inner or (levels > 0 and all(_is_shallow(each, levels - 1) for each in inner))


def _path(subject: str, machine: dict[str, Any], device: torch.device) -> Path:
    digest = hashlib.sha256(json.dumps(machine, sort_keys=True).encode()).hexdigest()[:12]
    words = re.sub(r"[^a-z0-9]+", "-", f"{device.type} {machine['device']}".lower()).strip("-")
    return cache_dir() / subject / f"{words}-{digest}.json"
