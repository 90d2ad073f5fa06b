"""Other implementations of the same operators, called on the same numbers."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping
from typing import Any

import ml_dtypes
import numpy as np

Arguments = dict[str, Any]
Results = dict[str, Any]
Peer = Callable[[str, Arguments, str], tuple[Arguments, Results] | None]

_STATISTICS = ("mean", "rstd")
_PARAMETERS = ("weight", "bias")


def to_torch(value: Any, device: str) -> Any:
    """An array as a tensor on a device; anything else as it is."""
    import torch

    if not isinstance(value, np.ndarray):
        return value
    value = np.ascontiguousarray(value)
    if value.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(value.view(np.int16).copy()).view(torch.bfloat16).to(device)
    return torch.from_numpy(value.copy()).to(device)


def to_numpy(value: Any) -> np.ndarray | None:
    """A result as an array on the host."""
    import torch

    if not isinstance(value, torch.Tensor):
        return value
    value = value.detach().cpu().contiguous()
    if value.dtype is torch.bfloat16:
        return value.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return value.numpy()


def pytorch(operator: str, arguments: Arguments, device: str) -> tuple[Arguments, Results] | None:
    """PyTorch's own kernels, on the call as it is or on the nearest that they take.

    Where they do not take 16-bit weights beside float32 statistics, with float32 weights; or else with narrower
    statistics. What the call was in the end comes back beside its results.
    """
    call = _PYTORCH.get(operator)
    if call is None:
        return None
    wide = {n: arguments[n].astype(np.float32) for n in _PARAMETERS if arguments.get(n) is not None}
    narrow = {n: arguments[n].astype(arguments["input"].dtype) for n in _STATISTICS if n in arguments}
    changes = [{}, wide, narrow] if arguments["input"].dtype != np.float32 else [{}]
    for changed in changes:
        given = {**arguments, **changed}
        try:
            results = call({name: to_torch(value, device) for name, value in given.items()}, device)
        except (RuntimeError, NotImplementedError):
            continue
        return None if results is None else (given, {name: to_numpy(value) for name, value in results.items()})
    return None


def _layer_norm_backward(a: Mapping[str, Any], device: str) -> Results:
    import torch

    found = torch.ops.aten.native_layer_norm_backward(
        a["grad_out"], a["input"], a["normalized_shape"], a["mean"], a["rstd"], a["weight"], a["bias"], [True] * 3
    )
    return dict(zip(("grad_input", "grad_weight", "grad_bias"), found, strict=True))


def _group_norm_backward(a: Mapping[str, Any], device: str) -> Results:
    import torch

    sizes = [a[name] for name in ("N", "C", "HxW", "group")]
    found = torch.ops.aten.native_group_norm_backward(
        a["grad_out"], a["input"], a["mean"], a["rstd"], a["weight"], *sizes, [True] * 3
    )
    return dict(zip(("grad_input", "grad_weight", "grad_bias"), found, strict=True))


def _layer_norm(a: Mapping[str, Any], device: str) -> Results:
    import torch

    found = torch.native_layer_norm(a["input"], a["normalized_shape"], a["weight"], a["bias"], 1e-5)
    return dict(zip(("output", "mean", "rstd"), found, strict=True))


def _group_norm(a: Mapping[str, Any], device: str) -> Results:
    import torch

    sizes = [a[name] for name in ("N", "C", "HxW", "group")]
    found = torch.native_group_norm(a["input"], a["weight"], a["bias"], *sizes, 1e-5)
    return dict(zip(("output", "mean", "rstd"), found, strict=True))


def _batch_norm_stats(a: Mapping[str, Any], device: str) -> Results:
    import torch

    if device != "cpu":
        return dict(zip(("mean", "invstd"), torch.batch_norm_stats(a["input"], 1e-5), strict=True))
    found = torch.native_batch_norm(a["input"], None, None, None, None, True, 0.0, 1e-5)
    return {"mean": found[1], "invstd": found[2]}


def _batch_norm_reduce_backward(a: Mapping[str, Any], device: str) -> Results:
    import torch

    statistics = (a["mean"], a["invstd"])
    if device != "cpu":
        found = torch.batch_norm_backward_reduce(a["grad_out"], a["input"], *statistics, a["weight"], True, True, True)
        return dict(zip(("sum_dy", "sum_dy_xmu", "grad_weight", "grad_bias"), found, strict=True))
    weight = a["weight"]
    _, grad_weight, grad_bias = torch.ops.aten.native_batch_norm_backward(
        a["grad_out"], a["input"], weight, None, None, *statistics, True, 1e-5, [False, True, True]
    )
    return {"grad_weight": grad_weight, "grad_bias": grad_bias}


def _batch_norm_elemt_backward(a: Mapping[str, Any], device: str) -> Results | None:
    import torch

    if device == "cpu":
        return None
    sums = (a["sum_dy"], a["sum_dy_xmu"], a["counter"])
    return {
        "grad_input": torch.batch_norm_backward_elemt(
            a["grad_out"], a["input"], a["mean"], a["invstd"], a["weight"], *sums
        )
    }


def _batch_norm_elemt(a: Mapping[str, Any], device: str) -> Results | None:
    import torch

    if device == "cpu":
        return None
    parameters = (a["weight"], a["bias"])
    return {"output": torch.batch_norm_elemt(a["input"], *parameters, a["mean"], a["invstd"], 1e-5)}


_PYTORCH: dict[str, Callable[[Mapping[str, Any], str], Results | None]] = {
    "layer_norm_backward": _layer_norm_backward,
    "group_norm_backward": _group_norm_backward,
    "batch_norm_elemt_backward": _batch_norm_elemt_backward,
    "layer_norm": _layer_norm,
    "group_norm": _group_norm,
    "batch_norm_stats": _batch_norm_stats,
    "batch_norm_elemt": _batch_norm_elemt,
    "batch_norm_reduce_backward": _batch_norm_reduce_backward,
}


def _rows(a: Mapping[str, Any]) -> list[Any]:
    """grad_out and input as the two-dimensional tensors that the kernels are written for."""
    return [a[name].reshape(-1, a["weight"].numel()) for name in ("grad_out", "input")]


def liger(operator: str, a: Mapping[str, Any]) -> tuple[Any, ...] | None:
    """Liger-Kernel's three gradients."""
    if operator == "layer_norm_backward":
        from liger_kernel.ops.layer_norm import layer_norm_backward

        statistics = (a["mean"].flatten(), a["rstd"].flatten())
        return layer_norm_backward(*_rows(a), a["weight"], a["bias"], *statistics)
    if operator == "group_norm_backward":
        from liger_kernel.ops.group_norm import group_norm_backward

        data = [a[name].reshape(a["N"], a["C"], -1) for name in ("grad_out", "input")]
        return group_norm_backward(*data, a["weight"], a["weight"], a["mean"], a["rstd"], a["C"], a["group"])
    return None


def quack(operator: str, a: Mapping[str, Any]) -> tuple[Any, ...] | None:
    """QuACK's three gradients."""
    if operator != "layer_norm_backward":
        return None
    from quack.rmsnorm import layernorm_bwd

    grad_out, x = _rows(a)
    return layernorm_bwd(x, a["weight"], grad_out, a["rstd"].flatten(), a["mean"].flatten())


def _on_gpu(gradients: Callable[[str, Mapping[str, Any]], tuple[Any, ...] | None]) -> Peer:
    """A peer of a function that gives the three gradients; a call that it fails on is one that it does not have.

    Others' compilers raise errors of their own kinds, so any is taken for a refusal; each is said once.
    """
    said: set[str] = set()

    def peer(operator: str, arguments: Arguments, device: str) -> tuple[Arguments, Results] | None:
        try:
            found = gradients(operator, {name: to_torch(value, device) for name, value in arguments.items()})
        except Exception as error:
            line = f"{gradients.__name__}: {type(error).__name__}: {str(error)[:100]!r}"
            if line not in said:
                print(line, file=sys.stderr)
            said.add(line)
            return None
        if found is None:
            return None
        names = ("grad_input", "grad_weight", "grad_bias")
        results = {name: to_numpy(value) for name, value in zip(names, found, strict=True)}
        results["grad_input"] = results["grad_input"].reshape(arguments["input"].shape)
        return arguments, results

    return peer


def peers(device: str) -> dict[str, Peer]:
    """The implementations there are, by name."""
    found: dict[str, Peer] = {}
    if importlib.util.find_spec("torch"):
        found["PyTorch"] = pytorch
    if device != "cpu" and importlib.util.find_spec("liger_kernel"):
        found["Liger"] = _on_gpu(liger)
    if device != "cpu" and importlib.util.find_spec("quack"):
        found["QuACK"] = _on_gpu(quack)
    return found
