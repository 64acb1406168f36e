"""`shoal env`: what a report of a fault needs to name: versions, devices, kernels, cache, settings."""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import psutil
import torch
import typer

import shoal
from shoal.app.cli.console import app, errors_reported
from shoal.core.columns import aligned
from shoal.core.files import cache_dir, json_text
from shoal.core.sizes import format_bytes
from shoal.cost.measurement_cache import device_name
from shoal.errors import InputError
from shoal.lowlevel import cuda_calls, dispatch, native
from shoal.memory import cpu_allocator
from shoal.memory.limit import memory_limit

# What Shoal computes, plans or draws with, and the trainers that it is used from.
PACKAGES = ("numpy", "scipy", "highspy", "triton", "torchvision", "lightning", "accelerate", "transformers")
SETTINGS = ("SHOAL_", "PYTORCH_", "TORCH", "OMP_", "CUDA_", "CUBLAS_")


@app.command()
def env(
    ctx: typer.Context, json: Annotated[bool, typer.Option("--json", help="Print JSON instead of lines.")] = False
) -> None:
    """Show versions, devices, kernels, cache and settings, to paste into an issue."""
    with errors_reported(ctx):
        found = environment()
        typer.echo(json_text(found) if json else as_text(found))


def environment() -> dict[str, dict[str, str]]:
    """What this installation is and runs on, by section; every value is text.

    >>> found = environment()
    >>> list(found)
    ['versions', 'devices', 'kernels', 'cache', 'settings']
    >>> found["versions"]["torch"] == torch.__version__
    True
    """
    return {
        "versions": _versions(),
        "devices": _devices(),
        "kernels": _kernels(),
        "cache": _cache(),
        "settings": {name: value for name, value in sorted(os.environ.items()) if name.startswith(SETTINGS)},
    }


def _versions() -> dict[str, str]:
    found = {
        "shoal": f"{shoal.__version__} in {Path(shoal.__file__).parent}",
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": torch.__version__,  # with the build, which the package's own version may lack
    }
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def _devices() -> dict[str, str]:
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = psutil.virtual_memory()
    found = {
        "cpu": f"{device_name(torch.device('cpu'))}, {cpus} of {os.cpu_count()} cores",
        "threads": str(torch.get_num_threads()),
        "memory": f"{format_bytes(memory.total)}, {format_bytes(memory.available)} available",
    }
    if not cuda_calls.is_available():
        return found | {
            "cuda": "none" if torch.version.cuda is None else f"none; PyTorch is built for {torch.version.cuda}"
        }
    found["cuda"] = f"{torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}"
    for index in range(torch.accelerator.device_count()):
        free_bytes, all_bytes = torch.accelerator.get_memory_info(index)
        name = device_name(torch.device("cuda", index))
        found[f"cuda:{index}"] = f"{name}, {format_bytes(all_bytes)}, {format_bytes(free_bytes)} free"
    return found


def _kernels() -> dict[str, str]:
    library = native.library()
    found = {
        "native": "not built: the references in PyTorch run instead" if library is None else str(library._name),
        "instructions": ", ".join(native.cpu_features()) or "unknown",
    }
    if library is not None:
        found["native"] += f", ABI {native.ABI_VERSION}, build {native.fingerprint()}"
        found["levels"] = ", ".join(native.levels())
    try:
        found[dispatch.VARIABLE] = ", ".join(dispatch.allowed().words()) or "not restricted"
    except InputError as error:
        found[dispatch.VARIABLE] = str(error)
    found["CPU allocator"] = _allocator()
    found["memory counting"] = _counting()
    return found


def _allocator() -> str:
    """Which allocator the tensors of this process have, and whether `shoal train` would have the caching one."""
    if cpu_allocator.active() == cpu_allocator.CACHING:
        return "caching"
    why = cpu_allocator.why_unavailable()
    return f"torch's; no caching one: {why}" if why else "torch's; caching after shoal.use_caching_allocator()"


def _counting() -> str:
    """By what the peaks of CPU steps are measured."""
    try:
        with memory_limit(None):
            return "counting allocator"
    except InputError as error:
        return f"PyTorch's memory events: {error}"


def _cache() -> dict[str, str]:
    try:
        folder = cache_dir()
    except InputError as error:
        return {"folder": str(error)}
    found = {"folder": str(folder)}
    for path in sorted(folder.iterdir()):
        files = [each for each in (path, *path.rglob("*")) if each.is_file()]
        found[path.name] = f"{len(files)} files, {format_bytes(sum(file.stat().st_size for file in files))}"
    return found


def as_text(found: dict[str, dict[str, Any]]) -> str:
    """The sections as lines that can be pasted into an issue.

    >>> print(as_text({"versions": {"shoal": "1"}, "settings": {}}))
    versions
      shoal  1
    settings
      none
    """
    lines: list[str] = []
    for section, values in found.items():
        lines.append(section)
        rows = aligned((name, str(value)) for name, value in values.items())
        lines += [f"  {row}" for row in rows or ["none"]]
    return "\n".join(lines)
