"""The launches of a plan through NVIDIA's ``cuda-bindings``: ``cuLaunchKernelEx``, prepared once.

Triton's launcher converts every argument at every launch, and launches no clusters of kernels that are compiled for one
CTA, as these are. Here the launch configurations and the parameter buffers are built when a plan is made; a run writes
addresses into the buffers and calls the driver once per launch. The backend falls back to Triton's launcher where
cuda-bindings is not installed, or a kernel takes other parameters than expected.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from normgrad.cuda.launch import Given, Scratch, Step, aligned

_PORTABLE_CLUSTER_SIZE = 8  # CTAs: larger clusters have to be allowed for each kernel
_MAX_POINTERS = 2  # that Triton adds to a kernel's parameters
_SIZES = {"i1": 1, "i8": 1, "i16": 2, "i32": 4, "i64": 8}  # bytes


class NotLaunchable(Exception):
    """Launches that cannot be prepared; the text says why."""


@cache
def load_driver() -> Any:
    """Return ``cuda.bindings.driver``; None, with a line in the log, where cuda-bindings is not installed."""
    try:
        from cuda.bindings import driver
    except ImportError as error:
        logging.getLogger("normgrad").warning(
            "cuda-bindings cannot be imported (%s): kernels are launched by Triton, without clusters, and each launch "
            "takes longer; pip install cuda-bindings",
            error,
        )
        return None
    return driver


def allow_cluster(driver: Any, function: Any, ctas: int, shared: int) -> None:
    """Allow a kernel to be launched in clusters of so many CTAs, each with these bytes of dynamic shared memory."""
    attributes = driver.CUfunction_attribute
    # With the static shared memory of the kernel's own they may exceed the 48 KiB that need no permission.
    settings = [(attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared)]
    if ctas > _PORTABLE_CLUSTER_SIZE:
        settings.append((attributes.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1))
    for attribute, value in settings:
        (status,) = driver.cuFuncSetAttribute(function, attribute, value)
        if status:
            raise NotLaunchable(f"the driver allows no clusters of {ctas} CTAs: {_error_text(driver, status)}")


def launch_config(
    driver: Any, grid: tuple[int, int, int], threads: int, shared: int, attributes: Sequence[Any] = ()
) -> Any:
    """Return a ``CUlaunchConfig`` for the default stream."""
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = grid
    config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
    config.sharedMemBytes = shared
    config.attrs, config.numAttrs = list(attributes), len(attributes)
    return config


def cluster_attribute(driver: Any, ctas: int) -> Any:
    """Return the launch attribute for clusters of so many CTAs."""
    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    size = attribute.value.clusterDim
    size.x, size.y, size.z = ctas, 1, 1
    return attribute


def _attributes(driver: Any, step: Step, kernel: Any) -> list[Any]:
    identifiers, found = driver.CUlaunchAttributeID, []
    if kernel.metadata.launch_pdl:
        attribute = driver.CUlaunchAttribute()
        attribute.id = identifiers.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        found.append(attribute)
    if kernel.metadata.launch_cooperative_grid:
        attribute = driver.CUlaunchAttribute()
        attribute.id = identifiers.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
        attribute.value.cooperative = 1
        found.append(attribute)
    if step.options.cluster > 1:
        found.append(cluster_attribute(driver, step.options.cluster))
    return found


@dataclass(slots=True)
class _Buffers:
    """What one run has for itself: the values of all parameters, and for each launch a configuration and pointers."""

    values: array[int]
    pointers: array[int]  # to the values
    launches: list[tuple[Any, Any, int]]  # configuration, function, address of the pointers
    stream: int


class DriverLaunches:
    """The launches of a plan, in order, on tensors whose addresses each run brings."""

    def __init__(
        self, steps: Sequence[Step], kernels: Sequence[Any], names: Sequence[str], device: int, driver: Any = None
    ) -> None:
        """Prepare the launches of compiled kernels; ``names`` are those of the tensors, in the order of addresses."""
        self._driver = load_driver() if driver is None else driver
        if self._driver is None:
            raise NotLaunchable("cuda-bindings is not installed")
        self._device = device
        self._values: list[int] = []
        self._given: list[tuple[int, int]] = []  # which value is the address of which tensor
        self._scratch: list[tuple[int, int]] = []  # which value is an address in the workspace, at which offset
        self._steps: list[tuple[Step, Any, int, int]] = []  # step, kernel, its first value, the values' end
        for step, kernel in zip(steps, kernels, strict=True):
            if all(step.grid):
                self._add(step, kernel, names)
        self._free = [self._new_buffers()]

    def _add(self, step: Step, kernel: Any, names: Sequence[str]) -> None:
        function = self._driver.CUfunction(kernel.function)
        parameters = list(parameters_of(step, kernel))
        extra = _extra_pointers(self._driver, kernel, function, [size for size, _ in parameters])
        if step.options.cluster > 1:
            allow_cluster(self._driver, function, step.options.cluster, kernel.metadata.shared)
        first = len(self._values)
        for index, (_, value) in enumerate(parameters, first):
            if isinstance(value, Given):
                self._given.append((index, names.index(value.name)))
            elif isinstance(value, Scratch):
                self._scratch.append((index, value.offset))
        self._values += [value if isinstance(value, int) else 0 for _, value in parameters] + [0] * extra
        self._steps.append((step, kernel, first, len(self._values)))

    def _new_buffers(self) -> _Buffers:
        # Every value has 8 bytes: of a smaller parameter the driver reads the first ones.
        values = array("q", self._values)
        base, _ = values.buffer_info()
        pointers = array("q", range(base, base + 8 * len(values), 8))
        pointers_at, _ = pointers.buffer_info()
        launches = []
        for step, kernel, first, _ in self._steps:
            metadata = kernel.metadata
            attributes = _attributes(self._driver, step, kernel)
            config = launch_config(self._driver, step.grid, 32 * metadata.num_warps, metadata.shared, attributes)
            launches.append((config, self._driver.CUfunction(kernel.function), pointers_at + 8 * first))
        return _Buffers(values, pointers, launches, stream=0)

    def launch(self, addresses: Sequence[int], workspace: int, stream: int) -> None:
        """Put the launches for tensors at these addresses on a stream."""
        try:
            buffers = self._free.pop()  # no other thread, and no signal handler, has them
        except IndexError:
            buffers = self._new_buffers()
        values, base = buffers.values, aligned(workspace)
        for index, tensor in self._given:
            values[index] = addresses[tensor]
        for index, offset in self._scratch:
            values[index] = base + offset
        if buffers.stream != stream:
            for config, _, _ in buffers.launches:
                config.hStream = stream
            buffers.stream = stream
        launch_kernel = self._driver.cuLaunchKernelEx
        for config, function, parameters in buffers.launches:
            (status,) = launch_kernel(config, function, parameters, 0)
            if status:
                self._retry(status, config, function, parameters)
        self._free.append(buffers)

    def _retry(self, status: Any, config: Any, function: Any, parameters: int) -> None:
        """Repeat a launch in a thread that had no context on the device; raise any other error."""
        if status == self._driver.CUresult.CUDA_ERROR_INVALID_CONTEXT:
            torch.cuda.set_device(self._device)
            (status,) = self._driver.cuLaunchKernelEx(config, function, parameters, 0)
        if status:
            raise RuntimeError(f"the CUDA driver refused a launch: {_error_text(self._driver, status)}")


def parameters_of(step: Step, kernel: Any) -> Iterator[tuple[int, Any]]:
    """Yield the size in bytes and the value of each parameter that the compiled code takes, in order."""
    for kind, value in zip(kernel.src.signature.values(), step.parameters, strict=True):
        yield from _flattened(kind, value)


def _flattened(kind: Any, value: Any) -> Iterator[tuple[int, Any]]:
    if isinstance(kind, tuple):
        for inner_kind, inner in zip(kind, value, strict=True):
            yield from _flattened(inner_kind, inner)
    elif kind.startswith("*") and isinstance(value, Given | Scratch):
        yield 8, value
    elif kind in _SIZES and isinstance(value, int):
        yield _SIZES[kind], value
    elif kind != "constexpr":
        raise NotLaunchable(f"a parameter has the type {kind}, which is not known")


def _extra_pointers(driver: Any, kernel: Any, function: Any, sizes: Sequence[int]) -> int:
    """Return how many pointers the loaded function takes after parameters of these sizes.

    Triton passes memory that some kernels need for themselves. These need none, so the pointers are null.
    """
    metadata = kernel.metadata
    if metadata.num_ctas != 1 or metadata.global_scratch_size or getattr(metadata, "profile_scratch_size", 0):
        raise NotLaunchable("a kernel needs several CTAs or memory of Triton's")
    found: list[int] = []
    while len(found) <= len(sizes) + _MAX_POINTERS:
        status, _, size = driver.cuFuncGetParamInfo(function, len(found))
        if status:
            break
        found.append(size)
    extra = len(found) - len(sizes)
    if extra not in range(_MAX_POINTERS + 1) or found != [*sizes, *[8] * extra]:
        raise NotLaunchable(f"a kernel takes parameters of {found} bytes, and {sizes} were expected")
    return extra


def _error_text(driver: Any, status: Any) -> str:
    _, text = driver.cuGetErrorString(status)
    return text.decode() if text else f"error {int(status)}"
