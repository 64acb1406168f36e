"""Published faults of offloading: what comes back is not what left, or the host runs out of memory."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

import shoal


def gradients(model: nn.Module, step: Callable[[], torch.Tensor]) -> list[torch.Tensor]:
    model.zero_grad()
    step().backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def same_as_plain(model: nn.Module, step: Callable[[], torch.Tensor]) -> int:
    """Compare the gradients bit for bit with plain PyTorch's, and say how many bytes were offloaded."""
    plain = gradients(model, step)
    offloading = shoal.offload_activations(min_bytes=64)

    def offloaded() -> torch.Tensor:
        with offloading:
            return step()

    for ours, theirs in zip(gradients(model, offloaded), plain, strict=True):
        assert torch.equal(ours, theirs)
    offloading.close()
    return offloading.offloaded_bytes


def test_a_square_matrix_and_its_transpose() -> None:
    """modelscope/ms-swift#10157: saved tensors are told apart by address and dtype, so that a transpose comes back as
    the matrix: wrong gradients where it is square."""
    torch.manual_seed(0)
    model, x = nn.Linear(32, 32), torch.randn(32, 32)

    def step() -> torch.Tensor:
        y = model(x)
        return (y.exp() @ y.t().sin() + y.t() @ y).sum() + (y[:16] @ y[:, :16].exp()).sum()

    assert same_as_plain(model, step) > 0


def test_tensors_that_are_gone_before_they_were_copied() -> None:
    """meta-pytorch/torchtune#1867: the device's memory is handed out again while the copy to the host still reads it,
    and gradients are NaN."""
    torch.manual_seed(0)
    model, x = nn.Sequential(*(nn.Linear(128, 128) for _ in range(6))), torch.randn(128, 128)

    def step() -> torch.Tensor:
        y = x
        for layer in model:
            y = torch.sigmoid(layer(y))
            y = y * y.sin()  # what came before is only saved
        torch.full((6, 128, 128), float("nan"))  # takes what was freed
        return y.sum()

    assert same_as_plain(model, step) > 0


def test_labels_with_an_offset_and_rows_with_strides() -> None:
    """huggingface/trl#7195: shifted labels, which do not begin where their storage does, and other strided tensors are
    made contiguous too late for the copy."""
    torch.manual_seed(0)
    model, tokens = nn.Embedding(64, 64), torch.randint(0, 64, (4, 33))

    def step() -> torch.Tensor:
        logits = model(tokens).tanh() @ model.weight.t()
        shifted, labels = logits[:, :-1], tokens[:, 1:]
        return (
            F.cross_entropy(shifted.reshape(-1, 64), labels.reshape(-1)) + (logits[..., ::2] * logits[..., 1::2]).sum()
        )

    assert same_as_plain(model, step) > 0


def test_the_host_holds_no_more_after_many_steps() -> None:
    """pytorch/pytorch#86097: `save_on_cpu(pin_memory=True)` takes more of the host's memory step by step."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 1)), torch.randn(64, 64)
    offloading = shoal.offload_activations(min_bytes=64, host_budget="128KiB")  # one step's, not two
    for _ in range(8):
        with offloading:
            loss = model(x).sum()
        loss.backward()
        assert 64 * 1024 < offloading.offloaded_bytes <= 128 * 1024
    offloading.close()


def test_hooks_for_saved_tensors_around_a_compiled_model() -> None:
    """pytorch/pytorch#116221: a compiled function computes other gradients within `saved_tensors_hooks`."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 8)), torch.randn(64, 32)
    plain = gradients(model, lambda: model(x).sin().sum())
    shoal.compile(model, "1MiB", allow="exact")
    for _ in range(2):

        def step() -> torch.Tensor:
            with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved.clone(), lambda packed: packed):
                return model(x).sin().sum()

        for ours, theirs in zip(gradients(model, step), plain, strict=True):
            assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6)
