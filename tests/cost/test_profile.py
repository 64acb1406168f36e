"""Ops run by themselves: every op of a real step can be, nothing else notices, and the disk remembers."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import default_partition
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from shoal.cost import measurement_cache
from shoal.cost.profile import _cpu_clock, profile
from shoal.cost.random_operands import OperandFactory
from shoal.errors import InputError
from shoal.graph.op_counts import moved_bytes, signature
from shoal.lowlevel import allocations
from tests.raising import raising

aten = torch.ops.aten

pytestmark = pytest.mark.usefixtures("real_machine")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path))
    return tmp_path


def nodes_of(function: Callable[..., Any], *operands: torch.Tensor) -> dict[str, fx.Node]:
    return by_signature(make_fx(function, tracing_mode="fake")(*operands).graph)


def by_signature(graph: fx.Graph) -> dict[str, fx.Node]:
    return {signature(node): node for node in graph.nodes if node.op == "call_function" and moved_bytes(node)}


class Network(nn.Module):
    """Every kind of layer whose backward op is fussy about its operands."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.MaxPool2d(3, stride=2, padding=1),
            nn.Conv2d(8, 8, 3, groups=8),
            nn.Dropout(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
        )
        self.classifier = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.classifier(self.features(x)), target)


def capture_step(visit: Callable[[fx.Graph], Any], x: torch.Tensor) -> None:
    """Call `visit` with the joint graph where a partitioner would see it, then train one step."""

    def partition(joint: fx.GraphModule, inputs: Any, **options: Any) -> Any:
        visit(joint.graph)
        return default_partition(joint, inputs, **options)

    from functorch.compile import make_boxed_func

    compiler = lambda module, _: make_boxed_func(module)  # noqa: E731
    backend = aot_autograd(fw_compiler=compiler, bw_compiler=compiler, partition_fn=partition)
    torch._dynamo.reset()
    compiled = torch.compile(Network(), backend=backend)
    compiled(x, torch.arange(len(x)) % 5).backward()


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_every_op_of_a_captured_step_is_timed_within_the_capture(layout):
    x = torch.randn(4, 3, 17, 17).to(memory_format=layout)
    seen: dict[str, Any] = {}

    def visit(graph: fx.Graph) -> None:
        seen["nodes"] = by_signature(graph)
        seen["costs"] = profile(seen["nodes"])

    capture_step(visit, x)
    names = " ".join(seen["nodes"])
    for target in ("convolution_backward", "batch_norm_backward", "indices_backward", "dropout_backward", "nll_loss"):
        assert target in names
    assert seen["costs"].seconds.keys() == seen["nodes"].keys()
    assert all(seconds > 0 for seconds in seen["costs"].seconds.values())
    assert all(count >= 0 for count in seen["costs"].workspace_bytes.values())


def test_random_state_gradient_mode_and_autocast_are_as_before():
    nodes = nodes_of(lambda x: torch.rand_like(aten.native_dropout(x, 0.5, True)[0]), torch.randn(100))
    torch.manual_seed(0)
    state = torch.get_rng_state()
    with torch.autocast("cpu", torch.bfloat16):
        costs = profile(nodes)
        assert torch.is_autocast_enabled("cpu")
    assert len(costs.seconds) == len(nodes) == 2
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.is_grad_enabled()


def with_scratch(x: torch.Tensor, scratch_elems: int) -> tuple[torch.Tensor, None, torch.Tensor]:
    scratch = torch.empty(scratch_elems)
    first = x.relu()
    more = torch.empty(scratch_elems)
    del scratch, more
    return first, None, first[:2].clone()


def late_result(x: torch.Tensor, scratch_elems: int) -> torch.Tensor:
    scratch = torch.empty(scratch_elems)
    del scratch
    return x.relu()


def python_node(function: Callable[..., Any], *options: Any) -> dict[str, fx.Node]:
    graph = fx.Graph()
    x = graph.placeholder("x")
    with FakeTensorMode():
        x.meta["val"] = torch.zeros(1000)
    node = graph.call_function(function, (x, *options))
    return {signature(node): node}


def test_workspace_is_exactly_what_is_held_beyond_operands_and_results():
    (held,) = profile(python_node(with_scratch, 5000)).workspace_bytes.values()
    # The first scratch and both results but for the last, 8 bytes, are there when the second scratch comes.
    assert held == 2 * 5000 * 4 - 8
    # Scratch that is gone before the result is made weighs only what the result does not.
    (held,) = profile(python_node(late_result, 5000)).workspace_bytes.values()
    assert held == (5000 - 1000) * 4
    (held,) = profile(python_node(late_result, 500)).workspace_bytes.values()
    assert held == 0


@pytest.mark.parametrize(
    ("read", "copies"),
    [
        (lambda z: (z, z.resolve_conj()), 0),
        (lambda z: (z, z.conj()), 1),
        (lambda z: (z.conj(), z.conj()), 2),
        (lambda z: (z.real, z.conj().imag), 1),  # a view that is negated
    ],
)
def test_what_a_kernel_copies_of_an_operand_that_is_conjugated_or_negated_lazily_is_workspace(read, copies):
    read = read(torch.randn(50, 40, dtype=torch.complex64))
    graph, fake = fx.Graph(), FakeTensorMode()
    operands = [graph.placeholder(f"x{place}") for place in range(2)]
    for operand, value in zip(operands, read, strict=True):
        operand.meta["val"] = fake.from_tensor(value)
    node = graph.call_function(aten.mul.Tensor, tuple(operands))
    node.meta["val"] = operands[0].meta["val"] * operands[1].meta["val"]
    (workspace,) = profile({signature(node): node}, cache=False).workspace_bytes.values()
    assert workspace == copies * read[0].nbytes


def test_under_a_running_profiler_ops_cost_the_same_bytes_and_none_of_their_runs_is_in_its_trace():
    nodes = python_node(with_scratch, 5000)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        costs = profile(nodes, cache=False)
        torch.zeros(1).tanh()
    assert costs.workspace_bytes == profile(nodes, cache=False).workspace_bytes
    assert set(costs.seconds) == set(nodes)
    recorded = {event.key for event in profiler.key_averages()}
    assert "aten::tanh" in recorded
    assert "aten::relu" not in recorded


def fail(x: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("no kernel\nand a long story")


def test_an_op_that_cannot_run_is_left_out_and_named():
    nodes = python_node(fail) | python_node(late_result, 1)
    with pytest.warns(UserWarning, match=r"cannot time .*fail.*: no kernel; its time"):
        costs = profile(nodes)
    assert len(costs.seconds) == 1


calls = {"count": 0}


def counted(x: torch.Tensor) -> torch.Tensor:
    calls["count"] += 1
    return x.relu()


def test_the_second_time_comes_from_disk_unless_told_otherwise(cache):
    nodes = python_node(counted)
    first = profile(nodes)
    calls["count"] = 0
    assert profile(nodes) == first
    assert calls["count"] == 0
    profile(nodes, cache=False)
    assert calls["count"] > 0
    profile(python_node(late_result, 1))
    (file,) = (cache / "costs").iterdir()
    assert len(json.loads(file.read_text())["entries"]) == 2


def test_other_kernels_are_another_machine(monkeypatch):
    before = measurement_cache.describe(torch.device("cpu"))
    monkeypatch.setenv("SHOAL_KERNELS", "portable")
    assert measurement_cache.describe(torch.device("cpu")) != before
    monkeypatch.undo()
    monkeypatch.setattr(measurement_cache, "fingerprint", lambda: "another build")
    assert measurement_cache.describe(torch.device("cpu")) != before


def test_the_precision_of_products_may_be_said_in_pytorchs_new_way_and_the_old():
    before = measurement_cache.describe(torch.device("cpu"))
    said = torch.backends.fp32_precision
    try:
        torch.backends.fp32_precision = "tf32"  # after which the old way cannot be asked
        new_way = measurement_cache.describe(torch.device("cpu"))
    finally:
        torch.backends.fp32_precision = said
    torch.set_float32_matmul_precision("medium")
    try:
        old_way = measurement_cache.describe(torch.device("cpu"))
    finally:
        torch.set_float32_matmul_precision("highest")
    assert len({str(one["float32_precision"]) for one in (before, new_way, old_way)}) == 3


def test_a_wrong_choice_of_kernels_is_refused_before_anything_is_measured(monkeypatch):
    monkeypatch.setenv("SHOAL_KERNELS", "cuda")
    with raising(InputError, "SHOAL_KERNELS=cuda"):
        measurement_cache.recall("costs", torch.device("cpu"), [])


def test_a_file_is_read_once_however_many_steps_ask_and_again_when_another_process_has_written_it(cache, monkeypatch):
    reads = []
    read_json = measurement_cache.read_json
    monkeypatch.setattr(measurement_cache, "read_json", lambda path: reads.append(path) or read_json(path))
    cpu = torch.device("cpu")
    for number in range(5):
        measurement_cache.remember("costs", cpu, {f"op {number}": [1.0, 0, 0.0]})
    assert measurement_cache.recall("costs", cpu, ["op 0", "op 4", "op 5"]).keys() == {"op 0", "op 4"}
    assert not reads
    (file,) = (cache / "costs").iterdir()
    content = json.loads(file.read_text())
    content["entries"]["op 5"] = [2.0, 0, 0.0]
    file.write_text(json.dumps(content))
    assert measurement_cache.recall("costs", cpu, ["op 5"]) == {"op 5": [2.0, 0, 0.0]}
    assert reads == [file]


def test_the_oldest_measurements_are_dropped(cache, monkeypatch):
    monkeypatch.setattr(measurement_cache, "_MOST_ENTRIES", 2)
    cpu = torch.device("cpu")
    for number in range(3):
        measurement_cache.remember("costs", cpu, {f"op {number}": [1.0, 0, 0.0]})
    assert measurement_cache.recall("costs", cpu, ["op 0", "op 1", "op 2"]).keys() == {"op 1", "op 2"}


def test_other_settings_are_another_machine():
    nodes = python_node(counted)
    profile(nodes)
    calls["count"] = 0
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        profile(nodes)
    finally:
        torch.set_num_threads(threads)
    assert calls["count"] > 0


@pytest.mark.parametrize(
    "content", [b"", b"{", b"\xff\xfe", b"[1, 2]", b'{"entries": 3}', b"[" * 100_000, b'{"a":' * 100_000, b"1" * 5000]
)
def test_a_broken_cache_file_is_told_and_rewritten(cache, content):
    nodes = python_node(late_result, 1)
    profile(nodes)
    (file,) = (cache / "costs").iterdir()
    file.write_bytes(content)
    with pytest.warns(UserWarning, match="measuring again"):
        profile(nodes)
    assert nodes.keys() == json.loads(file.read_text())["entries"].keys()


BROKEN_ENTRIES = (
    '["fast", null]',
    "[Infinity, 0]",
    "[-Infinity, 0]",
    "[NaN, 0]",
    "[1e300, 0]",
    "[3600.1, 0]",
    "[-1e-9, 0]",
    "[1e-3, -1]",
    "[1e-3, 9223372036854775808]",
    "[1e-3, 1.5]",
    "[1e-3, NaN]",
    "[1e-3, true]",
    "[true, 0]",
    "[1e-3]",
    "[1e-3, 0, 0]",
    "[]",
    "null",
    "7",
    '"ab"',
    '{"a": 1, "b": 2}',
    "[" * 500 + "]" * 500,
)


@pytest.mark.parametrize("entry", BROKEN_ENTRIES, ids=lambda entry: entry[:20])
def test_a_broken_entry_is_measured_again_and_rewritten(cache, entry):
    nodes = python_node(late_result, 1)
    profile(nodes)
    (file,) = (cache / "costs").iterdir()
    content = json.loads(file.read_text())
    content["entries"] = dict.fromkeys(content["entries"], "here") | {"of another op": "here"}
    file.write_text(json.dumps(content).replace('"here"', entry))
    (seconds,) = profile(nodes).seconds.values()
    assert 0 < seconds < 3600
    (key,) = nodes
    known = json.loads(file.read_text())["entries"][key]
    assert known[0] == seconds and type(known[1]) is int


def test_without_a_place_to_write_it_goes_on(cache, monkeypatch):
    blocked = cache / "file"
    blocked.write_text("in the way")
    monkeypatch.setenv("SHOAL_CACHE", str(blocked))
    assert len(profile(python_node(late_result, 1)).seconds) == 1
    assert measurement_cache.remember("costs", torch.device("cpu"), {}) is False


@pytest.mark.parametrize(
    ("run_seconds", "runs", "fastest_seconds"),
    [
        # The first run selects kernels too, and counts where that is a small part of it.
        ([4e-3, 1e-3, 1.02e-3], 3, 1e-3),  # the third confirms the second
        ([1e-5, 1e-4, 3e-4, 2e-4, 1.01e-4], 5, 1e-4),  # the last does
        ([4e-3, 1e-3, 2.1e-3], 3, 1e-3),  # two runs that took 3 ms
        ([5.1e-3, 5e-3], 2, 5e-3),  # this first run counts
        ([1e-2, 2e-2], 2, 1e-2),
        ([5.1e-2, 5e-2], 2, 5e-2),
        ([6e-1], 1, 6e-1),  # it is not run again
    ],
)
def test_an_op_is_timed_until_a_second_run_confirms_the_fastest(monkeypatch, run_seconds, runs, fastest_seconds):
    left = list(run_seconds) + [7e-6] * 3

    def take(run: Callable[[], Any]) -> float:
        run()
        return left.pop(0)

    monkeypatch.setattr("shoal.cost.profile._cpu_clock", take)
    costs = profile(nodes_of(torch.sin, torch.randn(8)), cache=False)
    assert list(costs.seconds.values()) == [fastest_seconds]
    assert len(left) == len(run_seconds) + 3 - runs


def test_an_op_that_may_write_over_an_operand_is_timed_doing_so(monkeypatch):
    made: list[int] = []

    def count(run: Callable[[], Any]) -> float:
        _, changes = allocations.record(run)
        made.append(max(changes, default=0))
        return 1e-3

    workspace = []
    monkeypatch.setattr("shoal.cost.profile._cpu_workspace", lambda run: workspace.append(run()) or 0)
    monkeypatch.setattr("shoal.cost.profile._cpu_clock", count)
    profile(nodes_of(torch.relu, torch.randn(1000)), cache=False)
    assert made[0] >= 4000  # by itself, for its workspace
    assert made[1:] == [0, 0]
    profile(nodes_of(torch.sin, torch.randn(1000)), cache=False)
    assert min(made[3:]) >= 4000


def test_a_spent_time_budget_still_times_every_op():
    nodes = nodes_of(lambda x: (x + 1).relu().sigmoid(), torch.randn(8, 8))
    assert profile(nodes, budget_seconds=0).seconds.keys() == nodes.keys()


def test_a_first_step_is_told_how_far_it_is_by_the_sizes_of_ops(monkeypatch):
    told: list[tuple[str, str, float, float | None]] = []

    def doing(stage: str, what: str = "", *, done: float = 0.0, total: float | None = None) -> bool:
        told.append((stage, what, done, total))
        return True

    monkeypatch.setattr("shoal.cost.profile.doing", doing)
    profile(nodes_of(lambda x: (x.sum() + 1).relu(), torch.randn(100)), cache=False)
    # One more than the numbers that each reads and writes.
    assert told == [
        ("profile", "", 0.0, None),
        ("profile", "op 1 of 3: aten.sum.default", 0, 102 + 3 + 3),
        ("profile", "op 2 of 3: aten.add.Tensor", 102, 102 + 3 + 3),
        ("profile", "op 3 of 3: aten.relu.default", 105, 102 + 3 + 3),
    ]


def test_the_bar_shows_on_stderr_only_when_asked_or_on_a_terminal(capfd):
    nodes = python_node(late_result, 1)
    profile(nodes, cache=False)
    assert capfd.readouterr() == ("", "")
    profile(nodes, cache=False, progress=True)
    out, err = capfd.readouterr()
    assert out == ""
    assert "timing ops" in err
    assert not sys.stderr.isatty()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_graph_captured_on_fake_cpu_tensors_is_timed_on_the_gpu():
    nodes = nodes_of(lambda x, w: torch.conv2d(x, w), torch.randn(2, 8, 16, 16), torch.randn(8, 8, 3, 3))
    costs = profile(nodes, device="cuda")
    assert costs.seconds.keys() == nodes.keys()


def test_time_in_which_another_process_has_the_core_does_not_count() -> None:
    assert _cpu_clock(lambda: time.sleep(0.1)) < 0.05  # asleep, as when another process runs


def test_a_large_op_finds_its_operands_in_no_cache_and_a_small_one_in_that_which_cores_share(monkeypatch):
    evicted: list[bool] = []
    monkeypatch.setattr(OperandFactory, "evict", lambda self, *, shared=False: evicted.append(shared))
    for elems, shared in ((1 << 10, False), (1 << 20, True)):
        evicted.clear()
        profile(nodes_of(torch.neg, torch.empty(elems)), cache=False)
        assert evicted and set(evicted) == {shared}
