"""A training step with batch norm and ReLU in four forms: plain, inverted, recomputed and inplace_abn's.

All contenders share parameters and statistics. They take the same pairs apart: those that `shoal.invert_norm`
finds, a batch norm with nothing but a ReLU behind it. Saved bytes are what the allocator gave out in the forward pass
and did not take back; peaks are those of the whole step.

- Checkpointing a pair alone saves nothing, since the convolution behind it saves its result. The usual way is to put
  that convolution into the segment; it is not run twice, since PyTorch stops as soon as its input is there again.
  Running statistics would move again in the backward pass, so they are saved and restored there.
- inplace_abn has no wheels. Its source distribution needs torch, setuptools_scm and a compiler where it is built:
  `pip install setuptools_scm ninja; pip install --no-build-isolation inplace-abn`.
"""

from __future__ import annotations

import copy
import gc
import importlib
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from rich.table import Table
from torch import fx, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import shoal
from bench.frame import WrongResult
from bench.interleave import median_ratio
from bench.reference import take_reference
from bench.tables import cells, new_table
from bench.workload import Forward, Workload, make_workload
from shoal.core.sizes import format_bytes
from shoal.lowlevel import allocations

SLOPE = 0.01
INPLACE_ABN = "inplace_abn"
# Rota Bulo, Porzi and Kontschieder (CVPR'18), abstract: of the memory of batch norm and activation; of the step.
PUBLISHED = {INPLACE_ABN: "up to 50 %, +0.8 to 2 %"}
_TIMES_PLAIN = 2.0  # how much further from float64 than plain float32's a gradient of ours may be
_TOLERANCE = 1e-5  # of its norm, on top
_PEER_TOLERANCE = 1e-2  # inplace_abn sums in float32 on the CPU

Pair = tuple[nn.Module, nn.Module | None]  # a batch norm, and the module that alone reads its ReLU's result


def rewritten(model: nn.Module, layers: frozenset[str], replace: Callable[[Pair], tuple[nn.Module, bool]]) -> nn.Module:
    """The network with another module for each of the pairs.

    Args:
        model: shared, not changed.
        layers: module paths of the batch norms, each with one ReLU behind it.
        replace: from a pair to its module, and whether that computes the reader, too.
    """
    graph = fx.Tracer().trace(model)
    modules = dict(model.named_modules())
    root = nn.Module()
    for node in [node for node in graph.nodes if node.op == "call_module" and node.target in layers]:
        (rectifier,) = node.users
        reader = next(iter(rectifier.users))
        alone = len(rectifier.users) == 1 and reader.op == "call_module"
        module, takes_reader = replace((modules[node.target], modules[str(reader.target)] if alone else None))
        name = str(node.target).replace(".", "_") + "_pair"
        modules[name] = module
        last = reader if takes_reader else rectifier
        with graph.inserting_before(last):
            call = graph.call_module(name, node.args)
        last.replace_all_uses_with(call)
        for one in [last, rectifier, node] if takes_reader else [rectifier, node]:
            graph.erase_node(one)
    for node in graph.nodes:
        if node.op == "call_module":
            name = str(node.target).replace(".", "_")
            root.add_module(name, modules[str(node.target)])
            node.target = name
    return fx.GraphModule(root, graph)


class Checkpointed(nn.Module):
    """Batch norm, ReLU and what reads it, where given, run again in the backward pass."""

    def __init__(self, layer: nn.Module, reader: nn.Module | None) -> None:
        super().__init__()
        self.layer, self.reader = layer, reader

    def forward(self, x: torch.Tensor) -> Any:
        return checkpoint(
            self._run,
            x,
            use_reentrant=False,
            preserve_rng_state=False,
            context_fn=lambda: (nullcontext(), _statistics_restored(self.layer)),
        )

    def _run(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu_(self.layer(x))
        return y if self.reader is None else self.reader(y)


@contextmanager
def _statistics_restored(layer: nn.Module) -> Iterator[None]:
    """Its running statistics move in copies."""
    buffers = dict(layer._buffers)
    layer._buffers.update({name: None if buffer is None else buffer.clone() for name, buffer in buffers.items()})
    try:
        yield
    finally:
        layer._buffers.update(buffers)


def inplace_abn_layer(layer: Any) -> nn.Module | None:
    """inplace_abn's layer over the same parameters and statistics; None where it is not installed."""
    try:
        package = importlib.import_module(INPLACE_ABN)
    except ImportError:
        return None
    theirs: nn.Module = package.InPlaceABN(layer.num_features, layer.eps, layer.momentum, activation_param=SLOPE)
    theirs._parameters, theirs._buffers = layer._parameters, layer._buffers
    return theirs


def saved_bytes(workload: Workload, forward: Forward) -> int:
    """What a forward pass and its loss leave allocated."""
    workload.reset()
    gc.collect()
    loss, changes = allocations.record(lambda: F.cross_entropy(forward(workload.images), workload.target))
    del loss
    return sum(changes)


def pair_elems(model: nn.Module, layers: frozenset[str], images: torch.Tensor) -> list[tuple[int, int]]:
    """Elements of the input of each of the layers, and its channels."""
    found: list[tuple[int, int]] = []
    hooks = [
        model.get_submodule(name).register_forward_hook(
            lambda layer, inputs, output: found.append((output.numel(), output.shape[1]))
        )
        for name in layers
    ]
    with torch.no_grad():
        copy.deepcopy(model).to("meta")(images.to("meta"))
    for hook in hooks:
        hook.remove()
    return found


def check_leaky(workload: Workload, forward: Forward, single: nn.Module, who: str) -> dict[str, float]:
    """Hold a contender's gradients and statistics against the network with LeakyReLU in float64.

    Args:
        workload: the step.
        forward: the contender, which shares the workload's parameters.
        single: that network in PyTorch's modules, as it was before the step.

    Returns:
        How far the gradient is off, relative to its norm: "ours", and "plain" for PyTorch's modules in float32.

    Raises:
        WrongResult: something is too far off.
    """
    single, exact = copy.deepcopy(single), copy.deepcopy(single).double()
    workload.reset()
    workload.step(forward)
    for model, images in ((single, workload.images), (exact, workload.images.double())):
        F.cross_entropy(model(images), workload.target).backward()
    ours, plain, exact_results = (_left_behind(model) for model in (workload.model, single, exact))
    for name, right in exact_results.items():
        error, allowed = (float((one[name].double() - right).norm()) for one in (ours, plain))
        slack = (_PEER_TOLERANCE if who == INPLACE_ABN else _TOLERANCE) * float(right.norm())
        if not error <= _TIMES_PLAIN * allowed + slack:
            raise WrongResult(f"{who}: {name} is {error:.1e} off, plain float32's {allowed:.1e}")
    whole = {
        way: torch.cat([t.double().flatten() for name, t in found.items() if name.startswith("gradient")])
        for way, found in (("ours", ours), ("plain", plain), ("exact", exact_results))
    }
    exact_norm = float(whole["exact"].norm())
    return {way: float((whole[way] - whole["exact"]).norm()) / exact_norm for way in ("ours", "plain")}


def _left_behind(model: nn.Module) -> dict[str, torch.Tensor]:
    """Gradients and running statistics, copied."""
    found = {f"gradient of {name}": p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return found | {name: buffer.clone() for name, buffer in model.named_buffers() if buffer.is_floating_point()}


def measure(
    network: str, batch: int, image: int, repeats: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, Any]:
    """Bytes and seconds of every contender, each checked.

    Raises:
        WrongResult: a contender computes something else.
        WrongResult: checkpointing does.
    """
    workload = make_workload(network, batch, image)
    leaky = shoal.invert_norm(copy.deepcopy(workload.model), SLOPE).restore()
    inverted = shoal.invert_norm(workload.shared_copy(), SLOPE)
    layers = frozenset(site.layer for site in inverted.inverted)
    plain = workload.shared_copy()
    forwards: dict[str, Forward] = {
        "plain": plain,
        "inverted": inverted,
        "checkpointed pairs": rewritten(plain, layers, lambda pair: (Checkpointed(pair[0], None), False)),
        "checkpointed pairs and convolutions": rewritten(
            plain, layers, lambda pair: (Checkpointed(*pair), pair[1] is not None)
        ),
    }
    installed = inplace_abn_layer(nn.BatchNorm2d(1)) is not None
    if installed:
        forwards[INPLACE_ABN] = rewritten(plain, layers, lambda pair: (inplace_abn_layer(pair[0]) or pair[0], False))
    reference = take_reference(workload, plain)
    off = {}
    for name, forward in forwards.items():
        reference.start()
        if name in ("inverted", INPLACE_ABN):
            off[name] = check_leaky(workload, forward, leaky, name)
        else:
            reference.check(forward, name)
    saved = {name: saved_bytes(workload, forward) for name, forward in forwards.items()}
    pairs = pair_elems(plain, layers, workload.images)
    # Plain PyTorch saves each pair's input, and mean and deviation, where the inverted form saves a deviation.
    fewer_bytes = sum(4 * elems + 4 * channels for elems, channels in pairs)
    if saved["plain"] - saved["inverted"] != fewer_bytes:
        raise WrongResult(f"inverted saves {saved['plain'] - saved['inverted']} bytes less, expected {fewer_bytes}")
    peaks = {name: workload.peak_bytes(forward) for name, forward in forwards.items()}
    seconds = workload.in_turns(forwards, repeats, 1, clock)
    rows = {
        name: {
            "saved_bytes": saved[name],
            "peak_bytes": peaks[name],
            "seconds": seconds[name],
            "gradient_off": off.get(name),
            "ratio": median_ratio(seconds[name], seconds["plain"]),
        }
        for name in forwards
    }
    return {
        "network": network,
        "batch": batch,
        "image": image,
        "pairs": len(pairs),
        "pair_bytes": sum(8 * elems for elems, _ in pairs),
        "rows": rows,
        "published": PUBLISHED,
        "not_installed": [] if installed else [INPLACE_ABN],
    }


def table(result: dict[str, Any]) -> Table:
    """One row a contender; shares of plain PyTorch's, and of what plain PyTorch saves for the pairs."""
    plain, pair_bytes = result["rows"]["plain"], result["pair_bytes"]
    shown = new_table(
        f"{result['network']}, {result['batch']} x {result['image']} pixels, {result['pairs']} pairs of batch "
        f"norm and ReLU that hold {format_bytes(pair_bytes)}; a step {statistics.median(plain['seconds']):.2f} s",
        "<contender | saved | of plain | less, of the pairs' | peak | of plain | time | gradient off | published",
    )
    for name, row in result["rows"].items():
        figures = {
            "saved": 100 * row["saved_bytes"] / plain["saved_bytes"],
            "less": 100 * (plain["saved_bytes"] - row["saved_bytes"]) / pair_bytes,
            "peak": 100 * row["peak_bytes"] / plain["peak_bytes"],
            "added": 100 * (row["ratio"] - 1),
        }
        form = "{saved_bytes:bytes} | {saved:.1f} % | {less:.1f} % | {peak_bytes:bytes} | {peak:.1f} % | {added:+.1f} %"
        form += " | {gradient_off[ours]:.1e} (plain {gradient_off[plain]:.1e})"
        shown.add_row(name, *cells(form, row | figures), result["published"].get(name, ""))
    for name in result["not_installed"]:
        shown.add_row(name, "not installed", *[""] * 6, result["published"].get(name, ""))
    return shown
