"""From a network with a finding to the smallest one that still has it, and to a script that shows it by itself.

`Examiner` does so for each network that `bench.fuzz` draws, in a process of its own.
"""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from bench import fuzz_step
from bench.fuzz_compare import Comparison, Finding, NotANetwork, Setting
from bench.fuzz_layers import VARIANTS
from bench.fuzz_networks import Layer, Network, draw, render
from bench.processes import Stage


@dataclass(frozen=True)
class Case:
    """A network and how Shoal was asked to train it."""

    network: Network
    setting: Setting


def shrink(case: Case, persists: Callable[[Case], bool], most_checks: int) -> Case:
    """Take away whatever the finding does not need, one thing at a time, the largest things first.

    Args:
        case: where it was found.
        persists: whether a simpler case still has the finding.
        most_checks: how often that may be asked.
    """
    left = most_checks
    tried = {case}
    while True:
        for simple in simpler(case):
            if simple in tried:
                continue
            tried.add(simple)
            if not left:
                return case
            left -= 1
            if persists(simple):
                case = simple
                break
        else:
            return case


def has(finding: Finding) -> Callable[[Case], bool]:
    """Whether a case has a finding of the same kind, and of the same error where it is one."""

    def persists(case: Case) -> bool:
        try:
            found, _ = Comparison(case.network).findings(case.setting)
        except NotANetwork:
            return False
        return any(one.kind == finding.kind and _alike(one, finding) for one in found)

    return persists


def _alike(one: Finding, other: Finding) -> bool:
    return one.what == other.what or {one.kind} <= {"differs", "rounding"}


def simpler(case: Case) -> Iterator[Case]:
    """Every case that is one step simpler."""
    network, setting = case.network, case.setting
    for layers in _fewer(network.layers):
        yield replace(case, network=replace(network, layers=layers))
    plain = Network(())
    smaller = {
        "autocast": False,
        "channels_last": False,
        "dtype": "float32",
        "head": "mean",
        "dims": 2,
        "size": plain.size,
        "channels": plain.channels,
        # PyTorch's group norm ends the process where a channels_last input wants no gradient.
        "input_gradient": network.channels_last,
    }
    for name, value in smaller.items():
        if getattr(network, name) != value and not (name == "dims" and network.dims == 1):
            yield replace(case, network=replace(network, **{name: value}))
    if network.batch > 2:
        yield replace(case, network=replace(network, batch=2))
    if setting.residence != "device":
        yield replace(case, setting=replace(setting, residence="host" if setting.residence == "file" else "device"))
    if setting.planner not in ("joint", "keep_all"):
        yield replace(case, setting=replace(setting, planner="joint"))
    if setting.budget == "between":
        yield replace(case, setting=replace(setting, budget="least"))
    for layers in _plainer(network.layers):
        yield replace(case, network=replace(network, layers=layers))


def _fewer(layers: tuple[Layer, ...]) -> Iterator[tuple[Layer, ...]]:
    """Half of them, all but one, or what a branch has inside instead of the branch; then the same inside."""
    half = len(layers) // 2
    if half > 1:
        yield from (layers[half:], layers[:half])
    for place, layer in enumerate(layers):
        before, after = layers[:place], layers[place + 1 :]
        yield before + after
        if layer.inside:
            yield before + layer.inside + after
    for place, layer in enumerate(layers):
        for inside in _fewer(layer.inside):
            yield (*layers[:place], replace(layer, inside=inside), *layers[place + 1 :])


def _plainer(layers: tuple[Layer, ...]) -> Iterator[tuple[Layer, ...]]:
    """One of them as the first variant of its kind, or with the amount 0."""
    for place, layer in enumerate(layers):
        plain = [replace(layer, variant=VARIANTS[layer.kind][0]), replace(layer, amount=0)]
        plain += [replace(layer, inside=inside) for inside in _plainer(layer.inside)]
        for one in plain:
            if one != layer:
                yield (*layers[:place], one, *layers[place + 1 :])


def script(case: Case, finding: Finding) -> str:
    """A program that shows the finding with nothing but torch and shoal: the text of the network and of the step are
    the very ones that ran."""
    network, setting = case.network, case.setting
    title = f"{finding.kind}: {finding.what or finding.details}".replace('"""', "'''").replace("\\", "/")
    details = finding.details.replace('"""', "'''").replace("\\", "/")
    step = inspect.getsource(fuzz_step).split('"""', 2)[2].lstrip()
    step = "\n".join(line for line in step.splitlines() if not line.startswith("import torch"))
    residence = {"device": None, "host": "host", "file": "/tmp"}[setting.residence]
    return (
        f'"""{title}\n\nFound by bench.fuzz: {details}\n\nnetwork = {network}\nsetting = {setting}\n"""\n\n'
        f"{render(network)}\n\n{step}\n\n\n"
        f"PLANNER, BUDGET, OFFLOAD_TO = {setting.planner!r}, {setting.budget!r}, {residence!r}\n"
        f"ALLOW, SHARE = {setting.allow!r}, {setting.share(network.seed)}  # of what is above the minimum\n"
        f"{_MAIN}"
    )


_MAIN = '''

def planned(budget):
    """Train inside a budget; what is refused is tried again with what is named."""
    for _ in range(5):
        torch._dynamo.reset()
        model = build()
        optimizer = optimizer_of(model)
        try:
            options = shoal.Options(planner=PLANNER)
            shoal.compile(model, budget, optimizer=optimizer, allow=ALLOW, offload_to=OFFLOAD_TO, options=options)
            reported = lambda: model.shoal.predicted_peak_bytes
            found, _, peaks = train(model, optimizer, globals(), course, reported, metered=True)
            print(f"budget {budget}: (measured, predicted) {peaks}, {model.shoal.repairs} repairs")
            return budget, found
        except shoal.BudgetError as error:
            print(f"budget {budget}: refused, {error.least_feasible_bytes} named")
            named = error.least_feasible_bytes
            budget = named if named else 2 * budget + 12 * sum(p.numel() for p in model.parameters())
    raise SystemExit("no named budget is feasible")


if __name__ == "__main__":
    import shoal

    torch.set_num_threads(1)
    eager_model = build()
    eager, course, peaks = train(eager_model, optimizer_of(eager_model), globals(), predicted=lambda: 0, metered=True)
    peak = max(measured for measured, _ in peaks)
    print(f"plain PyTorch: {peak} bytes")
    try:
        aot_model = build()
        compiled = torch.compile(aot_model, backend="aot_eager", fullgraph=True, dynamic=False)
        aot, _, _ = train(compiled, optimizer_of(aot_model), globals(), course)
        print("aot_eager differs from eager in", differences(aot, eager)[:5])
    except Exception as error:
        aot = {}
        print("aot_eager:", type(error).__name__, str(error).splitlines()[:1])
    budget, found = planned(peak if BUDGET == "plain" else 1)
    if BUDGET == "between":
        budget, found = planned(budget + int(SHARE * (peak - budget)))
    wrong = differences(found, eager)
    print("Shoal differs from eager in", wrong[:5])
    print("Shoal differs from both in", [name for name in wrong if not same(found.get(name), aot.get(name))][:5])
'''


SHRINKING = "shrinking"


class Examiner:
    """Examines one network after another in a process of its own; see `bench.processes`.

    A question has `seed`, `number`, `attempt`, `settings`, `most_checks`, `most_shrunk` and `shrunk`; the answer has
    `findings` and `runs`, or `not_a_network`.
    """

    def __init__(self) -> None:
        torch.set_num_threads(1)
        warnings.simplefilter("ignore")
        logging.getLogger("shoal").setLevel(logging.ERROR)  # repairs are counted
        logging.getLogger("torch._dynamo").setLevel(logging.CRITICAL)

    def __call__(self, asked: Mapping[str, Any], stage: Stage) -> dict[str, Any]:
        return examine(asked, stage)


def examine(asked: Mapping[str, Any], stage: Stage) -> dict[str, Any]:
    """The findings of one network, each with its script, and what each training took."""
    network = draw(asked["seed"], asked["number"], asked["attempt"])
    try:
        comparison = Comparison(network, stage)
    except NotANetwork as error:
        return {"not_a_network": str(error)}
    found: list[Finding] = []
    runs = []
    for setting in asked["settings"]:
        findings, ran = comparison.findings(Setting(*setting))
        found += findings
        runs += [asdict(one) for one in ran]
    shrunk = dict(asked["shrunk"])
    reported = []
    for finding in distinct(found):
        case = Case(network, finding.setting)
        key = f"{finding.kind}: {finding.what}"
        if shrunk.get(key, 0) < asked["most_shrunk"]:
            shrunk[key] = shrunk.get(key, 0) + 1
            stage(f"{SHRINKING} {key}")
            case = shrink(case, has(finding), asked["most_checks"])
        count = sum((one.kind, one.what) == (finding.kind, finding.what) for one in found)
        reported.append(asdict(finding) | {"count": count, "ours": finding.ours, "script": script(case, finding)})
    return {"findings": reported, "runs": runs}


def distinct(found: Sequence[Finding]) -> list[Finding]:
    """The first of each kind."""
    return list({(one.kind, one.what): one for one in reversed(found)}.values())[::-1]
