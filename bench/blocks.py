"""Networks as their users would checkpoint them by hand: cut into natural blocks, one way a network family.

A block never begins with an in-place op, since that would change the tensor the checkpoint saved as its input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from bench.workload import Forward
from shoal.app.models.densenet import DenseNet
from shoal.app.models.googlenet import GoogLeNet
from shoal.app.models.mobilenet import MobileNetV2
from shoal.app.models.resnet import ResNet
from shoal.app.models.unet import UNet
from shoal.app.models.vgg import VGG

_SEGMENTS = (2, 3, 4, 5, 6, 8, 12)
_GROUPS = (1, 2, 3, 6)

_checkpoint = partial(checkpoint, use_reentrant=False)


def checkpointed(model: nn.Module) -> Iterator[tuple[str, Forward]]:
    """Every way to checkpoint `model` that is tried, as (setting, forward).

    Networks that are a sequence of blocks: `checkpoint_sequential` with each number of segments. DenseNet: also its
    dense layers in groups. U-Nets: blocks or single convolutions of the first levels, the largest ones.
    """
    if isinstance(model, UNet):
        for levels in range(1, model.levels + 2):
            yield f"blocks of {levels} levels", partial(_unet, model, levels, False)
            yield f"convolutions of {levels} levels", partial(_unet, model, levels, True)
        return
    blocks = sequence(model)
    for segments in sorted({min(k, len(blocks)) for k in (*_SEGMENTS, len(blocks))}):
        yield f"{segments} segments", partial(_segments, blocks, segments)
    if isinstance(model, DenseNet):
        for group in _GROUPS:
            yield f"dense layers by {group}", partial(_dense_layers, model, group)


def sequence(model: nn.Module) -> list[nn.Module]:
    """The model as blocks that run one after the other.

    Raises:
        TypeError: it is of a family that nobody has cut yet.
    """
    match model:
        case ResNet():
            stem = nn.Sequential(model.conv1, model.bn1, model.relu, model.maxpool)
            stages = (block for stage in (model.layer1, model.layer2, model.layer3, model.layer4) for block in stage)
            return [stem, *stages, nn.Sequential(model.avgpool, nn.Flatten(), model.fc)]
        case MobileNetV2():
            return [*model.features, nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), model.classifier)]
        case GoogLeNet():
            names = [name for name, _ in model.named_children() if name not in ("avgpool", "dropout", "fc")]
            head = nn.Sequential(model.avgpool, nn.Flatten(), model.dropout, model.fc)
            return [*(getattr(model, name) for name in names), head]
        case VGG():
            convolutions = _from_each(nn.Conv2d, model.features)
            return [*convolutions, nn.Sequential(model.avgpool, nn.Flatten(), model.classifier)]
        case DenseNet():
            features = dict(model.features.named_children())
            stem = nn.Sequential(*(features.pop(name) for name in ("conv0", "norm0", "relu0", "pool0")))
            head = nn.Sequential(
                features.pop("norm5"), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), model.classifier
            )
            return [stem, *features.values(), head]
        case nn.Module(layers=nn.Sequential() as layers):
            return _from_each(nn.Conv2d, layers)
    raise TypeError(f"{type(model).__name__} has no blocks to checkpoint yet; cut it in bench.blocks.sequence")


def _from_each(first: type[nn.Module], layers: nn.Sequential) -> list[nn.Module]:
    """Blocks that each begin at a layer of type `first`."""
    blocks: list[list[nn.Module]] = []
    for layer in layers:
        if isinstance(layer, first) or not blocks:
            blocks.append([])
        blocks[-1].append(layer)
    return [nn.Sequential(*block) for block in blocks]


def _segments(blocks: Sequence[nn.Module], segments: int, x: torch.Tensor) -> torch.Tensor:
    return checkpoint_sequential(nn.Sequential(*blocks), segments, x, use_reentrant=False)


def _dense_layers(model: DenseNet, group: int, x: torch.Tensor) -> torch.Tensor:
    """Checkpoint `group` dense layers at a time, and each concatenation with the transition that reads it."""
    children = dict(model.features.named_children())
    for name, child in children.items():
        if name.startswith("transition"):
            continue  # it ran with the block before it
        if not name.startswith("denseblock"):
            x = child(x)
            continue
        features = [x]
        layers: list[Any] = list(child.children())
        for start in range(0, len(layers), group):
            features += _checkpoint(partial(_some_layers, layers[start : start + group]), *features)
        after = children.get(name.replace("denseblock", "transition"))
        x = torch.cat(features, 1) if after is None else _checkpoint(partial(_transition, after), *features)
    x = F.relu(x, inplace=True)
    return model.classifier(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1))


def _some_layers(layers: Sequence[Callable[..., torch.Tensor]], *features: torch.Tensor) -> tuple[torch.Tensor, ...]:
    new: list[torch.Tensor] = []
    for layer in layers:
        new.append(layer([*features, *new]))
    return tuple(new)


def _transition(transition: nn.Module, *features: torch.Tensor) -> torch.Tensor:
    return transition(torch.cat(features, 1))


def _unet(model: UNet, levels: int, singly: bool, x: torch.Tensor) -> torch.Tensor:
    """Checkpoint the first `levels` levels (the bottom is the last), both convolutions at once or singly."""

    def run(block: Any, level: int, x: torch.Tensor) -> torch.Tensor:
        if level >= levels:
            return block(x)
        return _checkpoint(block[3:], _checkpoint(block[:3], x)) if singly else _checkpoint(block, x)

    def run_joined(up: nn.Module, block: Any, level: int, skip: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        if level >= levels:
            return block(torch.cat([skip, up(x)], 1))
        first = block[:3] if singly else block
        x = _checkpoint(lambda skip, x: first(torch.cat([skip, up(x)], 1)), skip, x)
        return _checkpoint(block[3:], x) if singly else x

    skips = []
    for level, encoder in enumerate(model.encoders):
        x = run(encoder, level, x)
        skips.append(x)
        x = model.pool(x)
    x = run(model.bottom, model.levels, x)
    for level, up, decoder in zip(reversed(range(model.levels)), model.ups, model.decoders, strict=True):
        x = run_joined(up, decoder, level, skips.pop(), x)
    return model.head(x)
