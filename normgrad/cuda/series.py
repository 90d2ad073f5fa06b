"""All launches of a kernel in one call of native code, past Triton's launcher, which takes each argument from Python.

A series is a descriptor of int64 numbers: what the driver's ``cuLaunchKernelEx`` takes for every launch, as it lies in
memory. The addresses of tensors, of the workspace and of the descriptor's own parts are filled in for each call; the
stream is put in by the native code, which asks for the current one where none is given.
"""

from __future__ import annotations

import ctypes
import sys
from array import array
from collections.abc import Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from normgrad.cpu.native import translated
from normgrad.cuda.launch import ALIGNMENT, Given, Scratch, Step, aligned
from normgrad.operators import gathering

_COOPERATIVE, CLUSTER, _PROGRAMMATIC_SERIALIZATION = 2, 4, 6  # of CUlaunchAttributeID
# Of CUfunction_attribute: bytes of dynamic shared memory; and that a cluster may be larger than all GPUs have room for.
_MOST_SHARED_MEMORY, _ANY_CLUSTER = 8, 14
_PORTABLE_CLUSTER = 8
_ATTRIBUTE, _CONFIGURATION = 9, 7  # numbers in CUlaunchAttribute and CUlaunchConfig
_COUNT, _LAUNCH, _CURRENT_STREAM, _DEVICE, _STREAM, _HEAD = range(6)  # a descriptor's head; then three for each launch
_STREAM_OF_LAUNCH = 4  # a number in CUlaunchConfig
_SELF = -1
_NO_CONTEXT = 201
_MOST_POINTERS = 2
_SIZES = {"i1": 1, "i8": 1, "i16": 2, "i32": 4, "i64": 8}


# What PyTorch's compiled programs make their tensors with; on the current device alone.
_quick_bytes: Any = getattr(sys.modules.get("torch._C._dynamo.guards"), "_empty_strided_cuda", None)


def fresh_bytes(nbytes: int, device: torch.device) -> torch.Tensor:
    """Memory from the current stream's pool."""
    if _quick_bytes is not None and torch._C._cuda_getDevice() == device.index:
        quickly: torch.Tensor = _quick_bytes((nbytes,), (1,), torch.uint8)
        return quickly
    return torch.empty(nbytes, dtype=torch.uint8, device=device)


class DoesNotFit(Exception):
    """A kernel that this module does not know how to launch."""


def allow_cluster(driver: Any, function: int, programs: int, shared: int) -> int:
    """Let a kernel be launched in clusters of so many programs; an error of the driver's where it cannot be, or 0.

    ``shared``: bytes of shared memory that are asked for at the launch; with the slots that the kernel has beside them,
    they may be more than a kernel has unasked.
    """
    handle = ctypes.c_void_p(function)
    refused = driver.cuFuncSetAttribute(handle, _MOST_SHARED_MEMORY, shared)
    if programs > _PORTABLE_CLUSTER:
        refused = refused or driver.cuFuncSetAttribute(handle, _ANY_CLUSTER, 1)
    return int(refused)


class Series:
    """Launches in order, with the names by which :class:`normgrad.contract.plan.OneStep` knows them."""

    def __init__(
        self,
        steps: Sequence[Step],
        kernels: Sequence[Any],
        names: Sequence[str],
        device: int,
        workspace_size: int,
        driver: Any = None,
        current_stream: Any = None,
    ) -> None:
        """:class:`DoesNotFit` where a kernel is other than expected.

        ``driver``: the library that launches. ``current_stream``: a function of a device and where its stream is to go.
        """
        driver = driver or driver_library()
        gather = gathering.gather()
        if gather is None or _quick_bytes is None:
            raise DoesNotFit
        self._gather, self._device = gather, device
        self.entry, self._launch = _launches()
        self.workspace_size = workspace_size
        self.alignment = ALIGNMENT
        self.workspace = partial(_quick_bytes, (workspace_size,), (1,), torch.uint8) if workspace_size else None
        self.call = None
        self.is_ready = None if torch.cuda.device_count() == 1 else self._is_ready
        self.fills: list[tuple[int, int, int]] = []
        self.scratch: list[tuple[int, int]] = []
        pairs = [(step, kernel) for step, kernel in zip(steps, kernels, strict=True) if all(step.grid)]
        asked = current_stream or _current_stream()
        numbers = [len(pairs), _address(driver.cuLaunchKernelEx), _address(asked), device, 0, *[0] * (3 * len(pairs))]
        for number, (step, kernel) in enumerate(pairs):
            self._add(numbers, _HEAD + 3 * number, step, kernel, names, driver)
        self.template = array("q", [*numbers, 0])
        self.numbers = len(self.template)
        in_workspace = [(position, len(names), offset) for position, offset in self.scratch]
        self._table = array("q", gathering.table([], [], self.numbers, [*self.fills, *in_workspace]))

    def _add(self, numbers: list[int], entry: int, step: Step, kernel: Any, names: Sequence[str], driver: Any) -> None:
        """A launch, which the numbers from ``entry`` on point to."""
        values = list(_parameters(step, kernel))
        values += [(8, 0)] * _more_pointers(kernel, [size for size, _ in values], driver)
        attributes = [(_PROGRAMMATIC_SERIALIZATION, 1, 0)] * bool(kernel.metadata.launch_pdl)
        attributes += [(_COOPERATIVE, 1, 0)] * bool(kernel.metadata.launch_cooperative_grid)
        attributes += [(CLUSTER, step.options.cluster | 1 << 32, 1)] * (step.options.cluster > 1)
        configuration = len(numbers)
        attributes_at = configuration + _CONFIGURATION
        values_at = attributes_at + _ATTRIBUTE * len(attributes)
        pointers_at = values_at + len(values)
        warps, shared = kernel.metadata.num_warps, kernel.metadata.shared
        cluster = step.options.cluster
        if cluster > 1 and allow_cluster(driver, kernel.function, cluster, shared):
            raise DoesNotFit
        x, y, z = step.grid
        numbers += [x | y << 32, z | 32 * warps << 32, 1 | 1 << 32, shared, 0, 0, len(attributes)]
        for attribute in attributes:
            numbers += [*attribute, *[0] * (_ATTRIBUTE - len(attribute))]
        numbers += [value if isinstance(value, int) else 0 for _, value in values]
        numbers += [0] * len(values)
        numbers[entry + 1] = kernel.function
        self.fills += [(entry, _SELF, 8 * configuration), (entry + 2, _SELF, 8 * pointers_at)]
        self.fills.append((configuration + 5, _SELF, 8 * attributes_at))
        for place, (_, value) in enumerate(values):
            self.fills.append((pointers_at + place, _SELF, 8 * (values_at + place)))
            if isinstance(value, Given):
                self.fills.append((values_at + place, names.index(value.name), 0))
            elif isinstance(value, Scratch):
                self.scratch.append((values_at + place, value.offset))

    def _is_ready(self) -> bool:
        """Whether the tensors' device is this thread's."""
        return bool(torch._C._cuda_getDevice() == self._device)

    def failed(self, status: int, address: int) -> None:
        """Launch again in a thread that had no context on the device; raise any other status."""
        if status == _NO_CONTEXT:  # nothing has been launched
            torch.cuda.set_device(self._device)
            status = self._launch(address)
        if status:
            raise RuntimeError(f"CUDA's driver refused a launch: {_words(status)}")

    def launch(self, addresses: Sequence[int], workspace: int, stream: int) -> None:
        """Put the launches for tensors at these addresses on a stream."""
        descriptor = self.template + array("q", [*addresses, aligned(workspace)])
        descriptor[_CURRENT_STREAM], descriptor[_STREAM] = 0, stream
        address, _ = descriptor.buffer_info()
        self._gather(self._table.buffer_info()[0], id(()), id(()), address)
        status = self._launch(address)
        if status:
            self.failed(status, address)


def _parameters(step: Step, kernel: Any) -> Iterator[tuple[int, Any]]:
    """The bytes and the value of each parameter that the compiled code takes, in order."""
    constants = step.kernel.arg_names[len(step.arguments) :]
    values = [*step.arguments, *(step.constants[name] for name in constants)]
    for kind, value in zip(kernel.src.signature.values(), values, strict=True):
        yield from _flat(kind, value)


def _flat(kind: Any, value: Any) -> Iterator[tuple[int, Any]]:
    if isinstance(kind, tuple):
        for inner_kind, inner in zip(kind, value, strict=True):
            yield from _flat(inner_kind, inner)
    elif kind.startswith("*") and isinstance(value, Given | Scratch):
        yield 8, value
    elif kind in _SIZES and isinstance(value, int):
        yield _SIZES[kind], value
    elif kind != "constexpr":
        raise DoesNotFit


def _more_pointers(kernel: Any, sizes: Sequence[int], driver: Any) -> int:
    """How many pointers the loaded function takes after parameters of these sizes, to memory that Triton may bring.

    These kernels need none of it, so that the pointers are null.
    """
    metadata = kernel.metadata
    if metadata.num_ctas != 1 or metadata.global_scratch_size or getattr(metadata, "profile_scratch_size", 0):
        raise DoesNotFit
    offset, size = ctypes.c_size_t(), ctypes.c_size_t()
    found: list[int] = []
    while len(found) <= len(sizes) + _MOST_POINTERS and not driver.cuFuncGetParamInfo(
        ctypes.c_void_p(kernel.function),
        ctypes.c_size_t(len(found)),
        ctypes.byref(offset),
        ctypes.byref(size),
    ):
        found.append(size.value)
    more = len(found) - len(sizes)
    if more not in range(_MOST_POINTERS + 1) or found != [*sizes, *[8] * more]:
        raise DoesNotFit
    return more


def _words(status: int) -> str:
    text = ctypes.c_char_p()
    driver_library().cuGetErrorString(status, ctypes.byref(text))
    return (text.value or b"").decode() or f"error {status}"


@cache
def driver_library() -> Any:
    """CUDA's driver."""
    return ctypes.CDLL("libcuda.so.1")


@cache
def _current_stream() -> Any:
    """Of PyTorch's interface for compiled programs."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cuda.so"))
    return library.aoti_torch_get_current_cuda_stream


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


@cache
def _launches() -> tuple[int, Any]:
    """The address of a function of a descriptor's address that does its launches, and the function.

    It is called without the interpreter's lock, and returns 0 or the first status that is not.
    """
    from llvmlite import ir

    from normgrad.operators.words import Function

    module = ir.Module()
    write = Function(module, "launches", 1)
    (descriptor,) = write.arguments
    launch, current_stream = write.load(descriptor, _LAUNCH), write.load(descriptor, _CURRENT_STREAM)
    with write.where(write.is_("!=", current_stream, 0)):
        place = write.at(descriptor, _STREAM)
        status = write.call(current_stream, write.load(descriptor, _DEVICE), place, returns=32)
        write.require(write.is_("==", status, 0), status)
    stream = write.load(descriptor, _STREAM)
    with write.loop(write.load(descriptor, _COUNT)) as number:
        entry = write.at(descriptor, write.add(write.multiply(number, 3), _HEAD))
        configuration, function, parameters = (write.load(entry, place) for place in range(3))
        write.store(stream, configuration, _STREAM_OF_LAUNCH)
        status = write.call(launch, configuration, function, parameters, 0, returns=32)
        write.require(write.is_("==", status, 0), status)
    write.give(0)
    (address,) = translated(str(module), ["launches"])
    return address, ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p)(address)
