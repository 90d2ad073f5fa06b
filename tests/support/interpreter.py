"""The backend ``interpreter``: runs the GPU kernels on host memory in Triton's interpreter, for tests without a GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from triton.runtime import interpreter as triton_interpreter

from normgrad.contract.arrays import bytes_at
from normgrad.contract.plan import Problem, allocate_host
from normgrad.contract.view import Memory
from normgrad.cuda.backend import OPERATORS
from normgrad.cuda.chip import Chip
from normgrad.cuda.device.indexing import INTERPRETED
from normgrad.cuda.launch import TORCH_DTYPES, Argument, Given, Scratch, Step, aligned

if not INTERPRETED:
    raise ImportError("Triton's interpreter is off; set TRITON_INTERPRET=1 before Triton is imported")

_patch_tensor = triton_interpreter._patch_lang_tensor


def _patch_tensor_and_index(tensor: Any, scope: Any) -> None:
    """Convert arrays of one element to int, which NumPy 2.4 no longer does and Triton 3.6 relies on."""
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


triton_interpreter._patch_lang_tensor = _patch_tensor_and_index

#: Few multiprocessors and small tiles, so that small tensors already take several CTA groups of several CTAs.
CHIP = Chip(multiprocessors=2, cooperative_launch=False, max_tile_elements=128)


@dataclass(frozen=True)
class _Kernel:
    workspace_size: int
    names: list[str]
    steps: list[Step]

    def launch(self, addresses: Sequence[int], workspace: int, stream: Any) -> None:
        named = dict(zip(self.names, addresses, strict=True))
        with np.errstate(all="ignore"):  # NaN and Inf pass through without a warning, as on the GPU
            for step in self.steps:
                interpret(step, named, aligned(workspace))


def interpret(step: Step, addresses: Mapping[str, int], workspace: int) -> None:
    """Run a step on host memory."""
    arguments = [_on_host(argument, addresses, workspace) for argument in step.arguments]
    step.kernel[step.grid](*arguments, **step.constants)


def _on_host(argument: Argument, addresses: Mapping[str, int], workspace: int) -> Any:
    """Return an argument as the interpreter takes it, tensors and buffers at these addresses.

    As a tensor of one element: the interpreter computes addresses from there as a kernel does.
    """
    if not isinstance(argument, Given | Scratch):
        return argument
    address = addresses[argument.name] if isinstance(argument, Given) else workspace + argument.offset
    dtype = TORCH_DTYPES[argument.dtype]
    if address == 0:  # of a tensor without elements
        return torch.empty(1, dtype=dtype)
    return torch.frombuffer(bytes_at(Memory(address, argument.dtype.itemsize)), dtype=dtype)


class _Interpreter:
    name = "interpreter"

    def prepare(self, problem: Problem) -> _Kernel:
        steps = OPERATORS[problem.signature.name](problem, CHIP)
        return _Kernel(steps.workspace_size, list(problem.views), steps.steps)

    def allocate(self, nbytes: int, device: str, stream: Any = None) -> Memory:
        return allocate_host(nbytes)


backend = _Interpreter()
