"""PyTorch's own backward passes of LayerNorm and GroupNorm on our kernels.

Our functions are registered under the dispatch key right above the devices' kernels, which every call passes and on
which PyTorch has nothing for these operators. So nothing of PyTorch's is replaced: what the contract does not take goes
on to PyTorch's kernel.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from normgrad.cpu.threads.pool import THREAD_NAME
from normgrad.operators import OPERATORS
from normgrad.torch.functional import runs_on_gpu, untraced
from normgrad.torch.kernels import TorchKernel
from normgrad.torch.outputs import DTYPES, Results, order_of


def _layer_norm_results(
    grad_out: Tensor,
    input: Tensor,
    normalized_shape: Sequence[int],
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    output_mask: Sequence[bool],
) -> Results:
    """As PyTorch lays them out: contiguous."""
    dtype = input.dtype if weight is None else weight.dtype
    parameters = [input.new_empty(normalized_shape, dtype=dtype) if wanted else None for wanted in output_mask[1:]]
    return input.new_empty(input.shape) if output_mask[0] else None, *parameters


def _group_norm_results(
    grad_out: Tensor,
    input: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    N: int,
    C: int,
    HxW: int,
    group: int,
    output_mask: Sequence[bool],
) -> Results:
    """As PyTorch lays them out: channels last on the CPU where the input is, otherwise contiguous."""
    dtype = mean.dtype if weight is None else weight.dtype
    parameters = [input.new_empty(C, dtype=dtype) if wanted else None for wanted in output_mask[1:]]
    layout = order_of(input) if input.is_cpu else torch.contiguous_format
    return torch.empty_like(input, memory_format=layout) if output_mask[0] else None, *parameters


def _on_our_kernel(op: Any, kernel: TorchKernel) -> Callable[..., Any]:
    """PyTorch's operator as a function that runs our kernel where the contract takes the call."""
    select = torch._C.DispatchKey.BackendSelect

    @untraced
    def function(keyset: torch._C.DispatchKeySet, *args: Any) -> Any:
        # Modes, transforms and subclasses have been handled under keys above this one. What is left and is no plain
        # memory, such as a nested tensor, the contract refuses.
        found = kernel.if_taken(*args) if _in_force and _is_ours(args[1]) else None
        if found is not None:
            return found
        return op.redispatch(keyset.remove(select), *args)

    return function


def _is_ours(input: Tensor) -> bool:
    return input.dtype in DTYPES and (not input.is_cuda or runs_on_gpu(input.device.index))


_OPERATORS = {
    "native_layer_norm_backward": TorchKernel(OPERATORS["layer_norm_backward"], _layer_norm_results),
    "native_group_norm_backward": TorchKernel(OPERATORS["group_norm_backward"], _group_norm_results),
}
_lock = threading.Lock()
if hasattr(os, "register_at_fork"):  # a child must not inherit the lock from a thread that it does not have
    os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)
_in_force = 0
_registration: torch.library.Library | None = None


def _register() -> torch.library.Library:
    library = torch.library.Library("aten", "IMPL")
    for name, kernel in _OPERATORS.items():
        op = getattr(torch.ops.aten, name).default
        library.impl(name, _on_our_kernel(op, kernel), "BackendSelect", with_keyset=True)
    return library


def _is_alone() -> bool:
    """Whether no other thread of Python's can be inside a backward pass; our own compute nothing but kernels."""
    return sum(not thread.name.startswith(THREAD_NAME) for thread in threading.enumerate()) == 1


class override:
    """Run PyTorch's backward passes of LayerNorm and GroupNorm on our kernels: until undone, or in a ``with`` block.

    Holds for the whole process and all of its threads, on CPU and CUDA, for every model as it is: what
    ``aten::native_layer_norm_backward`` and ``aten::native_group_norm_backward`` are given in float32, float16 or
    bfloat16. Everything else, float64 above all, stays with PyTorch's kernels. Blocks may be nested, and may
    overlap in several threads; after the last, PyTorch's own kernels do all the work again. An object may be entered
    again and again.

    Examples
    --------
    >>> import torch, normgrad.torch
    >>> x = torch.tensor([[0.0, 1.0, 5.0]], requires_grad=True)
    >>> with normgrad.torch.override():
    ...     torch.nn.functional.layer_norm(x, [3]).square().sum().backward()
    >>> bool(x.grad.abs().max() < 1e-4)
    True
    >>> process_wide = normgrad.torch.override()
    >>> process_wide.undo()
    """

    def __init__(self) -> None:
        self._is_in_force = False
        self._entered = 0
        self._begin()

    def _begin(self) -> None:
        global _in_force, _registration
        with _lock:
            if self._is_in_force:
                return
            if _registration is None:
                _registration = _register()
            self._is_in_force = True
            _in_force += 1

    def undo(self) -> None:
        """End this override; a second time does nothing."""
        global _in_force, _registration
        with _lock:
            if not self._is_in_force:
                return
            self._is_in_force = False
            _in_force -= 1
            # The dispatcher reads its tables without a lock: while another thread may be inside a backward pass, our
            # functions stay, and hand every call on.
            if _in_force == 0 and _registration is not None and _is_alone():
                _registration._destroy()
                _registration = None

    def __enter__(self) -> override:
        self._begin()
        self._entered += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._entered -= 1
        if self._entered == 0:
            self.undo()
