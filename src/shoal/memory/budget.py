"""Budgets in terms of the device: "auto" for what it has left, "80%" for a share of all that it has."""

from __future__ import annotations

import logging
import os
import re

import psutil
import torch

from shoal.core.sizes import format_bytes, parse_bytes
from shoal.errors import InputError, brief
from shoal.memory.cpu_allocator import release_unused

log = logging.getLogger("shoal")

MARGIN = 0.05
"""Share of what is left that "auto" leaves free: for the allocator's fragments, and other processes' growth."""
_PERCENT = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*%\s*")


def budget_bytes(budget: int | str | None, device: torch.device | int, *, of_environment: bool = True) -> int | None:
    """The bytes that a budget stands for on a device.

    Args:
        budget: an int of bytes; a size such as "2GiB"; "auto" for what the device has left, and what PyTorch has
            reserved of it, less 5 %; "80%" for that share of all the memory that it has. None for SHOAL_BUDGET of the
            environment, else None.
        device: a device of this machine, or the memory of one that is not here, in bytes, all of which is left.
        of_environment: whether SHOAL_BUDGET counts.

    Raises:
        InputError: it is none of these.

    >>> budget_bytes("25%", 1 << 34), budget_bytes("auto", 1 << 34), budget_bytes("2GiB", 1 << 34)
    (4294967296, 16320875724, 2147483648)
    """
    name = "budget"
    if budget is None and of_environment:
        name, budget = "SHOAL_BUDGET", os.environ.get("SHOAL_BUDGET") or None
    if budget is None:
        return None
    if isinstance(budget, str) and budget.strip().lower() == "auto":
        left_bytes = _left_bytes(device)
        found_bytes = int((1 - MARGIN) * left_bytes)
        log.info(
            "%s 'auto': %s, which is what is left (%s) less %.0f %%",
            name,
            format_bytes(found_bytes),
            format_bytes(left_bytes),
            100 * MARGIN,
        )
        return found_bytes
    if isinstance(budget, str) and (percent := _PERCENT.fullmatch(budget)):
        share = float(percent.group(1)) / 100
        if not 0 < share <= 1:
            raise InputError(f"{name}={brief(budget)}: expected a share of the device's memory, more than 0 to 100%")
        return int(share * all_bytes(device))
    return parse_bytes(budget, name)


def _left_bytes(device: torch.device | int) -> int:
    if isinstance(device, int):
        return device
    if device.type == "cuda":
        return torch.accelerator.get_memory_info(device)[0] + torch.accelerator.memory_reserved(device)
    release_unused()
    return int(psutil.virtual_memory().available)


def all_bytes(device: torch.device | int) -> int:
    """All the memory that a device of this machine has; of one that is not here it is given."""
    if isinstance(device, int):
        return device
    if device.type == "cuda":
        return torch.accelerator.get_memory_info(device)[1]
    return int(psutil.virtual_memory().total)
