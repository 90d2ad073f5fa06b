"""Which devices there are: the host, or the GPUs where NORMGRAD_DEVICE says so."""

from __future__ import annotations

import functools
import os
from typing import Any, Protocol

from normgrad.contract.plan import Plan
from normgrad.contract.view import Memory
from normgrad.sdk import native
from normgrad.sdk.errors import AclError, Refused

ENVIRONMENT = "NORMGRAD_DEVICE"


class Mark(Protocol):
    """A point in a stream's work."""

    def query(self) -> bool: ...
    def wait(self) -> None: ...
    def milliseconds_since(self, earlier: Any) -> float: ...


class DeviceStream(Protocol):
    """Work in order, beside the caller. Copies say which addresses (to, source) lie in blocks of ours."""

    def run(self, plan: Plan, workspace: Memory) -> None: ...
    def copy(self, to: int, source: int, nbytes: int, sides: tuple[bool, bool], kept: Any) -> None: ...
    def fill(self, to: int, value: int, nbytes: int, on_device: bool, kept: Any) -> None: ...
    def record(self) -> Mark: ...
    def wait_for(self, mark: Any) -> None: ...
    def query(self) -> bool: ...
    def synchronize(self, timeout: float | None = None) -> None: ...


class Devices(Protocol):
    """Devices of one sort, by index."""

    def count(self) -> int: ...
    def device_name(self, index: int) -> str: ...
    def allocate(self, nbytes: int, index: int) -> int: ...
    def release(self, address: int) -> None: ...
    def stream(self, index: int) -> DeviceStream: ...
    def copy(self, to: int, source: int, nbytes: int, sides: tuple[bool, bool]) -> None: ...
    def fill(self, to: int, value: int, nbytes: int, on_device: bool) -> None: ...
    def memory_info(self, index: int) -> tuple[int, int]: ...
    def close(self) -> None: ...


@functools.cache
def devices() -> Devices:
    """The devices that this process uses, chosen once."""
    chosen = _choose()
    native.wait_for_work_at_exit("devices")
    return chosen


def close() -> None:
    """The process ends: nothing may reach the devices any more."""
    if devices.cache_info().currsize:
        devices().close()


def _choose() -> Devices:
    wanted = os.environ.get(ENVIRONMENT, "").strip().lower()
    if wanted in ("", "cpu"):
        from normgrad.sdk.host import HostDevices

        return HostDevices()
    if wanted != "cuda":
        raise Refused(AclError.INVALID_PARAM, f"{ENVIRONMENT} is {wanted!r}, and must be cpu or cuda")
    try:
        from normgrad.sdk.cuda import CudaDevices

        return CudaDevices()
    except (ImportError, OSError, RuntimeError) as problem:
        raise Refused(
            AclError.INTERNAL_ERROR, f"{ENVIRONMENT} is cuda, and there is no GPU to use: {problem}"
        ) from problem
