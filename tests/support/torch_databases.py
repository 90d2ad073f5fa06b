"""PyTorch's own databases of samples, by which it tests its operators and modules."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("expecttest", reason="PyTorch's databases need it")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torch.testing._internal.common_methods_invocations import op_db
    from torch.testing._internal.common_modules import module_db

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
OPERATORS = {
    op.name: op
    for op in op_db
    if op.variant_test_name == ""
    and op.name
    in (
        "native_layer_norm",
        "nn.functional.layer_norm",
        "nn.functional.group_norm",
        "nn.functional.batch_norm",
    )
}
MODULES = {info.name.removeprefix("nn."): info for info in module_db if info.name in ("nn.LayerNorm", "nn.GroupNorm")}


def calls(name: str, dtype: torch.dtype, requires_grad: bool = True) -> Iterator[tuple[Callable[..., Any], Any]]:
    """PyTorch's sample calls of an operator: the function and its sample."""
    op = OPERATORS[name]
    torch.manual_seed(0)
    for sample in op.sample_inputs("cpu", dtype, requires_grad=requires_grad):
        yield op.op, sample


def modules(name: str, dtype: torch.dtype, **options: Any) -> list[Any]:
    """PyTorch's sample constructions and calls of a module."""
    torch.manual_seed(0)
    info = MODULES[name]
    options = {"requires_grad": True, "training": True, **options}
    found: list[Any] = info.module_inputs_func(info, device="cpu", dtype=dtype, **options)
    return found
