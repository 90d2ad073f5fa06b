"""``override()``: PyTorch's own LayerNorm and GroupNorm on normgrad's kernels, for every model in the process.

``aten::layer_norm`` and ``aten::group_norm`` are composite operators: PyTorch has no kernels of its own for them under
the dispatch keys of devices and of autograd. normgrad registers its functions there. For every call that it does not
take they do what the composite does. So tools above these keys (``torch.func``, ``torch.jit.trace``) see the operator
that they know. Under autocast on CUDA PyTorch's own function would convert 16-bit data to float32 first: there
normgrad's stands in its place, takes the data as it is, and converts like PyTorch's what it does not take.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import os
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor

from normgrad.cpu.threads.pool import THREAD_NAME
from normgrad.torch.functional import (
    TENSORS,
    are_plain,
    as_autocast,
    group_norm_problem,
    layer_norm_problem,
    run_group_norm,
    run_layer_norm,
    sizes_of,
)
from normgrad.torch.heuristics import PYTORCH_IS_FASTER, group_norm_is_slower, layer_norm_is_slower
from normgrad.torch.internals import is_watched, unregister, untraced, without_autocast
from normgrad.torch.modules import check_options
from normgrad.torch.outputs import DTYPES_OF_16_BITS, memory_format

_Function = TypeVar("_Function", bound=Callable[..., Any])

_KEYS = ("CPU", "CUDA", "AutogradCPU", "AutogradCUDA", "AutocastCUDA")

WATCHED = "a mode or transform is active, which knows PyTorch's operators"
SUBCLASS = "a tensor is of a subclass, or not in strided memory"

#: An operator, and the reason why a call of it was left to PyTorch; None for a call that normgrad took.
_Key = tuple[str, str | None]


class _Tally:
    """A number of calls, which threads count without a lock: an iterator's step is atomic."""

    def __init__(self) -> None:
        self.add = itertools.count().__next__
        self._reads = 0

    def read(self) -> int:
        """Return the number; the lock is held."""
        value = self.add() - self._reads
        self._reads += 1
        return value


_tallies: dict[_Key, _Tally] = {}


def _count(name: str, reason: str | None) -> None:
    tally = _tallies.get((name, reason))
    if tally is None:
        tally = _tallies.setdefault((name, reason), _Tally())
    tally.add()


def _read_tallies() -> Counter[_Key]:
    return Counter({key: tally.read() for key, tally in list(_tallies.items())})


#: In the order in which they began. Replaced, never changed: calls read it without a lock.
_in_force: tuple[override, ...] = ()
_registration: torch.library.Library | None = None
_lock = threading.RLock()  # a finalizer that ends an override may run where another begins
if hasattr(os, "register_at_fork"):  # a child must not inherit the lock from a thread that it does not have
    os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)


@dataclass(frozen=True)
class _Norm:
    """An operator of PyTorch's, and the functions of its arguments that decide on a call and compute it."""

    name: str
    is_slower: Callable[[Tensor, Tensor | None], bool]
    problem: Callable[..., str | None]
    run: Callable[..., Tensor]
    composite: Callable[..., Tensor]

    def why_not(self, input: Tensor, sizes: Any, weight: Tensor | None, bias: Tensor | None) -> str | None:
        """Return why a call is left to PyTorch; None where it is ours. What small calls need comes first."""
        if type(input) in TENSORS and self.is_slower(input, weight):
            return PYTORCH_IS_FASTER
        if is_watched():
            return WATCHED
        if not are_plain(input, weight, bias):
            return SUBCLASS
        return self.problem(input, sizes, weight, bias)


def _composite_layer_norm(
    input: Tensor, shape: Any, weight: Tensor | None, bias: Tensor | None, eps: float, _: bool
) -> Any:
    """Do what PyTorch's composite does, without its way through Python, which takes 2 µs of a left call."""
    return torch.native_layer_norm(input, shape, weight, bias, eps)[0]


def _composite_group_norm(
    input: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float, cudnn: bool
) -> Any:
    """Do what PyTorch's composite does: for plain tensors without its way through Python, 5 µs of a left call."""
    if type(input) not in TENSORS or input.dim() < 2:
        return torch.ops.aten.group_norm.default.decompose(input, groups, weight, bias, eps, cudnn)
    if not input.is_contiguous():
        input = input.contiguous(memory_format=memory_format(input) if input.is_cpu else torch.contiguous_format)
    weight = None if weight is None else weight.contiguous()
    bias = None if bias is None else bias.contiguous()
    return torch.native_group_norm(input, weight, bias, *sizes_of(input), groups, eps)[0]


_NORMS = (
    _Norm("layer_norm", layer_norm_is_slower, layer_norm_problem, run_layer_norm, _composite_layer_norm),
    _Norm("group_norm", group_norm_is_slower, group_norm_problem, run_group_norm, _composite_group_norm),
)


def _function(norm: _Norm, below_autograd: bool = False, under_autocast: bool = False) -> Callable[..., Tensor]:
    """Return the function that is registered for an operator: ours where normgrad takes a call, else the composite.

    Below autograd, inputs may require gradients and no graph is wanted.
    """
    run = torch.no_grad()(norm.run) if below_autograd else norm.run

    @untraced
    def function(
        input: Tensor,
        sizes: Any,  # the normalized shape, or the number of groups
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        eps: float = 1e-5,
        cudnn: bool = True,
    ) -> Tensor:
        in_force = _in_force
        if in_force:
            reason = norm.why_not(input, sizes, weight, bias)
            _count(norm.name, reason)
            if reason is None:
                return run(input, sizes, weight, bias, eps, in_force[-1].autocast_dtype)
        if not under_autocast:
            return norm.composite(input, sizes, weight, bias, eps, cudnn)
        with without_autocast():
            output = norm.composite(_cast(input), sizes, _cast(weight), _cast(bias), eps, cudnn)
        return as_autocast(output, input, in_force[-1].autocast_dtype) if in_force else output

    return function


def _cast(tensor: Tensor | None) -> Any:
    """Return a tensor as PyTorch's autocast passes it to these operators: 16-bit data on CUDA as float32."""
    return tensor.float() if tensor is not None and tensor.is_cuda and tensor.dtype in DTYPES_OF_16_BITS else tensor


def _register() -> torch.library.Library:
    library = torch.library.Library("aten", "IMPL")
    for norm in _NORMS:
        for device in ("CPU", "CUDA"):
            library.impl(norm.name, _function(norm), f"Autograd{device}")
            library.impl(norm.name, _function(norm, below_autograd=True), device)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that PyTorch's function steps back
            library.impl(norm.name, _function(norm, under_autocast=True), "AutocastCUDA")
    return library


def _is_alone() -> bool:
    """Return whether no other thread of Python's can be inside an operator; our own compute nothing but kernels."""
    return sum(not thread.name.startswith(THREAD_NAME) for thread in threading.enumerate()) == 1


@dataclass(frozen=True)
class Report:
    """The calls of PyTorch's LayerNorm and GroupNorm while an override was in force.

    Attributes
    ----------
    taken : mapping of str to int
        By operator (``"layer_norm"``, ``"group_norm"``), how many calls normgrad computed.
    left : mapping of str to mapping of str to int
        By operator and reason, how many calls were left to PyTorch.
    """

    taken: Mapping[str, int]
    left: Mapping[str, Mapping[str, int]]

    def __str__(self) -> str:
        lines = [f"{name}: {count} by normgrad" for name, count in self.taken.items()]
        for name, reasons in self.left.items():
            lines += [f"{name}: {count} left to PyTorch: {reason}" for reason, count in reasons.items()]
        return "\n".join(lines) or "no calls"


class override:
    """Run PyTorch's LayerNorm and GroupNorm on normgrad's kernels: until undone, or in a ``with`` block.

    Holds for the whole process and all of its threads, on CPU and CUDA, for every model as it is. Each call of
    ``torch.nn.functional.layer_norm`` and ``group_norm``, from whatever module or library, does what
    :class:`normgrad.torch.LayerNorm` and :class:`normgrad.torch.GroupNorm` do: both passes run on normgrad's kernels,
    except if normgrad cannot run or PyTorch is faster. The forward pass decides: a backward pass is normgrad's if the
    forward pass ran in the block, even after its end.

    Blocks may be nested, and may overlap in several threads; after the last, PyTorch's own kernels do all the work
    again. An object may be entered again and again, and used as a decorator.

    Parameters
    ----------
    autocast_dtype : torch.dtype
        The dtype of outputs under autocast on CUDA, as of :class:`normgrad.torch.LayerNorm`. Of several overrides in
        force the one that began last decides.

    Examples
    --------
    >>> import torch, normgrad.torch
    >>> x = torch.randn(4, 3, dtype=torch.bfloat16, requires_grad=True)
    >>> with normgrad.torch.override() as ours:
    ...     torch.nn.functional.layer_norm(x, [3]).square().sum().backward()
    ...     output = torch.nn.functional.layer_norm(x.double(), [3])
    >>> ours
    <override: off; layer_norm: 1 by normgrad; layer_norm: 1 left to PyTorch: the data is not float32, ...>
    >>> print(ours.report())
    layer_norm: 1 by normgrad
    layer_norm: 1 left to PyTorch: the data is not float32, float16 or bfloat16
    >>> process_wide = normgrad.torch.override()
    >>> process_wide.undo()
    """

    def __init__(self, *, autocast_dtype: torch.dtype = torch.float32) -> None:
        check_options("auto", autocast_dtype)
        self.autocast_dtype = autocast_dtype
        self._is_in_force = False
        self._entered = 0
        self._counted: Counter[_Key] = Counter()
        self._before: Counter[_Key] = Counter()
        with _lock:
            self._begin()

    def _begin(self) -> None:
        """Put this override in force; the lock is held."""
        global _in_force, _registration
        if self._is_in_force:
            return
        self._before = _read_tallies()
        self._is_in_force = True
        _in_force += (self,)
        if _registration is None:
            try:
                _registration = _register()
            except BaseException:
                self._end()
                raise

    def _end(self) -> None:
        """End this override; the lock is held."""
        global _in_force, _registration
        if not self._is_in_force:
            return
        self._counted = self._calls()
        self._is_in_force = False
        _in_force = tuple(other for other in _in_force if other is not self)
        # The dispatcher reads its tables without a lock: while another thread may be inside an operator, our functions
        # stay, and hand every call on.
        if not _in_force and _registration is not None and _is_alone():
            operators = torch.ops.aten.layer_norm.default, torch.ops.aten.group_norm.default
            if unregister(_registration, operators, _KEYS):
                _registration = None

    def undo(self) -> None:
        """End this override; a second time does nothing."""
        with _lock:
            self._end()

    def report(self) -> Report:
        """Return the calls that normgrad took while this override was in force, and those left to PyTorch, with why."""
        taken: dict[str, int] = {}
        left: dict[str, dict[str, int]] = {}
        with _lock:
            calls = self._calls()
        for (name, reason), count in sorted(calls.items(), key=str):
            if reason is None:
                taken[name] = count
            else:
                left.setdefault(name, {})[reason] = count
        return Report(taken, left)

    def _calls(self) -> Counter[_Key]:
        """Return the calls so far; the lock is held."""
        return self._counted + (_read_tallies() - self._before if self._is_in_force else Counter())

    def __repr__(self) -> str:
        calls = "; ".join(str(self.report()).splitlines())
        dtype = "" if self.autocast_dtype == torch.float32 else f", autocast_dtype={self.autocast_dtype}"
        return f"<override: {'on' if self._is_in_force else 'off'}{dtype}; {calls}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("an override cannot be copied or pickled: it stands for what this process does")

    def __call__(self, function: _Function) -> _Function:
        """Return the function with every call of it in a block of its own, as ``torch.no_grad()`` does.

        The block of a generator or a coroutine lasts until it ends.
        """
        self.undo()
        if isinstance(function, type) or inspect.isasyncgenfunction(function) or not callable(function):
            raise TypeError(f"an override decorates functions, generators and coroutines, not {function!r}")

        @functools.wraps(function)
        def overridden(*args: Any, **kwargs: Any) -> Any:
            with override(autocast_dtype=self.autocast_dtype):
                return function(*args, **kwargs)

        @functools.wraps(function)
        def generator(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
            with override(autocast_dtype=self.autocast_dtype):
                return (yield from function(*args, **kwargs))

        @functools.wraps(function)
        async def coroutine(*args: Any, **kwargs: Any) -> Any:
            with override(autocast_dtype=self.autocast_dtype):
                return await function(*args, **kwargs)

        if inspect.isgeneratorfunction(function):
            return generator  # type: ignore[return-value]
        return coroutine if inspect.iscoroutinefunction(function) else overridden  # type: ignore[return-value]

    def __enter__(self) -> override:
        with _lock:
            self._entered += 1
            self._begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with _lock:
            self._entered = max(self._entered - 1, 0)
            if self._entered == 0:
                self._end()
