"""Which implementation runs: the first that SHOAL_KERNELS allows, that applies and that pays; else the reference."""

from __future__ import annotations

from inspect import signature
from typing import Any

import pytest
import torch

from shoal.errors import InputError
from shoal.kernels import batch_norm, direct_convolution, norm_again, odd_products, pooling
from shoal.kernels.invertible_norm import inverted_norms
from shoal.kernels.norm import norm_conv
from shoal.kernels.relu import note_closed
from shoal.lowlevel import dispatch
from shoal.lowlevel.dispatch import KINDS, TABLE, VARIABLE, DispatchedOp, Implementation, Kind, choose, level_number
from shoal.lowlevel.native import LEVELS, levels
from tests.raising import raising


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)


def op_of(**applies: bool) -> tuple[DispatchedOp[str], list[tuple[str, Any]]]:
    """An op whose implementations apply or not, and what they are asked."""
    asked: list[tuple[str, Any]] = []

    def implementation(kind: Kind) -> Implementation[str]:
        return Implementation(kind, kind, lambda *case: (asked.append((kind, case)), applies.get(kind, False))[1])

    return DispatchedOp("test", "reference", tuple(map(implementation, KINDS))), asked


def test_where_none_applies_the_reference_runs() -> None:
    assert choose(op_of()[0], torch.ones(1)) == "reference"


def test_each_is_asked_about_the_case_in_order() -> None:
    op, asked = op_of(native=True)
    assert choose(op, 1, 2) == "native"
    assert asked == [("triton", (1, 2)), ("native", (1, 2))]
    assert choose(op_of(native=True, triton=True)[0], 1) == "triton"


def test_what_does_not_pay_leaves_it_to_the_next() -> None:
    slow = Implementation[str]("triton", "triton", lambda elems: True, lambda elems: elems > 8)
    fast = Implementation[str]("native", "native", lambda elems: True)
    op = DispatchedOp("test", "reference", (slow, fast))
    assert (choose(op, 9), choose(op, 8)) == ("triton", "native")


@pytest.mark.parametrize(
    ("value", "runs"),
    [
        ("reference", "reference"),
        ("native", "native"),
        ("triton", "triton"),
        ("", "triton"),
        (" native , triton ", "triton"),
        ("portable", "triton"),
        ("native,portable,no-winograd", "native"),
    ],
)
def test_the_variable_narrows_the_choice(monkeypatch: pytest.MonkeyPatch, value: str, runs: str) -> None:
    monkeypatch.setenv(VARIABLE, value)
    assert choose(op_of(native=True, triton=True)[0], 1) == runs


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("cuda", "'cuda' is none of them"),
        ("native,,triton", "'' is none of them"),
        ("Native", "'Native' is none of them"),
        ("reference,native", "reference excludes other words"),
        ("avx2,avx512", "avx2 and avx512 exclude each other"),
        ("triton,avx2", "are for native kernels, so add native"),
        ("triton,no-winograd", "are for native kernels, so add native"),
    ],
)
def test_a_wrong_value_is_one_line_that_lists_the_choices(
    monkeypatch: pytest.MonkeyPatch, value: str, problem: str
) -> None:
    monkeypatch.setenv(VARIABLE, value)
    with pytest.raises(InputError) as error:
        choose(op_of()[0], 1)
    message = str(error.value)
    assert message.startswith(
        f"{VARIABLE}={value}: expected words of reference, triton, native, portable, avx2, avx512"
    )
    assert problem in message


def test_the_level_is_the_variables_unless_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    assert level_number() == -1
    for level in levels():
        monkeypatch.setenv(VARIABLE, level)
        assert level_number() == LEVELS.index(level)
        assert level_number(levels()[0]) == 0
    for absent in set(LEVELS) - set(levels()):
        monkeypatch.setenv(VARIABLE, absent)
        with raising(InputError, absent):
            level_number()


def test_every_op_is_in_the_table() -> None:
    modules = (batch_norm, direct_convolution, inverted_norms, norm_again, norm_conv, pooling, odd_products)
    assert all(modules) and note_closed  # imported, as codecs are, they are registered
    assert set(TABLE) == {
        *("activated_norm", "copy_rows", "direct_convolution", "max_pool"),
        *("batch_norm_gradient", "norm_conv", "norm_conv_backward", "norm_conv_weight_grad"),
        *("norm_sweeps", "one_bit", "relu_gate", "relu_sign_bits", "sign_mask", "table_codes", "truncation"),
    }


@pytest.mark.parametrize("name", ["table_codes", "truncation", "one_bit", "sign_mask", "norm_sweeps"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_implementation_has_the_functions_of_the_reference(name: str, kind: str) -> None:
    reference, own = TABLE[name].functions("reference"), TABLE[name].functions(kind)
    names = [each for each in dir(reference) if not each.startswith("_")]
    assert names
    for each in names:
        theirs, ours = (list(signature(getattr(of, each)).parameters) for of in (own, reference))
        assert theirs[: len(ours)] == ours


def test_a_name_is_registered_once() -> None:
    with pytest.raises(AssertionError, match="truncation"):
        dispatch.register("truncation", None)
