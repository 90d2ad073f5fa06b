"""Judge two kernels for LayerNorm's backward pass: one is correct, one forgets the last elements of every row.

python examples/judge_a_kernel.py
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import numpy as np

import normgrad
from normgrad.testing import judge

COLUMNS = 500
Kernel = Callable[..., np.ndarray]


def correct(grad_out: np.ndarray, x: np.ndarray, mean: np.ndarray, rstd: np.ndarray) -> np.ndarray:
    """Return the gradient of the input, in float32."""
    normalized = (x - mean) * rstd
    inner = grad_out - grad_out.mean(1, keepdims=True) - normalized * (grad_out * normalized).mean(1, keepdims=True)
    return rstd * inner


def without_tail(grad_out: np.ndarray, x: np.ndarray, mean: np.ndarray, rstd: np.ndarray) -> np.ndarray:
    """Return the same from a kernel that works in blocks of 8 and has no mask for what is left over."""
    result = correct(grad_out, x, mean, rstd)
    result[:, COLUMNS - COLUMNS % 8 :] = 0
    return result


def passes(kernel: Kernel) -> bool:
    """Judge a kernel by normgrad's error bound and print what the errors look like."""
    rng = np.random.default_rng(0)
    x, grad_out = (rng.normal(size=(64, COLUMNS)).astype(np.float32) for _ in range(2))
    _, mean, rstd = normgrad.layer_norm(x, [COLUMNS])
    call = {"grad_out": grad_out, "input": x, "normalized_shape": [COLUMNS], "mean": mean, "rstd": rstd}
    call["output_mask"] = (True, False, False)
    judgement = judge("layer_norm_backward", call, {"grad_input": kernel(grad_out, x, mean, rstd)})
    print(f"{kernel.__name__}:\n{judgement}\n")
    return judgement.passed


def main() -> int:
    """Exit with 0 if the correct kernel passes and the other one does not."""
    return 0 if passes(correct) and not passes(without_tail) else 1


if __name__ == "__main__":
    sys.exit(main())
