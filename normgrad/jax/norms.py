"""The two norms as functions that JAX can differentiate, compile and vectorise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from normgrad.contract.check import check
from normgrad.contract.products import current_product
from normgrad.jax.calls import call, layout_of, result, stand_ins
from normgrad.jax.sharding import as_varying, gathered, varying_axes
from normgrad.operators import OPERATORS


def layer_norm(
    input: ArrayLike,
    normalized_shape: int | Sequence[int],
    weight: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    eps: float = 1e-5,
) -> jax.Array:
    """Compute LayerNorm on the CPU, under ``jit``, ``grad`` and ``vmap``.

    Over the elements of a row, ``output = (x − mean)·rstd·weight + bias`` with ``rstd = 1/√(variance + eps)``.

    Parameters
    ----------
    input : array of float32, float16 or bfloat16
        Shape ``[A1..Ai, R1..Rj]`` of 1 to 8 dimensions.
    normalized_shape : int or sequence of int
        ``[R1..Rj]``, the last dimensions of ``input``.
    weight, bias : array, optional
        ``input``'s dtype or float32, one dtype for both, shape ``normalized_shape``.
    eps : float
        Added to the variance.

    Returns
    -------
    output
        As ``input``.

    Raises
    ------
    ContractError
        For a broken rule, when the function is called or traced.
    NotImplementedError
        Where the program is compiled for a platform other than the CPU.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from normgrad.jax import layer_norm
    >>> layer_norm(jnp.array([[0.0, 2.0], [4.0, 8.0]]), 2, eps=0)
    Array([[-1.,  1.],
           [-1.,  1.]], dtype=float32)
    """
    x, weight, bias = _arrays("layer_norm", input, weight, bias)
    attributes = _checked("layer_norm", x, weight, bias, normalized_shape=normalized_shape, eps=eps)
    sizes = attributes["normalized_shape"]
    rows, columns = math.prod(x.shape[: x.ndim - len(sizes)]), math.prod(sizes)
    weight, bias = _vectors(weight, bias)
    return _layer_norm(x.reshape(rows, columns), weight, bias, attributes["eps"]).reshape(x.shape)


def group_norm(
    input: ArrayLike,
    group: int,
    weight: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    eps: float = 1e-5,
) -> jax.Array:
    """Compute GroupNorm on the CPU, under ``jit``, ``grad`` and ``vmap``.

    Over a sample's group of ``C/group`` channels, ``output = (x − mean)·rstd·weight + bias`` with
    ``rstd = 1/√(variance + eps)`` and weight and bias per channel.

    Parameters
    ----------
    input : array of float32, float16 or bfloat16
        2 to 8 dimensions; dimension 1 is the channel.
    group : int
        How many groups; divides the number of channels.
    weight, bias : array, optional
        ``input``'s dtype or float32, one dtype for both, one element per channel.
    eps : float
        Added to the variance.

    Returns
    -------
    output
        As ``input``.

    Raises
    ------
    ContractError
        For a broken rule, when the function is called or traced.
    NotImplementedError
        Where the program is compiled for a platform other than the CPU.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from normgrad.jax import group_norm
    >>> group_norm(jnp.array([[0.0, 2.0, 4.0, 8.0]]), 2, eps=0)
    Array([[-1.,  1., -1.,  1.]], dtype=float32)
    """
    x, weight, bias = _arrays("group_norm", input, weight, bias)
    if x.ndim < 2:
        raise ValueError(f"normgrad.jax.group_norm: input has the shape {x.shape}, and must have 2 dimensions or more")
    samples, channels, *positions = x.shape
    sizes = {"N": samples, "C": channels, "HxW": math.prod(positions)}
    attributes = _checked("group_norm", x, weight, bias, **sizes, group=group, eps=eps)
    weight, bias = _vectors(weight, bias)
    flat = x.reshape(tuple(sizes.values()))
    return _group_norm(flat, weight, bias, attributes["group"], attributes["eps"]).reshape(x.shape)


def _arrays(operator: str, *values: Any) -> list[Any]:
    """The arguments as JAX's arrays. Inside shard_map all vary over the same axes of the mesh, as the output will."""
    arrays = [None if value is None else gathered(jnp.asarray(value)) for value in values]
    for name, array in zip(("input", "weight", "bias"), arrays, strict=True):
        if array is not None and not all(isinstance(size, int) for size in array.shape):
            raise NotImplementedError(
                f"normgrad.jax.{operator}: {name} has the shape {array.shape}, and every dimension must be a number: "
                "kernels are chosen when the function is traced; export it for each shape"
            )
    axes = varying_axes(*arrays)
    return [as_varying(array, axes) for array in arrays]


def _checked(operator: str, x: Any, weight: Any, bias: Any, **attributes: Any) -> dict[str, Any]:
    """Check the operator's own rules on the arrays as given, and return the attributes as it reads them."""
    arrays = {"input": x, "weight": weight, "bias": bias}
    views = stand_ins({name: layout_of(array) for name, array in arrays.items() if array is not None})
    call = check(OPERATORS[operator].signature, views | attributes, current_product(), outputs_needed=False)
    return call.attributes


def _vectors(weight: Any, bias: Any) -> tuple[Any, Any]:
    """Weight and bias flat; a bias alone gets a weight beside it, from which its gradient has its dtype."""
    if bias is not None and weight is None:
        weight = jnp.ones_like(bias)
    return (None if weight is None else weight.reshape(-1), None if bias is None else bias.reshape(-1))


def _layer_norm_forward(x: Any, weight: Any, bias: Any, eps: float) -> tuple[Any, Any]:
    rows = (x.shape[0], 1)
    results = {"output": result(x.shape, x.dtype), "mean": result(rows), "rstd": result(rows)}
    output, mean, rstd = call("layer_norm", {"input": x, "weight": weight, "bias": bias}, results, eps=eps)
    return output, (x, mean, rstd, weight, bias)


def _layer_norm_backward(eps: float, saved: tuple[Any, ...], grad_out: Any) -> tuple[Any, Any, Any]:
    x, mean, rstd, weight, bias = saved
    arrays = {"grad_out": grad_out, "input": x, "mean": mean, "rstd": rstd, "weight": weight}
    return _gradients("layer_norm_backward", arrays, bias)


def _group_norm_forward(x: Any, weight: Any, bias: Any, group: int, eps: float) -> tuple[Any, Any]:
    groups = (x.shape[0], group)
    results = {"output": result(x.shape, x.dtype), "mean": result(groups), "rstd": result(groups)}
    arrays = {"input": x, "weight": weight, "bias": bias}
    output, mean, rstd = call("group_norm", arrays, results, group=group, eps=eps)
    return output, (x, mean, rstd, weight, bias)


def _group_norm_backward(group: int, eps: float, saved: tuple[Any, ...], grad_out: Any) -> tuple[Any, Any, Any]:
    x, mean, rstd, weight, bias = saved
    arrays = {"grad_out": grad_out, "input": x, "mean": mean, "rstd": rstd, "weight": weight}
    return _gradients("group_norm_backward", arrays, bias, group=group)


def _gradients(operator: str, arrays: dict[str, Any], bias: Any, **attributes: Any) -> tuple[Any, Any, Any]:
    """The gradients of the input, and of weight and bias where there are any."""
    like = {"grad_input": arrays["input"], "grad_weight": arrays["weight"], "grad_bias": bias}
    results = {name: result(array.shape, array.dtype) for name, array in like.items() if array is not None}
    mask = [array is not None for array in like.values()]
    done = dict(zip(results, call(operator, arrays, results, output_mask=mask, **attributes), strict=True))
    return done["grad_input"], done.get("grad_weight"), done.get("grad_bias")


_layer_norm = jax.custom_vjp(lambda *args: _layer_norm_forward(*args)[0], nondiff_argnums=(3,))
_layer_norm.defvjp(_layer_norm_forward, _layer_norm_backward)
_group_norm = jax.custom_vjp(lambda *args: _group_norm_forward(*args)[0], nondiff_argnums=(3, 4))
_group_norm.defvjp(_group_norm_forward, _group_norm_backward)
