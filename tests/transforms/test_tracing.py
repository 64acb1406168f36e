from __future__ import annotations

import pytest
import torch
from torch import fx, nn

from shoal.transforms.tracing import UntraceableError, has_hooks, trace


class Doubled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if self.training else x


class Stops(nn.Module):
    def __init__(self, *said: str) -> None:
        super().__init__()
        self.said, self.norm = said, nn.BatchNorm2d(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError(*self.said)


@pytest.mark.parametrize("training", [True, False])
def test_a_model_is_traced_in_the_mode_asked_for(training: bool) -> None:
    graph = trace(Doubled().train(not training), fx.Tracer(), training=training)
    assert [node.op for node in graph.nodes] == ["placeholder"] + ["call_function"] * training + ["output"]


@pytest.mark.parametrize("model", [nn.Sequential(Doubled(), nn.BatchNorm2d(2)), Stops()])
def test_every_module_keeps_its_own_mode(model: nn.Module) -> None:
    frozen = list(model.modules())[-1]
    frozen.eval()
    try:
        trace(model, fx.Tracer(), training=True)
    except UntraceableError:
        assert isinstance(model, Stops)
    assert model.training and not frozen.training


def test_the_reason_is_one_line() -> None:
    for model, said in ((Stops("this\nand that"), "this"), (Stops(), "RuntimeError")):
        with pytest.raises(UntraceableError) as caught:
            trace(model, fx.Tracer(), training=True)
        assert str(caught.value) == said


@pytest.mark.parametrize("kind", ["forward_pre_hook", "forward_hook", "full_backward_pre_hook", "full_backward_hook"])
def test_any_kind_of_hook_is_seen(kind: str) -> None:
    module = nn.ReLU()
    assert not has_hooks(module)
    handle = getattr(module, f"register_{kind}")(lambda *_: None)
    assert has_hooks(module)
    handle.remove()
    assert not has_hooks(module)
