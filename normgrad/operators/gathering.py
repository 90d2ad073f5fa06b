"""Where tensors of PyTorch lie, and their sizes and strides: a few lines of native code, made by LLVM in this process.

From Python it takes four calls to learn a tensor's address and that its storage still holds it, from C three, which
take a hundredth of the time: PyTorch's own interface for compiled programs, which does not change with its versions.
"""

from __future__ import annotations

import ctypes
import sys
from array import array
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

# int gather(const int64 *table, tuple *tensors, tuple *results, int64 *out)
Gather = Callable[[int, int, int, int], int]

#: Of a tensor: bytes of an element, bytes from the first element to the end, the bits of an address within an element,
#: and what they must be.
Limits = tuple[int, int, int, int]

#: What a table begins with: how many tensors and results there are, where the addresses go, how many fills follow.
HEAD = 4

_PLACE = ("aoti_torch_get_data_ptr", "aoti_torch_get_storage_offset", "aoti_torch_get_storage_size")
_LAYOUT = ("aoti_torch_get_dim", "aoti_torch_get_sizes", "aoti_torch_get_strides")
_LIBRARIES = {"linux": "libtorch_cpu.so", "darwin": "libtorch_cpu.dylib", "win32": "torch_cpu.dll"}
_ITEMS = tuple.__basicsize__  # where a tuple's items begin
_HANDLES = (object.__basicsize__, object.__basicsize__ + 8)  # where a tensor's pointer to PyTorch's object may be


def table(
    limits: Sequence[Limits], results: Sequence[tuple[int, int]], at: int, fills: Sequence[tuple[int, int, int]]
) -> list[int]:
    """What :func:`gather` is to do.

    Parameters
    ----------
    limits
        Of each tensor.
    results
        Which of the results count, by their places, and the bits of the address of each that must be 0.
    at
        Where in ``out`` the addresses go, of tensors and then of results. Before them goes the address of ``out``.
    fills
        What else to write: a position, the number of an address (-1 for that of ``out``, -2 for what stands before it,
        and so on) and an offset to add.
    """
    numbers = [len(limits), len(results), at, len(fills)]
    for row in (*limits, *results, *fills):
        numbers += row
    return numbers


def gather() -> Gather | None:
    """A function of a table's address, the identities of two tuples and an address to write to.

    It returns 0, or 1 where a tensor is no longer inside its storage or lies otherwise than it must. Both tuples
    hold tensors of PyTorch's own types alone, but for results that do not count. None where this Python, this PyTorch
    or LLVM is other than it counts on.
    """
    return _functions()[0]


def has_layout() -> int | None:
    """The address of a function of a row's address and the identity of an object.

    It returns 1 where the object is a tensor of the row's type, sizes and strides, and 0 where it is not. The row
    belongs to a table of :mod:`normgrad.operators.tables`. None where :func:`gather` is.
    """
    return _functions()[1]


@cache
def _functions() -> tuple[Gather, int] | tuple[None, None]:
    try:
        from normgrad.cpu.native import translated  # which takes LLVM with it

        gather, has_layout = translated(_code(), ["gather", "has_layout"])
        # With the interpreter's lock: nothing may happen to the tensors meanwhile.
        function: Gather = ctypes.PYFUNCTYPE(ctypes.c_int32, *[ctypes.c_void_p] * 4)(gather)
        tells = ctypes.PYFUNCTYPE(ctypes.c_int64, *[ctypes.c_void_p] * 2)(has_layout)
    except Exception:
        return None, None
    return (function, has_layout) if _finds_places(function) and _tells_layouts(tells) else (None, None)


def layout_row(tensor: Any) -> list[int]:
    """What :func:`has_layout` looks for, after the beginning that all rows have."""
    return [id(type(tensor)), tensor.dim(), *tensor.shape, *tensor.stride()]


def _handle() -> int:
    """Where in a tensor of Python's its pointer is."""
    torch = sys.modules["torch"]
    tensors = [torch.empty(2), torch.empty(3, 3)[1:], torch.nn.Parameter(torch.empty(1))]
    if sys.implementation.name != "cpython" or ctypes.sizeof(ctypes.c_void_p) != 8:
        raise NotImplementedError
    (found,) = [
        place
        for place in _HANDLES
        if all(ctypes.c_int64.from_address(id(tensor) + place).value == tensor._cdata for tensor in tensors)
    ]
    return found


def _addresses(names: Sequence[str]) -> list[int]:
    """Of PyTorch's functions."""
    folder = Path(sys.modules["torch"].__file__ or "").parent / "lib"
    library = ctypes.CDLL(str(folder / _LIBRARIES[sys.platform]))
    return [ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0 for name in names]


def _code() -> str:
    """The functions in LLVM's language."""
    from llvmlite import ir

    module, handle = ir.Module(), _handle()
    _write_gather(module, handle)
    _write_has_layout(module, handle)
    return str(module)


def _write_gather(module: Any, handle: int) -> None:
    from normgrad.operators.words import Function

    write = Function(module, "gather", 4)
    table, tensors, results, out = write.arguments
    answer, asked = write.stack(8), _addresses(_PLACE)

    def ask(question: int, tensor: Any) -> Any:
        status = write.call(question, write.add(tensor, handle), answer, returns=32)
        write.require(write.is_("==", status, 0), 1)
        return write.load(answer)

    tensor_count, result_count, at, fill_count = (write.load(table, number) for number in range(HEAD))
    addresses = write.at(out, at)
    write.store(out, addresses, -1)
    limits = write.at(table, HEAD)
    counting = write.at(limits, write.multiply(tensor_count, 4))
    fills = write.at(counting, write.multiply(result_count, 2))
    with write.loop(tensor_count) as number:
        tensor = write.load(write.add(tensors, _ITEMS), number)
        address, offset, room = (ask(question, tensor) for question in asked)
        row = write.at(limits, write.multiply(number, 4))
        size, reach, odd, rest = (write.load(row, place) for place in range(4))
        write.require(write.is_("<=", write.add(write.multiply(offset, size), reach), room), 1)
        write.require(write.is_("==", write.bits(address, odd), rest), 1)
        write.store(address, addresses, number)
    with write.loop(result_count) as number:
        row = write.at(counting, write.multiply(number, 2))
        address = ask(asked[0], write.load(write.add(results, _ITEMS), write.load(row)))
        write.require(write.is_("==", write.bits(address, write.load(row, 1)), 0), 1)
        write.store(address, addresses, write.add(number, tensor_count))
    with write.loop(fill_count) as number:
        row = write.at(fills, write.multiply(number, 3))
        position, source, offset = (write.load(row, place) for place in range(3))
        write.store(write.add(write.load(addresses, source), offset), out, position)
    write.give(0)


def _write_has_layout(module: Any, handle: int) -> None:
    from normgrad.operators import objects
    from normgrad.operators.tables import OWN
    from normgrad.operators.words import Function

    write = Function(module, "has_layout", 2)
    row, tensor = write.arguments
    answer = write.stack(8)
    kind, dimensions = (write.load(row, OWN + place) for place in range(2))
    write.require(write.is_("==", write.load(write.add(tensor, objects.TYPE)), kind))

    def ask(question: int) -> Any:
        status = write.call(question, write.add(tensor, handle), answer, returns=32)
        write.require(write.is_("==", status, 0))
        return write.load(answer)

    of_dimensions, of_sizes, of_strides = _addresses(_LAYOUT)
    write.require(write.is_("==", ask(of_dimensions), dimensions))
    sizes, strides = ask(of_sizes), ask(of_strides)
    with write.loop(dimensions) as axis:
        expected = write.add(axis, OWN + 2)
        write.require(write.is_("==", write.load(sizes, axis), write.load(row, expected)))
        stride = write.load(row, write.add(expected, dimensions))
        write.require(write.is_("==", write.load(strides, axis), stride))
    write.give(1)


def _finds_places(function: Gather) -> bool:
    """Whether it finds what PyTorch says of a few tensors."""
    torch = sys.modules["torch"]
    tensors = torch.empty(2), torch.empty(3, 3)[1:], torch.nn.Parameter(torch.empty(1))
    results = None, torch.empty(5, dtype=torch.int32)
    places = [tensor.data_ptr() for tensor in (*tensors, results[1])]
    for spare, expected in ((0, 0), (1, 1)):
        limits = [(4, tensor.numel() * 4 + spare, 3, 0) for tensor in tensors]
        numbers = array("q", table(limits, [(1, 3)], 3, [(0, 3, 8), (1, 1, 0)]))
        out = array("q", bytes(8 * 7))
        at, _ = out.buffer_info()
        found = function(numbers.buffer_info()[0], id(tensors), id(results), at)
        if found != expected or (found == 0 and out.tolist() != [places[3] + 8, places[1], at, *places]):
            return False
    return True


def _tells_layouts(function: Callable[[int, int], int]) -> bool:
    """Whether it knows a few objects from one another."""
    torch = sys.modules["torch"]
    tensors = torch.empty(()), torch.empty(3), torch.empty(6)[::2], torch.empty(2, 3), torch.empty(3, 2).t()
    others = [*tensors, torch.nn.Parameter(torch.empty(2, 3)), torch.empty(2, 3, 1), torch.empty(3, 3), None, 1.5]
    for number, tensor in enumerate(tensors):
        row = array("q", [0, 0, *layout_row(tensor)])
        found = [function(row.buffer_info()[0], id(other)) for other in others]
        if found != [int(place == number) for place in range(len(others))]:
            return False
    return True
