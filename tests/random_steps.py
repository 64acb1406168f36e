"""Steps for tests, as pure data: hand-built networks with their backward pass, and random ones from Hypothesis.

Sizes are in bytes, times in seconds. A convolution saves its input, a batch norm its input and two small statistics,
a ReLU its output (which takes over the block of its input), a pool its indices, a dropout its mask.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

from hypothesis import strategies as st

from shoal.core.hardware import Device, Hardware, Link
from shoal.core.joined_step import EagerUse, Part, Pass, joined_step, with_eager_use
from shoal.core.residence import Offload, Residence
from shoal.core.schedule import schedule
from shoal.core.step import Op, Phase, StepGraph, Storage, StorageKind
from shoal.planners.just_in_time import just_in_time

HARDWARE = Hardware("test", Device("test", 1 << 34, 1e12, 1e11, 1e-6), Link("test", 1e10, 1e10, 1e-5), "made up")
SLOW_LINK = Link("slow", 10.0, 8.0, 0.25)  # in addition to ops of a second and storages of tens of bytes


@dataclass
class Builder:
    """Collects forward ops; `step()` mirrors them into a backward pass. Tensors are storage ids.

    `gradients_apart`: a convolution's weight gradient and input gradient are two ops, as they are in a captured step.
    """

    ops: list[Op] = field(default_factory=list)
    storages: list[Storage] = field(default_factory=list)
    backward: list[tuple[str, tuple[int, ...], dict[str, object]]] = field(default_factory=list)
    gradients_apart: bool = False

    def storage(self, name: str, nbytes: int, kind: StorageKind, layer: str = "") -> int:
        self.storages.append(Storage(len(self.storages), name, nbytes, kind, layer, (nbytes,), "uint8", (name,)))
        return len(self.storages) - 1

    def bytes_of(self, storage: int) -> int:
        return self.storages[storage].nbytes

    def op(
        self,
        target: str,
        phase: Phase,
        reads: Sequence[int],
        writes: Sequence[tuple[str, int, StorageKind]],
        seconds: float,
        workspace_bytes: int = 0,
        overwrites: int = -1,
        recomputable: bool = True,
        layer: str = "",
    ) -> tuple[int, ...]:
        name = f"{target}_{len(self.ops)}"
        layer = layer or name
        out = tuple(self.storage(f"{name}.{what}", nbytes, kind, layer) for what, nbytes, kind in writes)
        self.ops.append(
            Op(
                len(self.ops),
                name,
                target,
                phase,
                layer,
                tuple(dict.fromkeys(reads)),
                out,
                overwrites,
                recomputable,
                signature=name,
                seconds=seconds,
                workspace_bytes=workspace_bytes,
            )
        )
        return out

    def forward(
        self, target: str, inputs: Sequence[int], writes: Sequence[tuple[str, int]], seconds: float, **options: object
    ) -> tuple[int, ...]:
        made = [(what, nbytes, "activation") for what, nbytes in writes]
        parameters = tuple(options.pop("parameters", ()))  # type: ignore[call-overload]
        out = self.op(target, "forward", (*inputs, *parameters), made, seconds, **options)  # type: ignore[arg-type]
        record = {"out": out, "parameters": parameters, "seconds": seconds, "layer": self.ops[-1].layer}
        self.backward.append((target, tuple(inputs), record))
        return out

    def input(self, nbytes: int) -> int:
        return self.storage("batch", nbytes, "input")

    def conv(self, x: int, nbytes: int, seconds: float = 10.0, workspace_bytes: int = 0, weight_bytes: int = 8) -> int:
        weight = self.storage(f"weight_{len(self.ops)}", weight_bytes, "parameter")
        return self.forward(
            "conv", (x,), [("out", nbytes)], seconds, workspace_bytes=workspace_bytes, parameters=(weight,)
        )[0]

    def batchnorm(self, x: int, seconds: float = 1.0) -> int:
        weight = self.storage(f"weight_{len(self.ops)}", 2, "parameter")
        return self.forward(
            "bn", (x,), [("out", self.bytes_of(x)), ("mean", 2), ("invstd", 2)], seconds, parameters=(weight,)
        )[0]

    def relu(self, x: int, seconds: float = 0.5) -> int:
        return self.forward("relu", (x,), [("out", self.bytes_of(x))], seconds, overwrites=x)[0]

    def add(self, a: int, b: int, seconds: float = 0.7) -> int:
        return self.forward("add", (a, b), [("out", self.bytes_of(a))], seconds, overwrites=a)[0]

    def cat(self, parts: Sequence[int], seconds: float = 0.8) -> int:
        return self.forward("cat", parts, [("out", sum(map(self.bytes_of, parts)))], seconds)[0]

    def pool(self, x: int, nbytes: int, seconds: float = 0.6) -> int:
        return self.forward("pool", (x,), [("out", nbytes), ("indices", nbytes)], seconds)[0]

    def dropout(self, x: int, seconds: float = 0.5, recomputable: bool = False) -> int:
        size = self.bytes_of(x)
        writes = [("out", size), ("mask", max(1, size // 4))]
        return self.forward("dropout", (x,), writes, seconds, recomputable=recomputable)[0]

    def conv_bn_relu(self, x: int, nbytes: int, seconds: float = 10.0, workspace_bytes: int = 0) -> int:
        return self.relu(self.batchnorm(self.conv(x, nbytes, seconds, workspace_bytes)))

    def step(self, out: int, model: str = "test", static_bytes: int = 0, with_loss: bool = True) -> StepGraph:
        last = self.storages[out]
        self.storages[out] = Storage(
            last.id, last.name, last.nbytes, "output", last.layer, last.shape, "uint8", last.tensors
        )
        if with_loss:
            (tangent,) = self.op("loss", "loss", (out,), [("tangent", last.nbytes, "tangent")], 0.1)
        else:
            tangent = self.storage("tangent", last.nbytes, "input")
        grads = {out: tangent}
        for target, inputs, record in reversed(self.backward):
            grad = grads.pop(record["out"][0], None)  # type: ignore[index]
            if grad is not None:
                self._backward_of(target, inputs, record, grad, grads)
        return StepGraph(model, tuple(self.ops), tuple(self.storages), static_bytes)

    def _backward_of(
        self, target: str, inputs: tuple[int, ...], record: dict[str, object], grad: int, grads: dict[int, int]
    ) -> None:
        out: tuple[int, ...] = record["out"]  # type: ignore[assignment]
        parameters: tuple[int, ...] = record["parameters"]  # type: ignore[assignment]
        seconds: float = record["seconds"]  # type: ignore[assignment]
        wanted = [x for x in inputs if self.storages[x].kind != "input"]
        if target == "add":
            for x in wanted:
                self._accumulate(x, grad, grads)
            return
        reads, overwrites = [grad], -1
        match target:
            case "conv":
                reads += [*inputs, *parameters]
            case "bn":
                reads += [*inputs, *parameters, *out[1:]]
            case "relu":
                reads += [out[0]]
                overwrites = grad
            case "pool" | "dropout":
                reads += [out[1]]
        writes: list[tuple[str, int, StorageKind]] = [
            (f"grad{x}", self.bytes_of(x), "activation_gradient") for x in wanted
        ]
        gradients: list[tuple[str, int, StorageKind]] = [(f"grad{p}", self.bytes_of(p), "gradient") for p in parameters]
        if self.gradients_apart and target == "conv":
            self.op("weight_gradient", "backward", reads, gradients, seconds, layer=str(record["layer"]))
        else:
            writes += gradients
        if not writes:
            return
        made = self.op(
            f"{target}_backward",
            "backward",
            reads,
            writes,
            2 * seconds,
            overwrites=overwrites,
            layer=str(record["layer"]),
        )
        for x, gradient in zip(wanted, made, strict=False):
            self._accumulate(x, gradient, grads)

    def _accumulate(self, x: int, grad: int, grads: dict[int, int]) -> None:
        if x in grads and grads[x] != grad:
            reads = (grads[x], grad)
            (grad,) = self.op(
                "sum", "backward", reads, [("out", self.bytes_of(x), "activation_gradient")], 0.5, overwrites=reads[0]
            )
        grads[x] = grad


def conv_bn_relu_chain(n: int, nbytes: int = 1000) -> StepGraph:
    """n times convolution, batch norm, ReLU, all of one size."""
    b = Builder()
    x = b.input(nbytes)
    for _ in range(n):
        x = b.conv_bn_relu(x, nbytes)
    return b.step(b.conv(x, 1, seconds=0.01), f"conv_bn_relu_chain_{n}")


def plain_chain(n: int, nbytes: int = 1000, seconds: float = 1.0) -> StepGraph:
    """n convolutions of one size and one cost: the textbook chain of checkpointing."""
    b = Builder()
    x = b.input(nbytes)
    for _ in range(n):
        x = b.conv(x, nbytes, seconds, weight_bytes=0)
    return b.step(x, f"plain_chain_{n}")


def resnet_like(blocks: Sequence[int] = (3, 4, 6, 3), scale: int = 1 << 16) -> StepGraph:
    """A bottleneck residual network with ResNet-50's sizes in proportion."""
    b = Builder()
    x = b.pool(b.conv_bn_relu(b.input(scale), 16 * scale, 8.0, scale), 4 * scale)
    for stage, depth in enumerate(blocks):
        inner, outer = (4 * scale) >> stage, (16 * scale) >> stage
        for i in range(depth):
            skip = x
            x = b.conv_bn_relu(x, 2 * inner if stage and i == 0 else inner, 4.0)
            x = b.conv_bn_relu(x, inner, 9.0, scale // 2)
            x = b.batchnorm(b.conv(x, outer, 4.0))
            if i == 0:
                skip = b.batchnorm(b.conv(skip, outer, 4.0))
            x = b.relu(b.add(x, skip))
    x = b.forward("mean", (x,), [("out", scale // 64)], 0.2)[0]
    return b.step(b.conv(x, scale // 64, 0.1), "resnet_like", static_bytes=scale)


def densenet_like(blocks: Sequence[int] = (6, 12, 24, 16), scale: int = 1 << 14) -> StepGraph:
    """Dense blocks: every layer reads the concatenation of all before it."""
    b = Builder()
    x = b.pool(b.conv_bn_relu(b.input(scale), 32 * scale, 8.0), 8 * scale)
    for stage, depth in enumerate(blocks):
        growth = (4 * scale) >> (2 * stage)
        features = [x]
        for _ in range(depth):
            whole = b.cat(features) if len(features) > 1 else features[0]
            x = b.conv(b.relu(b.batchnorm(whole)), 4 * growth, 5.0)
            features.append(b.conv(b.relu(b.batchnorm(x)), growth, 6.0))
        x = b.relu(b.batchnorm(b.cat(features)))
        if stage + 1 < len(blocks):
            x = b.conv(x, b.bytes_of(x) // 2, 4.0)
            x = b.forward("avgpool", (x,), [("out", b.bytes_of(x) // 4)], 0.5)[0]
    return b.step(b.conv(x, scale // 64, 0.1), "densenet_like", static_bytes=scale)


def unet_like(depth: int = 4, nbytes: int = 1 << 20) -> StepGraph:
    """An encoder whose outputs wait for the decoder."""
    b = Builder()
    x, skips, size = b.input(nbytes // 16), [], nbytes
    for _ in range(depth):
        x = b.conv_bn_relu(b.conv_bn_relu(x, size, 10.0), size, 10.0)
        skips.append(x)
        x = b.pool(x, size // 4)
        size //= 2
    x = b.conv_bn_relu(x, size, 10.0)
    for skip in reversed(skips):
        size *= 2
        x = b.cat([skip, b.conv(x, size, 4.0)])
        x = b.conv_bn_relu(b.conv_bn_relu(x, size, 12.0), size, 10.0)
    return b.step(b.conv(x, nbytes // 16, 1.0), "unet_like")


def inception_like(modules: int = 2, nbytes: int = 1 << 16) -> StepGraph:
    """Branches of one, two and three convolutions, with narrow results, that are concatenated."""
    b = Builder(gradients_apart=True)
    x = b.conv_bn_relu(b.input(nbytes // 4), nbytes, 5.0)
    for _ in range(modules):
        branches = []
        for depth in (1, 2, 3):
            y = x
            for _ in range(depth - 1):
                y = b.relu(b.batchnorm(b.conv(y, nbytes // 2 * depth, 3.0, weight_bytes=nbytes // 4)))
            branches.append(b.conv_bn_relu(y, nbytes // 4, 2.0))
        x = b.relu(b.batchnorm(b.conv(b.cat(branches), nbytes // 2, 4.0, weight_bytes=nbytes // 2)))
    return b.step(b.conv(x, nbytes // 64, 0.1, weight_bytes=2 * nbytes), "inception_like")


@st.composite
def steps(draw: st.DrawFn, max_ops: int = 10) -> StepGraph:
    """Random steps: chains with skips and concatenations, several outputs an op, in-place candidates, workspaces, ops
    that must not run twice, with and without a loss op."""
    b = Builder()
    tensors = [b.input(draw(st.integers(1, 60)))]
    cost = st.integers(1, 9)
    for i in range(draw(st.integers(1, max_ops))):
        # Mostly the newest tensor, so that the graph stays connected; sometimes an older one: a skip.
        x = tensors[-1] if draw(st.integers(0, 3)) else draw(st.sampled_from(tensors))
        kinds = ["conv", "bn", "relu", "pool", "dropout"] if i else ["conv"]
        if len(tensors) > 2:
            kinds += ["add", "cat"]
        seconds = float(draw(cost))
        match draw(st.sampled_from(kinds)):
            case "conv":
                x = b.conv(x, draw(st.integers(1, 60)), seconds, draw(st.integers(0, 40)), draw(st.integers(0, 9)))
            case "bn":
                x = b.batchnorm(x, seconds)
            case "relu":
                x = b.relu(x, seconds)
            case "pool":
                x = b.pool(x, max(1, b.bytes_of(x) // 2), seconds)
            case "dropout":
                x = b.dropout(x, seconds, draw(st.booleans()))
            case "add":
                same = [t for t in tensors[1:] if b.bytes_of(t) == b.bytes_of(x) and t != x]
                x = b.add(x, draw(st.sampled_from(same)), seconds) if same else b.relu(x, seconds)
            case "cat":
                other = draw(st.sampled_from(tensors))
                x = b.cat([x, other], seconds) if other != x else b.conv(x, 7, seconds)
        tensors.append(x)
    return b.step(tensors[-1], static_bytes=draw(st.integers(0, 20)), with_loss=draw(st.booleans()))


@st.composite
def joined_steps(draw: st.DrawFn, max_ops: int = 5) -> StepGraph:
    """Random steps of two or three parts, each of which is given the result of the one before, with eager code that
    uses memory between their passes."""
    graphs = draw(st.lists(steps(max_ops), min_size=2, max_size=3))
    parts: list[Part] = []
    for number, graph in enumerate(graphs):
        result = next(s.id for s in graph.storages if s.kind == "output")
        before = number and next(iter(parts[-1].results))
        parts.append(Part(graph, {result}, {0: (number - 1, before)} if number else {}))
    numbers = range(len(parts))
    passes: list[Pass] = [*((n, "forward") for n in numbers), *((n, "backward") for n in reversed(numbers))]
    uses = st.builds(EagerUse, st.integers(0, 30), st.integers(0, 60))
    used = draw(st.lists(uses, min_size=len(passes), max_size=len(passes)))
    return with_eager_use(joined_step("joined", parts, passes), used)


def any_order(graph: StepGraph, seed: int) -> tuple[str, ...]:
    """Names of the step's ops in a random order in which they can run."""
    chance = random.Random(seed)
    ordered: list[Op] = []
    for stays, ops in groupby(graph.ops, key=lambda op: op.is_outside or op.id == graph.n_forward - 1):
        waiting = list(ops)
        acting = [op for op in waiting if op.random or not op.writes]
        while waiting:
            unmet = {storage for op in waiting for storage in op.writes}
            ready = [op for op in waiting if unmet.isdisjoint(op.reads) and (op not in acting or op is acting[0])]
            ordered.append(waiting[0] if stays else chance.choice(ready))
            waiting.remove(ordered[-1])
            acting = [op for op in acting if op is not ordered[-1]]
    return tuple(op.name for op in ordered)


def legal_offloads(
    graph: StepGraph, residences: Mapping[str, Residence], storages: Iterable[int]
) -> Iterator[tuple[str, Sequence[Op], Sequence[Op]]]:
    """(name, ops after which it may be freed, ops before which it may be fetched), for those that can be offloaded."""
    runs = schedule(graph, residences)
    for storage in storages:
        reader = next((n for n in range(graph.n_forward, len(runs)) if storage in runs[n].of(graph).reads), None)
        fixed = graph.storages[storage].kind != "activation" or storage in graph.never_given_up
        if reader is None or fixed:
            continue
        served = next(run.op for run in runs[reader:] if not run.again)
        last = max([graph.producer[storage], *(r for r in graph.readers[storage] if r < graph.n_forward)])
        before = [op for op in graph.ops if op.phase == "backward" and op.id <= served]
        yield graph.storages[storage].name, graph.ops[last : graph.n_forward], before


@st.composite
def offloads(draw: st.DrawFn, graph: StepGraph) -> dict[str, Residence]:
    """Residences of any kind: some storages kept, some recomputed, some offloaded from and to any legal place."""
    forward = [s.id for s in graph.storages if s.kind == "activation"]
    stays = draw(st.sets(st.sampled_from(forward))) if forward else set()
    residences: dict[str, Residence] = dict(just_in_time(graph, stays))
    for name, ends, starts in list(legal_offloads(graph, residences, sorted(stays))):
        if draw(st.booleans()):
            residences[name] = Offload(draw(st.sampled_from(ends)).name, draw(st.sampled_from(starts)).name)
    return residences


@st.composite
def launches(draw: st.DrawFn, graph: StepGraph) -> StepGraph:
    """The step on a device of its own: the host takes time to launch each op, more than that runs or less."""
    seconds = iter(draw(st.lists(st.integers(0, 9), min_size=len(graph.ops), max_size=len(graph.ops))))
    return replace(graph, ops=tuple(replace(op, launch_seconds=float(next(seconds))) for op in graph.ops))
