"""A region of a step as one op: several ops of PyTorch, compiled together by Inductor.

Regions of one content are one object in a process, and are compiled once.
"""

from __future__ import annotations

import hashlib
import logging
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from shoal.core.progress import doing
from shoal.kernels.pieces import span_elems
from shoal.lowlevel.inductor_region import Boxed, code_of, compile_each, in_primitive_ops
from shoal.lowlevel.region_launches import Launches, is_tuned, launches_of
from shoal.lowlevel.torch_internals import isolated

log = logging.getLogger("shoal")

# Inductor's loops for these read and write booleans one by one, at ten times the time of the bytes that they are.
_MASKS_AS_BYTES_ON = ("cpu",)
# Elsewhere results are new tensors: written into a block that is handed in, one that the region reads again would be
# written twice.
_OVERWRITES_ON = ("cpu",)
_SOURCES = ("capture/region_ops.py", "capture/regions.py", "kernels/compiled_region.py", "lowlevel/inductor_region.py")
_DRAWN_ELEMS = (1 << 20) - 3  # not a power of two, so that rows of a tensor differ
_known: weakref.WeakValueDictionary[str, CompiledRegion] = weakref.WeakValueDictionary()  # by digest
_compiled: dict[str, CompiledRegion] = {}  # those that stay


class CompiledRegion:
    """Calls what a region computes, as tensors → tuple of new tensors; traced and compiled when that is asked for.

    Where an operand has the layout of the first result, it may be given as `over=` too, on the CPU: the first result is
    then written over it, with the same bits.

    Attributes:
        digest: of its content.
        words: the ops that it consists of, for people.
        sort: equal for regions that compute the same of tensors of other sizes.
        failure: why it cannot be compiled; "" as long as nothing says so.
        overwritable: places of the operands that the first result may be written over; None until that is found out.
    """

    def __init__(
        self, digest: str, words: str, sort: str, function: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor]
    ) -> None:
        self.digest, self.words, self.sort = digest, words, sort
        self.failure = ""
        self.overwritable: tuple[int, ...] | None = None
        self.__name__ = self.__qualname__ = f"region_{digest}"
        self._function: Callable[..., Sequence[Tensor]] | None = function  # these two until it is compiled
        self._inputs = inputs  # the block of the first result, then the operands
        self._first = _layout(inputs[0])
        self._run: Boxed | None = None
        self._overwrites = inputs[0].device.type in _OVERWRITES_ON
        self._as_bytes = inputs[0].device.type in _MASKS_AS_BYTES_ON
        self._has_masks = self._as_bytes and any(x.dtype is torch.bool for x in inputs)
        self._launches: Launches | None = None
        self._masks: tuple[bool, ...] = ()  # which results after the first are masks that are made as bytes

    @property
    def is_compiled(self) -> bool:
        return self._run is not None

    def traced(self) -> tuple[fx.GraphModule, Sequence[Tensor]]:
        """The ops that Inductor compiles, and inputs of theirs."""
        function = self._function
        assert function is not None

        def is_mask(value: Tensor) -> bool:
            return self._as_bytes and value.dtype is torch.bool

        read = [is_mask(fake) for fake in self._inputs[1:]]

        def written(first: Tensor, *operands: Tensor) -> Sequence[Tensor]:
            given = [
                operand.to(torch.int32) != 0 if mask else operand for operand, mask in zip(operands, read, strict=True)
            ]
            result, *others = function(*given)
            self._masks = tuple(map(is_mask, others))
            first.copy_(_bytes_of_mask(result) if is_mask(result) else result)
            return [_bytes_of_mask(one) if mask else one for one, mask in zip(others, self._masks, strict=True)]

        if not self._overwrites:
            return in_primitive_ops(function, self._inputs[1:])
        return in_primitive_ops(written, [self._passed(fake) for fake in self._inputs])

    def is_made(self, run: Boxed, results: Sequence[Tensor]) -> None:
        """It is compiled; `results` are laid out as those that it returns must be."""
        self._run = run
        if self.overwritable is None:
            self._try_out(results)
        elif not is_tuned(code_of(run)):  # else the first step would be, and allocate for it
            with isolated(self._inputs[0].device):
                self(*map(_zeros, self._inputs[1:]))
        self._run = code_of(run)
        self._function, self._inputs = None, ()  # which hold the graph that they are of
        _compiled[self.digest] = self

    def __call__(self, *tensors: Tensor, over: Tensor | None = None) -> tuple[Tensor, ...]:
        run = self._run
        if run is None:
            compile_regions([self])
            run = self._run
            assert run is not None, self.failure
        if not self._overwrites:
            return tuple(run(list(tensors)))
        if over is None:
            shape, strides, dtype, device = self._first
            over = torch.empty_strided(shape, strides, dtype=dtype, device=device)
        passed = [over, *tensors]
        others = run([self._passed(one) for one in passed] if self._has_masks else passed)
        if True in self._masks:
            others = [o.view(torch.bool) if mask else o for o, mask in zip(others, self._masks, strict=True)]
        return (over, *others)

    def launches(self) -> Launches | None:
        """What a call does, as one function of the operands; None on the CPU, and where that is not known."""
        if self._overwrites or self._run is None:
            return None
        if self._launches is None:
            self._launches = launches_of(self._run, self.__name__)
        return self._launches

    def _passed(self, tensor: Tensor) -> Tensor:
        """What the compiled code is given: a mask as its bytes."""
        return tensor.view(torch.uint8) if self._as_bytes and tensor.dtype is torch.bool else tensor

    def __repr__(self) -> str:
        return f"<{self.__name__}: {self.words}>"

    def __deepcopy__(self, memo: Any) -> CompiledRegion:
        return self

    def __reduce__(self) -> Any:
        raise TypeError(f"{self!r} cannot be pickled")

    def _try_out(self, wanted: Sequence[Tensor]) -> None:
        """Look on random data at the results' layouts, and at which operands they may be written over."""
        with isolated(self._inputs[0].device):
            operands = [_drawn(fake, seed) for seed, fake in enumerate(self._inputs[1:])]
            results = self(*operands)
            returned = results[1:] if self._overwrites else results
            for result, fake in zip(map(self._passed, returned), wanted, strict=True):
                if _layout(result)[:3] != _layout(fake)[:3]:
                    self.failure = "a result has another layout than in the trace"
            blocks = [tensor.untyped_storage().data_ptr() for tensor in results if tensor.numel()]
            blocks += {tensor.untyped_storage().data_ptr() for tensor in operands if tensor.numel()}
            if len(set(blocks)) < len(blocks):
                self.failure = "a result shares memory with another tensor"
            places = range(len(operands)) if not self.failure and self._overwrites else ()
            self.overwritable = tuple(place for place in places if self._repeats(place, operands, results))

    def _repeats(self, place: int, operands: Sequence[Tensor], results: Sequence[Tensor]) -> bool:
        operand = operands[place]
        if _layout(operand) != self._first or not operand.numel():
            return False
        over = operand.clone()
        again = self(*operands[:place], over, *operands[place + 1 :], over=over)
        return all(torch.equal(_bits(one), _bits(other)) for one, other in zip(again, results, strict=True))


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device


def _bytes_of_mask(mask: Tensor) -> Tensor:
    """The bytes of a boolean tensor, in ops that Inductor makes many of at once."""
    return torch.where(mask, 1.0, 0.0).to(torch.uint8)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)


def _zeros(fake: Tensor) -> Tensor:
    block = torch.zeros(span_elems(fake.shape, fake.stride()), dtype=fake.dtype, device=fake.device)
    return block.as_strided(fake.shape, fake.stride())


def _drawn(fake: Tensor, seed: int) -> Tensor:
    """A tensor like a fake one: normal numbers, positive ones where there is one axis; booleans; zeros."""
    drawn = _zeros(fake)
    block = drawn.as_strided((drawn.untyped_storage().nbytes() // drawn.element_size(),), (1,))
    if fake.dtype.is_floating_point or fake.dtype is torch.bool:
        draw = torch.Generator("cpu").manual_seed(seed)
        numbers = torch.randn(min(block.numel(), _DRAWN_ELEMS), generator=draw).to(fake.device)
        numbers = numbers.abs() + 0.5 if fake.dim() < 2 else numbers
        numbers = numbers > 0 if fake.dtype is torch.bool else numbers.to(fake.dtype)
        for start in range(0, block.numel(), _DRAWN_ELEMS):
            piece = block[start : start + _DRAWN_ELEMS]
            piece.copy_(numbers[: piece.numel()])
    return drawn


def region_of(
    function: Callable[..., Sequence[Tensor]],
    first: Tensor,
    inputs: Sequence[Tensor],
    words: str,
    description: str,
    sort: str = "",
) -> CompiledRegion:
    """The region that computes a function, not yet traced.

    Args:
        function: of the inputs, in ops of PyTorch; the results are new tensors.
        first: a fake tensor laid out as the first result.
        inputs: fake tensors.
        words: the ops, for people.
        description: equal where the function and all fake tensors are.
        sort: equal where the function is, and the layouts but for sizes.
    """
    content = "\n".join([torch.__version__, str(torch.get_num_threads()), _source(), description])
    digest = hashlib.sha256(content.encode()).hexdigest()[:12]
    region = _known.get(digest)
    if region is None:
        _known[digest] = region = CompiledRegion(digest, words, sort or description, function, [first, *inputs])
    return region


def compile_regions(regions: Iterable[CompiledRegion]) -> None:
    """Compile those that are not; one that cannot be gets its `failure`."""
    missing = [region for region in dict.fromkeys(regions) if not region.is_compiled and not region.failure]
    if not missing:
        return
    doing("profile", f"compile {len(missing)} regions")
    traced = [region.traced() for region in missing]
    for region, (module, _), one in zip(missing, traced, compile_each(traced), strict=True):
        if isinstance(one, Exception):
            region.failure = (str(one).strip().splitlines() or [type(one).__name__])[0]
        else:
            results: Any = module.graph.output_node().args[0]
            region.is_made(one, [node.meta["val"] for node in results])
        if region.failure:
            log.info("a region cannot be compiled (%s): %s", region.words, region.failure)


@cache
def _source() -> str:
    """Changes where a region may compute something else of the same ops."""
    folder = Path(__file__).parents[1]
    found = hashlib.sha256()
    for name in _SOURCES:
        found.update((folder / name).read_bytes())
    return found.hexdigest()
