"""The kernels that a compiled region launches on CUDA, one after another, without what comes between them.

Inductor's code changes the device and back, looks at each operand's address, and has each kernel look whether it has
been tuned, is profiled or recorded. That is right for code that anybody may call; of a small region it is the larger
part of what the host does. A region whose kernels have been launched once is rewritten from Inductor's own code: the
launchers by themselves, behind one look at the device and at all addresses.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Sequence
from textwrap import dedent
from typing import Any

import torch
from torch.autograd import profiler

Launches = Callable[..., Sequence[torch.Tensor]]


def launches_of(boxed: Callable[[list[Any]], Sequence[torch.Tensor]], name: str) -> Launches | None:
    """What Inductor's code for a graph on CUDA computes, as a function of the tensors.

    Args:
        boxed: that code; takes a list of tensors. It has run once, so that its kernels are tuned.
        name: of the function.

    Returns:
        The function; under a profiler, on another current device, and with tensors that are not aligned as the kernels
        were compiled for, it calls `boxed`. None where the code has another form than those of PyTorch 2.11 to 2.15,
        or a kernel is not tuned.
    """
    code = _code_of(boxed)
    scope = getattr(code, "__globals__", {})
    try:
        [call] = ast.parse(dedent(inspect.getsource(code))).body
    except (OSError, TypeError, SyntaxError, ValueError):
        return None
    rewritten = _rewritten(call, scope, name)
    if rewritten is None:
        return None
    module, launchers = rewritten
    own = {**scope, **launchers, "_boxed": boxed, "_device": torch._C._cuda_getDevice, "_profiler": profiler}
    exec(compile(module, code.__code__.co_filename, "exec"), own)
    function: Launches = own[name]
    function.__module__ = __name__
    return function


def is_tuned(boxed: Callable[[list[Any]], Sequence[torch.Tensor]]) -> bool:
    """Whether the code has one way to launch each kernel, and need not time several, for which it allocates."""
    scope = getattr(_code_of(boxed), "__globals__", {})
    return all(len(getattr(one, "launchers", ())) < 2 for one in scope.values())


def _code_of(boxed: Any) -> Any:
    """The function in Inductor's module, out of what copies operands that are not aligned."""
    code = getattr(boxed, "__code__", None)
    if code is not None and "model" in code.co_freevars and "inputs_to_check" in code.co_freevars:
        boxed = boxed.__closure__[code.co_freevars.index("model")].cell_contents
    return getattr(boxed, "__func__", boxed)


def _rewritten(call: ast.stmt, scope: dict[str, Any], name: str) -> tuple[ast.Module, dict[str, Any]] | None:
    """A module of one function, which has the launches of `call`, and what launches each kernel."""
    match getattr(call, "body", None):
        case [
            ast.Assign(targets=[ast.Tuple(elts=operands)], value=ast.Name(id="args")),
            ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id="args"), attr="clear"))),
            ast.With(items=[ast.withitem(context_expr=ast.Call(args=[ast.Constant(value=int(device))]))], body=guarded),
            ast.Return() as returned,
        ]:
            pass
        case _:
            return None
    names = [operand.id for operand in operands if isinstance(operand, ast.Name)]
    launchers: dict[str, Any] = {}
    body: list[ast.stmt] = []
    n_streams = 0
    for statement in guarded:
        match statement:
            case ast.Expr(value=ast.Call(func=ast.Attribute(attr="set_device"))):
                continue
            case ast.Assign(value=ast.Call(func=ast.Name(id="copy_if_misaligned"))):
                continue
            case ast.Assign(value=ast.Call(func=ast.Name(id="get_raw_stream"))):
                n_streams += 1
                if n_streams > 1:
                    continue
            case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id=kernel), attr="run")) as launch):
                launcher = _tuned(scope.get(kernel))
                if launcher is None:
                    return None
                launchers[f"_{kernel}"] = launcher
                launch.func = ast.Name(f"_{kernel}", ast.Load())
            case ast.Assign() | ast.Delete():
                pass
            case _:
                return None
        body.append(statement)
    if len(names) != len(operands) or not names or not launchers:
        return None
    addresses = " | ".join(f"{one}.data_ptr()" for one in names)
    module = ast.parse(_FUNCTION.format(name=name, operands=", ".join(names), device=device, addresses=addresses))
    [function] = module.body
    assert isinstance(function, ast.FunctionDef)
    function.body += [*body, returned]
    return ast.fix_missing_locations(module), launchers


_FUNCTION = """
def {name}({operands}):
    if _profiler._is_profiler_enabled or _device() != {device} or ({addresses}) & 15:
        return _boxed([{operands}])
"""


def _tuned(kernel: Any) -> Any:
    """What launches a kernel of Inductor's, once there is one way to."""
    launchers: Any = getattr(kernel, "launchers", ())
    if len(launchers) != 1 or getattr(launchers[0], "store_cubin", False):
        return None
    if getattr(kernel, "dump_launch_params", False) or getattr(kernel, "dump_launch_tensors", False):
        return None
    return getattr(kernel, "_cached_launcher", None) or launchers[0]
