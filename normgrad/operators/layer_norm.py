"""LayerNorm: the backward pass and the forward pass that makes its statistics."""

from __future__ import annotations

import math
from collections.abc import Sequence

from normgrad.contract.dtypes import FLOAT32
from normgrad.contract.parameters import Attribute, Broken, Call, Mask, Role, Tensor
from normgrad.contract.products import Family, Product
from normgrad.contract.rules import (
    dtype_of,
    dtype_of_given,
    elements,
    floats,
    masked,
    not_narrower_than,
    preferring_float32,
    real,
    shape_is,
    shape_of,
    sizes,
)
from normgrad.contract.view import Shape
from normgrad.operators.operator import operator
from normgrad.typing import Array, ArrayT

_RANKS = (1, 8)


def _outer(call: Call) -> Shape:
    """A1..Ai of an input [A1..Ai, R1..Rj]."""
    shape: Shape = call.shape("input")
    return shape[: len(shape) - len(_normalized(call))]


def _normalized(call: Call) -> Shape:
    shape: Shape = call.attributes["normalized_shape"]
    return shape


def _ends_input(call: Call) -> None:
    shape, normalized = call.shape("input"), _normalized(call)
    if not 1 <= len(normalized) <= max(len(shape), 1):
        raise Broken(f"is {normalized}, and must have 1 to {len(shape)} elements (the dimensions of {{input}})")
    if shape[len(shape) - len(normalized) :] != normalized:
        raise Broken(f"is {normalized}, and must equal the last dimensions of {{input}}, whose shape is {shape}")


def _statistics_shape(call: Call) -> Shape:
    return (*_outer(call), *(1 for _ in _normalized(call)))


_normalized_shape = Attribute("normalized_shape", "normalizedShape", sizes, follows=_ends_input, nullable=True)
_one_per_row = elements(lambda call: math.prod(_outer(call)), "one per row of {input}", preferred=_statistics_shape)
_like_weight = shape_is(_normalized, "{normalized_shape}")
_input_or_float32 = dtype_of("input", FLOAT32)
_weight_and_bias = (
    Tensor("weight", "weightOptional", _input_or_float32, _RANKS, _like_weight, optional=True),
    Tensor("bias", "biasOptional", dtype_of_given("weight", _input_or_float32), _RANKS, _like_weight, optional=True),
)
_weight_or_input = dtype_of_given("weight", dtype_of("input"))
_statistics_dtype = preferring_float32(not_narrower_than("input"))


@operator(
    "aclnnLayerNormBackward",
    Family.LAYER_NORM_BACKWARD,
    (
        Tensor("grad_out", "gradOut", floats, _RANKS),
        Tensor("input", "input", dtype_of("grad_out"), _RANKS, shape_of("grad_out")),
        _normalized_shape,
        Tensor("mean", "mean", not_narrower_than("input"), _RANKS, _one_per_row),
        Tensor("rstd", "rstd", dtype_of("mean"), _RANKS, shape_of("mean")),
        *_weight_and_bias,
        Mask("output_mask", "outputMask", 3),
        Tensor(
            "grad_input", "gradInputOut", dtype_of("input"), _RANKS, shape_of("input"), Role.OUTPUT, wanted=masked(0)
        ),
        Tensor("grad_weight", "gradWeightOut", _weight_or_input, _RANKS, _like_weight, Role.OUTPUT, wanted=masked(1)),
        Tensor("grad_bias", "gradBiasOut", _weight_or_input, _RANKS, _like_weight, Role.OUTPUT, wanted=masked(2)),
    ),
)
def layer_norm_backward(
    grad_out: Array,
    input: ArrayT,
    normalized_shape: int | Sequence[int],
    mean: Array,
    rstd: Array,
    weight: Array | None = None,
    bias: Array | None = None,
    output_mask: Sequence[bool] = (True, True, True),
    *,
    out: Sequence[Array | None] | None = None,
    product: Product | str | None = None,
) -> tuple[ArrayT, ArrayT, ArrayT]:
    """Compute the gradients of LayerNorm.

    With ``x̂ = (input − mean)·rstd``, ``g = grad_out·weight`` and N elements in a row::

        grad_input  = rstd·(g − Σg/N − x̂·Σ(g·x̂)/N)      sums over the row
        grad_weight = Σ grad_out·x̂                       sums over the rows
        grad_bias   = Σ grad_out

    Parameters
    ----------
    grad_out, input : array of float32, float16 or bfloat16
        One dtype and one shape ``[A1..Ai, R1..Rj]`` of 1 to 8 dimensions.
    normalized_shape : int or sequence of int
        ``[R1..Rj]``, the last dimensions of ``input``.
    mean, rstd : array
        One dtype, not narrower than ``input``'s, and one shape; one element per row (``[A1..Ai, 1..1]``).
    weight, bias : array, optional
        ``input``'s dtype or float32, shape ``normalized_shape``. The bias takes part in no formula.
    output_mask : sequence of 3 bool
        Which of the outputs are requested. The others are None.
    out : tuple of 3 arrays or None, optional
        Arrays to write to; None for each that the library allocates.
    product : Product or str, optional
        Check the call as this product's documents do.

    Returns
    -------
    grad_input, grad_weight, grad_bias
        Arrays of ``input``'s library, on its device. ``grad_weight`` and ``grad_bias`` have ``weight``'s dtype
        (``input``'s without one).

    Raises
    ------
    ContractError
        161001 for a missing array, 161002 for a broken rule, 561003 for a product without LayerNorm.

    Examples
    --------
    >>> import numpy as np
    >>> from normgrad import layer_norm_backward
    >>> x = np.array([[2, 3], [4, 5]], np.float32)
    >>> mean, rstd = np.array([[2], [3]], np.float32), np.array([[4], [5]], np.float32)
    >>> grad_input, grad_weight, grad_bias = layer_norm_backward(x, x, [2], mean, rstd, np.ones(2, np.float32))
    >>> grad_input
    array([[   -2. ,   -94. ],
           [ -877.5, -1747.5]], dtype=float32)
    >>> grad_weight, grad_bias
    (array([20., 62.], dtype=float32), array([6., 8.], dtype=float32))
    """
    return locals()  # type: ignore[return-value]


@operator(
    "aclnnLayerNorm",
    Family.LAYER_NORM,
    (
        Tensor("input", "input", floats, _RANKS),
        _normalized_shape,
        *_weight_and_bias,
        Attribute("eps", "eps", real),
        Tensor("output", "out", dtype_of("input"), _RANKS, shape_of("input"), Role.OUTPUT),
        Tensor("mean", "meanOutOptional", _statistics_dtype, _RANKS, _one_per_row, Role.OUTPUT, optional=True),
        Tensor(
            "rstd",
            "rstdOutOptional",
            dtype_of_given("mean", _statistics_dtype),
            _RANKS,
            _one_per_row,
            Role.OUTPUT,
            optional=True,
        ),
    ),
)
def layer_norm(
    input: ArrayT,
    normalized_shape: int | Sequence[int],
    weight: Array | None = None,
    bias: Array | None = None,
    eps: float = 1e-5,
    *,
    out: Sequence[Array | None] | None = None,
    product: Product | str | None = None,
) -> tuple[ArrayT, ArrayT, ArrayT]:
    """Compute LayerNorm, with the statistics that its backward pass needs.

    Over the N elements of a row, ``mean = Σx/N``, ``rstd = 1/√(Σ(x − mean)²/N + eps)`` and
    ``output = (x − mean)·rstd·weight + bias``.

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
    out : tuple of 3 arrays or None, optional
        Arrays to write to; None for each that the library allocates.
    product : Product or str, optional
        Check the call as this product's documents do.

    Returns
    -------
    output, mean, rstd
        ``output`` as ``input``; the statistics in float32, shape ``[A1..Ai, 1..1]``.

    Examples
    --------
    >>> import numpy as np
    >>> from normgrad import layer_norm
    >>> output, mean, rstd = layer_norm(np.array([[0, 2], [4, 8]], np.float32), [2], eps=0)
    >>> output
    array([[-1.,  1.],
           [-1.,  1.]], dtype=float32)
    >>> mean, rstd
    (array([[1.],
           [6.]], dtype=float32), array([[1. ],
           [0.5]], dtype=float32))
    """
    return locals()  # type: ignore[return-value]
