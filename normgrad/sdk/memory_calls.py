"""Memory: allocate, free, copy, set. Every range is checked against the table of what is there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from normgrad.sdk import native
from normgrad.sdk.contexts import current_context, required, stream_of
from normgrad.sdk.devices import devices
from normgrad.sdk.errors import AclError, Refused
from normgrad.sdk.exported import exported
from normgrad.sdk.memory import Allocation, table

_HOST, _DEVICE = "host", "device"
#: What a copy of each kind asks of its two sides; None takes either.
_KINDS: dict[int, tuple[str | None, str | None]] = {
    0: (_HOST, _HOST),
    1: (_DEVICE, _HOST),
    2: (_HOST, _DEVICE),
    3: (_DEVICE, _DEVICE),
    4: (None, None),
}
_POLICIES = range(6)


def _allocate(result: int, name: str, nbytes: int, device: str | None, take: Callable[[int], int]) -> None:
    required(result, name)
    if nbytes == 0:
        raise Refused(AclError.INVALID_PARAM, "size is 0, and must be greater")
    address = take(nbytes)
    if not address:
        raise Refused(AclError.RT_MEMORY_ALLOCATION, f"there is no memory for {nbytes} bytes")
    release = devices().release if device is not None else native.release
    block = Allocation(address, nbytes, device, release)
    native.write(result, "Q", address)  # where that fails, the block goes back with its last reference
    table.add(block)


@exported("aclrtMalloc")
def malloc(result: int, nbytes: int, policy: int) -> None:
    """Allocate memory on the device of the thread's context."""
    index = current_context().index
    if policy not in _POLICIES:
        raise Refused(AclError.RT_PARAM_INVALID, f"policy is {policy}, and must be 0 to {_POLICIES[-1]}")
    _allocate(result, "devPtr", nbytes, devices().device_name(index), lambda nbytes: devices().allocate(nbytes, index))


@exported("aclrtMallocHost")
def malloc_host(result: int, nbytes: int) -> None:
    """Allocate memory on the host."""
    current_context()
    _allocate(result, "hostPtr", nbytes, None, native.allocate)


def _free(address: int, name: str, allocator: str, *, on_device: bool) -> None:
    required(address, name)
    if table.remove(address, on_device=on_device) is None:
        raise Refused(
            AclError.RT_PARAM_INVALID,
            f"{name} is {address:#x}, and must be an address that {allocator} gave and that was not freed since",
        )


@exported("aclrtFree")
def free(address: int) -> None:
    """Free memory of the device. Work that still uses it keeps it until that is done."""
    _free(address, "devPtr", "aclrtMalloc", on_device=True)


@exported("aclrtFreeHost")
def free_host(address: int) -> None:
    """Free memory of the host."""
    _free(address, "hostPtr", "aclrtMallocHost", on_device=False)


def _side(name: str, address: int, count: int, must: str | None) -> Allocation | None:
    """The block that one side of a copy lies in; None for other memory of the host."""
    required(address, name)
    block = table.touching(address, count)
    on_device = _is_on_device(block)
    if must == _DEVICE and not on_device:
        raise Refused(
            AclError.RT_PARAM_INVALID, f"{name} is {address:#x}, and must lie in memory that aclrtMalloc gave"
        )
    if must == _HOST and on_device:
        raise Refused(
            AclError.RT_PARAM_INVALID, f"{name} is {address:#x}, memory of the device, and must be memory of the host"
        )
    if block is not None and not block.address <= address <= address + count <= block.end:
        first = table.touching(address, 1) or block  # the range may reach over several
        raise Refused(
            AclError.RT_PARAM_INVALID,
            f"{name} is {address:#x} with {count} bytes, and must stay inside its allocation of {first.nbytes} bytes "
            f"at {first.address:#x}",
        )
    return block


@dataclass(frozen=True, slots=True)
class _Copy:
    """A checked copy."""

    to: int
    source: int
    count: int
    blocks: tuple[Allocation | None, Allocation | None]

    @property
    def known(self) -> tuple[bool, bool]:
        to, source = self.blocks
        return to is not None, source is not None


def _checked_copy(to: int, most: int, source: int, count: int, kind: int) -> _Copy | None:
    if kind not in _KINDS:
        raise Refused(AclError.RT_PARAM_INVALID, f"kind is {kind}, and must be 0 to 4")
    if count == 0:
        return None
    required(to, "dst")
    required(source, "src")
    if count > most:
        raise Refused(AclError.RT_PARAM_INVALID, f"count is {count}, and must not be more than destMax = {most}")
    to_must, source_must = _KINDS[kind]
    return _Copy(to, source, count, (_side("dst", to, count, to_must), _side("src", source, count, source_must)))


@exported("aclrtMemcpy")
def memcpy(to: int, most: int, source: int, count: int, kind: int) -> None:
    """Copy now, whatever streams do."""
    copy = _checked_copy(to, most, source, count, kind)
    if copy is not None:
        devices().copy(copy.to, copy.source, copy.count, copy.known)


@exported("aclrtMemcpyAsync")
def memcpy_async(to: int, most: int, source: int, count: int, kind: int, stream: int) -> None:
    """Copy in a stream's order."""
    work = stream_of(stream).work
    copy = _checked_copy(to, most, source, count, kind)
    if copy is not None:
        work.copy(copy.to, copy.source, copy.count, copy.known, kept=copy.blocks)


def _checked_fill(to: int, most: int, count: int) -> Allocation | None:
    """The block to set bytes in; None where there are none to set."""
    required(to, "devPtr")
    if count > most:
        raise Refused(AclError.RT_PARAM_INVALID, f"count is {count}, and must not be more than maxCount = {most}")
    block = _side("devPtr", to, count, None) if count else None
    if count and block is None:
        raise Refused(
            AclError.RT_PARAM_INVALID,
            f"devPtr is {to:#x}, and must lie in memory that aclrtMalloc or aclrtMallocHost gave",
        )
    return block


def _is_on_device(block: Allocation | None) -> bool:
    return block is not None and block.device is not None


@exported("aclrtMemset")
def memset(to: int, most: int, value: int, count: int) -> None:
    """Set bytes now, whatever streams do."""
    block = _checked_fill(to, most, count)
    if block is not None:
        devices().fill(to, value, count, _is_on_device(block))


@exported("aclrtMemsetAsync")
def memset_async(to: int, most: int, value: int, count: int, stream: int) -> None:
    """Set bytes in a stream's order."""
    work = stream_of(stream).work
    block = _checked_fill(to, most, count)
    if block is not None:
        work.fill(to, value, count, _is_on_device(block), kept=block)


@exported("aclrtGetMemInfo")
def get_mem_info(attribute: int, free_result: int, total_result: int) -> None:
    """Free and total bytes of the device."""
    required(free_result, "free")
    required(total_result, "total")
    if attribute not in (0, 1):
        raise Refused(AclError.INVALID_PARAM, f"attr is {attribute}, and must be 0 or 1")
    free_bytes, total_bytes = devices().memory_info(current_context().index)
    native.write(free_result, "Q", free_bytes)
    native.write(total_result, "Q", total_bytes)
