"""LayerNorm and GroupNorm in JAX: normgrad's kernels against what XLA makes of the plain formulas.

    python benchmarks/jax_norms.py

prints the table of docs/guides/jax.md: the fastest of many jitted calls on the CPU, in microseconds. A step is the
forward pass and the gradients of input, weight and bias.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from normgrad.bench.clock import measure
from normgrad.jax import group_norm, layer_norm

EPS = 1e-5
SECONDS = 0.5  # per contender and case
CASES = [
    ("layer_norm", (2, 8), "float32"),
    ("layer_norm", (64, 256), "float32"),
    ("layer_norm", (4096, 1024), "float32"),
    ("layer_norm", (4096, 1024), "bfloat16"),
    ("group_norm", (8, 64, 56, 56), "float32"),
    ("group_norm", (8, 64, 56, 56), "bfloat16"),
]
GROUP = 32


def plain_layer_norm(x: Any, weight: Any, bias: Any) -> Any:
    """The formula, in float32."""
    return (_normalised(x.astype(jnp.float32), -1) * weight + bias).astype(x.dtype)


def plain_group_norm(x: Any, weight: Any, bias: Any) -> Any:
    """The formula, in float32."""
    y = _normalised(x.astype(jnp.float32).reshape(x.shape[0], GROUP, -1), -1).reshape(x.shape)
    return (y * weight[:, None, None] + bias[:, None, None]).astype(x.dtype)


def _normalised(x: Any, axis: int) -> Any:
    mean = x.mean(axis, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(((x - mean) ** 2).mean(axis, keepdims=True) + EPS)


def ours(name: str, x: Any, weight: Any, bias: Any) -> Any:
    """The same by normgrad."""
    if name == "layer_norm":
        return layer_norm(x, x.shape[-1], weight, bias, EPS)
    return group_norm(x, GROUP, weight, bias, EPS)


def fastest(functions: Sequence[Callable[..., Any]], *arguments: Any) -> list[float]:
    """Return the microseconds of each function's fastest call; the functions take turns."""
    jitted = map(jax.jit, functions)
    runs = {str(n): lambda f=f: jax.block_until_ready(f(*arguments)) for n, f in enumerate(jitted)}
    return [1e6 * timing.fastest for timing in measure(runs, SECONDS * len(runs)).values()]


def step(function: Callable[..., Any], x: Any, weight: Any, bias: Any, upstream: Any) -> Any:
    """Forward and backward."""
    output, pull = jax.vjp(function, x, weight, bias)
    return output, pull(upstream)


def main() -> None:
    """Print the table."""
    print(f"JAX {jax.__version__}, {len(jax.devices('cpu'))} device, times in µs\n")
    print("| function | shape | dtype | forward: normgrad | forward: XLA | step: normgrad | step: XLA |")
    print("|---|---|---|---:|---:|---:|---:|")
    rng = np.random.default_rng(0)
    for name, shape, dtype in CASES:
        size = shape[1]
        x, upstream = (jnp.asarray(rng.normal(size=shape), dtype) for _ in range(2))
        weight, bias = (jnp.asarray(rng.normal(size=size), dtype) for _ in range(2))
        plain = plain_layer_norm if name == "layer_norm" else plain_group_norm
        both = [partial(ours, name), plain]
        times = fastest(both, x, weight, bias)
        times += fastest([partial(step, f) for f in both], x, weight, bias, upstream)
        cells = " | ".join(f"{value:,.0f}" for value in times)
        print(f"| `{name}` | {'×'.join(map(str, shape))} | {dtype} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
