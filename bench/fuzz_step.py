"""Training steps of one network and everything they leave behind. Only torch is used: this text is part of every
stand-alone script that `bench.fuzz` writes."""

import itertools

import torch
from torch._C._profiler import ProfilerConfig, ProfilerState, _ExperimentalConfig

STEPS = 4  # the first plans; a budget that it breaks is planned for again in the second


def train(model, optimizer, network, course=None, predicted=lambda: None, metered=False):
    """Train for `STEPS` steps.

    Args:
        model: what is trained, plain or compiled.
        optimizer: its optimizer; its state counts in the peak.
        network: the namespace of a rendered network.
        course: an earlier training's: what parameters and buffers are put to before each step, so that no step inherits
            a difference of an earlier one, and the weights of the loss. None: this training makes its own.
        predicted: asked for the predicted peak before and after each forward pass.
        metered: whether to count allocations.

    Returns:
        By name, every tensor that the steps leave behind; the course; and (peak bytes, what was predicted) of each step
        that planned nothing, where metered.
    """
    plain = getattr(model, "_orig_mod", model)
    found, peaks = {}, []
    follows = course is not None
    course = course or {"states": [], "weights": []}
    weights = course["weights"]
    for step in range(STEPS):
        if follows:
            plain.load_state_dict(course["states"][step])
        else:
            course["states"].append({name: value.detach().clone() for name, value in plain.state_dict().items()})
        optimizer.zero_grad()
        x = network["batch"](step)
        torch.manual_seed(step)
        static = [x, *plain.parameters(), *plain.buffers()]
        static += [v for state in optimizer.state.values() for v in state.values() if torch.is_tensor(v)]
        before_bytes = sum({v.untyped_storage().data_ptr(): v.untyped_storage().nbytes() for v in static}.values())
        reported = [predicted()]

        def one_step(x=x, reported=reported):
            with torch.autocast("cpu", torch.bfloat16, enabled=network["AUTOCAST"] and x.dtype == torch.float32):
                outputs = model(x)
            reported.append(predicted())
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            loss = torch.zeros(())
            for place, output in enumerate(outputs[: network["IN_LOSS"]]):
                if place == len(weights):  # of the output's own layout: kernels may add up in another order in another
                    chance = torch.Generator().manual_seed(place)
                    drawn = torch.randn(output.shape, generator=chance)
                    weights.append(torch.empty_like(output, requires_grad=False).copy_(drawn))
                loss = loss + (output * weights[place].to(output.dtype)).sum()
            loss.backward()
            return outputs, loss

        if metered and step and reported[0] is not None:
            (outputs, loss), peak_bytes = allocated(one_step)
            if reported[0] == reported[1]:
                peaks.append((before_bytes + peak_bytes, reported[0]))
        else:
            outputs, loss = one_step()
        found[f"{step}: generator"] = torch.get_rng_state()
        for place, output in enumerate(outputs):
            found[f"{step}: output {place}"] = output.detach().clone()
        found[f"{step}: loss"] = loss.detach()
        if x.grad is not None:
            found[f"{step}: gradient of the input"] = x.grad.clone()
        for name, parameter in plain.named_parameters():
            if parameter.grad is not None:
                found[f"{step}: gradient of {name}"] = parameter.grad.clone()
        for name, buffer in plain.named_buffers():
            found[f"{step}: buffer {name}"] = buffer.clone()
        del outputs, output, loss, one_step  # what the loop holds counts in the next step
        optimizer.step()
    return found, course, peaks


def optimizer_of(model):
    """What trains each network."""
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def allocated(run):
    """What `run` returns, and the most bytes of the CPU's allocator in use at once meanwhile, beyond those before: the
    `[memory]` events of PyTorch's older profiler, since the newer one writes to stderr every time."""
    config = ProfilerConfig(ProfilerState.CPU, False, True, False, False, False, _ExperimentalConfig())
    torch._C._autograd._enable_profiler_legacy(config)
    try:
        result = run()
    finally:
        threads = torch._C._autograd._disable_profiler_legacy()
    events = [event for thread in threads for event in thread if event.kind() == "memory_alloc"]
    events.sort(key=lambda event: threads[0][0].cpu_elapsed_us(event))
    return result, max(itertools.accumulate((event.cpu_memory_usage() for event in events), initial=0))


def differences(ours, theirs):
    """Names of what is not bit for bit the same: 0 is not -0, and no gradient is not a gradient of zeros."""
    return [name for name in {**theirs, **ours} if not same(ours.get(name), theirs.get(name))]


def same(one, other):
    """Same dtype, shape and bits."""
    if one is None or other is None or one.dtype != other.dtype or one.shape != other.shape:
        return one is other
    one, other = (tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other))
    return torch.equal(one, other)


def error(found, exact, least=1e-30):
    """The largest error of any element, as a share of the largest magnitude, which counts as `least` at least."""
    found, exact = found.double(), exact.double()
    if found.shape != exact.shape or not found.isfinite().equal(exact.isfinite()):
        return float("inf")
    return float((found - exact).nan_to_num(0, 0, 0).abs().max()) / max(largest(exact), least, 1e-30)


def largest(tensor):
    """The largest finite magnitude."""
    return float(tensor.double().nan_to_num(0, 0, 0).abs().max())
