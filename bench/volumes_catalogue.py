"""Networks that segment volumes, of MONAI and of nnU-Net's dynamic-network-architectures, with random weights.

Each has two sizes: as it is trained here, on one thread, and as it is planned for a GPU, with the widths and patches
that its users train. `blocks` are the modules that its users checkpoint, as MONAI's CheckpointUNet does.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from bench.frame import Unavailable

CLASSES = 2
_NNUNET_FEATURES = (32, 64, 128, 256, 320, 320)


@dataclass(frozen=True)
class Size:
    """A network's width, and the batch that it takes.

    Attributes:
        build: makes the network, for one channel in and two classes out.
        side, batch: of its patches.
        dims: of them.
    """

    build: Callable[[], nn.Module]
    side: int
    batch: int = 1
    dims: int = 3


@dataclass(frozen=True)
class Entry:
    """A network of the table.

    Attributes:
        library: what it comes from.
        here, planned: as it is trained here, and as it is planned for a GPU.
        blocks: names of the classes that are checkpointed, the outermost of them.
        multiple_of: what the sides of its patches are multiples of.
        flat: the same network in two dimensions, on about as many pixels as `planned` has voxels; None: not planned.
        slabbed: as it is trained here on slabs of depth, with tensors that are large enough for them; None: it is not.
    """

    library: str
    here: Size
    planned: Size
    blocks: tuple[str, ...]
    multiple_of: int = 16
    flat: Size | None = None
    slabbed: Size | None = None


def _unet(channels: tuple[int, ...], dims: int = 3) -> Callable[[], nn.Module]:
    return lambda: _monai("UNet", dims, 1, CLASSES, channels, (2,) * (len(channels) - 1), num_res_units=2)


def _dynunet(filters: tuple[int, ...], dims: int = 3) -> Callable[[], nn.Module]:
    levels = len(filters)
    strides = [1] + [2] * (levels - 1)
    return lambda: _monai(
        "DynUNet", dims, 1, CLASSES, [3] * levels, strides, strides[1:], filters=list(filters), deep_supervision=True,
        deep_supr_num=levels - 3,
    )  # fmt: skip


def _segresnet(filters: int, dims: int = 3) -> Callable[[], nn.Module]:
    return lambda: _monai("SegResNet", dims, init_filters=filters, in_channels=1, out_channels=CLASSES)


def _attention_unet(channels: tuple[int, ...]) -> Callable[[], nn.Module]:
    return lambda: _monai("AttentionUnet", 3, 1, CLASSES, channels, (2,) * (len(channels) - 1))


def _vnet() -> nn.Module:
    return _monai("VNet", 3, 1, CLASSES)


def _swin_unetr(features: int) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        network = _monai("SwinUNETR", 1, CLASSES, feature_size=features)
        # Its check of the input's size branches on an array, which would end the graph; patches here pass it.
        network._check_input_size = lambda spatial_shape: None  # type: ignore[assignment]
        return network

    return build


def _nnunet(name: str, features: tuple[int, ...], n_blocks: tuple[int, ...], dims: int = 3) -> Callable[[], nn.Module]:
    """As nnU-Net's planners make them: instance norms with weights, leaky ReLUs, deep supervision."""
    convolution, norm = {2: (nn.Conv2d, nn.InstanceNorm2d), 3: (nn.Conv3d, nn.InstanceNorm3d)}[dims]

    def build() -> nn.Module:
        made = getattr(_library("dynamic_network_architectures.architectures.unet"), name)
        stages = len(features)
        network: nn.Module = made(
            1, stages, features, convolution, 3, [1] + [2] * (stages - 1), n_blocks, CLASSES, (1,) * (stages - 1)
            if name == "ResidualEncoderUNet" else (2,) * (stages - 1), True, norm,
            {"eps": 1e-5, "affine": True}, None, None, nn.LeakyReLU, {"inplace": True}, deep_supervision=True,
        )  # fmt: skip
        return network

    return build


_STACKS = ("StackedConvBlocks", "StackedResidualBlocks")
_UNET_BLOCKS = ("UnetBasicBlock", "UnetResBlock", "UnetrBasicBlock", "UnetUpBlock", "UnetrUpBlock")
_ENCODER_M = (1, 3, 4, 6, 6, 6)

CATALOGUE: dict[str, Entry] = {
    "UNet": Entry(
        "monai", Size(_unet((16, 32, 64, 128)), 64, 2), Size(_unet((16, 32, 64, 128, 256)), 128, 2),
        ("ResidualUnit", "Convolution"), flat=Size(_unet((16, 32, 64, 128, 256), 2), 1440, 2, 2),
    ),
    "DynUNet": Entry(
        "monai", Size(_dynunet((8, 16, 32, 64)), 48), Size(_dynunet(_NNUNET_FEATURES), 128, 2), _UNET_BLOCKS, 32,
        Size(_dynunet(_NNUNET_FEATURES, 2), 1440, 2, 2),
    ),
    "SegResNet": Entry("monai", Size(_segresnet(8), 48), Size(_segresnet(16), 128), ("ResBlock",),
        flat=Size(_segresnet(16, 2), 1440, 1, 2),
    ),
    "AttentionUnet": Entry(
        "monai", Size(_attention_unet((8, 16, 32)), 48), Size(_attention_unet((32, 64, 128, 256)), 128),
        ("ConvBlock", "UpConv", "AttentionBlock"), slabbed=Size(_attention_unet((16, 32, 64)), 64),
    ),
    "VNet": Entry(
        "monai", Size(_vnet, 48), Size(_vnet, 128),
        ("InputTransition", "DownTransition", "UpTransition", "OutputTransition"),
    ),
    "SwinUNETR": Entry(
        "monai", Size(_swin_unetr(12), 64), Size(_swin_unetr(48), 96), ("BasicLayer", *_UNET_BLOCKS), 32
    ),
    "PlainConvUNet": Entry(
        "dynamic_network_architectures", Size(_nnunet("PlainConvUNet", (8, 16, 32, 64), (2,) * 4), 48),
        Size(_nnunet("PlainConvUNet", _NNUNET_FEATURES, (2,) * 6), 128, 2), _STACKS, 32,
        Size(_nnunet("PlainConvUNet", _NNUNET_FEATURES, (2,) * 6, 2), 1440, 2, 2),
        Size(_nnunet("PlainConvUNet", (16, 32, 64), (2,) * 3), 64),
    ),
    "ResidualEncoderUNet": Entry(
        "dynamic_network_architectures", Size(_nnunet("ResidualEncoderUNet", (8, 16, 32, 64), (1, 2, 2, 2)), 48),
        Size(_nnunet("ResidualEncoderUNet", _NNUNET_FEATURES, _ENCODER_M), 128, 2), _STACKS, 32,
        Size(_nnunet("ResidualEncoderUNet", _NNUNET_FEATURES, _ENCODER_M, 2), 1440, 2, 2),
    ),
}  # fmt: skip


def build(size: Size, seed: int) -> nn.Module:
    """The network in training mode; the same weights every time.

    Raises:
        Unavailable: its library is not installed, or does not import.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return size.build().train()


def _monai(name: str, *arguments: Any, **settings: Any) -> nn.Module:
    made: nn.Module = getattr(_library("monai.networks.nets"), name)(*arguments, **settings)
    return made


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except Exception as error:  # also what a library's own imports raise
        raise Unavailable(f"{name} does not import here: {str(error).splitlines()[0]}") from error
