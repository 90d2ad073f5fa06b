"""Run a small model with GroupNorm on normgrad's modules, prove that they ran, and compare the gradients.

python examples/torch_model.py [--device cuda]
"""

from __future__ import annotations

import argparse
import sys

import torch
from torch import nn

import normgrad.torch


def gradients(model: nn.Module, images: torch.Tensor, targets: torch.Tensor) -> list[torch.Tensor]:
    """Return the gradients of all parameters for one batch."""
    model.zero_grad()
    nn.functional.mse_loss(model(images), targets).backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def main() -> int:
    """Exit with 0 if normgrad ran and its gradients agree with PyTorch's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 64, 3, padding=1), nn.GroupNorm(8, 64), nn.SiLU(), nn.Conv2d(64, 64, 3, padding=1)
    )
    model.append(nn.GroupNorm(8, 64)).to(options.device)
    images = torch.randn(8, 3, 64, 64, device=options.device)
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
    return 0 if node == "NormgradGroupNormBackward" and difference < 1e-4 else 1


if __name__ == "__main__":
    sys.exit(main())
