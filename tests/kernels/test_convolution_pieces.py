"""A convolution and its gradients in pieces: what the whole gives, with less scratch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from shoal.kernels import convolution_pieces
from shoal.kernels.convolution import input_gradient
from shoal.kernels.convolution_pieces import IN_PIECES, choose, cut_of_large_weight, may_be_worth_pieces
from shoal.lowlevel import allocations
from tests.kernels.test_convolution import convolutions

aten = torch.ops.aten
CONVOLUTION, BACKWARD = aten.convolution.default, aten.convolution_backward.default


@pytest.fixture(autouse=True)
def nothing_chosen_before() -> None:
    convolution_pieces._best_cut.cache_clear()


def close(found: torch.Tensor, whole: torch.Tensor, exact: torch.Tensor) -> bool:
    """Whether it is as near to what float64 gives as the whole is."""
    tolerance = 8 * torch.finfo(found.dtype).eps * max(1.0, float(exact.abs().max()))
    return bool((found - exact).abs().max() <= (whole - exact).abs().max() + tolerance)


def is_padded_beyond_reach(weight: torch.Tensor, options: list[Any]) -> bool:
    return bool(options[1][0] > (weight.shape[2] - 1) * options[2][0])


@settings(max_examples=60)
@given(convolutions(), st.integers(1, 9), st.booleans(), st.booleans())
def test_a_result_in_pieces_is_as_close_to_float64_as_the_whole(
    convolution: tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[Any]], pieces: int, slabs: bool, with_bias: bool
) -> None:
    _, x, weight, options = convolution
    assume(not (slabs and is_padded_beyond_reach(weight, options)))
    n_out = weight.shape[1] * options[5] if options[3] else weight.shape[0]
    bias = torch.linspace(-1, 1, n_out, dtype=x.dtype) if with_bias else None
    whole = aten.convolution(x, weight, bias, *options)
    exact = aten.convolution(x.double(), weight.double(), None if bias is None else bias.double(), *options)
    found = convolution_pieces.forward(x, weight, bias, *options, 2 if slabs else 0, pieces)
    assert (found.shape, found.dtype) == (whole.shape, whole.dtype)
    assert close(found, whole, exact)


@settings(max_examples=60)
@given(convolutions(), st.integers(1, 9), st.booleans())
def test_an_input_gradient_in_pieces_is_as_close_to_float64_as_the_whole(
    convolution: tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[Any]], pieces: int, slabs: bool
) -> None:
    grad, x, weight, options = convolution
    assume(not (slabs and is_padded_beyond_reach(weight, options)))
    layout = list(x.shape), list(x.stride())
    whole = input_gradient(grad, weight, *layout, *options)
    exact = input_gradient(grad.double(), weight.double(), *layout, *options)
    found = convolution_pieces.input_gradient(grad, weight, *layout, *options, 2 if slabs else 0, pieces)
    assert (found.shape, found.dtype) == (whole.shape, whole.dtype)
    assert close(found, whole, exact)


@settings(max_examples=40)
@given(convolutions(), st.integers(1, 9), st.integers(0, 1), st.booleans())
def test_a_weight_gradient_in_pieces_is_as_close_to_float64_as_the_whole(
    convolution: tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[Any]], pieces: int, dim: int, with_bias: bool
) -> None:
    grad, x, weight, options = convolution
    assume(options[5] == 1)
    rest = ([grad.shape[1]] if with_bias else None, *options, [False, True, with_bias])
    whole = BACKWARD(grad, x, weight, *rest)[1:]
    exact = BACKWARD(grad.double(), x.double(), weight.double(), *rest)[1:]
    _, *found = convolution_pieces.weight_gradient(grad, x, weight, *rest, dim, pieces)
    for ours, theirs, reference in zip(found, whole, exact, strict=True):
        assert (ours is None) == (theirs is None)
        assert ours is None or (ours.shape == theirs.shape and close(ours, theirs, reference))


def test_what_a_filter_does_not_reach_is_zero_and_what_is_infinite_stays_where_it_is() -> None:
    x, weight = torch.randn(1, 2, 12, 5), torch.randn(3, 2, 1, 1)
    options = [[4, 1], [0, 0], [1, 1], False, [0, 0], 1]
    grad = torch.randn(1, 3, 3, 5)
    whole = input_gradient(grad, weight, list(x.shape), list(x.stride()), *options)
    found = convolution_pieces.input_gradient(grad, weight, list(x.shape), list(x.stride()), *options, 2, 12)
    assert torch.equal(found, whole) and int((found[0, 0, :, 0] != 0).sum()) == 3
    weight = torch.full((1, 1, 3, 3), torch.inf)
    padded = [[1, 1], [1, 1], [1, 1], False, [0, 0], 1]
    x = torch.ones(1, 1, 8, 8)
    expected = aten.convolution(x, weight, None, *padded)
    assert torch.equal(convolution_pieces.forward(x, weight, None, *padded, 2, 4).isnan(), expected.isnan())


def unfolded() -> dict[Any, tuple[Any, ...]]:
    """By what computes it whole: a 3-D convolution on a batch of one, which PyTorch unfolds 27 times."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(shape, generator=generator)  # noqa: E731
    x, weight, grad = draw(1, 4, 24, 24, 24), draw(4, 4, 3, 3, 3), draw(1, 4, 24, 24, 24)
    options = ([1, 1, 1], [1, 1, 1], [1, 1, 1], False, [0, 0, 0], 1)
    return {
        CONVOLUTION: (x, weight, None, *options),
        input_gradient: (grad, weight, list(x.shape), list(x.stride()), *options),
        BACKWARD: (grad, x, weight, None, *options, [False, True, False]),
    }


def test_a_transposed_convolution_leaves_its_bias_between_the_windows_and_pads_its_output() -> None:
    x, weight, bias = torch.randn(1, 2, 6, 4), torch.randn(2, 3, 2, 2), torch.randn(3)
    options = [[3, 1], [0, 0], [1, 1], True, [2, 0], 1]
    whole = aten.convolution(x, weight, bias, *options)
    for n in (1, 4, 19):
        assert torch.allclose(convolution_pieces.forward(x, weight, bias, *options, 2, n), whole, atol=1e-6)
    assert torch.equal(whole[:, :, -2], bias.view(1, 3, 1).expand(1, 3, whole.shape[3]))


def results(made: Any) -> torch.Tensor:
    return made[1] if isinstance(made, tuple) else made


@pytest.mark.parametrize("whole", list(unfolded()), ids=["forward", "input gradient", "weight gradient"])
def test_pieces_are_proposed_where_they_repeat_the_bits_and_save_scratch(whole: Any) -> None:
    arguments = unfolded()[whole]
    cut = choose(whole, arguments)
    assert cut is not None
    expected, theirs = allocations.record(lambda: results(whole(*arguments)))
    found, ours = allocations.record(lambda: results(IN_PIECES[whole](*arguments, cut.dim, cut.count)))
    assert torch.equal(found, expected) and found.stride() == expected.stride()
    assert allocations.peak_bytes(theirs) - allocations.peak_bytes(ours) == cut.saved_bytes
    assert cut.saved_bytes > (allocations.peak_bytes(theirs) - found.nbytes) / 2


@pytest.mark.parametrize("whole", list(unfolded()), ids=["forward", "input gradient", "weight gradient"])
def test_a_running_profiler_changes_no_choice(whole: Any) -> None:
    arguments = unfolded()[whole]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        beside = choose(whole, arguments)
    convolution_pieces._best_cut.cache_clear()
    assert beside is not None
    assert beside == choose(whole, arguments)


def test_samples_are_cut_where_a_batch_of_a_strided_convolution_takes_scratch() -> None:
    x, weight = torch.randn(8, 64, 56, 56), torch.randn(128, 64, 1, 1)
    arguments = (x, weight, None, [2, 2], [0, 0], [1, 1], False, [0, 0], 1)
    cut = choose(CONVOLUTION, arguments)
    if cut is None:
        pytest.skip("this processor's convolution takes no scratch worth saving here, or other bits than pieces")
    assert torch.equal(convolution_pieces.forward(*arguments, cut.dim, cut.count), CONVOLUTION(*arguments))


@pytest.mark.parametrize("whole", list(unfolded()), ids=["forward", "input gradient", "weight gradient"])
def test_where_pieces_give_other_bits_the_whole_stays(whole: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def off_by_a_little(*arguments: Any) -> Any:
        made = whole(*arguments[:-2])
        return tuple(one if one is None else one + 1e-3 for one in made) if isinstance(made, tuple) else made + 1e-3

    monkeypatch.setitem(IN_PIECES, whole, off_by_a_little)
    assert choose(whole, unfolded()[whole]) is None


def test_what_takes_little_scratch_or_is_elsewhere_stays_whole() -> None:
    small = torch.randn(1, 4, 8, 8, 8)
    weight, options = torch.randn(4, 4, 3, 3, 3), ([1] * 3, [1] * 3, [1] * 3, False, [0] * 3, 1)
    assert choose(CONVOLUTION, (small, weight, None, *options)) is None
    assert not may_be_worth_pieces(small, weight, small)
    x, weight, *rest = (one.to("meta") if isinstance(one, torch.Tensor) else one for one in unfolded()[CONVOLUTION])
    assert choose(CONVOLUTION, (x, weight, *rest)) is None
    assert not may_be_worth_pieces(x, weight, x)
    x, weight, *_ = unfolded()[CONVOLUTION]
    assert may_be_worth_pieces(x, weight, x)


def large_weight(channels: int = 512, groups: int = 1, device: str = "cpu") -> tuple[Any, ...]:
    """A weight of 9 MiB on images of one pixel; the arguments of `weight_gradient` but for the cut."""
    generator = torch.Generator().manual_seed(channels)
    draw = lambda *shape: torch.randn(shape, generator=generator).to(device)  # noqa: E731
    options = ([1, 1], [1, 1], [1, 1], False, [0, 0], groups, [False, True, False])
    return draw(4, channels, 1, 1), draw(4, 512, 1, 1), draw(channels, 512 // groups, 3, 3), None, *options


def test_pieces_of_a_large_weight_are_proposed_only_where_they_repeat_bits_and_save_its_bytes() -> None:
    arguments = large_weight()
    cut = cut_of_large_weight(*arguments)
    if cut is None:
        pytest.skip("this processor's whole weight gradient takes no scratch worth saving, or other bits than pieces")
    whole, theirs = allocations.record(lambda: BACKWARD(*arguments)[1])
    found, ours = allocations.record(lambda: convolution_pieces.weight_gradient(*arguments, cut.dim, cut.count)[1])
    assert torch.equal(found, whole)
    assert allocations.peak_bytes(ours) <= allocations.peak_bytes(theirs) - whole.nbytes


def test_a_running_profiler_does_not_change_whether_a_large_weight_is_cut() -> None:
    convolution_pieces._best_cut.cache_clear()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        beside = cut_of_large_weight(*large_weight())
    convolution_pieces._best_cut.cache_clear()
    assert beside == cut_of_large_weight(*large_weight())


@pytest.mark.parametrize(
    "arguments",
    [
        large_weight(channels=16),  # a small weight
        large_weight(groups=2),
        large_weight(device="meta"),
        (
            torch.empty(4, 512, 64, 64),
            torch.empty(4, 512, 64, 64),
            *large_weight()[2:],
        ),  # images larger than the weight
    ],
    ids=["small", "grouped", "elsewhere", "large images"],
)
def test_other_weight_gradients_come_whole_untried(arguments: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convolution_pieces, "_best_cut", lambda *_: pytest.fail("tried"))
    assert cut_of_large_weight(*arguments) is None


def test_where_pieces_of_a_large_weight_give_other_bits_the_whole_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    convolution_pieces._best_cut.cache_clear()

    def off_by_a_little(*arguments: Any) -> tuple[None, torch.Tensor, None]:
        return None, BACKWARD(*arguments[:-2])[1] + 1e-3, None

    monkeypatch.setitem(IN_PIECES, BACKWARD, off_by_a_little)
    assert cut_of_large_weight(*large_weight()) is None
    convolution_pieces._best_cut.cache_clear()
