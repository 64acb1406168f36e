"""Settings of PyTorch's caching allocator on CUDA, which has no public way to change them once a process runs."""

from __future__ import annotations

import os

import torch

_EXPANDABLE = "expandable_segments"
_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_set_here = ""


def set_expandable_segments() -> bool:
    """Let the caching allocator grow its segments from here on, unless the environment says whether it may.

    Its blocks are then cut to size, so that what it hands out is what was asked for, in steps of 512 bytes, and what is
    freed fits what comes next: less is reserved for the same tensors. Segments that are there stay as they are.

    Returns:
        Whether its segments grow now.
    """
    if torch.cuda.get_allocator_backend() != "native":
        return False
    given = next((os.environ[name] for name in _VARIABLES if os.environ.get(name)), "")
    if _EXPANDABLE not in given:
        _set(f"{given},{_EXPANDABLE}:True" if given else f"{_EXPANDABLE}:True")
        return True
    return f"{_EXPANDABLE}:true" in given.lower().replace(" ", "")


def allocator_settings() -> str:
    """What the caching allocator was told, by the environment and since, and which allocator it is."""
    given = " ".join(f"{name}={os.environ[name]}" for name in _VARIABLES if os.environ.get(name))
    since = getattr(torch._C, "_accelerator_getAllocatorSettings", lambda: _set_here)()  # not before PyTorch 2.12
    return f"{torch.cuda.get_allocator_backend()} {given} {since}".strip()


def _set(settings: str) -> None:
    global _set_here
    _set_here = settings
    set_settings = getattr(torch._C, "_accelerator_setAllocatorSettings", None)  # not before PyTorch 2.12
    (set_settings or torch.cuda.memory._set_allocator_settings)(settings)
