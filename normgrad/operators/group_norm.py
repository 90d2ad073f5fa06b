"""GroupNorm: the backward pass and the forward pass that makes its statistics."""

from __future__ import annotations

from collections.abc import Sequence

from normgrad.contract.dtypes import FLOAT32
from normgrad.contract.parameters import Attribute, Broken, Call, DtypeRule, Dtypes, Extent, Mask, Role, Tensor
from normgrad.contract.products import Family, Product
from normgrad.contract.rules import (
    dtype_of,
    dtype_of_given,
    elements,
    floats,
    masked,
    positive,
    preferring_float32,
    product_of,
    real,
    shape_of,
    size,
)
from normgrad.contract.view import Shape
from normgrad.operators.operator import operator
from normgrad.typing import Array, ArrayT

_RANKS = (0, 8)


def _fits(call: Call) -> None:
    product_of({name: call.attributes[name] for name in ("N", "C", "HxW")})


def _divides_channels(call: Call) -> None:
    channels, group = call.attributes["C"], call.attributes["group"]
    if channels % group:
        raise Broken(f"is {group}, and must divide {{C}} = {channels}")


_attributes = (
    Attribute("N", "N", size, follows=_fits),
    Attribute("C", "C", size),
    Attribute("HxW", "HxW", size),
    Attribute("group", "group", positive, follows=_divides_channels),
)


def _size(call: Call, *names: str) -> int:
    return product_of({name: call.attributes[name] for name in names})


def _statistics_shape(call: Call) -> Shape:
    return (call.attributes["N"], call.attributes["group"])


_whole = elements(lambda call: _size(call, "N", "C", "HxW"), "{N}·{C}·{HxW}")
_one_per_group = elements(lambda call: _size(call, "N", "group"), "{N}·{group}", preferred=_statistics_shape)
_one_per_channel = elements(lambda call: _size(call, "C"), "{C}", preferred=lambda call: (call.attributes["C"],))


def _statistics_dtype(data: str) -> DtypeRule:
    """The data's dtype, or float32 on the products that take it beside 16-bit data (and without a product)."""

    def rule(call: Call) -> Dtypes:
        mixed = call.product is None or call.product.value.mixed_group_norm
        found = dtype_of(data, FLOAT32)(call) if mixed else dtype_of(data)(call)
        return found if call.product is None else Dtypes(found.allowed, f"{found.why} on {call.product.label}")

    return rule


def _weight_dtype(call: Call) -> Dtypes:
    """The statistics' dtype; without a product the data's too."""
    if call.product is not None:
        return dtype_of("mean")(call)
    found = dtype_of("mean")(call).allowed + dtype_of("grad_out")(call).allowed
    return Dtypes(tuple(dict.fromkeys(found)), "{mean}'s dtype or {grad_out}'s")


_parameter_dtype = dtype_of_given("weight", dtype_of("mean"))


def _like_weight(call: Call) -> Extent:
    if "weight" in call.views:
        return shape_of("weight")(call)
    return Extent((call.attributes["C"],), why="{C}")


@operator(
    "aclnnGroupNormBackward",
    Family.GROUP_NORM_BACKWARD,
    (
        Tensor("grad_out", "gradOut", floats, _RANKS, _whole),
        Tensor("input", "input", dtype_of("grad_out"), _RANKS, _whole),
        Tensor("mean", "mean", _statistics_dtype("grad_out"), _RANKS, _one_per_group),
        Tensor("rstd", "rstd", dtype_of("mean"), _RANKS, _one_per_group),
        Tensor("weight", "gamma", _weight_dtype, _RANKS, _one_per_channel, optional=True),
        *_attributes,
        Mask("output_mask", "outputMask", 3),
        Tensor(
            "grad_input", "gradInput", dtype_of("grad_out"), _RANKS, shape_of("input"), Role.OUTPUT, wanted=masked(0)
        ),
        Tensor("grad_weight", "gradGammaOut", _parameter_dtype, _RANKS, _like_weight, Role.OUTPUT, wanted=masked(1)),
        Tensor("grad_bias", "gradBetaOut", _parameter_dtype, _RANKS, _like_weight, Role.OUTPUT, wanted=masked(2)),
    ),
)
def group_norm_backward(
    grad_out: Array,
    input: ArrayT,
    mean: Array,
    rstd: Array,
    weight: Array | None,
    N: int,
    C: int,
    HxW: int,
    group: int,
    output_mask: Sequence[bool] = (True, True, True),
    *,
    out: Sequence[Array | None] | None = None,
    product: Product | str | None = None,
) -> tuple[ArrayT, ArrayT, ArrayT]:
    """Compute the gradients of GroupNorm.

    Data is taken in the order ``(N, C, HxW)`` whatever its shape. Per sample and group of ``C/group`` channels,
    with ``x̂ = (input − mean)·rstd``, ``g = weight·grad_out`` and m elements in a group::

        grad_input  = rstd·(g − Σg/m − x̂·Σ(g·x̂)/m)      sums over the group
        grad_weight = Σ grad_out·x̂                       per channel, sums over samples and positions
        grad_bias   = Σ grad_out

    Parameters
    ----------
    grad_out, input : array of float32, float16 or bfloat16
        One dtype, ``N·C·HxW`` elements each, 0 to 8 dimensions.
    mean, rstd : array
        ``grad_out``'s dtype or float32, one dtype for both, ``N·group`` elements each.
    weight : array or None
        ``mean``'s dtype or ``grad_out``'s, C elements.
    N, C, HxW, group : int
        Samples, channels, spatial positions per channel, groups; ``group`` divides C.
    output_mask : sequence of 3 bool
        Which of the outputs are requested. The others are None.
    out : tuple of 3 arrays or None, optional
        Arrays to write to; None for each that the library allocates.
    product : Product or str, optional
        Check the call as this product's documents do.

    Returns
    -------
    grad_input, grad_weight, grad_bias
        Arrays of ``input``'s library, on its device. The last two have ``weight``'s dtype and shape (``mean``'s dtype
        and ``[C]`` without one).

    Raises
    ------
    ContractError
        161001 for a missing array, 161002 for a broken rule, 561003 for a product without GroupNorm.

    Examples
    --------
    >>> import numpy as np
    >>> from normgrad import group_norm_backward
    >>> x = np.arange(1, 25, dtype=np.float32).reshape(2, 3, 4)
    >>> mean, rstd = np.array([6.5, 18.5], np.float32), np.full(2, 0.2896827, np.float32)
    >>> _, grad_weight, grad_bias = group_norm_backward(x, x, mean, rstd, np.ones(3, np.float32), 2, 3, 4, 1)
    >>> grad_weight.round(2)
    array([-75.9 ,   2.9 , 155.85], dtype=float32)
    >>> grad_bias
    array([ 68., 100., 132.], dtype=float32)
    """
    return locals()  # type: ignore[return-value]


_forward_statistics = preferring_float32(_statistics_dtype("input"))
_forward_parameter = dtype_of("input", FLOAT32)


@operator(
    "aclnnGroupNorm",
    Family.GROUP_NORM,
    (
        Tensor("input", "self", floats, _RANKS, _whole),
        Tensor("weight", "gamma", _forward_parameter, _RANKS, _one_per_channel, optional=True),
        Tensor("bias", "beta", dtype_of_given("weight", _forward_parameter), _RANKS, _one_per_channel, optional=True),
        *_attributes,
        Attribute("eps", "eps", real),
        Tensor("output", "out", dtype_of("input"), _RANKS, shape_of("input"), Role.OUTPUT),
        Tensor("mean", "meanOut", _forward_statistics, _RANKS, _one_per_group, Role.OUTPUT),
        Tensor("rstd", "rstdOut", dtype_of_given("mean", _forward_statistics), _RANKS, _one_per_group, Role.OUTPUT),
    ),
)
def group_norm(
    input: ArrayT,
    weight: Array | None,
    bias: Array | None,
    N: int,
    C: int,
    HxW: int,
    group: int,
    eps: float = 1e-5,
    *,
    out: Sequence[Array | None] | None = None,
    product: Product | str | None = None,
) -> tuple[ArrayT, ArrayT, ArrayT]:
    """Compute GroupNorm, with the statistics that its backward pass needs.

    Data is taken in the order ``(N, C, HxW)`` whatever its shape. Over the m elements of a sample's group,
    ``mean = Σx/m`` and ``rstd = 1/√(Σ(x − mean)²/m + eps)``; ``output = (x − mean)·rstd·weight + bias`` with weight
    and bias per channel.

    Parameters
    ----------
    input : array of float32, float16 or bfloat16
        ``N·C·HxW`` elements, 0 to 8 dimensions.
    weight, bias : array or None
        ``input``'s dtype or float32, one dtype for both, C elements.
    N, C, HxW, group : int
        Samples, channels, spatial positions per channel, groups; ``group`` divides C.
    eps : float
        Added to the variance.
    out : tuple of 3 arrays or None, optional
        Arrays to write to; None for each that the library allocates.
    product : Product or str, optional
        Check the call as this product's documents do.

    Returns
    -------
    output, mean, rstd
        ``output`` as ``input``; the statistics in float32 (``input``'s dtype for a product whose documents ask for it),
        shape ``[N, group]``.

    Examples
    --------
    >>> import numpy as np
    >>> from normgrad import group_norm
    >>> x = np.array([[0, 2, 4, 8]], np.float32)
    >>> output, mean, rstd = group_norm(x, None, None, 1, 4, 1, 2, eps=0)
    >>> output, mean, rstd
    (array([[-1.,  1., -1.,  1.]], dtype=float32), array([[1., 6.]], dtype=float32), array([[1. , 0.5]], dtype=float32))
    """
    return locals()  # type: ignore[return-value]
