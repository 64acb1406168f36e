"""Forty models of other people's, built from their configurations with random weights: nothing is downloaded.

timm's by family: plain residual and its kin (grouped, pre-activation, squeeze-and-excite by search), inverted
residuals, ConvNeXt, dense and dual-path connections, branches (Inception, HRNet, DLA), no batch norm at all (nfnet),
reparametrised branches, and the transformers with and without windows. Of transformers: text, vision and audio. Of
diffusers: the networks that training examples train. Sizes are such that plain PyTorch's step takes at most about three
seconds on one core; depths of transformers are cut where weights would be nearly all of the peak.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from bench.frame import Unavailable

Step = Callable[[nn.Module], torch.Tensor]
Built = tuple[nn.Module, Step]


@dataclass(frozen=True)
class Entry:
    """A model of the table.

    Attributes:
        library: what it comes from.
        build: makes it, in training mode, and a function that draws a batch, calls the model and returns the loss.
    """

    library: str
    build: Callable[[], Built]


def _timm(name: str, batch: int, pixels: int, **settings: Any) -> Entry:
    def build() -> Built:
        model = _library("timm").create_model(name, **settings).train()

        def step(model: nn.Module) -> torch.Tensor:
            return F.cross_entropy(model(torch.randn(batch, 3, pixels, pixels)), torch.arange(batch))

        return model, step

    return Entry("timm", build)


def _transformers(model_name: str, config: str, inputs: Callable[[], dict[str, Any]], **settings: Any) -> Entry:
    def build() -> Built:
        transformers = _library("transformers")
        model = getattr(transformers, model_name)(getattr(transformers, config)(**settings)).train()

        def step(model: nn.Module) -> torch.Tensor:
            loss: torch.Tensor = model(**inputs()).loss
            return loss

        return model, step

    return Entry("transformers", build)


def _tokens(batch: int, length: int, label: str, n_tokens: int = 2000) -> Callable[[], dict[str, Any]]:
    """A batch of text. Its labels are the tokens themselves, or with `label` "class" a class of each text."""

    def inputs() -> dict[str, Any]:
        tokens = torch.randint(5, n_tokens, (batch, length))
        labels = torch.arange(batch) % 2 if label == "class" else tokens
        return {"input_ids": tokens, "labels": labels}

    return inputs


def _pictures(batch: int, pixels: int, **labels: Callable[[], Any]) -> Callable[[], dict[str, Any]]:
    def inputs() -> dict[str, Any]:
        made = {name: value() for name, value in (labels or {"labels": lambda: torch.arange(batch) % 2}).items()}
        return {"pixel_values": torch.randn(batch, 3, pixels, pixels), **made}

    return inputs


def _sound(batch: int, samples: int) -> Callable[[], dict[str, Any]]:
    return lambda: {"input_values": torch.randn(batch, samples), "labels": torch.arange(batch) % 2}


def _spectrogram(batch: int, frames: int, length: int) -> Callable[[], dict[str, Any]]:
    return lambda: {"input_features": torch.randn(batch, 80, frames), "labels": torch.randint(5, 900, (batch, length))}


def _boxes(batch: int) -> Callable[[], Any]:
    box = torch.tensor([[0.4, 0.5, 0.3, 0.2], [0.6, 0.4, 0.2, 0.4]])
    return lambda: [{"class_labels": torch.tensor([1, 3]), "boxes": box.clone()} for _ in range(batch)]


def _diffusers(
    model_name: str, call: Callable[[nn.Module], tuple[torch.Tensor, torch.Tensor]], **settings: Any
) -> Entry:
    """A network of diffusers'; `call` returns what it predicts and what it should have."""

    def build() -> Built:
        model = getattr(_library("diffusers"), model_name)(**settings).train()
        return model, lambda model: F.mse_loss(*call(model))

    return Entry("diffusers", build)


def _denoise(*shape: int, **others: Callable[[int], torch.Tensor]) -> Callable[[nn.Module], tuple[Any, Any]]:
    def call(model: nn.Module) -> tuple[Any, Any]:
        noise, batch = torch.randn(shape), shape[0]
        times = torch.randint(0, 1000, (batch,))
        given = {name: value(batch) for name, value in others.items()}
        sample = "sample" if "sample" in signature(type(model).forward).parameters else "hidden_states"
        predicted = model(**{sample: noise, "timestep": times}, **given).sample
        return predicted[:, : shape[1]], noise

    return call


def _reconstruct(*shape: int) -> Callable[[nn.Module], tuple[Any, Any]]:
    def call(model: nn.Module) -> tuple[Any, Any]:
        images = torch.randn(shape)
        return model(images).sample, images

    return call


def _segmentation(name: str, batch: int, pixels: int) -> Entry:
    def build() -> Built:
        models = _library("torchvision").models.segmentation
        model = getattr(models, name)(weights=None, weights_backbone=None, num_classes=21).train()

        def step(model: nn.Module) -> torch.Tensor:
            classes = torch.randint(0, 21, (batch, pixels, pixels))
            return F.cross_entropy(model(torch.randn(batch, 3, pixels, pixels))["out"], classes)

        return model, step

    return Entry("torchvision", build)


def _detection(name: str, pixels: int) -> Entry:
    def build() -> Built:
        models = _library("torchvision").models.detection
        sizes = {"min_size": pixels, "max_size": pixels}
        model = getattr(models, name)(
            weights=None, weights_backbone=None, num_classes=5, box_batch_size_per_image=32, **sizes
        ).train()
        boxes = torch.tensor([[8.0, 8.0, 70.0, 60.0], [40.0, 30.0, 100.0, 110.0]])

        def step(model: nn.Module) -> torch.Tensor:
            images = [torch.rand(3, pixels, pixels) for _ in range(2)]
            targets = [{"boxes": boxes.clone(), "labels": torch.tensor([1, 2])} for _ in images]
            return torch.stack(list(model(images, targets).values())).sum()

        return model, step

    return Entry("torchvision", build)


_SMALL_TEXT = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 1024}
_SMALL_UNET = {"sample_size": 32, "layers_per_block": 1, "norm_num_groups": 8}

CATALOGUE: dict[str, Entry] = {
    "resnet50": _timm("resnet50", 12, 128),
    "resnext50_32x4d": _timm("resnext50_32x4d", 10, 128),
    "resnetv2_50": _timm("resnetv2_50", 10, 128),
    "regnety_016": _timm("regnety_016", 12, 128),
    "efficientnet_b0": _timm("efficientnet_b0", 12, 128),
    "tf_efficientnetv2_s": _timm("tf_efficientnetv2_s", 8, 128),
    "mobilenetv3_large_100": _timm("mobilenetv3_large_100", 16, 128),
    "mobilenetv4_conv_small": _timm("mobilenetv4_conv_small", 16, 128),
    "convnext_tiny": _timm("convnext_tiny", 8, 128),
    "convnextv2_nano": _timm("convnextv2_nano", 8, 128),
    "densenet121": _timm("densenet121", 8, 128),
    "inception_v3": _timm("inception_v3", 12, 139),
    "dpn68b": _timm("dpn68b", 8, 128),
    "hrnet_w18_small": _timm("hrnet_w18_small", 8, 128),
    "vgg16_bn": _timm("vgg16_bn", 6, 112, num_classes=10),
    "xception41": _timm("xception41", 6, 128),
    "nfnet_l0": _timm("nfnet_l0", 10, 128),
    "vit_small_patch16_224": _timm("vit_small_patch16_224", 8, 160, img_size=160),
    "swin_tiny_patch4_window7_224": _timm("swin_tiny_patch4_window7_224", 4, 224),
    "maxvit_tiny_tf_224": _timm("maxvit_tiny_tf_224", 2, 224),
    "mixer_s32_224": _timm("mixer_s32_224", 16, 224),
    "edgenext_small": _timm("edgenext_small", 8, 128),
    "levit_128s": _timm("levit_128s", 16, 224),
    "dla34": _timm("dla34", 12, 128),
    "repvgg_a0": _timm("repvgg_a0", 12, 128),
    "bert": _transformers(
        "BertForSequenceClassification", "BertConfig", _tokens(8, 128, "class"), vocab_size=2000, **_SMALL_TEXT
    ),
    "distilbert": _transformers(
        "DistilBertForMaskedLM", "DistilBertConfig", _tokens(8, 128, "tokens"), vocab_size=2000, dim=256, n_heads=4,
        n_layers=4, hidden_dim=1024,
    ),
    "gpt2": _transformers(
        "GPT2LMHeadModel", "GPT2Config", _tokens(8, 128, "tokens"), vocab_size=2000, n_embd=256, n_layer=4, n_head=4,
        bos_token_id=None, eos_token_id=None,
    ),
    "t5": _transformers(
        "T5ForConditionalGeneration", "T5Config", _tokens(8, 96, "tokens"), vocab_size=2000, d_model=256, d_kv=64,
        d_ff=1024, num_layers=2, num_heads=4, decoder_start_token_id=0,
    ),
    "roberta": _transformers(
        "RobertaForTokenClassification", "RobertaConfig",
        lambda: {"input_ids": torch.randint(5, 2000, (8, 128)), "labels": torch.randint(0, 2, (8, 128))},
        vocab_size=2000, **_SMALL_TEXT,
    ),
    "vit": _transformers(
        "ViTForImageClassification", "ViTConfig", _pictures(12, 160), image_size=160, hidden_size=384,
        num_hidden_layers=6, num_attention_heads=6, intermediate_size=1536,
    ),
    "convnextv2": _transformers(
        "ConvNextV2ForImageClassification", "ConvNextV2Config", _pictures(8, 128), image_size=128,
        depths=[2, 2, 6, 2], hidden_sizes=[48, 96, 192, 384],
    ),
    "segformer": _transformers(
        "SegformerForSemanticSegmentation", "SegformerConfig",
        _pictures(4, 160, labels=lambda: torch.randint(0, 10, (4, 160, 160))), num_labels=10,
    ),
    "detr": _transformers(
        "DetrForObjectDetection", "DetrConfig", _pictures(2, 448, labels=_boxes(2)), use_pretrained_backbone=False,
        backbone="resnet18", num_labels=5, num_queries=20, encoder_layers=2, decoder_layers=2,
    ),
    "wav2vec2": _transformers(
        "Wav2Vec2ForSequenceClassification", "Wav2Vec2Config", _sound(2, 48000), hidden_size=256, num_hidden_layers=4,
        num_attention_heads=4, intermediate_size=1024, conv_dim=(128,) * 7, classifier_proj_size=64, layerdrop=0.0,
    ),
    "whisper": _transformers(
        "WhisperForConditionalGeneration", "WhisperConfig", _spectrogram(8, 400, 40), vocab_size=1000, d_model=192,
        encoder_layers=3, decoder_layers=3, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=768,
        decoder_ffn_dim=768, max_source_positions=200, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        decoder_start_token_id=1, suppress_tokens=None, begin_suppress_tokens=None,
    ),
    "UNet2DModel": _diffusers(
        "UNet2DModel", _denoise(12, 3, 32, 32), in_channels=3, out_channels=3, block_out_channels=(32, 64, 64, 128),
        **_SMALL_UNET,
    ),
    "UNet2DConditionModel": _diffusers(
        "UNet2DConditionModel", _denoise(4, 4, 32, 32, encoder_hidden_states=lambda n: torch.randn(n, 20, 64)),
        block_out_channels=(32, 64, 64, 64), cross_attention_dim=64, attention_head_dim=4, **_SMALL_UNET,
    ),
    "AutoencoderKL": _diffusers(
        "AutoencoderKL", _reconstruct(2, 3, 64, 64), block_out_channels=(32, 64), norm_num_groups=8,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2, layers_per_block=2,
    ),
    "DiTTransformer2DModel": _diffusers(
        "DiTTransformer2DModel", _denoise(4, 4, 32, 32, class_labels=lambda n: torch.arange(n)), num_layers=4,
        num_attention_heads=4, attention_head_dim=48, sample_size=32, num_embeds_ada_norm=1000,
    ),
    "SD3Transformer2DModel": _diffusers(
        "SD3Transformer2DModel",
        _denoise(
            4, 4, 32, 32,
            encoder_hidden_states=lambda n: torch.randn(n, 20, 96), pooled_projections=lambda n: torch.randn(n, 64),
        ),
        sample_size=32, in_channels=4, out_channels=4, num_layers=3, num_attention_heads=4, attention_head_dim=48,
        joint_attention_dim=96, caption_projection_dim=192, pooled_projection_dim=64, pos_embed_max_size=32,
    ),
    "fcn_resnet50": _segmentation("fcn_resnet50", 4, 128),
    "fasterrcnn_mobilenet_v3_large_fpn": _detection("fasterrcnn_mobilenet_v3_large_fpn", 320),
}  # fmt: skip


def _library(name: str) -> Any:
    """
    Raises:
        Unavailable: it is not installed, or does not import.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if importlib.util.find_spec("torchvision") is not None:
        _complete_torchvision()
    if importlib.util.find_spec(name) is None:
        raise Unavailable(f"{name} is not installed")
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise Unavailable(f"{name} does not import: {str(error).splitlines()[0]}") from error


_FRAGMENTS: list[torch.library.Library] = []


def _complete_torchvision() -> None:
    """Give torchvision what it needs to be imported beside a PyTorch without CUDA, for which PyPI's is built: its own
    kernels do not load there. The one that training needs, without gradients, is done by PyTorch's ops."""
    if _FRAGMENTS or hasattr(torch.ops.torchvision, "nms"):
        return
    fragment = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        fragment.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    fragment.impl("nms", _nms, "CPU")
    _FRAGMENTS.append(fragment)
    extension = importlib.util.find_spec("torchvision.extension")  # imports torchvision
    if extension is not None:
        module = importlib.import_module("torchvision.extension")
        if not module._has_ops():
            importlib.import_module("torchvision.ops.boxes")._assert_has_ops = lambda: None


def _nms(boxes: torch.Tensor, scores: torch.Tensor, iou_threshold: float) -> torch.Tensor:
    areas = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    left, kept = scores.argsort(descending=True, stable=True), []
    while left.numel():
        first, left = left[0], left[1:]
        kept.append(first)
        corner = torch.maximum(boxes[first, :2], boxes[left, :2])
        sides = (torch.minimum(boxes[first, 2:], boxes[left, 2:]) - corner).clamp(min=0)
        shared = sides[:, 0] * sides[:, 1]
        left = left[shared / (areas[first] + areas[left] - shared) <= iou_threshold]
    return torch.stack(kept) if kept else torch.empty(0, dtype=torch.long)
