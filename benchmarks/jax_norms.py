"""LayerNorm and GroupNorm in JAX: normgrad's kernels against what XLA makes of the plain formulas.

    python benchmarks/jax_norms.py --json benchmarks/results/jax_norms.json

writes the results of which pages.py makes the table of docs/guides/jax.md: the fastest of many jitted calls on the CPU,
in seconds. A step is the forward pass and the gradients of input, weight and bias.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from normgrad.bench import machine
from normgrad.bench.clock import measure
from normgrad.bench.results import write_json
from normgrad.jax import group_norm, layer_norm

EPS = 1e-5
SECONDS = 0.5  # per implementation and case
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
    return (_normalised(x.astype(jnp.float32)) * weight + bias).astype(x.dtype)


def plain_group_norm(x: Any, weight: Any, bias: Any) -> Any:
    """The formula, in float32."""
    y = _normalised(x.astype(jnp.float32).reshape(x.shape[0], GROUP, -1)).reshape(x.shape)
    return (y * weight[:, None, None] + bias[:, None, None]).astype(x.dtype)


def _normalised(x: Any) -> Any:
    centred = x - x.mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + EPS)


def ours(name: str, x: Any, weight: Any, bias: Any) -> Any:
    """The same by normgrad."""
    if name == "layer_norm":
        return layer_norm(x, x.shape[-1], weight, bias, EPS)
    return group_norm(x, GROUP, weight, bias, EPS)


def fastest(functions: Sequence[Callable[..., Any]], *arguments: Any) -> list[float]:
    """Return the seconds of each function's fastest call; the functions take turns."""
    jitted = map(jax.jit, functions)
    runs = {str(n): lambda f=f: jax.block_until_ready(f(*arguments)) for n, f in enumerate(jitted)}
    return [timing.fastest for timing in measure(runs, SECONDS * len(runs)).values()]


def step(function: Callable[..., Any], x: Any, weight: Any, bias: Any, upstream: Any) -> Any:
    """Forward and backward."""
    output, pull = jax.vjp(function, x, weight, bias)
    return output, pull(upstream)


def measured(name: str, shape: tuple[int, ...], dtype: str) -> dict[str, Any]:
    """Return the record of a case."""
    rng = np.random.default_rng(0)
    x, upstream = (jnp.asarray(rng.normal(size=shape), dtype) for _ in range(2))
    weight, bias = (jnp.asarray(rng.normal(size=shape[1]), dtype) for _ in range(2))
    both = [partial(ours, name), plain_layer_norm if name == "layer_norm" else plain_group_norm]
    forward = fastest(both, x, weight, bias)
    steps = fastest([partial(step, function) for function in both], x, weight, bias, upstream)
    times = zip(("forward", "forward_xla", "step", "step_xla"), (*forward, *steps), strict=True)
    group = GROUP if name == "group_norm" else None
    return {"function": name, "shape": "x".join(map(str, shape)), "group": group, "dtype": dtype, **dict(times)}


def main() -> None:
    """Measure every case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results")
    options = parser.parse_args()
    results = []
    for case in CASES:
        results.append(measured(*case))
        print(results[-1], flush=True)
    if options.json:
        write_json(options.json, machine.describe("cpu"), results)


if __name__ == "__main__":
    main()
