"""Which calls of a model wait for their backward passes, told from what their graphs returned and are given."""

from __future__ import annotations

import torch

from shoal.engine.calls import Calls


class Step:
    """Stands for a step: any object that can be referenced weakly."""


def forward(calls: Calls, step: Step, weight: torch.Tensor) -> list[torch.Tensor]:
    """A graph that returns a result, its input and what it saved, the larger one last."""
    given = calls.keys_needed(step, [weight])
    outputs = [torch.ones(4), weight, torch.ones(8), torch.ones(16)]
    calls.started(given, outputs, 2, (0, 1), step)
    return outputs


def test_a_call_is_under_way_as_long_as_what_it_saved() -> None:
    calls, step, weight = Calls(), Step(), torch.ones(1000)
    outputs = forward(calls, step, weight)
    assert calls.under_way() == 1
    del outputs[2]
    assert calls.under_way() == 1  # the largest is watched
    outputs.clear()
    assert calls.under_way() == 0


def test_arguments_are_looked_up_in_the_first_call_alone_and_are_never_a_witness() -> None:
    calls, step, weight = Calls(), Step(), torch.ones(1000)
    assert calls.keys_needed(step, [weight])
    for number in (1, 2):
        calls.begins()
        outputs = forward(calls, step, weight)
        assert not calls.keys_needed(step, [weight])
        call = calls.goes_back([weight, *outputs[2:], torch.ones(4)], step)
        assert call is not None and call.number == number and list(call.outputs) == [0]
        assert call.witness is not None and call.witness.nbytes == 64


def test_a_backward_pass_is_found_wherever_its_arguments_lie_and_of_its_own_step_alone() -> None:
    calls, step, other, weight = Calls(), Step(), Step(), torch.ones(1000)
    first, second = forward(calls, step, weight), forward(calls, step, weight)
    assert calls.goes_back([*second[2:]], other) is None
    assert calls.goes_back([second[3], second[2]], step) is not None
    assert calls.goes_back([torch.ones(1), first[2], first[3]], step) is not None
    assert calls.under_way() == 0
