"""PyTorch: its own operators, and what torch.compile makes of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from normgrad.bench.cases import Case
from normgrad.bench.implementations.implementation import Implementation, Role, Unavailable, results_of
from normgrad.bench.tensors import arguments_as_torch
from normgrad.bench.workload import Workload

Prepared = Callable[[], Any]  # what is timed; gives a tensor (or None) per output of the operator


class PyTorch:
    """The operators as they are. They allocate their results."""

    name = "PyTorch"

    def prepare(self, work: Workload) -> Iterable[Implementation]:
        """PyTorch's operator, or the nearest thing to it."""
        import torch

        with torch.no_grad():
            arguments = with_own_statistics(work.case.operator, arguments_as_torch(work.arguments, work.device))
            run = operator(work.case.operator, arguments, work.device)
        yield Implementation(self.name, Role.PEER, run, partial(results_of, run))


def operator(name: str, arguments: dict[str, Any], device: str) -> Prepared:
    """Return PyTorch's operator on tensors by parameter name, or the nearest thing to it; Unavailable where none is."""
    table = _ANY_DEVICE | (_CUDA if device == "cuda" else _CPU)
    if name not in table:
        raise Unavailable(f"PyTorch has no {name} on {device}")
    return table[name](arguments)


def with_own_statistics(name: str, a: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a backward pass with statistics of PyTorch's own forward pass, in the dtype it wants."""
    forward = {"layer_norm_backward": _layer_norm, "group_norm_backward": _group_norm}.get(name)
    if forward is None:
        return a
    _, mean, rstd = forward({"bias": None} | a)()
    return a | {"mean": mean, "rstd": rstd}


class CompiledPyTorch:
    """The operators, or the formulas where PyTorch has no operator, through torch.compile.

    Without autograd around it: the time of the compiled kernel alone.
    """

    name = "torch.compile"

    def __init__(self, cases: frozenset[Case] | None = None) -> None:
        self._cases = cases

    def prepare(self, work: Workload) -> Iterable[Implementation]:
        """Compile for the workload's sizes; takes seconds."""
        import torch

        if self._cases is not None and work.case not in self._cases:
            raise Unavailable("it compiles for seconds, and only in the cases chosen for it")
        if work.case.operator not in _FORMULAS:
            raise Unavailable(f"there is no formula of {work.case.operator} to compile")
        torch.compiler.reset()  # every case is compiled for its own sizes, and none counts as a recompilation
        with torch.no_grad():
            arguments = with_own_statistics(work.case.operator, arguments_as_torch(work.arguments, work.device))
        function, values = _FORMULAS[work.case.operator](arguments)
        compiled = torch.compile(function, dynamic=False, fullgraph=True)
        try:
            with torch.no_grad():
                compiled(*values)
        except Exception as error:  # a missing compiler is reported in many ways
            raise Unavailable(f"torch.compile failed: {type(error).__name__}") from error
        run = partial(_without_grad, compiled, values)
        yield Implementation(self.name, Role.PEER, run, partial(results_of, run))


def _without_grad(function: Callable[..., Any], values: Sequence[Any]) -> Any:
    import torch

    with torch.no_grad():
        return function(*values)


def _aten(name: str) -> Any:
    import torch

    return getattr(torch.ops.aten, name).default


# Each takes the arguments by name.


def _layer_norm_backward(a: dict[str, Any]) -> Prepared:
    values = _layer_norm_backward_values(a)
    return partial(_aten("native_layer_norm_backward"), *values)


def _layer_norm_backward_values(a: dict[str, Any]) -> tuple[Any, ...]:
    statistics, mask = (a["mean"], a["rstd"]), [True, True, True]
    return a["grad_out"], a["input"], list(a["normalized_shape"]), *statistics, a["weight"], a.get("bias"), mask


def _layer_norm(a: dict[str, Any]) -> Prepared:
    operator = _aten("native_layer_norm")
    return partial(operator, a["input"], list(a["normalized_shape"]), a["weight"], a["bias"], a.get("eps", 1e-5))


def _group_norm_backward(a: dict[str, Any]) -> Prepared:
    return partial(_group_norm_backward_operator(a), *_group_norm_backward_values(a))


def _group_norm_backward_operator(a: dict[str, Any]) -> Any:
    """PyTorch's operator; on a GPU with the contiguous copies that it wants and that its own autograd makes."""
    operator = _aten("native_group_norm_backward")
    if not a["input"].is_cuda:
        return operator
    return lambda dy, x, *rest: operator(dy.contiguous(), x.contiguous(), *rest)


def _group_norm_backward_values(a: dict[str, Any]) -> tuple[Any, ...]:
    sizes = (a["N"], a["C"], a["HxW"], a["group"])
    return a["grad_out"], a["input"], a["mean"], a["rstd"], a["weight"], *sizes, [True, True, True]


def _group_norm(a: dict[str, Any]) -> Prepared:
    rest = (a["weight"], a["bias"], a["N"], a["C"], a["HxW"], a["group"], a.get("eps", 1e-5))
    operator, x = _aten("native_group_norm"), a["input"]
    return (lambda: operator(x.contiguous(), *rest)) if x.is_cuda else partial(operator, x, *rest)


def _batch_norm_stats_on_cpu(a: dict[str, Any]) -> Prepared:
    return partial(_var_mean, a["input"], a["eps"])


def _var_mean(x: Any, eps: float) -> tuple[Any, Any]:
    import torch

    variance, mean = torch.var_mean(x, dim=[0, *range(2, x.dim())], correction=0)
    return mean, torch.rsqrt(variance + eps)


def _batch_norm_elemt_on_cpu(a: dict[str, Any]) -> Prepared:
    """BatchNorm as in evaluation, whose running statistics are the given ones."""
    variance = 1 / a["invstd"] ** 2 - a["eps"]
    operator = _aten("native_batch_norm")
    run = partial(operator, a["input"], a["weight"], a["bias"], a["mean"], variance, False, 0.1, a["eps"])
    return lambda: run()[0]


def _batch_norm_reduce_backward_on_cpu(a: dict[str, Any]) -> Prepared:
    """The gradients of weight and bias; the sums themselves PyTorch keeps to itself."""
    operator = _aten("native_batch_norm_backward")
    statistics = (None, None, a["mean"], a["invstd"])
    run = partial(operator, a["grad_out"], a["input"], a["weight"], *statistics, True, 1e-5, [False, True, True])
    return lambda: (None, None, *run()[1:])


_BATCH_NORM_ON_CUDA = {
    "batch_norm_stats": ("batch_norm_stats", ("input", "eps")),
    "batch_norm_elemt": ("batch_norm_elemt", ("input", "weight", "bias", "mean", "invstd", "eps")),
    "batch_norm_reduce_backward": (
        "batch_norm_backward_reduce",
        ("grad_out", "input", "mean", "invstd", "weight", "input_g", "weight_g", "bias_g"),
    ),
    "batch_norm_elemt_backward": (
        "batch_norm_backward_elemt",
        ("grad_out", "input", "mean", "invstd", "weight", "sum_dy", "sum_dy_xmu", "counter"),
    ),
    "batch_norm_gather_stats_with_counts": (
        "batch_norm_gather_stats_with_counts",
        ("input", "mean", "invstd", "running_mean", "running_var", "momentum", "eps", "counts"),
    ),
}


def _on_cuda(name: str, a: dict[str, Any]) -> Prepared:
    operator, parameters = _BATCH_NORM_ON_CUDA[name]
    return partial(_aten(operator), *(a[parameter] for parameter in parameters))


Table = dict[str, Callable[[dict[str, Any]], Prepared]]
_ANY_DEVICE: Table = {
    "layer_norm_backward": _layer_norm_backward,
    "layer_norm": _layer_norm,
    "group_norm_backward": _group_norm_backward,
    "group_norm": _group_norm,
}
_CPU: Table = {
    "batch_norm_stats": _batch_norm_stats_on_cpu,
    "batch_norm_elemt": _batch_norm_elemt_on_cpu,
    "batch_norm_reduce_backward": _batch_norm_reduce_backward_on_cpu,
}
_CUDA: Table = {name: partial(_on_cuda, name) for name in _BATCH_NORM_ON_CUDA}


# What torch.compile is given: a function and its arguments.


def _per_channel(vector: Any, x: Any) -> Any:
    return vector.reshape(1, -1, *(1 for _ in x.shape[2:]))


def _elemt_backward(
    dy: Any, x: Any, mean: Any, invstd: Any, weight: Any, sum_dy: Any, sum_xmu: Any, counter: Any
) -> Any:
    scale = _per_channel(invstd * weight, x)
    n = counter.sum()
    shift, slope = _per_channel(sum_dy / n, x), _per_channel(invstd**2 * sum_xmu / n, x)
    return ((dy - shift - (x - _per_channel(mean, x)) * slope) * scale).to(x.dtype)


def _elemt(x: Any, weight: Any, bias: Any, mean: Any, invstd: Any) -> Any:
    return ((x - _per_channel(mean, x)) * _per_channel(invstd * weight, x) + _per_channel(bias, x)).to(x.dtype)


def _reduce_backward(dy: Any, x: Any, mean: Any, invstd: Any) -> tuple[Any, ...]:
    others = [0, *range(2, x.dim())]
    dy32 = dy.float()
    sum_dy = dy32.sum(others)
    sum_dy_xmu = (dy32 * (x - _per_channel(mean, x))).sum(others)
    return sum_dy, sum_dy_xmu, sum_dy_xmu * invstd, sum_dy


Formula = tuple[Callable[..., Any], tuple[Any, ...]]


def _named(function: Callable[..., Any], *names: str) -> Callable[[dict[str, Any]], Formula]:
    return lambda a: (function, tuple(a[name] for name in names))


_FORMULAS: dict[str, Callable[[dict[str, Any]], Formula]] = {
    "layer_norm_backward": lambda a: (_aten("native_layer_norm_backward"), _layer_norm_backward_values(a)),
    "group_norm_backward": lambda a: (_group_norm_backward_operator(a), _group_norm_backward_values(a)),
    "layer_norm": lambda a: (_layer_norm(a), ()),
    "group_norm": lambda a: (_group_norm(a), ()),
    "batch_norm_stats": _named(lambda x, eps: _var_mean(x.float(), eps), "input", "eps"),
    "batch_norm_elemt": _named(_elemt, "input", "weight", "bias", "mean", "invstd"),
    "batch_norm_reduce_backward": _named(_reduce_backward, "grad_out", "input", "mean", "invstd"),
    "batch_norm_elemt_backward": _named(
        _elemt_backward,
        *("grad_out", "input", "mean", "invstd", "weight", "sum_dy", "sum_dy_xmu", "counter"),
    ),
}
