"""All launches of a kernel in one call of native code, past Triton's launcher, which takes each argument from Python.

A series is a descriptor of int64 numbers: what the driver's ``cuLaunchKernelEx`` takes for every launch, as it lies in
memory. The addresses of tensors, of the workspace and of the descriptor's own parts are filled in for each call.
"""

from __future__ import annotations

import ctypes
import sys
from array import array
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import torch

from normgrad.cpu.native import translated
from normgrad.cuda.launch import Given, Scratch, Step
from normgrad.cuda.problem import ALIGNMENT
from normgrad.operators import gathering

_COOPERATIVE, CLUSTER, _PROGRAMMATIC_SERIALIZATION = 2, 4, 6  # of CUlaunchAttributeID
_ANY_CLUSTER = 14  # of CUfunction_attribute: it may be larger than every GPU with clusters has room for
_PORTABLE_CLUSTER = 8
_ATTRIBUTE, _CONFIGURATION = 9, 7  # numbers in CUlaunchAttribute and CUlaunchConfig
_SELF, _STREAM, _WORKSPACE = -1, -2, -3
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


def allow_cluster(driver: Any, function: int, programs: int) -> int:
    """Let a kernel be launched in clusters of so many programs; an error of the driver's where it cannot be, or 0."""
    if programs <= _PORTABLE_CLUSTER:
        return 0
    return int(driver.cuFuncSetAttribute(ctypes.c_void_p(function), _ANY_CLUSTER, 1))


class Series:
    """Launches in order, with the names by which :class:`normgrad.contract.plan.OneStep` knows them."""

    def __init__(
        self,
        steps: Sequence[Step],
        kernels: Sequence[Any],
        names: Sequence[str],
        device: int,
        workspace_size: int,
        counted_on: Sequence[int],
        driver: Any = None,
    ) -> None:
        """:class:`DoesNotFit` where a kernel is other than expected. ``driver``: the library that launches."""
        driver = driver or driver_library()
        gather = gathering.gather()
        if gather is None or _quick_bytes is None:
            raise DoesNotFit
        self._gather, self._launch, self._device = gather, _launches(), device
        self.workspace_size, self.counted_on = workspace_size, counted_on
        self.workspace = self._workspace if workspace_size else None
        self.is_ready = None if torch.cuda.device_count() == 1 else self._is_ready
        self.fills: list[tuple[int, int, int]] = []
        pairs = [(step, kernel) for step, kernel in zip(steps, kernels, strict=True) if all(step.grid)]
        numbers = [len(pairs), ctypes.cast(driver.cuLaunchKernelEx, ctypes.c_void_p).value or 0]
        numbers += [0] * (3 * len(pairs))
        for number, (step, kernel) in enumerate(pairs):
            self._add(numbers, 2 + 3 * number, step, kernel, names, driver)
        self._template = array("q", [*numbers, 0, 0, 0])
        self.numbers = len(self._template)
        self._table = array("q", gathering.table([], [], self.numbers, self.fills))

    def _add(self, numbers: list[int], entry: int, step: Step, kernel: Any, names: Sequence[str], driver: Any) -> None:
        """A launch, which the numbers from ``entry`` on point to."""
        values = list(_parameters(step, kernel))
        values += [(8, 0)] * _more_pointers(kernel, [size for size, _ in values], driver)
        attributes = [(_PROGRAMMATIC_SERIALIZATION, 1, 0)] * bool(kernel.metadata.launch_pdl)
        attributes += [(_COOPERATIVE, 1, 0)] * bool(kernel.metadata.launch_cooperative_grid)
        attributes += [(CLUSTER, step.options.cluster | 1 << 32, 1)] * (step.options.cluster > 1)
        if step.options.cluster > 1:
            allow_cluster(driver, kernel.function, step.options.cluster)
        configuration = len(numbers)
        attributes_at = configuration + _CONFIGURATION
        values_at = attributes_at + _ATTRIBUTE * len(attributes)
        pointers_at = values_at + len(values)
        warps, shared = kernel.metadata.num_warps, kernel.metadata.shared
        x, y, z = step.grid
        numbers += [x | y << 32, z | 32 * warps << 32, 1 | 1 << 32, shared, 0, 0, len(attributes)]
        for attribute in attributes:
            numbers += [*attribute, *[0] * (_ATTRIBUTE - len(attribute))]
        numbers += [value if isinstance(value, int) else 0 for _, value in values]
        numbers += [0] * len(values)
        numbers[entry + 1] = kernel.function
        self.fills += [(entry, _SELF, 8 * configuration), (entry + 2, _SELF, 8 * pointers_at)]
        self.fills += [(configuration + 4, _STREAM, 0), (configuration + 5, _SELF, 8 * attributes_at)]
        for place, (_, value) in enumerate(values):
            self.fills.append((pointers_at + place, _SELF, 8 * (values_at + place)))
            if isinstance(value, Given):
                self.fills.append((values_at + place, names.index(value.name), 0))
            elif isinstance(value, Scratch):
                self.fills.append((values_at + place, _WORKSPACE, value.offset))

    def _is_ready(self) -> bool:
        """Whether the tensors' device is this thread's."""
        return bool(torch._C._cuda_getDevice() == self._device)

    def _workspace(self) -> tuple[Any, int]:
        """Memory for a call on the current stream, and its address."""
        memory = _quick_bytes((self.workspace_size,), (1,), torch.uint8)
        return memory, memory.data_ptr()

    def descriptor(self, workspace: int, stream: int | None = None) -> array[int]:
        """The descriptor without the tensors' addresses, for a stream, by default the current one."""
        numbers = self._template[:]
        numbers[_WORKSPACE] = -(-workspace // ALIGNMENT) * ALIGNMENT
        numbers[_STREAM] = torch._C._cuda_getCurrentRawStream(self._device) if stream is None else stream
        return numbers

    def call(self, descriptor: array[int], address: int) -> None:
        """Put the launches on their stream."""
        status = self._launch(address)
        if status == _NO_CONTEXT:  # a thread that has done nothing on the device yet; nothing has been launched
            torch.cuda.set_device(self._device)
            status = self._launch(address)
        if status:
            raise RuntimeError(f"CUDA's driver refused a launch: {_words(status)}")

    def launch(self, addresses: Sequence[int], workspace: int, stream: int) -> None:
        """Put the launches for tensors at these addresses on a stream."""
        descriptor = self.descriptor(workspace, stream) + array("q", addresses)
        address, _ = descriptor.buffer_info()
        self._gather(self._table.buffer_info()[0], id(()), id(()), address)
        self.call(descriptor, address)


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
def _launches() -> Any:
    """A function of a descriptor's address that does its launches; without the interpreter's lock."""
    from llvmlite import ir

    word = ir.IntType(64)
    status = ir.IntType(32)
    module = ir.Module()
    function = ir.Function(module, ir.FunctionType(status, [word]), "launches")
    (descriptor,) = function.args
    start, head, body, after, failed = (
        function.append_basic_block(name) for name in ["start", "head", "body", "after", "failed"]
    )
    build = ir.IRBuilder(start)

    def load(build: Any, index: Any) -> Any:
        return build.load(build.inttoptr(build.add(descriptor, build.mul(index, word(8))), word.as_pointer()))

    count = load(build, word(0))
    launch_type = ir.FunctionType(status, [word] * 4).as_pointer()
    launch = build.inttoptr(load(build, word(1)), launch_type)
    build.branch(head)
    build = ir.IRBuilder(head)
    index = build.phi(word)
    index.add_incoming(word(0), start)
    build.cbranch(build.icmp_signed("<", index, count), body, after)
    build = ir.IRBuilder(body)
    entry = build.add(build.mul(index, word(3)), word(2))
    given = [load(build, build.add(entry, word(number))) for number in range(3)]
    found = build.call(launch, [*given, word(0)])
    index.add_incoming(build.add(index, word(1)), body)
    build.cbranch(build.icmp_signed("==", found, status(0)), head, failed)
    ir.IRBuilder(after).ret(status(0))
    ir.IRBuilder(failed).ret(found)
    (address,) = translated(str(module), ["launches"])
    return ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p)(address)
