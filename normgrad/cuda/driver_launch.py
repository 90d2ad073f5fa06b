"""The launches of a plan through NVIDIA's ``cuda-bindings``: ``cuLaunchKernelEx``, prepared once.

Triton's launcher converts every argument at every launch, and launches no clusters of kernels that are compiled for one
CTA, as these are. Here the launch configurations and the parameter buffers are built when a plan is made; a run writes
addresses into the buffers and calls the driver once per launch.

The driver also says how many clusters of CTAs are resident on a GPU at once (``cluster_occupancy``, which
``backend.chip`` asks for): a cluster needs multiprocessors of one GPC with room for all of its CTAs.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import triton

from normgrad.cuda.helper_kernels import clear_mailbox
from normgrad.cuda.launch import INT64, Given, Scratch, Step, aligned, compiled
from normgrad.log import warn_once

#: The GPU and the Triton that launches in clusters were tried with. With others, kernels are launched without clusters.
CHECKED_CAPABILITY = (9, 0)
CHECKED_TRITON = "3.6."

_PORTABLE_CLUSTER_SIZE = 8  # CTAs: larger clusters have to be allowed for each kernel
_MAX_POINTERS = 2  # that Triton adds to a kernel's parameters
_OCCUPANCY_THREADS = 128  # of a CTA of the kernel that the driver is asked about
_RESERVED = 1024  # bytes of shared memory that the hardware takes for a CTA
_SIZES = {"i1": 1, "i8": 1, "i16": 2, "i32": 4, "i64": 8}  # bytes of an integer parameter, by Triton's name of its type


class NotLaunchable(Exception):
    """Launches that cannot be prepared; the text says why."""


@cache
def load_driver() -> Any:
    """Return ``cuda.bindings.driver``, imported when the first plan is made."""
    from cuda.bindings import driver

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
    driver: Any, grid: tuple[int, int, int], threads: int, shared: int, cluster: int, pdl: bool, cooperative: bool
) -> Any:
    """Return a ``CUlaunchConfig`` for the default stream, with ``cluster`` CTAs in a cluster."""
    attributes: list[Any] = []

    def add_attribute(name: str) -> Any:
        attribute = driver.CUlaunchAttribute()
        attribute.id = getattr(driver.CUlaunchAttributeID, f"CU_LAUNCH_ATTRIBUTE_{name}")
        attributes.append(attribute)
        return attribute.value

    if pdl:
        add_attribute("PROGRAMMATIC_STREAM_SERIALIZATION").programmaticStreamSerializationAllowed = 1
    if cooperative:
        add_attribute("COOPERATIVE").cooperative = 1
    if cluster > 1:
        size = add_attribute("CLUSTER_DIMENSION").clusterDim
        size.x, size.y, size.z = cluster, 1, 1
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = grid
    config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
    config.sharedMemBytes = shared
    config.attrs, config.numAttrs = attributes, len(attributes)
    return config


@dataclass(slots=True)
class _Buffers:
    """The memory that a run needs for itself, so that several threads may run a plan at once.

    It has the values of all parameters, and for each launch a configuration and pointers to the values.
    """

    values: array[int]
    pointers: array[int]  # the addresses of the values
    launches: list[tuple[Any, Any, int]]  # configuration, function, address of the pointers
    stream: int


class DriverLaunches:
    """The launches of a plan, in order, on tensors whose addresses each run brings.

    The parameters of all launches are one list of values. Those that are addresses of tensors or of the workspace are
    written anew at every run.
    """

    def __init__(
        self, steps: Sequence[Step], kernels: Sequence[Any], names: Sequence[str], device: int, driver: Any = None
    ) -> None:
        """Prepare the launches of compiled kernels; ``names`` are those of the tensors, in the order of addresses."""
        self._driver = load_driver() if driver is None else driver
        self._device = device
        self._values: list[int] = []
        self._given: list[tuple[int, int]] = []  # which value is the address of which tensor
        self._scratch: list[tuple[int, int]] = []  # which value is an address in the workspace, at which offset
        self._steps: list[tuple[Step, Any, int]] = []  # step, kernel, its first value
        try:
            for step, kernel in zip(steps, kernels, strict=True):
                if all(step.grid):
                    self._add(step, kernel, names)
            self._free = [self._new_buffers()]  # that no run is using
        except (AttributeError, LookupError, RuntimeError, ValueError, OverflowError) as error:
            raise NotLaunchable(f"another Triton or driver than was tried ({type(error).__name__}: {error})") from error

    def _add(self, step: Step, kernel: Any, names: Sequence[str]) -> None:
        """Add a launch, and where the values of its parameters come from."""
        function = self._driver.CUfunction(kernel.function)
        parameters = list(parameters_of(step, kernel))
        extra = _extra_pointers(kernel, [size for size, _ in parameters])
        if step.options.cluster > 1:
            allow_cluster(self._driver, function, step.options.cluster, kernel.metadata.shared)
        first = len(self._values)
        for index, (_, value) in enumerate(parameters, first):
            if isinstance(value, Given):
                self._given.append((index, names.index(value.name)))
            elif isinstance(value, Scratch):
                self._scratch.append((index, value.offset))
        self._values += [value if isinstance(value, int) else 0 for _, value in parameters] + [0] * extra
        self._steps.append((step, kernel, first))

    def _new_buffers(self) -> _Buffers:
        # Every value has 8 bytes. Of a smaller parameter the driver reads the first ones, which are the low ones.
        values = array("q", self._values)
        base, _ = values.buffer_info()
        pointers = array("q", range(base, base + 8 * len(values), 8))
        pointers_at, _ = pointers.buffer_info()
        launches = []
        for step, kernel, first in self._steps:
            metadata = kernel.metadata
            size = step.grid, 32 * metadata.num_warps, metadata.shared, step.options.cluster
            config = launch_config(self._driver, *size, metadata.launch_pdl, metadata.launch_cooperative_grid)
            launches.append((config, self._driver.CUfunction(kernel.function), pointers_at + 8 * first))
        return _Buffers(values, pointers, launches, stream=0)

    def launch(self, addresses: Sequence[int], workspace: int, stream: int) -> None:
        """Put the launches for tensors at these addresses on a stream."""
        try:
            buffers = self._free.pop()  # no other thread, and no signal handler, has them
        except IndexError:  # other runs have all that there are
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
    """Yield the size in bytes and the value of each parameter that the compiled code takes, in order.

    Tuples are taken apart and constants left out, as Triton does. The value of a tensor is its `Given` or `Scratch`.
    """
    for of_type, value in zip(kernel.src.signature.values(), step.parameters, strict=True):
        yield from _flattened(of_type, value)


def _flattened(of_type: Any, value: Any) -> Iterator[tuple[int, Any]]:
    """Yield size and value of a parameter of one of Triton's types, those of a tuple one by one."""
    if isinstance(of_type, tuple):
        for pair in zip(of_type, value, strict=True):
            yield from _flattened(*pair)
    elif of_type.startswith("*") and isinstance(value, Given | Scratch):
        yield 8, value
    elif of_type in _SIZES and isinstance(value, int):
        yield _SIZES[of_type], value
    elif of_type != "constexpr":
        raise NotLaunchable(f"a parameter has the type {of_type}, which is not known")


def parameter_sizes(kernel: Any) -> list[int]:
    """Return the bytes of each parameter of compiled code, in order, from its PTX.

    ``cuFuncGetParamInfo`` would say the same, but older drivers do not have it.
    """
    ptx = kernel.asm["ptx"]
    entry = ptx[ptx.index(".entry") :]
    return [int(bits) // 8 for bits in re.findall(r"\.param \.[a-z](\d+)", entry[: entry.index(")")])]


def _extra_pointers(kernel: Any, sizes: Sequence[int]) -> int:
    """Return how many pointers compiled code takes after parameters of these sizes.

    They are for memory that Triton passes to kernels that need some. These need none, so the pointers are null.
    """
    metadata = kernel.metadata
    if metadata.num_ctas != 1 or metadata.global_scratch_size or getattr(metadata, "profile_scratch_size", 0):
        raise NotLaunchable("a kernel needs several CTAs or memory of Triton's")
    found = parameter_sizes(kernel)
    extra = len(found) - len(sizes)
    if extra not in range(_MAX_POINTERS + 1) or found != [*sizes, *[8] * extra]:
        raise NotLaunchable(f"a kernel takes parameters of {found} bytes, and {sizes} were expected")
    return extra


def _error_text(driver: Any, status: Any) -> str:
    _, text = driver.cuGetErrorString(status)
    return text.decode() if text else f"error {int(status)}"


def cluster_occupancy(device: int) -> Callable[[int, int], int] | None:
    """Return a function that says how many clusters are resident at once, from CTAs per cluster and CTAs per SM.

    Return None for a GPU without clusters, and for a GPU or a Triton that clusters were not checked with.
    """
    capability = torch.cuda.get_device_capability(device)
    if capability < (9, 0):
        return None
    problem = unchecked(capability, triton.__version__)
    if problem is not None:
        warn_once(f"kernels are launched without clusters: {problem}")
        return None
    return partial(_occupancy, device)


def unchecked(capability: tuple[int, int], triton_version: str) -> str | None:
    """Return why clusters are not used with a GPU and a Triton, or None where they were checked."""
    if capability != CHECKED_CAPABILITY:
        found, checked = (".".join(map(str, version)) for version in (capability, CHECKED_CAPABILITY))
        return f"compute capability {found} was not checked with them, {checked} was"
    if not triton_version.startswith(CHECKED_TRITON):
        return f"Triton {triton_version} was not checked with them, {CHECKED_TRITON}x was"
    return None


@cache
def _occupancy(device: int, ctas: int, ctas_per_sm: int) -> int:
    """Return how many clusters of ``ctas`` CTAs are resident where ``ctas_per_sm`` CTAs fit on an SM; 0 if unknown.

    The driver answers for a kernel and its shared memory. Any kernel will do, with so much shared memory that an SM has
    room for ``ctas_per_sm`` CTAs and not for one more.
    """
    kernel = compiled(Step(clear_mailbox, (1, 1, 1), [Scratch(0, INT64), 1], {"BLOCK": 1024}), device)
    properties = torch.cuda.get_device_properties(device)
    shared = properties.shared_memory_per_multiprocessor // (ctas_per_sm + 1) + _RESERVED
    return max_active_clusters(load_driver(), kernel.function, ctas, shared)


def max_active_clusters(driver: Any, function: int, ctas: int, shared: int) -> int:
    """Return how many clusters of a kernel are resident at once; 0 where the driver does not say."""
    handle = driver.CUfunction(function)
    config = launch_config(driver, (ctas, 1, 1), _OCCUPANCY_THREADS, shared, ctas, pdl=False, cooperative=False)
    try:
        allow_cluster(driver, handle, ctas, shared)
    except NotLaunchable:
        return 0
    status, found = driver.cuOccupancyMaxActiveClusters(handle, config)
    return 0 if status else int(found)
