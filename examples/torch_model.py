"""Run a small model with GroupNorm on normgrad's modules, prove that they ran, compare the gradients and the times.

python examples/torch_model.py [--device cuda]
"""

from __future__ import annotations

import argparse
import sys
import time

import torch
from torch import nn

import normgrad.torch


def gradients(model: nn.Module, images: torch.Tensor, targets: torch.Tensor) -> list[torch.Tensor]:
    """Return the gradients of all parameters for one batch."""
    model.zero_grad()
    nn.functional.mse_loss(model(images), targets).backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def seconds(model: nn.Module, images: torch.Tensor, targets: torch.Tensor) -> float:
    """Return the time of a forward and backward pass."""
    begin = time.perf_counter()
    gradients(model, images, targets)
    if images.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def compare_times(model: nn.Module, images: torch.Tensor, targets: torch.Tensor, rounds: int = 10) -> None:
    """Time the model in bfloat16 with PyTorch's norms and with normgrad's in turns; print the fastest pass of each."""
    model, images, targets = model.bfloat16(), images.bfloat16(), targets.bfloat16()
    theirs, ours = [], []
    for _ in range(rounds):
        theirs.append(seconds(model, images, targets))
        with normgrad.torch.override():
            ours.append(seconds(model, images, targets))
    pytorchs, normgrads = 1e3 * min(theirs), 1e3 * min(ours)
    print(f"bfloat16, channels_last: {pytorchs:.1f} ms with PyTorch's norms, {normgrads:.1f} ms with normgrad's")


def main() -> int:
    """Exit with 0 if normgrad ran and its gradients agree with PyTorch's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 64, 3, padding=1), nn.GroupNorm(8, 64), nn.SiLU(), nn.Conv2d(64, 64, 3, padding=1, groups=64)
    )
    model.append(nn.GroupNorm(8, 64)).to(options.device, memory_format=torch.channels_last)
    images = torch.randn(8, 3, 64, 64, device=options.device).to(memory_format=torch.channels_last)
    targets = torch.randn(8, 64, 64, 64, device=options.device)

    print("before:   ", model(images).grad_fn.name())
    pytorchs = gradients(model, images, targets)

    replacement = normgrad.torch.replace_norms(model)
    node = model(images).grad_fn.name()
    print("replaced: ", node, replacement)
    normgrads = gradients(model, images, targets)

    replacement.undo()
    print("undone:   ", model(images).grad_fn.name())

    pairs = zip(pytorchs, normgrads, strict=True)
    difference = max(float((a - b).abs().max() / a.abs().max()) for a, b in pairs)
    print(f"largest difference of a gradient: {difference:.1e} of the largest one")
    compare_times(model, images, targets)
    return 0 if node == "NormgradGroupNormBackward" and difference < 1e-4 else 1


if __name__ == "__main__":
    sys.exit(main())
