"""What a measurement ran under: machine, process, date; and the name of its file."""

from __future__ import annotations

import datetime
import os
import platform
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from bench.code_digest import code_digests
from shoal.cost import measurement_cache
from shoal.memory.cpu_allocator import CACHING, active, use_caching_allocator

CPU_ALLOCATOR = "BENCH_CPU_ALLOCATOR"
"""Environment variable: "caching" switches it on in a bench and its processes; without it, PyTorch's, as users have."""
_MALLOC = ("LD_PRELOAD", "MALLOC_ARENA_MAX", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
_CUDA = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "CUBLAS_WORKSPACE_CONFIG")
_OPENMP = ("OMP_NUM_THREADS", "OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY")
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def use_allocator() -> None:
    """The allocator that the environment asks for."""
    if os.environ.get(CPU_ALLOCATOR) == CACHING:
        use_caching_allocator()


def conditions(device: torch.device, seed: int) -> dict[str, Any]:
    """Everything about this machine and process that a reader needs to repeat a measurement."""

    def environment(names: Sequence[str]) -> Any:
        return {name: os.environ[name] for name in names if name in os.environ} or "default"

    found: dict[str, Any] = {
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": measurement_cache.device_name(device),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "openmp": environment(_OPENMP),
        "seed": seed,
        "malloc": environment(_MALLOC),
        "huge_pages": _HUGE_PAGES.read_text().strip() if _HUGE_PAGES.exists() else "unknown",
        "load_average": os.getloadavg()[0],
        "code": code_digests(),
    }
    if device.type == "cpu":
        use_allocator()  # for every contender of this process
        found["cpu_allocator"] = active()
    if device.type == "cuda":
        found["cuda"] = torch.version.cuda
        found["cudnn"] = torch.backends.cudnn.version()
        found["tf32"] = torch.backends.cudnn.allow_tf32 or torch.backends.cuda.matmul.allow_tf32
        found["cudnn_deterministic"] = torch.backends.cudnn.deterministic
        found["cuda_malloc"] = environment(_CUDA)
    return found


def describe(found: Mapping[str, Any]) -> str:
    """The conditions in a line or two."""
    allocator = f"{found['cpu_allocator']} allocator, " if "cpu_allocator" in found else ""
    parts = [
        f"torch {found['torch']}, {found['device']}, {found['cores']} cores, {found['threads']} threads",
        f"OpenMP {found['openmp']}, seed {found['seed']}",
        f"{allocator}malloc {found['malloc']}, huge pages {found['huge_pages']}",
        f"load {found['load_average']:.1f} at the start, {found['date']}",
    ]
    if "cuda" in found:
        parts.append(f"CUDA {found['cuda']}, cuDNN {found['cudnn']}, TF32 {'on' if found['tf32'] else 'off'}")
    return "; ".join(parts)


def brief(found: Mapping[str, Any]) -> str:
    """What a reader of a page is told of the conditions; the file has all of them."""
    threads = "one thread" if found["threads"] == 1 else f"{found['threads']} threads"
    cuda = f", CUDA {found['cuda']}, cuDNN {found['cudnn']}" if "cuda" in found else ""
    allocator = f", {found['cpu_allocator']} allocator" if "cpu_allocator" in found else ""
    return (
        f"torch {found['torch']}{cuda}, {found['device']}, {threads} of {found['cores']} cores{allocator}, "
        f"seed {found['seed']}, load {found['load_average']:.1f} at the start"
    )


def file_name(theme: str, device: torch.device) -> str:
    """`theme_hardware_date.json`.

    >>> file_name("chain", torch.device("cpu")).startswith("chain_")
    True
    """
    hardware = re.sub(r"[^a-z0-9]+", "-", measurement_cache.device_name(device).lower()).strip("-")
    return f"{theme}_{hardware}_{datetime.date.today().isoformat()}.json"
