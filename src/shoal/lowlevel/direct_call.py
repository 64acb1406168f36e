"""Registers the ops of this package, and calls them by their own functions where nothing has to see the op.

What `torch.library` puts around an op in Python (schema, dispatch, a walk through its arguments for autograd) takes 0.3
to 0.5 ms for a forward and a backward pass: more than a small layer computes. A compiler, a trace, a dispatch mode or
a transform of `torch.func` has to see the op; there the op itself is called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from shoal.errors import InputError

_PLAIN = (torch.Tensor, torch.nn.Parameter)


def register_op(
    schema: str,
    forward: Callable[..., Any],
    fake: Callable[..., Any],
    setup: Callable[..., None] | None = None,
    differentiate: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """Register `shoal::<schema>` with one implementation for all devices; the op is then `torch.ops.shoal.<name>`.

    Args:
        schema: of the op, without its namespace: "name(Tensor x) -> Tensor".
        forward: its implementation.
        fake: what it returns, in shapes, strides and dtypes.
        setup, differentiate: as `torch.library.register_autograd` takes them; None: the op is not differentiable.

    Returns:
        The op's `direct_call`.
    """
    name, parenthesis, arguments = schema.partition("(")
    qualified = f"shoal::{name}"
    torch.library.define(qualified, parenthesis + arguments)
    torch.library.impl(qualified, "CompositeExplicitAutograd", forward)
    torch.library.register_fake(qualified, fake)
    if differentiate is not None:
        torch.library.register_autograd(qualified, differentiate, setup_context=setup)
    return direct_call(getattr(torch.ops.shoal, name), forward, setup, differentiate)


def direct_call(
    op: Callable[..., Any],
    forward: Callable[..., Any],
    setup: Callable[..., None] | None = None,
    differentiate: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """A function that does what `op` does, in eager mode without `torch.library`.

    Args:
        op: as registered; it returns a tensor or a tuple of them (a list of tensors would be cut from autograd).
        forward: its implementation, for all devices.
        setup, differentiate: what `torch.library.register_autograd` was given; None: nothing runs through it backward.

    Returns:
        Takes the op's arguments, by position, its lists as lists; differentiable once, and says so where more is asked.
    """

    class Direct(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, lengths: tuple[int, ...], *flat: Any) -> Any:
            assert setup is not None
            inputs = _nested(lengths, flat)
            output = forward(*inputs)
            ctx.lengths = lengths
            setup(ctx, inputs, output)
            return output

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> Any:
            assert differentiate is not None
            if torch.is_grad_enabled():
                raise _no_second_derivative(op)
            found = differentiate(_Nested(ctx), *grads)
            found = found if isinstance(found, tuple) else (found,)
            return None, *_flat(ctx.lengths, found)

    def call(*arguments: Any) -> Any:
        if needs_dispatch(arguments):
            return op(*arguments)
        if not torch.is_grad_enabled():
            return forward(*arguments)
        if differentiate is None:
            if any(tensor.requires_grad for tensor in _tensors(arguments)):
                raise _no_second_derivative(op)
            return forward(*arguments)
        lengths = tuple(len(value) if _is_tensors(value) else -1 for value in arguments)
        # Skips what `Function.apply` does for functorch, which is not active here.
        return super(torch.autograd.Function, Direct).apply(lengths, *_flat(lengths, arguments))

    return call


class _Nested:
    """The context of an op's backward pass, where a list of tensors has a list of needs."""

    def __init__(self, ctx: Any) -> None:
        self._ctx = ctx
        self.needs_input_grad = _nested(ctx.lengths, ctx.needs_input_grad[1:])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)


def needs_dispatch(arguments: tuple[Any, ...]) -> bool:
    """Whether a compiler, a trace, a mode, a transform or a tensor subclass has to see an op of `arguments`."""
    if (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._get_tracing_state() is not None
    ):
        return True
    for value in arguments:
        for each in value if type(value) is list else (value,):
            if type(each) in _PLAIN:
                if each.is_meta:
                    return True
            elif isinstance(each, torch.Tensor):  # a subclass may override ops
                return True
    return False


def in_places(found: Iterable[Any], wanted: Iterable[bool]) -> list[Any]:
    """What an op returned of its gradients, those that were wanted, each in its place; None in the others.

    >>> in_places(["of x", "of bias"], [True, False, True])
    ['of x', None, 'of bias']
    """
    taken = iter(found)
    return [next(taken) if asked else None for asked in wanted]


def _tensors(arguments: tuple[Any, ...]) -> Iterator[torch.Tensor]:
    for value in arguments:
        for each in value if type(value) is list else (value,):
            if isinstance(each, torch.Tensor):
                yield each


def _no_second_derivative(op: Callable[..., Any]) -> InputError:
    return InputError(f"{op}: its gradient has none; leave out create_graph=True, or use the network as it was")


def _is_tensors(value: Any) -> bool:
    return type(value) is list and any(isinstance(each, torch.Tensor) for each in value)


def _flat(lengths: tuple[int, ...], values: tuple[Any, ...]) -> list[Any]:
    flat: list[Any] = []
    for length, value in zip(lengths, values, strict=True):
        if length < 0:
            flat.append(value)
        else:
            flat += [None] * length if value is None else value
    return flat


def _nested(lengths: tuple[int, ...], flat: tuple[Any, ...]) -> tuple[Any, ...]:
    nested: list[Any] = []
    taken = iter(flat)
    for length in lengths:
        nested.append(next(taken) if length < 0 else [next(taken) for _ in range(length)])
    return tuple(nested)
