"""The steps of synchronised BatchNorm, forward and backward. Dimension 1 of the data is the channel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from normgrad.contract.dtypes import FLOAT16, FLOAT32, INT32
from normgrad.contract.parameters import Attribute, Broken, Call, Dtypes, Extent, Role, Tensor
from normgrad.contract.products import Family, Product
from normgrad.contract.rules import (
    elements,
    flag,
    flagged,
    floats,
    one_of,
    preferring,
    preferring_float32,
    real,
    shape_is,
    shape_of,
)
from normgrad.operators.operator import operator
from normgrad.typing import Array, ArrayT

_DATA = (2, 8)
_VECTOR = (1, 1)
_COUNTER = (0, 8)


def _some_channels(name: str) -> Any:
    """A shape of any size with at least one channel."""

    def rule(call: Call) -> Extent:
        shape = call.shape(name)
        if shape[1] == 0:
            raise Broken(f"has the shape {shape}, and must have at least one channel (dimension 1)")
        return Extent(shape)

    return rule


_per_channel = shape_is(lambda call: (call.shape("input")[1],), "one per channel of {input}")
_like_input = preferring("input", floats)
_statistics = preferring_float32(floats)
_counts = one_of(INT32, FLOAT16, FLOAT32)


@operator(
    "aclnnBatchNormElemtBackward",
    Family.BATCH_NORM,
    (
        Tensor("grad_out", "gradOut", floats, _DATA, _some_channels("grad_out")),
        Tensor("input", "input", floats, _DATA, shape_of("grad_out")),
        Tensor("mean", "mean", floats, _VECTOR, _per_channel),
        Tensor("invstd", "invstd", floats, _VECTOR, _per_channel),
        Tensor("weight", "weight", floats, _VECTOR, _per_channel, optional=True),
        Tensor("sum_dy", "sumDy", floats, _VECTOR, _per_channel),
        Tensor("sum_dy_xmu", "sumDyXmu", floats, _VECTOR, _per_channel),
        Tensor("counter", "counter", _counts, _COUNTER),
        Tensor("grad_input", "gradInput", _like_input, _DATA, shape_of("input"), Role.OUTPUT),
    ),
)
def batch_norm_elemt_backward(
    grad_out: Array,
    input: ArrayT,
    mean: Array,
    invstd: Array,
    weight: Array | None,
    sum_dy: Array,
    sum_dy_xmu: Array,
    counter: Array,
    *,
    out: Array | None = None,
    product: Product | str | None = None,
) -> ArrayT:
    """Compute the gradient of the input: the last step of synchronised BatchNorm's backward pass.

    With ``n = Σ counter`` (one count per rank) and everything else per channel::

        grad_input = (grad_out − sum_dy/n − (input − mean)·invstd²·sum_dy_xmu/n)·invstd·weight

    Parameters
    ----------
    grad_out, input : array of float32, float16 or bfloat16
        One shape of 2 to 8 dimensions; dimension 1 is the channel. Any mix of dtypes, here and below.
    mean, invstd, sum_dy, sum_dy_xmu : array of float32, float16 or bfloat16
        Shape ``[C]``: the statistics of the whole batch, and its sums as ``batch_norm_reduce_backward`` returns them.
    weight : array or None
        Shape ``[C]``.
    counter : array of int32, float16 or float32
        How many elements per channel each rank has.
    out : array, optional
        The array to write to.
    product : Product or str, optional
        Check the call as this product's documents do.

    Returns
    -------
    grad_input
        An array of ``input``'s library, dtype and shape, on its device.

    Raises
    ------
    ContractError
        161001 for a missing array, 161002 for a broken rule, 561003 for a product without the operator.

    Examples
    --------
    >>> import numpy as np
    >>> from normgrad import batch_norm_elemt_backward
    >>> x = np.arange(8, dtype=np.float32).reshape(1, 2, 4)
    >>> zero, one = np.zeros(2, np.float32), np.ones(2, np.float32)
    >>> batch_norm_elemt_backward(x, x, zero, one, one, zero, one, np.array([5, 5], np.int32))
    array([[[0. , 0.9, 1.8, 2.7],
            [3.6, 4.5, 5.4, 6.3]]], dtype=float32)
    """
    return locals()  # type: ignore[return-value]


@operator(
    "aclnnBatchNormStats",
    Family.BATCH_NORM,
    (
        Tensor("input", "input", floats, _DATA, _some_channels("input")),
        Attribute("eps", "eps", real),
        Tensor("mean", "mean", _statistics, _VECTOR, _per_channel, Role.OUTPUT),
        Tensor("invstd", "invstd", _statistics, _VECTOR, _per_channel, Role.OUTPUT),
    ),
)
def batch_norm_stats(
    input: ArrayT, eps: float = 1e-5, *, out: Sequence[Array | None] | None = None, product: Product | str | None = None
) -> tuple[ArrayT, ArrayT]:
    """Compute the statistics of each channel over all other dimensions: the first step of BatchNorm, on one rank.

    ``mean = Σx/n`` and ``invstd = 1/√(Σ(x − mean)²/n + eps)``.

    Parameters
    ----------
    input : array of float32, float16 or bfloat16
        2 to 8 dimensions; dimension 1 is the channel.
    eps : float
        Added to the variance.
    out : tuple of 2 arrays or None, optional
        Arrays to write to; None for each that the library allocates.
    product : Product or str, optional
        Check the call as this product's documents do.

    Returns
    -------
    mean, invstd
        float32, shape ``[C]``.

    Examples
    --------
    >>> import numpy as np
    >>> from normgrad import batch_norm_stats
    >>> batch_norm_stats(np.array([[0, 4], [2, 8]], np.float32), eps=0)
    (array([1., 6.], dtype=float32), array([1. , 0.5], dtype=float32))
    """
    return locals()  # type: ignore[return-value]


def _ranks_by_channels(call: Call) -> Extent:
    """Any number of ranks, every one with a statistic per channel."""
    channels, shape = call.shape("input")[1], call.shape("mean")
    return Extent((shape[0], channels), why="ranks × channels of {input}")


_one_per_rank = elements(lambda call: call.shape("mean")[0], "one per rank, as rows of {mean}")


@operator(
    "aclnnBatchNormGatherStatsWithCounts",
    Family.BATCH_NORM,
    (
        Tensor("input", "input", floats, _DATA, _some_channels("input")),
        Tensor("mean", "mean", floats, (2, 2), _ranks_by_channels),
        Tensor("invstd", "invstd", floats, (2, 2), shape_of("mean")),
        Tensor("running_mean", "runningMean", floats, _VECTOR, _per_channel, Role.IN_PLACE, optional=True),
        Tensor("running_var", "runningVar", floats, _VECTOR, _per_channel, Role.IN_PLACE, optional=True),
        Attribute("momentum", "momentum", real),
        Attribute("eps", "eps", real),
        Tensor("counts", "counts", _counts, _COUNTER, _one_per_rank),
        Tensor("mean_all", "meanAll", _statistics, _VECTOR, _per_channel, Role.OUTPUT),
        Tensor("invstd_all", "invstdAll", _statistics, _VECTOR, _per_channel, Role.OUTPUT),
    ),
)
def batch_norm_gather_stats_with_counts(
    input: ArrayT,
    mean: Array,
    invstd: Array,
    running_mean: Array | None,
    running_var: Array | None,
    momentum: float,
    eps: float,
    counts: Array,
    *,
    out: Sequence[Array | None] | None = None,
    product: Product | str | None = None,
) -> tuple[ArrayT, ArrayT]:
    """Compute the statistics of the whole batch from those of its ranks.

    With ``n = Σ counts``, ``mean_all = Σ mean·counts/n``, ``var = 1/invstd² − eps`` and
    ``S = Σ (var + (mean − mean_all)²)·counts``, the result is ``mean_all`` and ``1/√(S/n + eps)``. A rank with
    count 0 adds nothing, whatever its statistics are.

    Parameters
    ----------
    input : array of float32, float16 or bfloat16
        A rank's data, of 2 to 8 dimensions: only its channels (dimension 1) and its array library matter.
    mean, invstd : array of float32, float16 or bfloat16
        Shape ``[ranks, C]``.
    running_mean, running_var : array or None
        Shape ``[C]``; move in place to ``(1 − momentum)·running + momentum·new``, the variance with ``S/(n − 1)``.
    momentum, eps : float
        The share of the new statistics in the running ones; what was added to the variances.
    counts : array of int32, float16 or float32
        One per rank.
    out : tuple of 2 arrays or None, optional
        Arrays to write to; None for each that the library allocates.
    product : Product or str, optional
        Check the call as this product's documents do.

    Returns
    -------
    mean, invstd
        float32, shape ``[C]``.

    Examples
    --------
    >>> import numpy as np
    >>> from normgrad import batch_norm_gather_stats_with_counts as gather
    >>> x = np.zeros((4, 1), np.float32)
    >>> mean, invstd = np.array([[0], [3]], np.float32), np.array([[0.5], [0.5]], np.float32)
    >>> gather(x, mean, invstd, None, None, 0.1, 0.0, np.array([3, 1], np.int32))
    (array([0.75], dtype=float32), array([0.41931...], dtype=float32))
    """
    return locals()  # type: ignore[return-value]


@operator(
    "aclnnBatchNormElemt",
    Family.BATCH_NORM,
    (
        Tensor("input", "input", floats, _DATA, _some_channels("input")),
        Tensor("weight", "weight", floats, _VECTOR, _per_channel, optional=True),
        Tensor("bias", "bias", floats, _VECTOR, _per_channel, optional=True),
        Tensor("mean", "mean", floats, _VECTOR, _per_channel),
        Tensor("invstd", "invstd", floats, _VECTOR, _per_channel),
        Attribute("eps", "eps", real),
        Tensor("output", "output", _like_input, _DATA, shape_of("input"), Role.OUTPUT),
    ),
)
def batch_norm_elemt(
    input: ArrayT,
    weight: Array | None,
    bias: Array | None,
    mean: Array,
    invstd: Array,
    eps: float = 1e-5,
    *,
    out: Array | None = None,
    product: Product | str | None = None,
) -> ArrayT:
    """Compute the output, the last step of synchronised BatchNorm: ``output = (input − mean)·invstd·weight + bias``.

    Parameters
    ----------
    input : array of float32, float16 or bfloat16
        2 to 8 dimensions; dimension 1 is the channel.
    weight, bias : array or None
        Shape ``[C]``, any mix of dtypes, here and below.
    mean, invstd : array of float32, float16 or bfloat16
        Shape ``[C]``.
    eps : float
        Takes no part: ``invstd`` holds it already.
    out : array, optional
        The array to write to.
    product : Product or str, optional
        Check the call as this product's documents do.

    Returns
    -------
    output
        An array of ``input``'s library, dtype and shape, on its device.

    Examples
    --------
    >>> import numpy as np
    >>> from normgrad import batch_norm_elemt
    >>> one_each = [np.array([v, v], np.float32) for v in (3, 1, 2, 0.5)]
    >>> batch_norm_elemt(np.array([[2, 4]], np.float32), *one_each)
    array([[1., 4.]], dtype=float32)
    """
    return locals()  # type: ignore[return-value]


def _parameter_dtype(call: Call) -> Dtypes:
    """Any dtype; where the library makes the array, the weight's, or the statistics' without one."""
    return preferring("weight", preferring("mean", floats))(call)


@operator(
    "aclnnBatchNormReduceBackward",
    Family.BATCH_NORM,
    (
        Tensor("grad_out", "gradOut", floats, _DATA, _some_channels("grad_out")),
        Tensor("input", "input", floats, _DATA, shape_of("grad_out")),
        Tensor("mean", "mean", floats, _VECTOR, _per_channel),
        Tensor("invstd", "invstd", floats, _VECTOR, _per_channel),
        Tensor("weight", "weight", floats, _VECTOR, _per_channel, optional=True),
        Attribute("input_g", "inputG", flag),
        Attribute("weight_g", "weightG", flag),
        Attribute("bias_g", "biasG", flag),
        Tensor("sum_dy", "sumDy", _statistics, _VECTOR, _per_channel, Role.OUTPUT, wanted=flagged("input_g")),
        Tensor("sum_dy_xmu", "sumDyXmu", _statistics, _VECTOR, _per_channel, Role.OUTPUT, wanted=flagged("input_g")),
        Tensor(
            "grad_weight",
            "gradWeight",
            _parameter_dtype,
            _VECTOR,
            _per_channel,
            Role.OUTPUT,
            wanted=flagged("weight_g"),
        ),
        Tensor("grad_bias", "gradBias", _parameter_dtype, _VECTOR, _per_channel, Role.OUTPUT, wanted=flagged("bias_g")),
    ),
)
def batch_norm_reduce_backward(
    grad_out: Array,
    input: ArrayT,
    mean: Array,
    invstd: Array,
    weight: Array | None,
    input_g: bool = True,
    weight_g: bool = True,
    bias_g: bool = True,
    *,
    out: Sequence[Array | None] | None = None,
    product: Product | str | None = None,
) -> tuple[ArrayT, ArrayT, ArrayT, ArrayT]:
    """Compute the sums over a rank's data that BatchNorm's backward pass needs, per channel.

    ``sum_dy = Σ grad_out``, ``sum_dy_xmu = Σ grad_out·(input − mean)``, ``grad_weight = sum_dy_xmu·invstd``,
    ``grad_bias = sum_dy``.

    Parameters
    ----------
    grad_out, input : array of float32, float16 or bfloat16
        One shape of 2 to 8 dimensions; dimension 1 is the channel. Any mix of dtypes, here and below.
    mean, invstd : array of float32, float16 or bfloat16
        Shape ``[C]``.
    weight : array or None
        Shape ``[C]``; gives the gradients their dtype and takes no part otherwise.
    input_g, weight_g, bias_g : bool
        Whether the two sums, ``grad_weight`` and ``grad_bias`` are requested.
    out : tuple of 4 arrays or None, optional
        Arrays to write to; None for each that the library allocates.
    product : Product or str, optional
        Check the call as this product's documents do.

    Returns
    -------
    sum_dy, sum_dy_xmu, grad_weight, grad_bias
        Shape ``[C]``; the sums in float32, the gradients in ``weight``'s dtype (``mean``'s without one).

    Examples
    --------
    >>> import numpy as np
    >>> from normgrad import batch_norm_reduce_backward
    >>> x = np.array([[1, 2], [3, 4]], np.float32)
    >>> mean, invstd = np.array([2, 3], np.float32), np.array([1, 0.5], np.float32)
    >>> batch_norm_reduce_backward(x, x, mean, invstd, None)[1:3]
    (array([2., 2.], dtype=float32), array([2., 1.], dtype=float32))
    """
    return locals()  # type: ignore[return-value]
