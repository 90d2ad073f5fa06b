"""The GPUs that the kernels run on, and why not on others.

Asked by the backends, the modules and ``override`` of :mod:`normgrad.torch`, and ``normgrad info``, before anything of
Triton's is imported.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from typing import Any

DRIVER = "libcuda.so.1"
_LEAST_CAPABILITY = (8, 0)  # the conversions cvt.rn.bf16x2.f32 and cvt.rn.f16x2.f32 need sm_80

_INSTALL = "pip install 'normgrad[cuda]'"


@functools.cache
def problem(index: int) -> str | None:
    """Return why the kernels do not run on the CUDA device of that index, or None where they do."""
    found = installation_problem()
    if found is not None:
        return found
    import torch

    capability = torch.cuda.get_device_capability(index)
    if capability < _LEAST_CAPABILITY:
        has, needs = (".".join(map(str, version)) for version in (capability, _LEAST_CAPABILITY))
        return f"{torch.cuda.get_device_name(index)} has compute capability {has}, and must have {needs} or later"
    return None


@functools.cache
def installation_problem() -> str | None:
    """Return why the kernels run on no GPU of this machine, or None."""
    try:
        import torch
    except ImportError:
        return f"PyTorch is not installed: {_INSTALL}"
    return _build_problem(torch) or _driver_problem()


def _build_problem(torch: Any) -> str | None:
    if torch.version.hip is not None:
        return f"PyTorch is built for ROCm {torch.version.hip}, and must be built for CUDA"
    if torch.version.cuda is None:
        return "PyTorch is built without CUDA"
    for module, name in (("triton", "Triton"), ("cuda.bindings", "cuda-bindings")):
        if not _is_installed(module):
            return f"{name} is not installed: {_INSTALL}"
    if torch.cuda.device_count() == 0:
        return "PyTorch finds no GPU"
    return None


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of the package that it is in
        return False


def _driver_problem() -> str | None:
    try:
        ctypes.CDLL(DRIVER)
    except OSError as error:
        return f"the driver library {DRIVER} cannot be loaded: {error}"
    return None
