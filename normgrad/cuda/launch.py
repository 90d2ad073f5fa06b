"""One kernel launch: its kernel, grid, arguments and options, and how it is compiled.

``steps.Steps`` collects the launches (``Step``) of an operator call. The backend compiles them when a plan is prepared,
and ``driver_launch`` launches them when it runs.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from normgrad.contract.arrays import torch_dtypes
from normgrad.contract.dtypes import DType
from normgrad.cuda.device.pdl import PDL_AVAILABLE
from normgrad.cuda.layout_checks import check_layouts

ALIGNMENT = 256  # bytes: of every workspace buffer, as from cudaMalloc
INT64 = DType("int64", 8)
FLOAT64 = DType("float64", 8)

TORCH_DTYPES = torch_dtypes() | {INT64: torch.int64, FLOAT64: torch.float64}


@dataclass(frozen=True, slots=True)
class Given:
    """A kernel argument: the address of one of the call's tensors. ``aligned``: to 16 bytes."""

    name: str
    dtype: DType
    aligned: bool


@dataclass(frozen=True, slots=True)
class Scratch:
    """A kernel argument: the address of a workspace buffer, at an offset that is a multiple of ALIGNMENT."""

    offset: int
    dtype: DType

    def part(self, index: int, elements: int) -> Scratch:
        """Return one of the parts, of so many elements each, that the buffer is divided into."""
        return Scratch(self.offset + index * elements * self.dtype.itemsize, self.dtype)


Argument = Given | Scratch | int | tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class Options:
    """How a kernel is compiled and launched."""

    warps: int = 4
    ctas_per_sm: int = 0  # CTAs that must fit on an SM at once, which limits the registers of a thread; 0 for no limit
    cooperative: bool = False  # all CTAs are resident at once, so that they can wait for each other
    pdl: bool = False  # programmatic dependent launch: may start before the previous launch ends, and waits itself
    cluster: int = 1  # consecutive CTAs that form a thread-block cluster

    def as_arguments(self, pdl_supported: bool = True) -> dict[str, Any]:
        """Return the options as Triton takes them; ``pdl_supported``: by the GPU."""
        # FMA contraction is set here and not left to Triton's default, since the bits of results depend on it.
        chosen: dict[str, Any] = {"num_warps": self.warps, "enable_fp_fusion": True}
        if self.ctas_per_sm:
            registers = 65536 // (self.ctas_per_sm * self.warps * 32) // 8 * 8
            if registers < 255:
                chosen["maxnreg"] = registers
        if self.cooperative:
            chosen["launch_cooperative_grid"] = True
        if self.pdl and pdl_supported and PDL_AVAILABLE:
            chosen["launch_pdl"] = True
        return chosen


@dataclass(frozen=True)
class Step:
    """One launch: a kernel, its grid, its arguments in order, its compile-time constants and options."""

    kernel: Any
    grid: tuple[int, int, int]
    arguments: Sequence[Argument]
    constants: Mapping[str, Any] = field(default_factory=dict)
    options: Options = Options()

    @property
    def parameters(self) -> list[Any]:
        """The arguments, and then the constants in the order of the kernel's parameters."""
        return [*self.arguments, *(self.constants[name] for name in self.kernel.arg_names[len(self.arguments) :])]


@dataclass(frozen=True, slots=True)
class _Pointer:
    """An address with a dtype: all that Triton asks of a tensor argument."""

    dtype: torch.dtype
    address: int

    def data_ptr(self) -> int:
        return self.address


def _stand_in(argument: Argument) -> Any:
    match argument:
        case Given(_, dtype, aligned):
            return _Pointer(TORCH_DTYPES[dtype], 0 if aligned else dtype.itemsize)
        case Scratch(_, dtype):
            return _Pointer(TORCH_DTYPES[dtype], 0)
    return argument


def _traits(argument: Argument) -> Any:
    """Return what Triton specializes a kernel on: dtype and alignment of pointers, divisibility of integers."""
    match argument:
        case int():
            return argument == 1, argument % 16 == 0, -(2**31) <= argument < 2**31
        case tuple():
            return tuple(_traits(item) for item in argument)
    return _stand_in(argument)


_compiled: dict[Any, Any] = {}


def compiled(step: Step, device: int) -> Any:
    """Return the compiled kernel of a step, loaded onto the device, which is the current one.

    Raise UnexpectedLayout if it must not be launched.
    """
    constants = tuple(step.constants.items())
    key = (step.kernel, device, tuple(map(_traits, step.arguments)), constants, step.options)
    kernel = _compiled.get(key)
    if kernel is None:
        stand_ins = [_stand_in(argument) for argument in step.arguments]
        options = step.options.as_arguments(torch.cuda.get_device_capability(device) >= (9, 0))
        kernel = step.kernel.warmup(*stand_ins, grid=step.grid, **step.constants, **options)
        check_layouts(kernel.asm)
        kernel.run  # noqa: B018 - loads the code onto the device, so that a run can be captured into a graph
        _compiled[key] = kernel
    return kernel


def aligned(workspace: int) -> int:
    """Return the first aligned address in the workspace; offsets of ``Scratch`` count from there."""
    return -(-workspace // ALIGNMENT) * ALIGNMENT


def float64_bits(value: float) -> int:
    """Return the bits of a float64 as an integer: Triton narrows float arguments to float32."""
    bits: int = struct.unpack("<q", struct.pack("<d", value))[0]
    return bits
