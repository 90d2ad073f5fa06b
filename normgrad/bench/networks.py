"""Networks of our own among the models of the benchmarks: a diffusion U-Net, and one that is small enough for tests."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

_GROUPS = 32


class _ResidualBlock(nn.Module):  # type: ignore[misc]
    """GroupNorm, SiLU and a convolution, twice, with a residual connection."""

    def __init__(self, channels_in: int, channels: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.GroupNorm(_GROUPS, channels_in), nn.SiLU(), nn.Conv2d(channels_in, channels, 3, padding=1)),
            *(nn.GroupNorm(_GROUPS, channels), nn.SiLU(), nn.Conv2d(channels, channels, 3, padding=1)),
        )
        self.residual = nn.Conv2d(channels_in, channels, 1) if channels_in != channels else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.residual(x) + self.layers(x)


class UNet(nn.Module):  # type: ignore[misc]
    """The convolutional part of a latent diffusion U-Net: (N, 4, H, W) to the same shape.

    Parameters
    ----------
    widths : sequence of int
        Channels of each level; the height and width are halved from one level to the next.
    """

    def __init__(self, widths: Sequence[int] = (320, 640, 1280)) -> None:
        super().__init__()
        self.stem = nn.Conv2d(4, widths[0], 3, padding=1)
        self.encoder = nn.ModuleList(map(_ResidualBlock, (widths[0], *widths), widths))
        self.middle = _ResidualBlock(widths[-1], widths[-1])
        above = (widths[-1], *widths[:0:-1])
        self.decoder = nn.ModuleList(
            _ResidualBlock(below + width, width) for below, width in zip(above, widths[::-1], strict=True)
        )
        self.head = nn.Sequential(nn.GroupNorm(_GROUPS, widths[0]), nn.SiLU(), nn.Conv2d(widths[0], 4, 3, padding=1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        levels = []
        for number, block in enumerate(self.encoder):
            x = block(functional.avg_pool2d(x, 2) if number else x)
            levels.append(x)
        x = self.middle(x)
        for number, block in enumerate(self.decoder):
            x = functional.interpolate(x, scale_factor=2.0, mode="nearest") if number else x
            x = block(torch.cat([x, levels.pop()], 1))
        return self.head(x)


class TinyVision(nn.Module):  # type: ignore[misc]
    """A few layers with the layouts of models: images, channels last, tokens with swapped axes, a class token."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 4, stride=4)
        self.group_norm = nn.GroupNorm(4, 16)
        self.channel_norm = nn.LayerNorm(16)
        self.class_token = nn.Parameter(torch.zeros(1, 1, 16))
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.token_norm = nn.LayerNorm(16)
        self.final_norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = functional.relu(self.group_norm(self.stem(images)))
        x = self.channel_norm(x.permute(0, 2, 3, 1)).flatten(1, 2)
        x = torch.cat([self.class_token.expand(len(x), -1, -1), x], 1)
        normed = self.token_norm(x)
        x = x + self.attention(normed, normed, normed, need_weights=False)[0]
        return self.head(self.final_norm(x)[:, 0])
