"""CUDA's driver and PyTorch's stream as a series of launches sees them, and what it writes down."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

from normgrad.cuda.launch import Step

LAUNCH = ctypes.CFUNCTYPE(ctypes.c_int32, *[ctypes.c_void_p] * 4)


@ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_int32, ctypes.c_void_p)
def current_stream(device: int, place: int) -> int:
    """A device's stream is called by its number."""
    ctypes.c_int64.from_address(place).value = 1000 + device
    return 0


def at(address: int, kind: Any = ctypes.c_int64) -> int:
    found: int = kind.from_address(address).value
    return found


class Driver:
    """Takes kernels whose parameters have given sizes, and notes the launches."""

    def __init__(self, *sizes: int, status: int = 0) -> None:
        self.launches: list[dict[str, Any]] = []
        self.allowed: list[tuple[int, ...]] = []
        self._sizes = sizes
        self.status = status
        self.cuLaunchKernelEx = LAUNCH(self._launched)

    def cuFuncGetParamInfo(self, function: Any, index: Any, offset: Any, size: Any) -> int:  # noqa: N802
        if index.value >= len(self._sizes):
            return 1
        size._obj.value = self._sizes[index.value]
        return 0

    def cuFuncSetAttribute(self, function: Any, attribute: int, value: int) -> int:  # noqa: N802
        self.allowed.append((function.value, attribute, value))
        return self.status

    def _launched(self, configuration: int, function: int, parameters: int, extra: int | None) -> int:
        assert extra is None
        halves = [at(configuration + 4 * place, ctypes.c_uint32) for place in range(7)]
        attributes, count = at(configuration + 40), at(configuration + 48, ctypes.c_uint32)
        values = [at(parameters + 8 * place) for place in range(len(self._sizes))]
        self.launches.append(
            {
                "function": function,
                "grid": tuple(halves[:3]),
                "block": tuple(halves[3:6]),
                "shared": halves[6],
                "stream": at(configuration + 32),
                "attributes": {at(attributes + 72 * n): at(attributes + 72 * n + 8) for n in range(count)},
                "values": [at(value) for value in values],
            }
        )
        return self.status


def kernel(signature: dict[str, Any], function: int = 77, **metadata: Any) -> Any:
    usual = {"num_warps": 4, "num_ctas": 1, "shared": 1024, "launch_pdl": False, "launch_cooperative_grid": False}
    none = {"global_scratch_size": 0, "profile_scratch_size": 0}
    return SimpleNamespace(
        src=SimpleNamespace(signature=signature),
        metadata=SimpleNamespace(**usual | none | metadata),
        function=function,
    )


def step(arguments: list[Any], constants: dict[str, Any], grid: tuple[int, int, int] = (3, 2, 1)) -> Step:
    names = [f"argument{place}" for place in range(len(arguments))]
    return Step(SimpleNamespace(arg_names=[*names, *constants]), grid, arguments, constants)
