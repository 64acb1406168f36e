"""How Shoal asks Dynamo for a model's call as one graph, and what becomes of Dynamo's errors."""

from __future__ import annotations

import gc
import itertools
import logging
import re
import time
import traceback
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch import fx, nn
from torch._dynamo import config
from torch._dynamo.exc import (
    BackendCompilerFailed,
    FailOnRecompileLimitHit,
    InternalTorchDynamoError,
    ObservedException,
    TorchRuntimeError,
    Unsupported,
    UserError,
)
from torch._dynamo.graph_break_hints import USER_ERROR
from torch._dynamo.pgo import get_code_state
from torch._dynamo.utils import get_compilation_metrics, get_metrics_context
from torch.fx.experimental.symbolic_shapes import ConstraintViolationError, GuardOnDataDependentSymNode

from shoal.capture import layer_by_layer
from shoal.capture.failed_traces import line_noted
from shoal.capture.known_graphs import KnownGraphs
from shoal.capture.recurrences import in_words
from shoal.capture.traced_functions import cumulative_norms, trace_more_functions
from shoal.core.progress import Preparation, preparing
from shoal.errors import CaptureError, ShoalError
from shoal.lowlevel.buffer_values import knowing_buffers
from shoal.lowlevel.dynamo_state import forget_backend, forget_code
from shoal.lowlevel.unread_writes import keeping_unread_writes
from shoal.transforms.split.split import CUTS_ARGUMENT, SplitModule

log = logging.getLogger("shoal")
MOST_CAPTURES = 64
OWN_BUDGET = "the model has a budget of its own, given to shoal.compile"  # why Dynamo must leave a call as it is
_MANY_CAPTURES = 8  # each takes seconds: that many are worth a warning
_COLLECTED_OBJECTS = 50_000  # new ones since the last collection of the youngest; Python's own is 700
_OUR_SOURCES = ("L['model']", "L['args']", "L['kwargs']")  # what `call_of` calls what it is given
_OURS = (__file__, layer_by_layer.__file__)
_DYNAMO = Path(torch._dynamo.__file__).parent
_LOGGED = ("debug", "info", "warning", "warn", "error", "exception", "critical", "fatal", "log", "isEnabledFor")


class ErrorThroughDynamo(BackendCompilerFailed):
    """Carries an error of ours through Dynamo, which wraps every other exception of a backend.

    Where Dynamo hands it back to the caller of the compiled model, what comes out is the error itself.
    """

    def __init__(self, error: BaseException) -> None:
        super().__init__(None, error, None)  # type: ignore[arg-type]

    def remove_dynamo_frames(self) -> Any:
        """Called by Dynamo, which raises what it returns."""
        return self.inner_exception


@contextmanager
def refusals() -> Iterator[None]:
    """Inside a backend: let errors of ours out as they are."""
    try:
        yield
    except ShoalError as error:
        raise ErrorThroughDynamo(error) from None


class ModelRaised(Exception):
    """The model's own forward pass raises an exception, by what Dynamo saw of it.

    Attributes:
        reason: one line.
        fault: what to raise where it does not raise when it runs: then Dynamo saw wrong.
    """

    def __init__(self, reason: str, fault: CaptureError) -> None:
        super().__init__(reason)
        self.reason, self.fault = reason, fault


class GraphBreak(CaptureError):
    """The model is not one graph, though it may be several; `reason` and `place` say what ends the first one.

    Attributes:
        may_be_an_error: by what Dynamo says, the model may raise there without it too, as where an argument is missing.
    """

    advice = "take that line out of forward(), or compile a submodule without it"

    def __init__(self, reason: str, place: str, *, may_be_an_error: bool = False) -> None:
        super().__init__(f"the model cannot be captured as one graph: {reason}; {self.advice}", details={"at": place})
        self.reason = reason
        self.place = place
        self.may_be_an_error = may_be_an_error


class FaultOfDynamo(GraphBreak):
    """Dynamo itself fails on the model, as it does for any backend of `torch.compile`."""

    advice = "keep Dynamo out of the function that stands there: @torch.compiler.disable"


class TooManyCaptures(CaptureError):
    """Dynamo captures no more graphs of a model's call.

    Attributes:
        captures: how many there are.
        difference: what asked for one more, as Dynamo words it.
    """

    def __init__(self, captures: int, difference: str) -> None:
        super().__init__(
            f"the model was called with more than {captures} different shapes or settings that each need a plan of "
            f"their own; what differed last: {difference}; keep it the same, pad or crop the batches to fewer shapes, "
            "or give a tensor in place of a number that varies"
        )
        self.captures, self.difference = captures, difference


@contextmanager
def one_graph() -> Iterator[None]:
    """Around a call that Dynamo is to capture: its errors become ours, and where a model breaks is told only by us.

    Raises:
        ShoalError: what the backend raised, as it was.
        GraphBreak: the model is not one graph, or Dynamo fails on it.
        ModelRaised: the model raises an exception of its own.
        TooManyCaptures: there are as many graphs of it as there may be, and none is of this call.
    """
    for logger, filtered in _FILTERED_LOGS:
        logger.addFilter(filtered)
    try:
        yield
    except BackendCompilerFailed as failure:
        inner = failure.inner_exception
        if isinstance(inner, (torch.OutOfMemoryError, MemoryError)):
            raise inner from None
        reason = f"{type(inner).__name__}: {inner}".strip().splitlines()[0]
        said = f"PyTorch cannot trace the training step of this model and input: {reason}"
        if line := line_noted(inner):
            raise CaptureError(f"{said} at {line}") from None
        raise CaptureError(said) from inner
    except InternalTorchDynamoError as failure:
        origin = _origin(failure)
        if isinstance(origin, (torch.OutOfMemoryError, MemoryError)):
            raise origin from None
        raise _fault_of_dynamo(origin, failure) from None
    except AssertionError as failure:
        if _is_of_dynamo(failure):
            raise _fault_of_dynamo(failure, failure) from None
        if hasattr(failure, "real_stack"):  # Dynamo has put its own words after those of torch._assert
            raise ModelRaised(_first_line(failure), _fault_of_dynamo(failure, failure)) from None
        raise  # the model's own, in eager code
    except TorchRuntimeError as failure:
        raise ModelRaised(_first_line(_origin(failure)), _fault_of_dynamo(_origin(failure), failure)) from None
    except (Unsupported, UserError, ConstraintViolationError) as failure:
        if isinstance(failure, Unsupported) and _is_models_own(failure):
            reason = f"an exception is raised at {_place(failure)}"
            raise ModelRaised(reason, _fault_of_dynamo(failure, failure)) from None
        raise _capture_error(failure) from None
    except GuardOnDataDependentSymNode as failure:  # an index into a list, say: Dynamo reports it as a fault of its own
        raise GraphBreak("Python code depends on a tensor's value", _place(failure)) from None
    except FailOnRecompileLimitHit:
        raise TooManyCaptures(MOST_CAPTURES, _last_difference()) from None
    finally:
        for logger, filtered in _FILTERED_LOGS:
            logger.removeFilter(filtered)


def _is_of_no_break(record: logging.LogRecord) -> bool:
    """Whether a record of Dynamo's is none of its warnings of a graph break, dozens of lines each."""
    breaks = "Graph break", "Backend compiler exception"
    return record.levelno != logging.WARNING or not str(record.msg).startswith(breaks)


def _is_of_no_refusal(record: logging.LogRecord) -> bool:
    """Whether a record of fake tensors is no traceback of what the model itself raises, which is told by its error."""
    return not str(record.msg).startswith("failed while attempting to run meta")


_FILTERED_LOGS = (
    *((logging.getLogger(f"torch._dynamo.{name}"), _is_of_no_break) for name in ("exc", "variables.tensor")),
    (logging.getLogger("torch._subclasses.fake_tensor"), _is_of_no_refusal),
)


def _is_models_own(failure: Unsupported) -> bool:
    return isinstance(failure.__cause__, ObservedException)


def _capture_error(failure: Unsupported | UserError | ConstraintViolationError) -> CaptureError:
    """What Dynamo could not capture, in one line: the reason, the place and the way out."""
    if isinstance(failure, ConstraintViolationError):
        return CaptureError(
            "drawn cuts cannot reach an op of the split part, which has one size only when compiled; use join= with an "
            "earlier module, or no stochastic="
        )
    what = str(failure.msg).strip().splitlines()[0]
    if OWN_BUDGET in str(failure.msg):
        return CaptureError(
            f"a part of the model has a budget of its own (shoal.compile), called at {_place(failure)}; compile the "
            "whole model or that part only"
        )
    if "backwards hooks" in what:
        return CaptureError(
            "a module has a full backward hook or pre-hook, which a planned step cannot run; use a forward hook, or "
            "Tensor.register_hook on a parameter"
        )
    return GraphBreak(in_words(str(failure.msg)), _place(failure), may_be_an_error=USER_ERROR[0] in str(failure.msg))


def _is_of_dynamo(failure: BaseException) -> bool:
    """Whether it was raised in Dynamo's own code, and not in what that traces or runs."""
    frames = traceback.extract_tb(failure.__traceback__)
    return bool(frames) and Path(frames[-1].filename).is_relative_to(_DYNAMO)


def _fault_of_dynamo(origin: BaseException, failure: BaseException) -> FaultOfDynamo:
    return FaultOfDynamo(f"PyTorch's Dynamo fails ({type(origin).__name__}: {_first_line(origin)})", _place(failure))


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), "")


def _place(failure: BaseException) -> str:
    return place_of(getattr(failure, "real_stack", None) or ())


def place_of(frames: Iterable[traceback.FrameSummary]) -> str:
    """The model's line at which Dynamo was, in words; the innermost frame is the last."""
    named = [frame for frame in frames if frame.filename not in _OURS]
    theirs = [frame for frame in named if "/torch/" not in frame.filename] or named  # else a layer of PyTorch's own
    return f"{theirs[-1].filename}:{theirs[-1].lineno} ({theirs[-1].line})" if theirs else "an unknown line"


def _origin(failure: BaseException) -> BaseException:
    """What the network itself raised, before Dynamo wrapped it."""
    while deeper := failure.__cause__ or failure.__context__:
        failure = deeper
    return failure


def _last_difference() -> str:
    """The guard that failed when a call was last captured again, as Dynamo words it: "args[1] == 2.0"."""
    now = getattr(get_metrics_context(), "_metrics", {}).get("recompile_reason")  # of a capture under way
    before = [metric.recompile_reason for metric in get_compilation_metrics() if metric.recompile_reason]
    reasons = [*before, *([now] if now else [])]
    if not reasons:
        return "something that Dynamo does not name"
    return re.sub(r"^\d+/\d+: |\s+(# |\(HINT).*", "", reasons[-1].strip().splitlines()[0])


def _why_again(guard: str) -> str:
    """What a guard of Dynamo's that failed says of a call.

    >>> _why_again("tensor 'args[0]' size mismatch at index 0. expected 8, actual 6")
    'size 0 of args[0] is 6, was 8'
    >>> _why_again("tensor 'model._modules['a']' requires_grad mismatch. expected requires_grad=1. Guard")
    'requires_grad of model.a is no longer 1'
    >>> _why_again("model.scale == 2.0")
    'model.scale == 2.0 no longer holds'
    """
    guard = re.sub(r"\._(?:modules|parameters|buffers)\['([^']+)'\]", r".\1", guard)
    found = re.match(
        r"tensor '(.+?)' ([\w ]+) mismatch(?: at index (\d+))?\. expected (?:\w+=)?(\w+)(?:, actual (\w+))?", guard
    )
    if found is None:
        return f"{guard} no longer holds"
    name, what, index, was, now = found.groups()
    subject = f"{what}{f' {index}' if index else ''} of {name}"
    return f"{subject} is no longer {was}" if now is None else f"{subject} is {now}, was {was}"


def _tensors(inputs: Sequence[Any]) -> str:
    tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
    return str(sorted(str((tuple(t.shape), t.dtype, t.device, t.requires_grad)) for t in tensors))


def _capturing_seconds() -> float:
    """How long Dynamo has been at the capture that is under way."""
    began_ns = getattr(get_metrics_context(), "_start_time_ns", None)
    return max(0.0, (time.time_ns() - began_ns) / 1e9) if began_ns else 0.0


def plain_call(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The model's call, hooks included, as if it was never compiled."""
    return type(model)._call_impl(model, *args, **kwargs)


_numbers = itertools.count()
_number_of: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()


def call_of(model: nn.Module, layers: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """The model's call, hooks included, as a function that Dynamo enters whatever class the model is of.

    Args:
        layers: what calls its layers, as of `layer_by_layer`; None: the model itself does.

    Raises:
        CaptureError: a part of the model is split at drawn cuts.
    """
    if any(_draws(module) for module in model.modules() if module is not model):
        raise CaptureError(
            "a submodule is split with stochastic=, which draws cuts outside the compiled step; split the whole model "
            "(depth=, join=) or compile only that submodule"
        )

    def call(*args: Any, **kwargs: Any) -> Any:
        return plain_call(model, *args, **kwargs)

    def call_layers(*args: Any, **kwargs: Any) -> Any:
        assert layers is not None
        return layers(*args, **kwargs)

    own = call if layers is None else call_layers
    # Dynamo keeps and counts its graphs by code object: one of its own, so that no model uses up another's. What it has
    # seen change between calls it keeps by the code's name: else another model's numbers would be taken for changed.
    name = _name_of(model)
    code = own.__code__.replace(co_name=name)
    function = FunctionType(code, own.__globals__, name, None, own.__closure__)
    weakref.finalize(function, forget_code, code).atexit = False
    return function


def drawn_for(model: nn.Module, arguments: Sequence[Any]) -> dict[str, Any]:
    """What the call needs in addition to its arguments: the cuts drawn for this step, if the model is split so."""
    cuts = model.draw(*arguments) if isinstance(model, SplitModule) else None
    return {} if cuts is None else {CUTS_ARGUMENT: cuts}


def _draws(module: nn.Module) -> bool:
    return isinstance(module, SplitModule) and module.stochastic is not None


@contextmanager
def settings(logging_functions: Collection[Callable[..., Any]] = ()) -> Iterator[None]:
    """Dynamo's settings while a model of ours is called: it guards all that the model's call depends on.

    Args:
        logging_functions: what its forward pass may log with, as of `logging_functions`.
    """
    trace_more_functions()
    # A region under torch.utils.checkpoint runs once, so what it does in addition, such as counting its calls, is safe.
    patched = config.patch(
        skip_fwd_side_effects_in_bwd_under_checkpoint=True,
        optimize_ddp=False,  # DDP's own splitting of the graph would give every bucket the whole budget
        recompile_limit=MOST_CAPTURES,
        accumulated_recompile_limit=64 * MOST_CAPTURES,
        fail_on_recompile_limit_hit=True,
        suppress_errors=False,
        allow_rnn=False,  # see sizes_of_values: an LSTM ends a graph
        allow_unspec_int_on_nn_module=True,  # a counter of the model's may become an input of the step
        allow_ignore_mark_dynamic=True,  # a guard of the step's own may narrow a size that the caller marked
        skip_nnmodule_hook_guards=False,  # else a hook that comes or goes between steps is not noticed
        ignore_logging_functions=config.ignore_logging_functions.union(logging_functions),
        use_numpy_random_stream=True,  # as in eager: else NumPy's random numbers come from PyTorch's generator
    )
    with patched, cumulative_norms(), knowing_buffers(), keeping_unread_writes():
        yield


@contextmanager
def few_collections() -> Iterator[None]:
    """Python looks for cycles less often in the block: a trace makes millions of objects, nearly all of which stay."""
    before = gc.get_threshold()
    if before[0]:
        gc.set_threshold(max(before[0], _COLLECTED_OBJECTS), *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def capturing(
    model: nn.Module, backend: Callable[..., Any], name: str, record: Callable[[Preparation], object]
) -> Callable[..., Any]:
    """The model's call as it is to be called under `settings`: captured as often as its guards ask, by `backend`.

    A number or a size that changes from one call to the next becomes an input of the graph. The cuts of a network that
    is split at drawn ones are told to be inputs, and nothing else is.

    Args:
        name, record: as of `preparing`, for what is captured after the first call.
    """

    captures = 0
    seen: set[str] = set()
    known, dynamic = KnownGraphs(), False if _draws(model) else None
    run: Callable[..., Any]

    def compile_graph(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        nonlocal captures
        captures += 1
        if captures == _MANY_CAPTURES:
            log.warning(
                "the model was captured and planned %d times, each for other shapes or settings, and captured %d times "
                "with a plan that it had; what differed: %s",
                captures - known.reused,
                known.reused,
                _last_difference(),
            )
        guard = _last_difference() if captures > 1 else ""
        why = _why_again(guard) if guard else ""
        is_of_tensors = guard.startswith("tensor ") or ".size()" in guard
        if is_of_tensors and _tensors(example_inputs) in seen:  # it is the last capture that had others
            why = "something besides its tensors has changed (TORCH_LOGS=recompiles says what)"
        seen.add(_tensors(example_inputs))

        def compile_new(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
            with preparing(name, why=why, begun_seconds=_capturing_seconds(), record=record):
                return backend(gm, example_inputs)

        with refusals(), few_collections():
            return known.compiled(gm, example_inputs, compile_new)

    def captured() -> Callable[..., Any]:
        return torch.compile(call_of(model), backend=held_weakly(compile_graph), fullgraph=True, dynamic=dynamic)

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal run
        try:
            return run(*args, **kwargs)
        except FailOnRecompileLimitHit:
            if not known.reused:
                raise
            known.reused = 0
            run = captured()  # Dynamo has as many captures of the call as it takes; what was compiled of them stays
        return run(*args, **kwargs)

    run = captured()
    return call


def held_weakly(compile_graph: Callable[..., Any]) -> Callable[..., Any]:
    """A backend for Dynamo, which keeps it for good: it holds neither `compile_graph` nor what that has compiled.

    Whoever holds the captured call has to hold `compile_graph` too.
    """
    held = weakref.ref(compile_graph)

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        compile_it = held()
        assert compile_it is not None
        compiled: Callable[..., Any] = compile_it(gm, example_inputs)
        return compiled

    weakref.finalize(compile_graph, forget_backend, backend).atexit = False
    return backend


def forget_sizes(model: nn.Module | None = None) -> None:
    """Let Dynamo forget the tensors that a model was called with: a size that it sees change becomes a symbol.

    Args:
        model: the model; None for all of ours.
    """
    name = None if model is None else _name_of(model)
    for code_id, code in get_code_state().items():
        seen = code.automatic_dynamic
        if name in (None, code_id.name):
            for source in [source for source, entry in seen.items() if isinstance(entry.size, tuple)]:
                if source.startswith(_OUR_SOURCES):
                    del seen[source]


def _name_of(model: nn.Module) -> str:
    """What the code of a model's call is called."""
    return f"call_{_number_of.setdefault(model, next(_numbers))}"


def global_hooks() -> tuple[int, ...]:
    """The hooks that run in every module's call, by their handles: Dynamo guards a module's own hooks only."""
    every = nn.modules.module
    kinds: tuple[Iterable[int], ...] = (
        every._global_forward_pre_hooks,
        every._global_forward_hooks,
        every._global_backward_pre_hooks,
        every._global_backward_hooks,
    )
    return tuple(handle for kind in kinds for handle in kind)


def logging_functions() -> set[Callable[..., Any]]:
    """What a forward pass may log with, which is no part of the step. Libraries give loggers methods of their own."""
    functions: set[Callable[..., Any]] = {getattr(logging, name) for name in _LOGGED if hasattr(logging, name)}
    functions |= {warnings.warn, warnings.warn_explicit}
    kinds: list[type] = [logging.Logger, logging.LoggerAdapter]
    for kind in kinds:
        kinds += kind.__subclasses__()
        for name, method in vars(kind).items():
            added = getattr(method, "__module__", "logging") != "logging" and not name.startswith("_")
            if callable(method) and (name in _LOGGED or (added and kind is logging.Logger)):
                functions.add(method)
    return functions
