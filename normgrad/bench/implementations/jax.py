"""JAX: a jitted function; of the backward passes, the vector-Jacobian product of the forward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np

from normgrad.bench.cases import CHANNELS_LAST
from normgrad.bench.implementations.implementation import Implementation, Role, Unavailable, results_of
from normgrad.bench.workload import EPS, Workload
from normgrad.testing.expected import as_tuple
from normgrad.testing.host import on_host


class Jax:
    """Whatever XLA makes of the formulas. It allocates its results, and uses all cores."""

    name = "JAX"

    def prepare(self, work: Workload) -> Iterable[Implementation]:
        """Compile for the workload's sizes."""
        import jax

        if work.case.operator not in _FUNCTIONS:
            raise Unavailable(f"there is no formula of {work.case.operator} for JAX")
        try:
            device = jax.devices(work.device)[0]
        except RuntimeError as error:
            raise Unavailable(str(error)) from None
        last = work.case.layout == CHANNELS_LAST  # JAX's arrays have no strides: the data goes in as it lies
        function, names = _FUNCTIONS[work.case.operator](work)
        values = [
            jax.device_put(np.moveaxis(value, 1, -1) if last and value.ndim > 2 else value, device)
            for value in (on_host(work.arguments[name]) for name in names)
        ]
        jitted = jax.jit(_in_order(function) if last else function)
        run = partial(_finished, jitted, values)
        yield Implementation(self.name, Role.PEER, run, partial(_on_host, run, last))


def _in_order(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of data with the channel last."""
    import jax.numpy as jnp

    def reordered(*values: Any) -> Any:
        results = function(*(jnp.moveaxis(value, -1, 1) if value.ndim > 2 else value for value in values))
        return tuple(jnp.moveaxis(result, 1, -1) if result.ndim > 2 else result for result in as_tuple(results))

    return reordered


def _finished(function: Callable[..., Any], values: list[Any]) -> Any:
    import jax

    return jax.block_until_ready(function(*values))


def _on_host(run: Callable[[], Any], channels_last: bool) -> list[np.ndarray | None]:
    arrays = [np.asarray(result) for result in results_of(run)]
    return [np.moveaxis(array, -1, 1) if channels_last and array.ndim > 2 else array for array in arrays]


Function = tuple[Callable[..., Any], tuple[str, ...]]


def _normalised(x: Any, axes: tuple[int, ...]) -> tuple[Any, Any, Any]:
    import jax
    import jax.numpy as jnp

    x32 = x.astype(jnp.float32)
    mean = jnp.mean(x32, axes, keepdims=True)
    rstd = jax.lax.rsqrt(jnp.mean((x32 - mean) ** 2, axes, keepdims=True) + EPS)
    return (x32 - mean) * rstd, mean, rstd


def _layer_norm_forward(x: Any, weight: Any, bias: Any) -> tuple[Any, Any, Any]:
    x_hat, mean, rstd = _normalised(x, (1,))
    return (x_hat * weight + bias).astype(x.dtype), mean, rstd


def _group_norm_forward(group: int, x: Any, weight: Any, bias: Any) -> tuple[Any, Any, Any]:
    samples, channels = x.shape[:2]
    x_hat, mean, rstd = _normalised(x.reshape(samples, group, channels // group, -1), (2, 3))
    y = x_hat.reshape(x.shape) * _per_channel(weight, x) + _per_channel(bias, x)
    return y.astype(x.dtype), mean.reshape(samples, group), rstd.reshape(samples, group)


def _per_channel(vector: Any, x: Any) -> Any:
    return vector.reshape(1, -1, *(1 for _ in x.shape[2:]))


def _gradients_of(forward: Callable[..., Any]) -> Callable[..., Any]:
    import jax
    import jax.numpy as jnp

    def backward(dy: Any, x: Any, weight: Any) -> Any:
        bias = jnp.zeros_like(weight)
        _, pull = jax.vjp(lambda *values: forward(*values)[0], x, weight, bias)
        return pull(dy)

    return backward


def _stats(x: Any) -> tuple[Any, Any]:
    _, mean, rstd = _normalised(x, (0, *range(2, x.ndim)))
    return mean.reshape(-1), rstd.reshape(-1)


def _elemt(x: Any, weight: Any, bias: Any, mean: Any, invstd: Any) -> Any:
    y = (x - _per_channel(mean, x)) * _per_channel(invstd * weight, x) + _per_channel(bias, x)
    return y.astype(x.dtype)


def _reduce_backward(dy: Any, x: Any, mean: Any, invstd: Any) -> tuple[Any, ...]:
    others = (0, *range(2, x.ndim))
    dy32 = dy.astype(np.float32)
    sum_dy, sum_dy_xmu = dy32.sum(others), (dy32 * (x - _per_channel(mean, x))).sum(others)
    return sum_dy, sum_dy_xmu, sum_dy_xmu * invstd, sum_dy


def _elemt_backward(
    dy: Any, x: Any, mean: Any, invstd: Any, weight: Any, sum_dy: Any, sum_dy_xmu: Any, counter: Any
) -> Any:
    n = counter.sum().astype(np.float32)
    shift, slope = _per_channel(sum_dy / n, x), _per_channel(invstd**2 * sum_dy_xmu / n, x)
    gradient = (dy - shift - (x - _per_channel(mean, x)) * slope) * _per_channel(invstd * weight, x)
    return gradient.astype(x.dtype)


_FORWARD = ("input", "weight", "bias")
_BACKWARD = ("grad_out", "input", "weight")
_FUNCTIONS: dict[str, Callable[[Workload], Function]] = {
    "layer_norm": lambda work: (_layer_norm_forward, _FORWARD),
    "group_norm": lambda work: (partial(_group_norm_forward, work.case.group), _FORWARD),
    "layer_norm_backward": lambda work: (_gradients_of(_layer_norm_forward), _BACKWARD),
    "group_norm_backward": lambda work: (
        _gradients_of(partial(_group_norm_forward, work.case.group)),
        _BACKWARD,
    ),
    "batch_norm_stats": lambda work: (_stats, ("input",)),
    "batch_norm_elemt": lambda work: (_elemt, ("input", "weight", "bias", "mean", "invstd")),
    "batch_norm_reduce_backward": lambda work: (_reduce_backward, ("grad_out", "input", "mean", "invstd")),
    "batch_norm_elemt_backward": lambda work: (
        _elemt_backward,
        ("grad_out", "input", "mean", "invstd", "weight", "sum_dy", "sum_dy_xmu", "counter"),
    ),
}
