"""The fuzzer draws the same networks every time, finds and shrinks a planted fault, and a slice of it finds nothing."""

from __future__ import annotations

import json
import runpy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx

from bench import fuzz, fuzz_step
from bench.fuzz_compare import (
    DIFFERS,
    EAGER_ONLY,
    LEAST,
    OVER_BUDGET,
    ROUNDING,
    UNCLEAR,
    Attempt,
    Comparison,
    Finding,
    NotANetwork,
    Setting,
    load,
)
from bench.fuzz_compare import settings as every_setting
from bench.fuzz_layers import VARIANTS
from bench.fuzz_networks import HEADS, Layer, Network, draw, render
from bench.fuzz_shrink import Case, distinct, has, script, shrink
from examples.planners import NAMES
from shoal.engine import backend

PLAIN = Setting("keep_all", "plain", "device")
PARTLY_FROZEN = Network(
    (
        Layer("conv", "reflect_strided"),
        Layer("norm", "batch_frozen"),
        Layer("branch", "eval", 0, (Layer("norm", "batch"), Layer("act", "relu"))),
        Layer("branch", "frozen", 0, (Layer("conv", "circular"), Layer("norm", "batch"))),
    )
)


def step_of(text: str) -> None:
    """One plain step of a rendered network."""
    network = load(text)
    model = network["build"]()
    with torch.autocast("cpu", torch.bfloat16, enabled=network["AUTOCAST"]):
        outputs = model(network["batch"](0))
    sum(output.sum() for output in (outputs if isinstance(outputs, tuple) else (outputs,))).backward()


def test_draws_are_the_same_every_time_and_of_every_kind() -> None:
    drawn = [draw(0, number) for number in range(300)]
    assert drawn == [draw(0, number) for number in range(300)]
    assert len({render(network) for network in drawn}) > 290
    assert draw(1, 0) != drawn[0] != draw(0, 0, attempt=1)

    def variants(layers: tuple[Layer, ...]) -> set[tuple[str, str]]:
        return {(one.kind, one.variant) for one in layers} | {pair for one in layers for pair in variants(one.inside)}

    assert set().union(*(variants(network.layers) for network in drawn)) == {
        (kind, variant) for kind, variants_ in VARIANTS.items() for variant in variants_
    }
    assert {network.head for network in drawn} == set(HEADS)
    assert {1, 2} <= {network.batch for network in drawn}
    assert {1, 2, 3} == {network.dims for network in drawn}
    assert {"float32", "float64"} == {network.dtype for network in drawn}


def test_a_network_is_read_back_from_what_a_script_says_of_it() -> None:
    for number in range(50):
        network = draw(0, number)
        assert eval(repr(network)) == network
        assert render(eval(repr(network))) == render(network)


@pytest.mark.parametrize("kind", [kind for kind in VARIANTS if kind not in ("branch", "repeat")])
def test_plain_pytorch_runs_every_layer_in_every_shape(kind: str) -> None:
    for variant in VARIANTS[kind]:
        for dims, channels, size in ((1, 8, 8), (2, 3, 1), (2, 8, 6), (3, 6, 3)):
            layers = (Layer("conv", "plain", 2), Layer(kind, variant, 3), Layer("conv", "plain"))
            network = Network(layers, dims=dims, channels=channels, size=size)
            step_of(render(network))


def test_any_list_of_layers_is_a_network() -> None:
    for number in range(30):
        network = draw(3, number)
        for place in range(len(network.layers)):
            left = replace(network, layers=network.layers[:place] + network.layers[place + 1 :])
            compile(render(left), "network.py", "exec")
            with torch.device("meta"):
                load(render(left))["build"]()


def test_the_rotation_meets_every_setting_equally_often() -> None:
    met = [setting for number in range(20) for setting in fuzz.rotating(number, 6)]
    assert {met.count(setting) for setting in every_setting()} == {2}


def test_allocations_are_counted_at_their_peak() -> None:
    x = torch.ones(256)
    assert fuzz_step.allocated(lambda: x.sin().cos())[1] == 2048
    assert fuzz_step.allocated(lambda: x.relu_())[1] == 0


@pytest.mark.parametrize(
    ("network", "settings"),
    [
        (PARTLY_FROZEN, [Setting("joint", "least", "device"), Setting(NAMES["hmms"], "least", "host")]),
        (draw(0, 5), [Setting("chain", "least", "device"), Setting("joint", "plain", "file")]),
        (draw(0, 10), [Setting(NAMES["sqrt"], "between", "device"), Setting(NAMES["hascoet"], "plain", "host")]),
    ],
)
def test_a_slice_of_the_fuzzer_finds_nothing(network: Network, settings: list[Setting]) -> None:
    comparison = Comparison(network)
    for setting in settings:
        findings, ran = comparison.findings(setting)
        assert [f for f in findings if f.ours] == []
        assert ran and all(one.peak_bytes <= one.budget_bytes for one in ran)


def wrong(
    lower: Callable[..., tuple[fx.GraphModule, fx.GraphModule]],
) -> Callable[..., tuple[fx.GraphModule, fx.GraphModule]]:
    """Lowering that takes the gradient of tanh for that of a sigmoid."""

    def planted(*args: Any, **kwargs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        forward, backward = lower(*args, **kwargs)
        for node in backward.graph.nodes:
            if "tanh_backward" in str(node.target):
                node.target = torch.ops.aten.sigmoid_backward.default
                node.kwargs = {}
        backward.recompile()
        return forward, backward

    return planted


def test_a_planted_fault_is_found_and_shrunk_to_the_layer_that_has_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(backend, "lower", wrong(backend.lower))
    aside = Layer("branch", "residual", 0, (Layer("act", "tanh"),))
    case = Case(Network((Layer("conv", "pointwise"), aside), batch=3, channels_last=True, input_gradient=True), PLAIN)
    findings, _ = Comparison(case.network).findings(PLAIN)
    (finding,) = (one for one in findings if one.ours)
    assert (finding.kind, finding.ours) == (DIFFERS, True)
    assert "gradient" in finding.what and "error" in finding.details

    small = shrink(case, has(finding), most_checks=20)
    assert [layer.kind for layer in small.network.layers] == ["act"]
    assert small.network.layers[0].variant == "tanh"
    assert not small.network.channels_last and small.network.batch == 2

    path = tmp_path / "script.py"
    path.write_text(script(small, finding))
    runpy.run_path(str(path), run_name="__main__")
    reported = capsys.readouterr().out
    assert "aot_eager differs from eager in []" in reported
    assert "Shoal differs from both in ['0: gradient of the input'" in reported


def test_what_pytorch_does_is_told_apart_from_what_is_ours() -> None:
    network = Network((Layer("conv", "plain"), Layer("dropout", "unused")), head="outside")
    findings, _ = Comparison(network).findings(PLAIN)
    assert not any(f.ours for f in findings)
    assert "generator, no gradient in eager" in [f.what for f in findings if f.kind == EAGER_ONLY]


def test_a_rounding_is_unclear_where_aot_eager_is_no_guide() -> None:
    comparison = Comparison(Network((Layer("conv", "plain"),)))
    (name,) = [name for name in comparison.eager if name == "0: gradient of l1.weight"]
    changed = torch.nextafter(comparison.eager[name], torch.tensor(9.0))
    rounded = Attempt(replace(PLAIN, allow="bitwise"), 1, comparison.eager | {name: changed}, [], 0, True)

    def kinds() -> set[str]:
        found: list[Finding] = []
        comparison._judge(rounded, found)
        return {finding.kind for finding in found}

    assert kinds() == {ROUNDING}
    comparison.__dict__["_aot_eager"] = ({}, "it fails")
    assert kinds() == {UNCLEAR}


def test_a_loss_that_cancels_is_held_against_what_it_sums() -> None:
    comparison = Comparison(Network((Layer("act", "gelu"),), dims=1))
    terms = comparison.eager["0: output 0"].double() * comparison.course["weights"][0]
    size = float(terms.abs().sum())
    comparison.__dict__["_nudged"] = [comparison.eager]
    for loss, kinds in ((size * 1e-7, []), (size * 1e-4, [DIFFERS])):
        comparison.eager["0: loss"] = comparison.aot["0: loss"] = torch.tensor(0.0)
        comparison.exact["0: loss"] = torch.tensor(0.0, dtype=torch.float64)
        trace = comparison.eager | {"0: loss": torch.tensor(loss)}
        found: list[Finding] = []
        comparison._judge(Attempt(replace(PLAIN, allow="exact"), 0, trace, [], 0, True), found)
        assert [one.kind for one in found] == kinds


def test_where_rounding_grows_it_is_told_by_batches_that_differ_in_their_last_bits() -> None:
    """Norms of three channels and of eight pixels: rounding grows a thousandfold on the way."""
    comparison = Comparison(draw(52, 37))
    grown = max(comparison._nudged, key=lambda one: _error(comparison, one))
    assert _error(comparison, grown) > 3 * _error(comparison, comparison.eager)
    wrong = {name: one * (1 + 1e-3) if "gradient of l2" in name else one for name, one in grown.items()}
    for trace, kinds in ((grown, []), (wrong, [DIFFERS])):
        found: list[Finding] = []
        comparison._judge(Attempt(replace(PLAIN, allow="exact"), 0, trace, [], 0, True), found)
        assert [one.kind for one in found] == kinds


def _error(comparison: Comparison, trace: dict[str, torch.Tensor]) -> float:
    name = "1: gradient of l2.weight"
    return fuzz_step.error(trace[name], comparison.exact[name])


def test_in_place_dropout_is_held_against_the_same_mask() -> None:
    network = Network((Layer("conv", "plain"), Layer("dropout", "in_place", 5)), channels_last=True)
    comparison = Comparison(network)
    assert "inplace=True" in render(network)
    assert comparison._is_guided("0: loss")


def test_a_network_that_plain_pytorch_refuses_is_none() -> None:
    with pytest.raises(NotANetwork):
        Comparison(Network((Layer("inplace", "directly"),), input_gradient=True))


def test_a_broken_budget_and_a_false_name_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted by other means than Shoal's own meter, which is switched off."""
    layers = (Layer("conv", "plain", 3), Layer("act", "gelu"), Layer("conv", "plain"), Layer("act", "gelu"))
    comparison = Comparison(Network(layers, size=16))
    monkeypatch.setattr(backend, "STEPS_TO_METER", 0)
    lower = backend.lower
    monkeypatch.setattr(backend, "lower", lambda captured, residences, **how: lower(captured, {}, **how))  # keep all
    findings, ran = comparison.findings(Setting("joint", "least", "device"))
    assert OVER_BUDGET in {finding.kind for finding in findings}
    assert ran[-1].peak_bytes > ran[-1].budget_bytes


def test_the_command_reports_and_writes_scripts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    number = 10  # of a small network
    asked = ["--only", str(number), "--settings", "1", "--jobs", "1", "--shrink", "0", "--out", str(tmp_path)]
    assert fuzz.main(asked) == 0
    reported = capsys.readouterr().out
    assert "Findings in 1 networks" in reported and "0 findings are ours" in reported
    figures = json.loads((tmp_path / "fuzz.json").read_text())
    assert figures["networks"] == 1 and figures["runs"][0]["setting"]["planner"] == fuzz.rotating(number, 1)[0].planner


def test_a_process_that_dies_is_a_finding() -> None:
    died = fuzz._died("Setting(planner='joint')", -11)
    (finding,) = died["findings"]
    assert (finding["kind"], finding["what"], finding["ours"]) == ("crash", "the process ended with -11", True)
    assert "not_a_network" in fuzz._died("plain", -11)
    assert "shrinking" in fuzz._died("shrinking crash: it ends", -11)


def test_findings_are_counted_once_a_kind() -> None:
    one = Finding(LEAST, "a", "1 named", PLAIN)
    other = replace(one, details="2 named")
    assert distinct([one, other, replace(one, kind=DIFFERS)]) == [one, replace(one, kind=DIFFERS)]
