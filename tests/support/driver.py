"""A stand-in for ``cuda.bindings.driver`` that writes launches down."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from normgrad.cuda.launch import Step

INVALID_CONTEXT = 201


def at(address: int, kind: Any = ctypes.c_int64) -> int:
    found: int = kind.from_address(address).value
    return found


class _Attribute:
    def __init__(self) -> None:
        self.id: Any = None
        self.value = SimpleNamespace(clusterDim=SimpleNamespace(x=0, y=0, z=0))


class _Config:
    def __init__(self) -> None:
        self.attrs: list[_Attribute] = []
        self.numAttrs = self.hStream = 0


#: What the driver's structures and constants are like, where cuda-bindings is not installed.
STRUCTURES = SimpleNamespace(
    CUlaunchConfig=_Config,
    CUlaunchAttribute=_Attribute,
    CUlaunchAttributeID=SimpleNamespace(
        CU_LAUNCH_ATTRIBUTE_COOPERATIVE=2,
        CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION=4,
        CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION=6,
    ),
    CUfunction=int,
    CUfunction_attribute=SimpleNamespace(
        CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES=8, CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED=14
    ),
    CUresult=SimpleNamespace(CUDA_ERROR_INVALID_CONTEXT=INVALID_CONTEXT),
)

_VALUES = {
    2: lambda value: value.cooperative,
    4: lambda value: (value.clusterDim.x, value.clusterDim.y, value.clusterDim.z),
    6: lambda value: value.programmaticStreamSerializationAllowed,
}


class Driver:
    """Takes kernels whose parameters have given sizes, and writes down the launches; ``status`` is every answer."""

    def __init__(self, *sizes: int, status: int = 0, structures: Any = STRUCTURES) -> None:
        self.launches: list[dict[str, Any]] = []
        self.allowed: list[tuple[int, ...]] = []
        self._sizes = sizes
        self.status = status
        for name in vars(STRUCTURES):
            setattr(self, name, getattr(structures, name))

    def cuFuncSetAttribute(self, function: Any, attribute: Any, value: int) -> tuple[int]:  # noqa: N802
        self.allowed.append((int(function), int(attribute), value))
        return (self.status,)

    def cuGetErrorString(self, status: int) -> tuple[int, bytes]:  # noqa: N802
        return 0, f"words for {status}".encode()

    def cuOccupancyMaxActiveClusters(self, function: Any, config: Any) -> tuple[int, int]:  # noqa: N802
        self.launches.append(self._described(config, function))
        return self.status, 30

    def cuLaunchKernelEx(self, config: Any, function: Any, parameters: int, extra: int) -> tuple[int]:  # noqa: N802
        assert extra == 0
        kinds = {1: ctypes.c_int8, 4: ctypes.c_int32, 8: ctypes.c_int64}
        values = [at(at(parameters + 8 * index), kinds[size]) for index, size in enumerate(self._sizes)]
        self.launches.append(self._described(config, function) | {"values": values})
        return (self.status,)

    def _described(self, config: Any, function: Any) -> dict[str, Any]:
        assert config.numAttrs == len(config.attrs)
        return {
            "function": int(function),
            "grid": (config.gridDimX, config.gridDimY, config.gridDimZ),
            "block": (config.blockDimX, config.blockDimY, config.blockDimZ),
            "shared": config.sharedMemBytes,
            "stream": int(config.hStream),
            "attributes": {int(one.id): _VALUES[int(one.id)](one.value) for one in config.attrs},
        }


def kernel(signature: dict[str, Any], sizes: Sequence[int], function: int = 77, **metadata: Any) -> Any:
    """Return a compiled kernel whose parameters have these sizes."""
    parameters = ", ".join(f".param .u{8 * size} kernel_param_{index}" for index, size in enumerate(sizes))
    usual = {"num_warps": 4, "num_ctas": 1, "shared": 1024, "launch_pdl": False, "launch_cooperative_grid": False}
    none = {"global_scratch_size": 0, "profile_scratch_size": 0}
    return SimpleNamespace(
        src=SimpleNamespace(signature=signature),
        metadata=SimpleNamespace(**usual | none | metadata),
        function=function,
        asm={"ptx": f".visible .entry kernel({parameters}) {{ ret; }}"},
    )


def step(arguments: list[Any], constants: dict[str, Any], grid: tuple[int, int, int] = (3, 2, 1)) -> Step:
    names = [f"argument{index}" for index in range(len(arguments))]
    return Step(SimpleNamespace(arg_names=[*names, *constants]), grid, arguments, constants)
