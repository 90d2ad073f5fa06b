# Written by tests/support/stubs.py from the annotations of the operators' functions.

from collections.abc import Sequence
from typing import Any, overload

from numpy.typing import NDArray

from normgrad.contract.plan import Plan
from normgrad.contract.products import Product
from normgrad.operators.operator import Operator as Operator
from normgrad.typing import Array, ArrayT

OPERATORS: dict[str, Operator]

class _layer_norm_backward(Operator):
    @overload
    def __call__(
        self,
        grad_out: Array,
        input: NDArray[Any],
        normalized_shape: int | Sequence[int],
        mean: Array,
        rstd: Array,
        weight: Array | None = None,
        bias: Array | None = None,
        *,
        out: Sequence[Array | None] | None = None,
        product: Product | str | None = None,
    ) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]: ...
    @overload
    def __call__(
        self,
        grad_out: Array,
        input: ArrayT,
        normalized_shape: int | Sequence[int],
        mean: Array,
        rstd: Array,
        weight: Array | None = None,
        bias: Array | None = None,
        *,
        out: Sequence[Array | None] | None = None,
        product: Product | str | None = None,
    ) -> tuple[ArrayT, ArrayT, ArrayT]: ...
    @overload
    def __call__(
        self,
        grad_out: Array,
        input: NDArray[Any],
        normalized_shape: int | Sequence[int],
        mean: Array,
        rstd: Array,
        weight: Array | None = None,
        bias: Array | None = None,
        output_mask: Sequence[bool] = (True, True, True),
        *,
        out: Sequence[Array | None] | None = None,
        product: Product | str | None = None,
    ) -> tuple[NDArray[Any] | Any, NDArray[Any] | Any, NDArray[Any] | Any]: ...
    @overload
    def __call__(
        self,
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
    ) -> tuple[ArrayT | Any, ArrayT | Any, ArrayT | Any]: ...
    def plan(
        self,
        grad_out: Array,
        input: Array,
        normalized_shape: int | Sequence[int],
        mean: Array,
        rstd: Array,
        weight: Array | None = None,
        bias: Array | None = None,
        output_mask: Sequence[bool] = (True, True, True),
        *,
        out: Sequence[Array | None],
        product: Product | str | None = None,
    ) -> Plan: ...

layer_norm_backward: _layer_norm_backward

class _group_norm_backward(Operator):
    @overload
    def __call__(
        self,
        grad_out: Array,
        input: NDArray[Any],
        mean: Array,
        rstd: Array,
        weight: Array | None,
        N: int,
        C: int,
        HxW: int,
        group: int,
        *,
        out: Sequence[Array | None] | None = None,
        product: Product | str | None = None,
    ) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]: ...
    @overload
    def __call__(
        self,
        grad_out: Array,
        input: ArrayT,
        mean: Array,
        rstd: Array,
        weight: Array | None,
        N: int,
        C: int,
        HxW: int,
        group: int,
        *,
        out: Sequence[Array | None] | None = None,
        product: Product | str | None = None,
    ) -> tuple[ArrayT, ArrayT, ArrayT]: ...
    @overload
    def __call__(
        self,
        grad_out: Array,
        input: NDArray[Any],
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
    ) -> tuple[NDArray[Any] | Any, NDArray[Any] | Any, NDArray[Any] | Any]: ...
    @overload
    def __call__(
        self,
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
    ) -> tuple[ArrayT | Any, ArrayT | Any, ArrayT | Any]: ...
    def plan(
        self,
        grad_out: Array,
        input: Array,
        mean: Array,
        rstd: Array,
        weight: Array | None,
        N: int,
        C: int,
        HxW: int,
        group: int,
        output_mask: Sequence[bool] = (True, True, True),
        *,
        out: Sequence[Array | None],
        product: Product | str | None = None,
    ) -> Plan: ...

group_norm_backward: _group_norm_backward

class _batch_norm_elemt_backward(Operator):
    @overload
    def __call__(
        self,
        grad_out: Array,
        input: NDArray[Any],
        mean: Array,
        invstd: Array,
        weight: Array | None,
        sum_dy: Array,
        sum_dy_xmu: Array,
        counter: Array,
        *,
        out: Array | None = None,
        product: Product | str | None = None,
    ) -> NDArray[Any]: ...
    @overload
    def __call__(
        self,
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
    ) -> ArrayT: ...
    def plan(
        self,
        grad_out: Array,
        input: Array,
        mean: Array,
        invstd: Array,
        weight: Array | None,
        sum_dy: Array,
        sum_dy_xmu: Array,
        counter: Array,
        *,
        out: Array,
        product: Product | str | None = None,
    ) -> Plan: ...

batch_norm_elemt_backward: _batch_norm_elemt_backward

class _layer_norm(Operator):
    @overload
    def __call__(
        self,
        input: NDArray[Any],
        normalized_shape: int | Sequence[int],
        weight: Array | None = None,
        bias: Array | None = None,
        eps: float = 1e-05,
        *,
        out: Sequence[Array | None] | None = None,
        product: Product | str | None = None,
    ) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]: ...
    @overload
    def __call__(
        self,
        input: ArrayT,
        normalized_shape: int | Sequence[int],
        weight: Array | None = None,
        bias: Array | None = None,
        eps: float = 1e-05,
        *,
        out: Sequence[Array | None] | None = None,
        product: Product | str | None = None,
    ) -> tuple[ArrayT, ArrayT, ArrayT]: ...
    def plan(
        self,
        input: Array,
        normalized_shape: int | Sequence[int],
        weight: Array | None = None,
        bias: Array | None = None,
        eps: float = 1e-05,
        *,
        out: Sequence[Array | None],
        product: Product | str | None = None,
    ) -> Plan: ...

layer_norm: _layer_norm

class _group_norm(Operator):
    @overload
    def __call__(
        self,
        input: NDArray[Any],
        weight: Array | None,
        bias: Array | None,
        N: int,
        C: int,
        HxW: int,
        group: int,
        eps: float = 1e-05,
        *,
        out: Sequence[Array | None] | None = None,
        product: Product | str | None = None,
    ) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]: ...
    @overload
    def __call__(
        self,
        input: ArrayT,
        weight: Array | None,
        bias: Array | None,
        N: int,
        C: int,
        HxW: int,
        group: int,
        eps: float = 1e-05,
        *,
        out: Sequence[Array | None] | None = None,
        product: Product | str | None = None,
    ) -> tuple[ArrayT, ArrayT, ArrayT]: ...
    def plan(
        self,
        input: Array,
        weight: Array | None,
        bias: Array | None,
        N: int,
        C: int,
        HxW: int,
        group: int,
        eps: float = 1e-05,
        *,
        out: Sequence[Array | None],
        product: Product | str | None = None,
    ) -> Plan: ...

group_norm: _group_norm

class _batch_norm_stats(Operator):
    @overload
    def __call__(
        self,
        input: NDArray[Any],
        eps: float = 1e-05,
        *,
        out: Sequence[Array | None] | None = None,
        product: Product | str | None = None,
    ) -> tuple[NDArray[Any], NDArray[Any]]: ...
    @overload
    def __call__(
        self,
        input: ArrayT,
        eps: float = 1e-05,
        *,
        out: Sequence[Array | None] | None = None,
        product: Product | str | None = None,
    ) -> tuple[ArrayT, ArrayT]: ...
    def plan(
        self,
        input: Array,
        eps: float = 1e-05,
        *,
        out: Sequence[Array | None],
        product: Product | str | None = None,
    ) -> Plan: ...

batch_norm_stats: _batch_norm_stats

class _batch_norm_gather_stats_with_counts(Operator):
    @overload
    def __call__(
        self,
        input: NDArray[Any],
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
    ) -> tuple[NDArray[Any], NDArray[Any]]: ...
    @overload
    def __call__(
        self,
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
    ) -> tuple[ArrayT, ArrayT]: ...
    def plan(
        self,
        input: Array,
        mean: Array,
        invstd: Array,
        running_mean: Array | None,
        running_var: Array | None,
        momentum: float,
        eps: float,
        counts: Array,
        *,
        out: Sequence[Array | None],
        product: Product | str | None = None,
    ) -> Plan: ...

batch_norm_gather_stats_with_counts: _batch_norm_gather_stats_with_counts

class _batch_norm_elemt(Operator):
    @overload
    def __call__(
        self,
        input: NDArray[Any],
        weight: Array | None,
        bias: Array | None,
        mean: Array,
        invstd: Array,
        eps: float = 1e-05,
        *,
        out: Array | None = None,
        product: Product | str | None = None,
    ) -> NDArray[Any]: ...
    @overload
    def __call__(
        self,
        input: ArrayT,
        weight: Array | None,
        bias: Array | None,
        mean: Array,
        invstd: Array,
        eps: float = 1e-05,
        *,
        out: Array | None = None,
        product: Product | str | None = None,
    ) -> ArrayT: ...
    def plan(
        self,
        input: Array,
        weight: Array | None,
        bias: Array | None,
        mean: Array,
        invstd: Array,
        eps: float = 1e-05,
        *,
        out: Array,
        product: Product | str | None = None,
    ) -> Plan: ...

batch_norm_elemt: _batch_norm_elemt

class _batch_norm_reduce_backward(Operator):
    @overload
    def __call__(
        self,
        grad_out: Array,
        input: NDArray[Any],
        mean: Array,
        invstd: Array,
        weight: Array | None,
        *,
        out: Sequence[Array | None] | None = None,
        product: Product | str | None = None,
    ) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any]]: ...
    @overload
    def __call__(
        self,
        grad_out: Array,
        input: ArrayT,
        mean: Array,
        invstd: Array,
        weight: Array | None,
        *,
        out: Sequence[Array | None] | None = None,
        product: Product | str | None = None,
    ) -> tuple[ArrayT, ArrayT, ArrayT, ArrayT]: ...
    @overload
    def __call__(
        self,
        grad_out: Array,
        input: NDArray[Any],
        mean: Array,
        invstd: Array,
        weight: Array | None,
        input_g: bool = True,
        weight_g: bool = True,
        bias_g: bool = True,
        *,
        out: Sequence[Array | None] | None = None,
        product: Product | str | None = None,
    ) -> tuple[NDArray[Any] | Any, NDArray[Any] | Any, NDArray[Any] | Any, NDArray[Any] | Any]: ...
    @overload
    def __call__(
        self,
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
    ) -> tuple[ArrayT | Any, ArrayT | Any, ArrayT | Any, ArrayT | Any]: ...
    def plan(
        self,
        grad_out: Array,
        input: Array,
        mean: Array,
        invstd: Array,
        weight: Array | None,
        input_g: bool = True,
        weight_g: bool = True,
        bias_g: bool = True,
        *,
        out: Sequence[Array | None],
        product: Product | str | None = None,
    ) -> Plan: ...

batch_norm_reduce_backward: _batch_norm_reduce_backward
