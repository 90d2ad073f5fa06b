"""Programmatic dependent launch: a launch that starts while the one before it still runs (Hopper and later)."""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from normgrad.cuda.device.indexing import INTERPRETED

try:
    from triton.language import target_info
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:  # before Triton 3.5
    target_info = gdc_launch_dependents = gdc_wait = None

#: Whether this Triton can compile programmatic dependent launches; whether the GPU has them is asked at compile time.
PDL_AVAILABLE = tl.constexpr(not INTERPRETED and target_info is not None)


@triton.jit
def pdl_wait():
    """Wait until the launch before this one has ended and its writes are visible; a no-op on older GPUs."""
    if PDL_AVAILABLE:  # noqa: SIM102 - Triton evaluates both sides of an "and"
        if target_info.cuda_capability_geq(9):
            gdc_wait()


@triton.jit
def pdl_launch_dependents():
    """Let the next launch start where there is room for its CTAs; it still waits before it reads this one's results."""
    if PDL_AVAILABLE:  # noqa: SIM102 - Triton evaluates both sides of an "and"
        if target_info.cuda_capability_geq(9):
            gdc_launch_dependents()
