"""Train a small U-Net with GroupNorm and a small vision transformer with LayerNorm, without the override and with it.

The models and the training are plain PyTorch; the only difference is ``with normgrad.torch.override()``. Two models
that are the same to begin with take a few steps in turn, so that whatever else the machine does meets both. Prints
what the override took and what it left to PyTorch, the losses side by side and the time per step. Exits with status 1
if a loss differs by more than a thousandth. With the default batch the override takes the U-Net's largest norms.

    python examples/torch_override.py [--device cuda] [--steps 20] [--dtype bfloat16] [--channels-last]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor, nn

import normgrad.torch

TOLERANCE = 1e-3
IN_TURN = 5  # steps


class Block(nn.Module):
    """Two convolutions with GroupNorm."""

    def __init__(self, channels_in: int, channels: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Conv2d(channels_in, channels, 3, padding=1), nn.GroupNorm(8, channels), nn.SiLU()),
            *(nn.Conv2d(channels, channels, 3, padding=1), nn.GroupNorm(8, channels), nn.SiLU()),
        )

    def forward(self, x: Tensor) -> Tensor:
        """The same height and width."""
        return self.layers(x)


class UNet(nn.Module):
    """Down twice, up twice, with what was there before beside it."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first, self.second, self.middle = Block(3, width), Block(width, 2 * width), Block(2 * width, 4 * width)
        self.down, self.up = nn.AvgPool2d(2), nn.Upsample(scale_factor=2)
        self.third, self.last = Block(6 * width, 2 * width), Block(3 * width, width)
        self.out = nn.Conv2d(width, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        """An image of the same size."""
        large = self.first(x)
        small = self.second(self.down(large))
        x = self.up(self.middle(self.down(small)))
        x = self.up(self.third(torch.cat([x, small], 1)))
        return self.out(self.last(torch.cat([x, large], 1)))


class VisionTransformer(nn.Module):
    """Patches of 4×4, attention and a hidden layer with LayerNorm before each, and the patches again."""

    def __init__(self, width: int = 64, depth: int = 2) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, stride=4)
        self.layers = nn.Sequential(
            *(
                nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0, batch_first=True, norm_first=True)
                for _ in range(depth)
            ),
            nn.LayerNorm(width),
        )
        self.out = nn.ConvTranspose2d(width, 3, 4, stride=4)

    def forward(self, x: Tensor) -> Tensor:
        """An image of the same size."""
        patches = self.patches(x)
        words = self.layers(patches.flatten(2).transpose(1, 2))
        return self.out(words.transpose(1, 2).reshape(patches.shape))


class Training:
    """A model with its optimiser, what it has lost and how long it took."""

    def __init__(self, make: Callable[[], nn.Module], options: argparse.Namespace, override: bool) -> None:
        torch.manual_seed(0)
        self._model = make().to(options.device, memory_format=layout_of(options))
        self._optimiser = torch.optim.AdamW(self._model.parameters(), lr=1e-3)
        self._device, self._dtype, self._override = options.device, getattr(torch, options.dtype), override
        self.losses: list[float] = []
        self.report = ""
        self._times: list[float] = []

    def steps(self, batches: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Forward pass, backward pass and optimiser for each batch."""
        with normgrad.torch.override() if self._override else nullcontext() as ours:
            for noisy, clean in batches:
                start = time.perf_counter()
                with torch.autocast(self._device, self._dtype, enabled=self._dtype != torch.float32):
                    loss = nn.functional.mse_loss(self._model(noisy), clean)
                self._optimiser.zero_grad()
                loss.backward()
                self._optimiser.step()
                self.losses.append(loss.item())  # which waits for the device
                self._times.append(time.perf_counter() - start)
        if ours is not None:
            self.report = str(ours.report())

    @property
    def time(self) -> float:
        """The median of a step in milliseconds, without the first ones."""
        return 1e3 * statistics.median(self._times[len(self._times) // 4 :])


def layout_of(options: argparse.Namespace) -> torch.memory_format:
    """How pictures lie in memory."""
    return torch.channels_last if options.channels_last else torch.contiguous_format


def pictures(options: argparse.Namespace) -> tuple[Tensor, Tensor]:
    """Random stripes with noise, and without it."""
    frequency = torch.rand(options.batch, 3, 1, 1) + 0.1
    clean = torch.sin(torch.arange(options.size) * frequency).expand(-1, -1, options.size, -1)
    noisy = clean + 0.3 * torch.randn(clean.shape)
    return noisy.to(options.device).contiguous(memory_format=layout_of(options)), clean.to(options.device)


def train(make: Callable[[], nn.Module], options: argparse.Namespace) -> tuple[Training, Training]:
    """Take the noise out of pictures, without the override and with it."""
    both = Training(make, options, override=False), Training(make, options, override=True)
    for number, first in enumerate(range(0, options.steps, IN_TURN)):
        batches = [pictures(options) for _ in range(first, min(first + IN_TURN, options.steps))]
        for training in both if number % 2 == 0 else both[::-1]:
            training.steps(batches)
    return both


def main() -> int:
    """Train every model twice and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"], help="bfloat16 by autocast")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, help="pictures (default: 16; on a GPU 64)")
    parser.add_argument("--size", type=int, default=64, help="height and width of the pictures")
    parser.add_argument("--channels-last", action="store_true")
    options = parser.parse_args()
    options.batch = options.batch or (64 if options.device.startswith("cuda") else 16)
    same = True
    for make in (UNet, VisionTransformer):
        plain, ours = train(make, options)
        print(f"{make.__name__}\nNorm calls of the last steps with the override:\n{ours.report}")
        print(" step   PyTorch   with override")
        for step in range(0, options.steps, max(1, options.steps // 5)):
            print(f"{step:5}  {plain.losses[step]:.6f}   {ours.losses[step]:.6f}")
        worst = max(abs(a - b) / a for a, b in zip(plain.losses, ours.losses, strict=True))
        same = same and worst <= TOLERANCE
        print(f"largest difference of a loss: {worst:.1e} of it (at most {TOLERANCE:.0e} is right)")
        print(f"time per step: {plain.time:.1f} ms, with override {ours.time:.1f} ms\n")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
