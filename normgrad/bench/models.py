"""The models of ``normgrad bench --models`` and ``benchmarks/model_calls.py``, each with one batch of random data.

Weights are random, and nothing is downloaded. Dropout and stochastic depth are off, so that two trainings from the same
seed differ by rounding alone. On a CPU the models have fewer layers of the same widths, and smaller batches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

_CLASSES = 1000


@dataclass(frozen=True)
class Task:
    """A model to train on one batch.

    Attributes
    ----------
    model : torch.nn.Module
        In training mode, on the device.
    loss : function
        Takes the model, or what stands in for it (a compiled one), and returns the loss of the batch.
    batch : tuple of int
        The shape of the data.
    """

    model: Any
    loss: Callable[[Any], Any]
    batch: tuple[int, ...]


@dataclass(frozen=True)
class Model:
    """What the benchmarks know of a model before it is built.

    Attributes
    ----------
    title : str
        Its name in tables and charts.
    package : str or None
        The package that defines it, imported when the model is built; None where it is our own.
    task : function
        Builds the model and its batch on a device, "cpu" or "cuda".
    """

    title: str
    package: str | None
    task: Callable[[str], Task]


def build(name: str, device: str, seed: int = 0) -> Task:
    """Build a model and its batch; the same seed gives the same weights and data."""
    import torch

    torch.manual_seed(seed)
    return MODELS[name].task(device)


def _on(device: str, model: Any, channels_last: bool) -> Any:
    import torch

    order = torch.channels_last if channels_last else torch.preserve_format
    return model.to(device, memory_format=order).train()


def _images(
    make: Callable[[bool], Any], images: dict[str, int], device: str, side: int = 224, channels_last: bool = False
) -> Task:
    """Classify random images; ``make`` is told whether the model is to be small."""
    import torch
    from torch.nn import functional

    model = _on(device, make(device == "cpu"), channels_last)
    shape = (images[device], 3, side, side)
    order = torch.channels_last if channels_last else torch.contiguous_format
    data = torch.randn(shape, device=device).contiguous(memory_format=order)
    targets = torch.randint(_CLASSES, shape[:1], device=device)
    return Task(model, lambda network: functional.cross_entropy(network(data), targets), shape)


def _denoising(device: str, channels_last: bool = False) -> Task:
    """Predict the noise of random latents."""
    import torch
    from torch.nn import functional

    from normgrad.bench.networks import UNet

    batch, side, widths = (2, 32, (160, 320, 640)) if device == "cpu" else (32, 64, (320, 640, 1280))
    model = _on(device, UNet(widths), channels_last)
    order = torch.channels_last if channels_last else torch.contiguous_format
    noisy, noise = (torch.randn(batch, 4, side, side, device=device).contiguous(memory_format=order) for _ in range(2))
    return Task(model, lambda network: functional.mse_loss(network(noisy), noise), tuple(noisy.shape))


def _tokens(make: Callable[[bool], Any], shapes: dict[str, tuple[int, int]], device: str) -> Task:
    """Predict random tokens."""
    import torch

    model = _on(device, make(device == "cpu"), channels_last=False)
    words = torch.randint(model.config.vocab_size, shapes[device], device=device)
    return Task(model, lambda network: network(input_ids=words, labels=words).loss, shapes[device])


def _vit(small: bool) -> Any:
    from torchvision.models import VisionTransformer

    return VisionTransformer(224, 16, num_layers=2 if small else 12, num_heads=12, hidden_dim=768, mlp_dim=3072)


def _swin(small: bool) -> Any:
    from torchvision.models import SwinTransformer

    depths = [2, 2, 2 if small else 6, 2]
    sizes: dict[str, Any] = {"patch_size": [4, 4], "embed_dim": 96, "num_heads": [3, 6, 12, 24], "window_size": [7, 7]}
    return SwinTransformer(depths=depths, stochastic_depth_prob=0.0, **sizes)


def _convnext(small: bool) -> Any:
    from torchvision.models import ConvNeXt
    from torchvision.models.convnext import CNBlockConfig

    widths, depths = (96, 192, 384, 768, None), (1, 1, 1, 1) if small else (3, 3, 9, 3)
    return ConvNeXt([CNBlockConfig(*sizes) for sizes in zip(widths, widths[1:], depths, strict=False)])


def _resnet(small: bool) -> Any:
    import torch
    from torchvision.models.resnet import Bottleneck, ResNet

    layers = [1, 1, 1, 1] if small else [3, 4, 6, 3]
    return ResNet(Bottleneck, layers, norm_layer=partial(torch.nn.GroupNorm, 32))


def _tiny_vision(small: bool) -> Any:
    from normgrad.bench.networks import TinyVision

    return TinyVision(_CLASSES)


def _gpt2(small: bool) -> Any:
    sizes = {"n_layer": 2, "vocab_size": 8192} if small else {}
    return _gpt2_of(**sizes)


def _gpt2_mini(small: bool) -> Any:
    return _gpt2_of(n_layer=4, n_head=4, n_embd=256, vocab_size=8192)


def _gpt2_of(**sizes: int) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False}
    return GPT2LMHeadModel(GPT2Config(bos_token_id=0, eos_token_id=0, **off, **sizes))


def _bert_mini(small: bool) -> Any:
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 1024}
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForMaskedLM(BertConfig(vocab_size=8192, **sizes, **off))


_IMAGES = {"cpu": 2, "cuda": 128}
_MINI_TOKENS = {"cpu": (4, 128), "cuda": (32, 128)}

#: By name.
MODELS = {
    "gpt2": Model("GPT-2 124M", "transformers", partial(_tokens, _gpt2, {"cpu": (1, 256), "cuda": (16, 1024)})),
    "vit_b_16": Model("ViT-B/16", "torchvision", partial(_images, _vit, _IMAGES)),
    "swin_t": Model("Swin-T", "torchvision", partial(_images, _swin, _IMAGES)),
    "convnext_tiny": Model("ConvNeXt-T", "torchvision", partial(_images, _convnext, _IMAGES)),
    "convnext_tiny_channels_last": Model(
        "ConvNeXt-T, channels_last", "torchvision", partial(_images, _convnext, _IMAGES, channels_last=True)
    ),
    "resnet50_group_norm": Model("ResNet-50 with GroupNorm", "torchvision", partial(_images, _resnet, _IMAGES)),
    "resnet50_group_norm_channels_last": Model(
        "ResNet-50 with GroupNorm, channels_last",
        "torchvision",
        partial(_images, _resnet, _IMAGES, channels_last=True),
    ),
    "unet": Model("U-Net with GroupNorm", None, _denoising),
    "unet_channels_last": Model("U-Net with GroupNorm, channels_last", None, partial(_denoising, channels_last=True)),
    "gpt2_mini": Model("GPT-2, 4 layers of 256", "transformers", partial(_tokens, _gpt2_mini, _MINI_TOKENS)),
    "bert_mini": Model("BERT, 4 layers of 256", "transformers", partial(_tokens, _bert_mini, _MINI_TOKENS)),
    "tiny": Model("tiny", None, partial(_images, _tiny_vision, {"cpu": 4, "cuda": 4}, side=32)),
}

#: What ``normgrad bench --models`` times unless it is told.
STEPS = tuple(name for name in MODELS if name not in ("convnext_tiny", "tiny"))
