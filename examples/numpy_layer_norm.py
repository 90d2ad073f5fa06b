"""LayerNorm and its gradients on NumPy arrays, compared with finite differences of the float64 oracle.

python examples/numpy_layer_norm.py
"""

from __future__ import annotations

import sys

import numpy as np

import normgrad
from normgrad.testing import oracle

ROWS, COLUMNS, STEP = 4, 32, 1e-4


def loss(x: np.ndarray, weight: np.ndarray, bias: np.ndarray, grad_out: np.ndarray) -> float:
    """Return a loss whose gradient with respect to the output is ``grad_out``, in float64."""
    output, _, _ = oracle.layer_norm(x, [COLUMNS], weight, bias)
    return float((output * grad_out).sum())


def main() -> int:
    """Compute all three gradients and compare some elements of each with central differences."""
    rng = np.random.default_rng(0)
    x, grad_out = (rng.normal(size=(ROWS, COLUMNS)).astype(np.float32) for _ in range(2))
    weight, bias = (rng.normal(size=COLUMNS).astype(np.float32) for _ in range(2))

    _, mean, rstd = normgrad.layer_norm(x, [COLUMNS], weight, bias)
    gradients = normgrad.layer_norm_backward(grad_out, x, [COLUMNS], mean, rstd, weight)

    worst = 0.0
    for argument, (name, gradient) in enumerate(zip(("input", "weight", "bias"), gradients, strict=True)):
        for index in [tuple(size // 2 for size in gradient.shape), tuple(0 for _ in gradient.shape)]:
            values = []
            for step in (STEP, -STEP):
                moved = [array.astype(np.float64) for array in (x, weight, bias)]
                moved[argument][index] += step
                values.append(loss(*moved, grad_out))
            numeric = (values[0] - values[1]) / (2 * STEP)
            worst = max(worst, abs(numeric - gradient[index]))
            print(f"grad_{name}{list(index)}: normgrad {gradient[index]: .6f}, finite difference {numeric: .6f}")
    print(f"largest difference: {worst:.1e}")
    return 0 if worst < 1e-4 else 1


if __name__ == "__main__":
    sys.exit(main())
