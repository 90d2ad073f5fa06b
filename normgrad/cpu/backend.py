"""The backend ``cpu``: Numba kernels on worker threads or PyTorch's. Maps an operator's name to its ``prepare``."""

from __future__ import annotations

import platform
import threading
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np

from normgrad.contract.plan import Kernel, Problem
from normgrad.contract.products import Family
from normgrad.contract.status import NO_KERNEL
from normgrad.contract.view import Memory
from normgrad.cpu.prepare import batch_norm, group_norm, layer_norm
from normgrad.cpu.prepare.launch import holds_workspace

_PREPARE: dict[str, Callable[[Problem], Kernel]] = {
    "layer_norm_backward": layer_norm.prepare_backward,
    "layer_norm": layer_norm.prepare_forward,
    "group_norm_backward": group_norm.prepare_backward,
    "group_norm": group_norm.prepare_forward,
    "batch_norm_elemt_backward": batch_norm.prepare_elemt_backward,
    "batch_norm_stats": batch_norm.prepare_stats,
    "batch_norm_gather_stats_with_counts": batch_norm.prepare_gather_stats,
    "batch_norm_elemt": batch_norm.prepare_elemt,
    "batch_norm_reduce_backward": batch_norm.prepare_reduce_backward,
}


def _problem() -> str | None:
    """Return why kernels cannot be compiled here."""
    if find_spec("numba") is None:
        return "Numba is not installed"
    if platform.machine() not in ("x86_64", "AMD64"):
        return None
    from llvmlite.binding import get_host_cpu_features

    has = get_host_cpu_features()
    missing = " and ".join(name.upper() for name in ("fma", "f16c") if not has.get(name))
    return f"the processor has no {missing} instructions, which kernels are made of" if missing else None


_found = _problem()
if _found is not None:
    raise ImportError(f"{_found}; NORMGRAD_BACKEND=reference computes without kernels")

_KEPT = 64 << 20  # bytes of workspace that a thread keeps for its next call


# The activations, which the kernels of LayerNorm and GroupNorm read and write in one dtype. Those of BatchNorm copy.
_ACTIVATIONS = ("grad_out", "input", "output", "grad_input")


def _refuse_two_dtypes(problem: Problem) -> None:
    """Refuse activations of two dtypes (normgrad.operators.mixed), for which these kernels would misread memory."""
    if problem.signature.family is Family.BATCH_NORM:
        return
    dtypes = {name: problem.views[name].dtype for name in _ACTIVATIONS if name in problem.views}
    if len(set(dtypes.values())) > 1:
        given = ", ".join(f"{{{name}}} is {dtype}" for name, dtype in dtypes.items())
        text = f"the backend cpu takes activations of one dtype, and {given}"
        raise problem.signature.error(None, text, NO_KERNEL)


class _CPU:
    name = "cpu"

    def __init__(self) -> None:
        self._kept = threading.local()

    def prepare(self, problem: Problem) -> Kernel:
        _refuse_two_dtypes(problem)
        return _PREPARE[problem.signature.name](problem)

    def allocate(self, nbytes: int, device: str, stream: Any = None) -> Memory:
        """Return memory for one launch. It belongs to the calling thread, which saves the page faults of new memory."""
        kept: Memory | None = getattr(self._kept, "memory", None)
        if kept is None or kept.nbytes < nbytes or holds_workspace():
            owner = np.empty(nbytes, np.uint8)
            kept = Memory(owner.ctypes.data, nbytes, owner=owner)
            if nbytes <= _KEPT and not holds_workspace():
                self._kept.memory = kept
        return kept


backend = _CPU()
