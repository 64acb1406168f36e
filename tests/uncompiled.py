"""Regions without a compiler: each runs as the ops that it would be compiled from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import fx


def interpreted(monkeypatch: pytest.MonkeyPatch, least_bytes: int = 0) -> None:
    """Let regions of any size be made, and run op by op."""

    def each(graphs: Sequence[tuple[fx.GraphModule, Sequence[torch.Tensor]]]) -> list[Callable[[list[Any]], Any]]:
        return [lambda arguments, module=module: module(*arguments) for module, _ in graphs]

    monkeypatch.setattr("shoal.kernels.compiled_region._known", {})
    monkeypatch.setattr("shoal.kernels.compiled_region.compile_each", each)
    # Not fused, a sum in float64 would hold its operand in float64, and a mask its elements in 32 bits.
    monkeypatch.setattr("shoal.kernels.compiled_region._MASKS_AS_BYTES_ON", ())
    monkeypatch.setattr("shoal.lowlevel.inductor_region.wide_sums", lambda device_type: {})
    monkeypatch.setattr("shoal.capture.regions._LEAST_BYTES", least_bytes)
