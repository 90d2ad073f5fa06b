"""The parts of PyTorch without a public equivalent that :mod:`normgrad.torch` uses.

Each is looked up once and has a fallback: where a PyTorch lacks it, normgrad is slower or leaves more to PyTorch, and
computes the same.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import forward_ad

_Function = TypeVar("_Function", bound=Callable[..., Any])


def _yes() -> bool:
    """Stand in for a question that this PyTorch does not answer: something may be watching."""
    return True


#: How many modes of ``__torch_dispatch__`` are active, such as FakeTensorMode and that of make_fx.
_dispatch_modes: Callable[[], int] = getattr(torch._C, "_len_torch_dispatch_stack", _yes)

#: Whether a transform of ``torch.func`` is active.
transforms_are_active: Callable[[], bool] = getattr(torch._C, "_are_functorch_transforms_active", _yes)

#: Whether ``torch.jit.trace`` is recording.
_is_tracing: Callable[[], bool] = getattr(torch._C, "_is_tracing", torch.jit.is_tracing)

#: Whether a mode of ``__torch_function__`` is active, such as that of ``torch.set_default_device``.
_function_modes: Callable[[], bool] = getattr(torch._C, "_is_torch_function_mode_enabled", _yes)


def is_watched() -> bool:
    """Return whether a mode or transform has to see the operators that are dispatched."""
    return _dispatch_modes() != 0 or transforms_are_active() or forward_mode_is_active()


def is_intercepted() -> bool:
    """Return whether a mode or tracer has to see the functions of ``torch`` that Python code calls."""
    return (_function_modes() and not _is_default_device()) or _is_tracing()


def _default_device_mode() -> type | None:
    try:
        from torch.utils._device import DeviceContext
    except ImportError:
        return None
    return DeviceContext


_DefaultDevice = _default_device_mode()
_function_mode_stack: Callable[[], list[Any]] | None = getattr(
    torch.overrides, "_get_current_function_mode_stack", None
)


def _is_default_device() -> bool:
    """Return whether all active modes are of ``torch.set_default_device``, which changes factory functions alone."""
    return _function_mode_stack is not None and all(type(mode) is _DefaultDevice for mode in _function_mode_stack())


def forward_mode_is_active() -> bool:
    """Return whether tensors may have tangents: inside ``forward_ad.dual_level`` or ``torch.func.jvp``."""
    return getattr(forward_ad, "_current_level", 0) >= 0


def has_tangent(args: tuple[Any, ...]) -> bool:
    """Return whether an argument has a tangent of forward mode.

    A compiled ``torch.func.jvp`` begins its level without ``forward_ad``, which then knows of none.
    """
    return (forward_mode_is_active() or transforms_are_active()) and any(
        isinstance(arg, Tensor) and forward_ad.unpack_dual(arg, level=0).tangent is not None for arg in args
    )


_functorch = getattr(torch._C, "_functorch", None)
_set_single_level: Any = getattr(_functorch, "set_single_level_autograd_function_allowed", None)
_get_single_level: Any = getattr(_functorch, "get_single_level_autograd_function_allowed", None)
_set_forward_mode: Any = getattr(forward_ad, "_set_fwd_grad_enabled", None)

#: Whether :func:`single_level` and :func:`outer_levels` work.
has_levels = None not in (_set_single_level, _get_single_level, _set_forward_mode)


@contextmanager
def single_level() -> Iterator[None]:
    """Allow a ``torch.autograd.Function`` at the level of one transform of ``torch.func``, as functorch's own does."""
    before = _get_single_level()
    _set_single_level(True)
    try:
        yield
    finally:
        _set_single_level(before)


@contextmanager
def outer_levels() -> Iterator[None]:
    """Inside a node's ``forward``, let the transforms further out differentiate what it calls."""
    with torch.enable_grad(), _set_forward_mode(True):
        yield


#: Excludes the dispatch keys of autograd, as ``torch.library.register_autograd`` does. None where it does not exist.
below_autograd: Callable[[], AbstractContextManager[None]] | None = getattr(
    torch._C, "_AutoDispatchBelowAutograd", None
)


_exclude_keys: Any = getattr(torch._C, "_ExcludeDispatchKeyGuard", None)
_AUTOCAST_KEYS = None if _exclude_keys is None else torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA)


def without_autocast() -> AbstractContextManager[Any]:
    """Turn autocast on CUDA off, below its dispatch key, as ``torch.library.register_autocast`` does.

    ``torch.autocast(enabled=False)``, the fallback, is recorded by ``torch.export``.
    """
    if _exclude_keys is None:
        off: AbstractContextManager[Any] = torch.autocast("cuda", enabled=False)
        return off
    below: AbstractContextManager[Any] = _exclude_keys(_AUTOCAST_KEYS)
    return below


def _fake_tensors() -> type[Tensor] | None:
    try:
        from torch._subclasses.fake_tensor import FakeTensor
    except ImportError:
        return None
    return FakeTensor


#: The class of fake tensors. None where it is elsewhere: then they are a subclass like any other.
FakeTensor = _fake_tensors()


def is_pending(input: Any) -> bool:
    """Return whether a collective has still to fill a tensor, as between layers under tensor parallelism."""
    collectives = sys.modules.get("torch.distributed._functional_collectives")
    return type(input) is getattr(collectives, "AsyncCollectiveTensor", None)


class Wait(torch.autograd.Function):  # type: ignore[misc]
    """The plain tensor that a pending one becomes once its collective has ended."""

    @staticmethod
    def forward(ctx: Any, input: Any) -> Tensor:
        found: Tensor = input.wait().detach()
        return found

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> Tensor:
        return grad_out


def unregister(library: torch.library.Library, operators: Iterable[Any], keys: Iterable[str]) -> bool:
    """Remove the kernels that a library has registered for operators; return whether this PyTorch can.

    The Python dispatcher, which traces for ``torch.compile``, caches what it found under a key, and is not told of the
    removal: it would go on without a kernel of autograd's, and drop gradients.
    """
    destroy = getattr(library, "_destroy", None)
    uncaches: list[Any] = [getattr(operator, "_uncache_dispatch", None) for operator in operators]
    if destroy is None or None in uncaches:
        return False
    destroy()
    for uncache in uncaches:
        for key in keys:
            uncache(getattr(torch._C.DispatchKey, key))
    return True


_eval_frame = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)


def untraced(function: _Function) -> _Function:
    """Keep Dynamo from tracing a function that autograd or the dispatcher calls, and what it calls.

    A backward pass may run under Dynamo's frame hook, as in a compiled training step with an eager module. Dynamo would
    trace the first call of a kernel down to Numba and LLVM, and fail. The mark on the function's code costs a call
    nothing. ``torch.compiler.disable``, the fallback, takes microseconds of every call, and imports Dynamo: it is used
    only where something else has. Compiled autograd traces backward passes on purpose, from their callers.
    """
    names = "set_code_exec_strategy", "_FrameExecStrategy", "_FrameAction"
    set_strategy, strategy, action = (getattr(_eval_frame, name, None) for name in names)
    if set_strategy and strategy and action:
        set_strategy(function.__code__, strategy(action.SKIP, action.SKIP))
        return function

    disabled = functools.cache(lambda: torch.compiler.disable(function))

    @functools.wraps(function)
    def run(*args: Any) -> Any:
        if torch.compiler.is_dynamo_compiling() or "torch._dynamo" not in sys.modules:
            return function(*args)
        return disabled()(*args)

    return run  # type: ignore[return-value]


def constant_when_compiled(function: _Function) -> _Function:
    """Mark a function as ``torch.compiler.assume_constant_result`` does, which would import Dynamo.

    Where Dynamo asks for another mark, it traces into the function, or breaks the graph there.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@constant_when_compiled
def is_gloo(group_name: str, device: str) -> bool:
    """Return whether a group's collectives are gloo's for a device type: on tensors of a GPU these end the process."""
    resolve = getattr(dist.distributed_c10d, "_resolve_process_group", None)
    of_device = getattr(resolve and resolve(group_name), "_get_backend", None)
    name = dist.get_backend() if of_device is None else of_device(torch.device(device)).name()
    return bool(name == "gloo")
