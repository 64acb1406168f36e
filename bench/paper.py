"""What a paper reports at the same shares of plain PyTorch's peak; its networks, batches and GPU are not ours."""

from __future__ import annotations

SHARES = (66, 60, 53, 46, 40, 33)  # percent of plain PyTorch's peak

# MONeT (Shah et al., ICLR'21), float32 on one GPU: overhead in % of plain PyTorch's step at each of `SHARES`.
_MONET = {
    "resnet50": (3.22, 4.68, 5.56, 7.28, 9.31, 11.95),
    "googlenet": (7.13, 7.87, 8.44, 9.71, 12.14, 15.77),
    "unet": (-4.10, -2.07, -0.09, 1.39, 4.95, 11.51),
    "mobilenet_v2": (2.40, 3.10, 4.77, 5.53, 7.55, 8.72),
    "vgg16_bn": (-5.30, -4.64, -2.18, 1.99, 5.44, 9.11),  # theirs is VGG-16
}


def monet_overhead_percent(network: str, share: float) -> float | None:
    """MONeT's overhead for a network at a share (percent) of plain PyTorch's peak; None where the paper has none.

    >>> monet_overhead_percent("resnet50", 40)
    9.31
    """
    return dict(zip(SHARES, _MONET.get(network, ()), strict=False)).get(int(share) if share == int(share) else -1)
