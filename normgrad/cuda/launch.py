"""Kernels with their arguments, compiled when a plan is made and launched when it runs."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from normgrad.contract.arrays import bytes_at
from normgrad.contract.dtypes import BFLOAT16, FLOAT16, FLOAT32, INT32, DType
from normgrad.contract.view import Memory
from normgrad.cuda.device.common import OVERLAPS

ALIGNMENT = 256  # bytes: of every block of workspace memory, as from cudaMalloc
INT64 = DType("int64", 8)
FLOAT64 = DType("float64", 8)

_TORCH = {
    FLOAT32: torch.float32,
    FLOAT16: torch.float16,
    BFLOAT16: torch.bfloat16,
    INT32: torch.int32,
    INT64: torch.int64,
    FLOAT64: torch.float64,
}


@dataclass(frozen=True, slots=True)
class Given:
    """The memory of one of the problem's tensors, as a kernel's argument."""

    name: str
    dtype: DType
    aligned: bool


@dataclass(frozen=True, slots=True)
class Scratch:
    """Memory in the workspace, as a kernel's argument; aligned to what any access needs."""

    offset: int
    dtype: DType


Argument = Given | Scratch | int | tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class Options:
    """How a kernel is compiled and launched. ``resident`` programs must fit on a multiprocessor side by side.

    One that ``follows`` may start before the launch before it has ended, and waits for it where it has to. So many
    programs one after the other are a ``cluster``.
    """

    warps: int = 4
    resident: int = 0
    cooperative: bool = False
    follows: bool = False
    cluster: int = 1

    def as_arguments(self, overlap: bool = True) -> dict[str, Any]:
        """As Triton takes them; ``overlap``: the GPU can start a launch before the one before it has ended."""
        # Whether products and sums are rounded once is no default of Triton's to decide: bits depend on it.
        chosen: dict[str, Any] = {"num_warps": self.warps, "enable_fp_fusion": True}
        if self.resident:
            registers = 65536 // (self.resident * self.warps * 32) // 8 * 8
            if registers < 255:
                chosen["maxnreg"] = registers
        if self.cooperative:
            chosen["launch_cooperative_grid"] = True
        if self.follows and overlap and OVERLAPS:
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


@dataclass(frozen=True, slots=True)
class _Pointer:
    """What Triton takes for a tensor: an address with a dtype."""

    dtype: torch.dtype
    address: int

    def data_ptr(self) -> int:
        return self.address


Launcher = Callable[[Sequence[int], int, int], None]

_compiled: dict[Any, Any] = {}


def _traits(argument: Argument) -> Any:
    """What of an argument Triton compiles into the code."""
    match argument:
        case Given(_, dtype, aligned):
            return dtype, aligned
        case Scratch(_, dtype):
            return dtype, True
        case int():
            return argument == 1, argument % 16 == 0, -(2**31) <= argument < 2**31
        case tuple():
            return tuple(_traits(item) for item in argument)
    return argument


def _stand_in(argument: Argument) -> Any:
    match argument:
        case Given(_, dtype, aligned):
            return _Pointer(_TORCH[dtype], 0 if aligned else dtype.itemsize)
        case Scratch(_, dtype):
            return _Pointer(_TORCH[dtype], 0)
    return argument


def compiled(step: Step, device: int) -> Any:
    """The compiled kernel of a step on a device."""
    constants = tuple(step.constants.items())
    key = (step.kernel, device, tuple(map(_traits, step.arguments)), constants, step.options)
    kernel = _compiled.get(key)
    if kernel is None:
        stand_ins = [_stand_in(argument) for argument in step.arguments]
        options = step.options.as_arguments(torch.cuda.get_device_capability(device) >= (9, 0))
        with torch.cuda.device(device):
            kernel = step.kernel.warmup(*stand_ins, grid=step.grid, **step.constants, **options)
            kernel.run  # noqa: B018 - loads the code onto the device, so that a run can be captured into a graph
        _compiled[key] = kernel
    return kernel


def launcher(step: Step, names: Sequence[str], device: int) -> Launcher:
    """A function of the named tensors' addresses, workspace and stream that launches the step."""
    kernel = compiled(step, device)
    run = kernel[step.grid]
    constants = step.kernel.arg_names[len(step.arguments) :]
    template = [*step.arguments, *(step.constants[name] for name in constants)]
    given = [(at, names.index(argument.name)) for at, argument in enumerate(template) if isinstance(argument, Given)]
    scratch = [(at, argument.offset) for at, argument in enumerate(template) if isinstance(argument, Scratch)]

    def launch(addresses: Sequence[int], workspace: int, stream: int) -> None:
        arguments = template.copy()
        for at, place in given:
            arguments[at] = addresses[place]
        for at, offset in scratch:
            arguments[at] = workspace + offset
        run(*arguments, stream=stream)

    return launch


def interpret(step: Step, addresses: Mapping[str, int], workspace: int) -> None:
    """Run a step in Triton's interpreter, on host memory."""

    def on_host(argument: Argument) -> Any:
        match argument:
            case Given(name, dtype, _):
                return _host_tensor(addresses[name], dtype)
            case Scratch(offset, dtype):
                return _host_tensor(workspace + offset, dtype)
        return argument

    step.kernel[step.grid](*map(on_host, step.arguments), **step.constants)


def _host_tensor(address: int, dtype: DType) -> torch.Tensor:
    """A tensor whose address is what counts: the interpreter reads and writes beside it as a kernel does."""
    if address == 0:  # of a tensor without elements
        return torch.empty(1, dtype=_TORCH[dtype])
    return torch.frombuffer(bytes_at(Memory(address, dtype.itemsize)), dtype=_TORCH[dtype])


def aligned(workspace: int) -> int:
    """Return the first aligned address in the workspace; offsets of ``Scratch`` count from there."""
    return -(-workspace // ALIGNMENT) * ALIGNMENT


def float64_bits(value: float) -> int:
    """A float64 as the integer of its bits: Triton narrows float arguments to float32."""
    bits: int = struct.unpack("<q", struct.pack("<d", value))[0]
    return bits
