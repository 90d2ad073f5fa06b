"""What a run was made on and with: times mean nothing without it."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import normgrad
from normgrad import backends
from normgrad.threads import get_num_threads, usable_cores

LIBRARIES = ("numpy", "numba", "ml_dtypes", "torch", "triton", "jax", "liger-kernel", "quack-kernels")


def processor() -> str:
    """The processor's name, as far as the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # not every system has the file
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


def describe(device: str) -> dict[str, Any]:
    """Machine, versions and date."""
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "system": platform.platform(),
        "processor": processor(),
        "cores": usable_cores(),
        "threads": get_num_threads(),
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "device": _device(device),
        "backend": backends.chosen(device),
        "python": platform.python_version(),
        "versions": {"normgrad": normgrad.__version__, **_versions()},
    }


def hardware(description: Mapping[str, Any]) -> str:
    """Return what a run was made on: the processor's name, or the GPU's."""
    return str(description["processor" if description["device"] == "cpu" else "device"])


def _device(device: str) -> str:
    if device == "cpu":
        return device
    import torch

    return str(torch.cuda.get_device_name())


def _versions() -> dict[str, str]:
    found = {name: _version(name) for name in LIBRARIES}
    return {name: number for name, number in found.items() if number is not None}


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
