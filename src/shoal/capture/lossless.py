"""Rewrites of the captured step that save fewer bytes and change no bit of the result.

Each takes the joint graph of forward and backward (aten ops, functional) and edits it in place:

- running statistics named by batch norm's backward, which does not read them in training mode, are not saved, and the
  forward pass writes them, and counters of batches, in place (`buffers_in_place`);
- what several layers compute alike of the same, as masks of attention, is computed once (`duplicates`);
- gradients that are written into zeros as a whole, only to be read from there, are views (`whole_scatters`);
- batch norms on CUDA that eager PyTorch leaves to cuDNN are left to it (`cudnn_batch_norms`), for the bits;
- results that kernels lay out or type otherwise than traced are so in the trace (`kernel_layouts`);
- results that PyTorch leaves in a larger storage, such as the mean of all squares, have one of their own size;
- the input of max pooling, of which the backward pass reads only the shape, is not saved for it;
- max-pool indices wait in 1 byte (the place within the window) instead of 8, which also says where a ReLU before the
  pooling lets no gradient through;
- dropout on the CPU gives the bits of eager PyTorch, with a mask of 1 byte per element where that saves noise of 4;
- the noise of an in-place dropout is drawn in the layout of its input, as eager PyTorch draws it;
- copies that functional graphs no longer need (an in-place activation's) are dropped;
- a clipped activation (ReLU6, hardtanh) and a leaky ReLU save their output, which the next layer saves anyway, instead
  of their input (an ELU keeps it: of its output PyTorch's kernel makes other bits in one element of seven);
- a convolution's gradients of weight and input are two ops, the second without the input, so that the input can go
  before its gradient comes;
- the gradient of a weight larger than its images comes a few output channels at a time where that saves scratch;
- a ReLU or leaky ReLU whose output is saved for nothing but its own backward waits as one boolean per element
  (`activation_masks`);
- the backward of batch, instance, group and layer norm and of PReLU runs in place, without the further gradient that
  PyTorch's kernels allocate (`gradients_in_place`);
- what a fused batch norm's backward hands on is multiplied and added where it is read (`norm_gradients`);
- gradients of concatenations of the same tensors are added as a whole, not part by part, which saves ops, and no byte
  (`concatenation_gradients`).

They run before planning, so that the planner sees the small storages. What costs an op, and bytes only while the
backward pass runs, is left to `shrunk`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from shoal.capture.activation_masks import save_masks
from shoal.capture.buffer_copies import copy_small_buffers
from shoal.capture.buffers_in_place import change_in_place
from shoal.capture.concatenation_gradients import add_gradients_whole
from shoal.capture.cudnn_batch_norms import leave_to_cudnn
from shoal.capture.duplicates import merge_duplicates
from shoal.capture.fx_nodes import args_of, describe_as, is_handed_out, is_view, per_axis, reaches_output
from shoal.capture.gradients_in_place import WRITTEN_OVER
from shoal.capture.inplace import WRITTEN_VIEW
from shoal.capture.kernel_layouts import lay_out_as_kernels_do, type_as_kernels_do
from shoal.capture.norm_gradients import fold_norm_gradients
from shoal.capture.op_counts import convolution_backward_flops
from shoal.capture.symbolic_sizes import as_arguments, usual
from shoal.capture.whole_scatters import view_whole_scatters
from shoal.codecs import pool_index
from shoal.kernels.convolution import can_do_without_input, input_gradient
from shoal.kernels.convolution_pieces import cut_of_large_weight, weight_gradient
from shoal.kernels.dropout import dropout, dropout_backward, noise_like
from shoal.kernels.memory_format import channels_last_format, suggested_memory_format
from shoal.kernels.norm import joined_statistics
from shoal.kernels.own_storage import OWN
from shoal.kernels.pooling import backward as pool_backward
from shoal.kernels.pooling import forward as pool_forward

_aten = torch.ops.aten
_registered = joined_statistics
_STATISTICS_OF_BATCH_NORM = (3, 4)
_TRAINING_OF_BATCH_NORM = 7
_PRESERVED = (None, torch.preserve_format)
_OF_SLICES = (torch.ops.shoal.sliced_norm.default, torch.ops.shoal.sliced_norm_gradient.default)
_WITH_SLICES = (_aten.convolution.default, _aten.constant_pad_nd.default, _aten.cat.default)
_COPIES: dict[Any, int] = {_aten.clone.default: 0, _aten.copy.default: 1}  # → place of what is copied
_POOL_BACKWARDS = {_aten.max_pool2d_with_indices_backward.default: 2, _aten.max_pool3d_with_indices_backward.default: 3}


def save_fewer_bytes(joint: fx.GraphModule, backward: set[fx.Node], *, cpu_kernels: bool = True) -> None:
    """Apply every rewrite to `joint`.

    Args:
        joint: the joint graph.
        backward: its backward nodes; new ones are added.
        cpu_kernels: make those too that are only for the CPU, where the tensors are on it. False for a step that is
            captured here but planned for another device.
    """
    graph = joint.graph
    for node in list(graph.nodes):
        if (kept := _kept_as_it_is(node)) is not None:
            node.replace_all_uses_with(kept)
            graph.erase_node(node)
    for node in graph.find_nodes(op="call_function", target=_aten.new_empty_strided.default):
        if not node.users:  # what a copy was for
            graph.erase_node(node)
    for node in graph.find_nodes(op="call_function", target=_aten.native_batch_norm_backward.default):
        if node.args[_TRAINING_OF_BATCH_NORM] is True:
            node.args = tuple(None if i in _STATISTICS_OF_BATCH_NORM else arg for i, arg in enumerate(node.args))
    view_whole_scatters(graph, backward)
    _write_uncopied(graph)
    for node in list(graph.nodes):
        if node.target in WRITTEN_VIEW:
            _write_through_views(graph, node)
    merge_duplicates(graph, backward)
    change_in_place(joint, backward)
    copy_small_buffers(joint, backward)
    type_as_kernels_do(graph)
    lay_out_as_kernels_do(joint, backward, leave_to_cudnn(joint, backward))
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if node.target in OWN and _is_smaller_than_an_operand(node):
            node.target = OWN[node.target]
        if cpu_kernels and node.target in WRITTEN_OVER:
            WRITTEN_OVER[node.target](graph, node)
        elif node.target is _aten.hardtanh_backward.default:
            _save_clipped_output(node)
        elif node.target is _aten.leaky_relu_backward.default:
            _save_leaky_output(node, backward)
        elif node.target is _aten.convolution_backward.default:
            _split_convolution_backward(graph, node, backward, cpu_kernels)
        elif node.target is _aten.native_dropout.default and cpu_kernels:
            _keep_dropout_bits(node)
        elif node.target is _aten.bernoulli.p:
            _draw_in_layout(graph, node)
        elif node.target in _POOL_BACKWARDS:
            _encode_pool(graph, node, _POOL_BACKWARDS[node.target], backward)
    if cpu_kernels:
        fold_norm_gradients(joint, backward)
    add_gradients_whole(graph, backward)
    _sink(graph, backward)
    _sink_slices(graph, backward)
    save_masks(graph, backward)
    graph.lint()


def _kept_as_it_is(node: fx.Node) -> fx.Node | None:
    """What a node only copies; None where it does more than that, or where the caller gets the copy."""
    if node.target is _aten.detach.default:
        return node.args[0]  # type: ignore[return-value]  # fx types an argument as a union of all it may be
    place = _COPIES.get(node.target)
    if place is None or is_handed_out(node):
        return None
    source = args_of(node)[place]
    copied, value = source.meta.get("val"), node.meta["val"]
    same = (
        source.op == "call_function"
        and isinstance(copied, torch.Tensor)
        and (copied.dtype, copied.device, copied.shape) == (value.dtype, value.device, value.shape)
        and (copied.is_conj(), copied.is_neg()) == (value.is_conj(), value.is_neg())
        and copied.stride() == value.stride()
        and copied.untyped_storage().nbytes() == value.untyped_storage().nbytes()
    )
    return source if same else None


def _write_uncopied(graph: fx.Graph) -> None:
    """Drop copies that are only written into other tensors: autograd's of the gradient of a strided view."""
    for target, place in _COPIES.items():
        for node in graph.find_nodes(op="call_function", target=target):
            source, value = args_of(node)[place], node.meta["val"]
            if (source.meta["val"].dtype, source.meta["val"].device) != (value.dtype, value.device):
                continue
            written = all(user.target in WRITTEN_VIEW and user.all_input_nodes.index(node) == 1 for user in node.users)
            if source.meta["val"].shape == value.shape and node.users and written:
                node.replace_all_uses_with(source)
                graph.erase_node(node)


def _write_through_views(graph: fx.Graph, node: fx.Node) -> None:
    """Write a view of a view at once: functional graphs make a copy of each view that is written through."""
    base, part = args_of(node)[:2]
    whole = base.meta["val"]
    outer: fx.Node = node
    views: list[fx.Node] = []
    region: Any = whole
    while True:
        operands = args_of(outer)[2:]
        if any(type(number) is not int for number in (*region.shape, *region.stride(), region.storage_offset())):
            return
        if outer.kwargs or any(isinstance(operand, fx.Node) for operand in operands):
            return
        region = WRITTEN_VIEW[outer.target](region, *operands)
        inner = args_of(outer)[1]
        if inner.target not in WRITTEN_VIEW or len(inner.users) > 1:
            break
        view = args_of(inner)[0]
        viewed = views[-1] if views else base
        if view.target is not WRITTEN_VIEW[outer.target] or view.args != (viewed, *operands) or view.kwargs:
            break
        views.append(view)
        outer = inner
    fits = whole.is_contiguous() and whole.numel() * whole.element_size() == whole.untyped_storage().nbytes()
    if outer is node or not fits or whole.is_conj() or whole.is_neg():
        return
    written = args_of(outer)[1]
    node.target = _aten.as_strided_scatter.default
    node.args = (base, written, list(region.shape), list(region.stride()), region.storage_offset())
    while part is not written:
        inner = args_of(part)[1]
        graph.erase_node(part)
        part = inner
    for view in reversed(views):
        if not view.users:
            graph.erase_node(view)


def _split_convolution_backward(graph: fx.Graph, node: fx.Node, backward: set[fx.Node], cpu_kernels: bool) -> None:
    *arguments, wanted = args_of(node)
    of_weight = node
    if wanted[0] and any(wanted[1:]):
        of_weight = _take_out_weight_gradient(graph, node, backward)
    if cpu_kernels:
        _cut_weight_gradient(of_weight)
    if not wanted[0]:
        return
    if not node.users:  # nothing wants the gradient of an input of the model
        graph.erase_node(node)
        return
    grad, x, weight = (operand.meta["val"] for operand in arguments[:3])
    on_cpu = cpu_kernels and x.device.type == "cpu"
    if not can_do_without_input(grad, x, weight, arguments[-1], on_cpu=on_cpu):
        return
    (of_input,) = node.users
    counted_flops = _flops(node)
    with graph.inserting_before(node):
        shape, stride = as_arguments(graph, x.shape), as_arguments(graph, x.stride())
        alone = graph.call_function(input_gradient, (arguments[0], arguments[2], shape, stride, *arguments[4:]))
    describe_as(alone, of_input.meta["val"], node)
    alone.meta["flops"] = counted_flops
    of_input.replace_all_uses_with(alone)
    for replaced in (of_input, node):
        graph.erase_node(replaced)
    backward.add(alone)


def _take_out_weight_gradient(graph: fx.Graph, node: fx.Node, backward: set[fx.Node]) -> fx.Node:
    *arguments, wanted = args_of(node)
    with graph.inserting_before(node):
        of_weight = graph.call_function(_aten.convolution_backward.default, (*arguments, [False, *wanted[1:]]))
    of_input_value, *of_weight_values = node.meta["val"]
    describe_as(of_weight, (None, *of_weight_values), node)
    backward.add(of_weight)
    node.args = (*arguments, [True, False, False])
    node.meta["val"] = (of_input_value, None, None)
    for item in list(node.users):
        if item.args[1] != 0:
            item.args = (of_weight, item.args[1])
    return of_weight


def _cut_weight_gradient(node: fx.Node) -> None:
    operands, options = args_of(node)[:3], args_of(node)[3:]
    cut = cut_of_large_weight(*(operand.meta["val"] for operand in operands), *options)
    if cut is not None:
        node.meta["flops"] = _flops(node)
        node.target, node.args = weight_gradient, (*node.args, cut.dim, cut.count)


def _sink(graph: fx.Graph, backward: set[fx.Node]) -> None:
    """Move what the backward pass makes of forward tensors only to just before its first reader."""
    fed: set[fx.Node] = {n for n in graph.find_nodes(op="placeholder") if n.name.startswith("tangents")}
    last = len(graph.nodes)
    place: dict[fx.Node, tuple[int, ...]] = {}  # compares as the order in the graph does
    for number, node in enumerate(graph.nodes):
        place[node] = (number, last)
        if node in backward and any(operand in fed for operand in node.all_input_nodes):
            fed.add(node)
    for turn, node in enumerate(reversed(list(graph.nodes))):
        if node in backward and node not in fed and node.users:
            first = min(node.users, key=place.__getitem__)
            first.prepend(node)
            place[node] = (*place[first][:-1], turn, last)  # after what was moved there earlier


def _sink_slices(graph: fx.Graph, backward: set[fx.Node]) -> None:
    """Move the pass over each slice or slab of a norm to just before its first reader in the same pass of the step.

    What only it reads there comes with it, but for what is drawn.
    """
    order = {node: place for place, node in enumerate(graph.nodes)}
    moved: set[fx.Node] = set()
    for node in reversed(list(graph.nodes)):
        readers = [user for user in node.users if (user in backward) == (node in backward) and user in order]
        sinks = node.target in _OF_SLICES or (
            node.op == "call_function"
            and node not in backward
            and len(readers) == 1
            and readers[0] in moved
            and (is_view(node) or node.target in _WITH_SLICES)
        )
        if sinks and readers and not reaches_output(node):
            first = min(readers, key=order.__getitem__)
            first.prepend(node)
            order[node] = order[first]
            moved.add(node)


def _keep_dropout_bits(node: fx.Node) -> None:
    x, p, train = args_of(node)
    if not train or x.meta["val"].device.type != "cpu":
        return
    node.target, node.args = dropout, (x, p)
    for item in node.users:
        for reader in list(item.users) if item.args[1] == 1 else ():
            if reader.target is _aten.native_dropout_backward.default:
                reader.target, reader.args = dropout_backward, (reader.args[0], item, p)


def _draw_in_layout(graph: fx.Graph, node: fx.Node) -> None:
    empty, value = args_of(node)[0], node.meta["val"]
    if empty.target is not _aten.empty_like.default or empty.kwargs.get("memory_format") not in _PRESERVED:
        return
    like, p = empty.args[0], node.args[1] if len(node.args) > 1 else 0.5
    if like.meta["val"].device == value.device and not node.kwargs:
        node.target, node.args = noise_like, (like, p, value.dtype)
        if not empty.users:
            graph.erase_node(empty)


def _save_clipped_output(node: fx.Node) -> None:
    clipped_input, low, high = args_of(node)[1:4]
    for user in clipped_input.users:
        if user.target is _aten.hardtanh.default and (*user.args[1:3], -1.0, 1.0)[:2] == (low, high) and low < high:
            node.update_arg(1, user)  # strictly inside the bounds before clipping is strictly inside after it
            return


def _save_leaky_output(node: fx.Node, backward: set[fx.Node]) -> None:
    leaky_input, slope, is_output = args_of(node)[1:4]
    if is_output or slope < 0 or any(user in backward and user is not node for user in leaky_input.users):
        return
    for user in leaky_input.users:
        if user.target is _aten.leaky_relu.default and (*user.args[1:], 0.01)[0] == slope:
            node.update_arg(1, user)  # positive where its input is, whatever the slope
            node.update_arg(3, True)
            return


def _encode_pool(graph: fx.Graph, node: fx.Node, dims: int, backward: set[fx.Node]) -> None:
    _, pool_input, *window, indices = args_of(node)
    pool, readers = indices.args[0], list(indices.users)  # several where poolings alike have become one
    kernel, stride, padding, dilation = (per_axis(size, dims) for size in window[:4])
    stride = stride or kernel
    value = pool_input.meta["val"]
    if not pool_index.fits(kernel) or value.dim() != dims + 2 or pool in backward:
        return
    if any(reader.target is not node.target or args_of(reader)[1:] != args_of(node)[1:] for reader in readers):
        return
    pooled, places = pool.meta["val"]
    pool.target, pool.args = pool_forward, (pool_input, kernel, stride, padding, dilation, bool(window[4]))
    codes_value = places.new_empty_strided(places.shape, places.stride(), dtype=torch.uint8)
    pool.meta["val"] = (pooled, codes_value)
    indices.meta["val"] = codes_value
    channels_last = _is_channels_last(value)
    for reader in readers:
        with graph.inserting_before(reader):
            shape = as_arguments(graph, value.shape)
        reader.target = pool_backward
        reader.args = (args_of(reader)[0], indices, shape, channels_last, *pool.args[1:])
    # A dilated window may lie in the padding altogether: its index is then of no maximum.
    alone = len(readers) == 1 and all(step == 1 for step in dilation)
    rectified = alone and _take_in_rectifier(graph, node, pool_input)
    for each in (pool, *readers):
        each.args = (*each.args, rectified)


def _is_channels_last(value: torch.Tensor) -> bool:
    """Whether pooling's backward kernel takes its input, of this layout, for channels_last."""
    if any(isinstance(size, torch.SymInt) for size in (*value.shape, *value.stride())):  # asked, they would be settled
        layout = channels_last_format(value.dim())
        return value.is_contiguous(memory_format=layout) and not value.is_contiguous()
    return suggested_memory_format(value) is not torch.contiguous_format


def _take_in_rectifier(graph: fx.Graph, unfolded: fx.Node, output: fx.Node) -> bool:
    if len(unfolded.users) != 1 or output.target is not _aten.relu.default:
        return False
    (node,) = unfolded.users
    if node.target is not _aten.threshold_backward.default:
        return False
    if node.args[1:] != (output, 0) or unfolded.meta["val"].stride() != node.meta["val"].stride():
        return False
    node.replace_all_uses_with(unfolded)
    graph.erase_node(node)
    return True


def _flops(node: fx.Node) -> int | torch.SymInt:
    arguments: Any = fx.node.map_arg(node.args, lambda operand: operand.meta["val"])
    return convolution_backward_flops(arguments)


def _is_smaller_than_an_operand(node: fx.Node) -> bool:
    elems = usual(node.meta["val"].numel())
    return any(elems < usual(operand.meta["val"].numel()) for operand in node.all_input_nodes)
