"""Graphs that Inductor compiles one by one, and what it takes from its cache."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters

from shoal.lowlevel.inductor_region import compile_each, in_primitive_ops
from tests.engine.training_laws import needs_compiler


@needs_compiler
def test_code_for_a_processor_with_longer_vectors_is_not_taken_from_the_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """PyTorch 2.13 keys its cache by the graph only: AVX-512's loops, compiled for AVX2, skip every second half."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    x = torch.linspace(0, 1, 400).view(4, 100)

    def hits(capability: str) -> int:
        monkeypatch.setenv("ATEN_CPU_CAPABILITY", capability)  # Inductor reads it whenever it writes code
        counters.clear()
        (run,) = compile_each([in_primitive_ops(lambda y: (torch.softmax(y.sin() + 1, -1),), [x])])
        assert not isinstance(run, Exception)
        torch.testing.assert_close(run([x])[0], torch.softmax(x.sin() + 1, -1))
        return counters["inductor"]["fxgraph_cache_hit"]

    assert [hits("default"), hits("default")] == [0, 1]
    if torch.backends.cpu.get_cpu_capability() != "DEFAULT":
        assert hits(torch.backends.cpu.get_cpu_capability().lower()) == 0
