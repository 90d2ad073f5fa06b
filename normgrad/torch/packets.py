"""``torch.ops.normgrad.NAME(...)`` in eager mode: past PyTorch's dispatcher where it would do nothing but call us."""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverloadPacket
from torch.autograd import forward_ad

from normgrad.torch.kernels import TorchKernel

_function_modes = torch._C._len_torch_function_stack
_profiles = torch.autograd._profiler_enabled
_differentiates = torch.is_grad_enabled


class ShortPacket(OpOverloadPacket):  # type: ignore[misc]
    """An operator whose calls of a known layout go straight to their kernel.

    A recipe's guard has seen the thread's state: under a mode that watches, traces or transforms calls it holds for
    none. What it does not see is asked here.
    """

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        if not (kwargs or _function_modes() or _profiles() or forward_ad._current_level >= 0):
            found = self._kernel.recalled(args, _differentiates())
            if found is not None:
                return found
        return super().__call__(*args, **kwargs)


def shorten(packet: Any, kernel: TorchKernel) -> None:
    """Let an operator's calls take the short way."""
    packet._kernel = kernel
    packet.__class__ = ShortPacket
