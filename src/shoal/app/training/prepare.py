"""Builds a run from its options: data, network, memory layout and memory limit."""

from __future__ import annotations

import gc
import inspect
import logging
import math
import signal
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import shoal
import shoal.app.data
import shoal.app.models
from shoal.app.data import Data
from shoal.app.training.batch_norm_form import described, in_form
from shoal.app.training.options import TrainOptions
from shoal.app.training.ranks import Ranks
from shoal.app.training.results import check_writable
from shoal.core import presets
from shoal.core.hardware import Hardware
from shoal.core.sizes import format_bytes
from shoal.cost.measurement_cache import device_of
from shoal.errors import InputError
from shoal.kernels.memory_format import channels_last_format
from shoal.lowlevel import cuda_calls
from shoal.memory.budget import all_bytes
from shoal.memory.limit import MemoryLimit, memory_limit
from shoal.transforms.split.split import SplitModule

log = logging.getLogger("shoal")


def device(name: str) -> torch.device:
    """The device of that name; "auto" is CUDA where there is one."""
    if name == "auto":
        name = "cuda" if cuda_calls.is_available() else "cpu"
    return device_of(name)


def use_allocator() -> None:
    """The caching allocator, where it can be had: the process is ours, and steps are faster."""
    try:
        shoal.use_caching_allocator()
    except InputError as error:
        log.info("tensors keep torch's allocator: %s", error)


def open_memory_limit(stack: ExitStack, device: torch.device, enforce: bool) -> MemoryLimit | None:
    """A counter of device bytes, whose limit is set later; None where there can be none and none is asked for."""
    gc.collect()  # what an earlier run in this process has left would count
    try:
        return stack.enter_context(memory_limit(None, device))
    except InputError:
        if enforce:
            raise
        return None


def _leave_signals_to_the_parent(worker: int) -> None:
    """Ctrl-C reaches every process of the terminal; the workers must outlive the step that ends the run."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def open_data(options: TrainOptions, ranks: Ranks) -> Data:
    """A rank's share of the data set. A function's `in_channels`, `dims` and `dense` are those of the network."""
    fitting: dict[str, Any] = {}
    parameters = inspect.signature(shoal.app.data.find(options.data)).parameters
    if not parameters.keys().isdisjoint(("in_channels", "dims", "dense")):
        with torch.device("meta"), torch.no_grad():
            network = shoal.app.models.build(options.model)
            shape = shoal.app.models.example_shape(network, 1, options.image or 32)
            outputs = _outputs(options, network, shape)
        of_network = {"in_channels": shape[1], "dims": len(shape) - 2, "dense": outputs.dim() > 2}
        fitting = {name: value for name, value in of_network.items() if name in parameters}
    data = shoal.app.data.open(
        options.data,
        batch=options.batch,
        image=options.image,
        root=options.root,
        seed=options.seed,
        workers=options.workers,
        rank=ranks.rank,
        ranks=ranks.count,
        **fitting,
    )
    for loader in (data.train, data.test):
        loader.worker_init_fn = _leave_signals_to_the_parent
    return data


def check_in_memory(shape: tuple[int, ...], device: torch.device) -> None:
    """See that a batch can be in a device's memory at all, before one is made.

    Raises:
        InputError: it cannot.
    """
    batch_bytes, device_bytes = 4 * math.prod(shape), all_bytes(device)
    if batch_bytes > device_bytes:
        raise InputError(
            f"a batch of {' x '.join(map(str, shape))} takes {format_bytes(batch_bytes)} and {device} has "
            f"{format_bytes(device_bytes)}; give a smaller --batch or --image"
        )


def check_fits(options: TrainOptions, data: Data) -> tuple[int, ...]:
    """The shape of a batch, which the network was seen to take."""
    with torch.device("meta"):
        network = shoal.app.models.build(options.model, num_classes=data.num_classes)
    shape = shoal.app.models.example_shape(network, options.batch // (options.ranks or 1), data.image)
    check_in_memory(shape, torch.device(options.device))
    with torch.device("meta"), torch.no_grad():
        outputs = _outputs(options, network, shape)
        in_patches = divided(options, network)
    _, label = data.test.examples[0]
    if outputs.dim() - 2 != label.dim():
        has, labelled = ("pixel" if dims else "image" for dims in (outputs.dim() - 2, label.dim()))
        raise InputError(
            f"{options.model} has an output per {has}, data {options.data!r} a label per {labelled}; "
            f"give --data with a label per {has}, or another --model"
        )
    if isinstance(in_patches, SplitModule):
        in_patches.check(shape[2:], shape[0])
    return shape


def _outputs(options: TrainOptions, network: nn.Module, shape: tuple[int, ...]) -> torch.Tensor:
    """What the network returns for images of that shape, on the device that is the default.

    Raises:
        InputError: it cannot take them, or returns something other than a tensor.
    """
    try:
        outputs = network.eval()(torch.empty(shape))
    except RuntimeError as error:
        raise InputError(
            f"{options.model} cannot take images of {shape[-1]} pixels a side "
            f"({str(error).strip().splitlines()[0][:60]}); give a larger --image"
        ) from error
    if not isinstance(outputs, torch.Tensor):
        raise InputError(f"{options.model} returns a {type(outputs).__name__}; expected a tensor of scores")
    return outputs


def divided(options: TrainOptions, model: nn.Module) -> nn.Module:
    """The network as it is, or its batch norms in another form, or split where that was asked for."""
    model = in_form(model, options.batch_norm)
    if options.split is None:
        return model
    return shoal.split(model, options.split, options.grid, options.stochastic, halo=options.halo)  # type: ignore[arg-type]


def layout(options: TrainOptions, shape: tuple[int, ...]) -> torch.memory_format:
    """Of images and weights. A three-dimensional network has another channels-last than a two-dimensional one."""
    if not options.channels_last:
        return torch.preserve_format
    return channels_last_format(len(shape))


def compiled(options: TrainOptions, model: nn.Module, optimizer: torch.optim.Optimizer) -> nn.Module:
    """The network under its budget; as it is for plain PyTorch."""
    if options.planner == "none":
        return model
    return shoal.compile(model, **options.compile_keywords(), optimizer=optimizer, name=options.model)


@dataclass(frozen=True)
class ToPlan:
    """What `shoal plan` and `shoal frontier` plan a step of.

    Attributes:
        target: the machine to plan for; None for this one.
        network: on the target's device; for a machine that is not here on "meta", where it takes no memory.
        shape: of a batch of images.
        form: how many of its batch norms have another form, in a line.
    """

    target: Hardware | None
    network: nn.Module
    shape: tuple[int, ...]
    form: str

    def images(self, *shape: int) -> torch.Tensor:
        """A batch of that shape, on the network's device."""
        return torch.empty(shape, device="cpu" if self.target is None else "meta")


def to_plan(model: str, batch: int, image: int, hardware: str | None, form: str | None, out: Path | None) -> ToPlan:
    """The network and the shape of its input, as those commands' flags ask for; see that `out` can be written."""
    target = None if hardware is None else presets.get(hardware)
    with torch.device("cpu" if target is None else "meta"):
        network = shoal.app.models.build(model, seed=0)
    shape = shoal.app.models.example_shape(network, batch, image)
    if target is None:
        check_in_memory(shape, torch.device("cpu"))
    if out is not None:
        check_writable(out)
    network = in_form(network, form)
    return ToPlan(target, network, shape, described(network))
