"""Where tensors of PyTorch lie, all of them at once: a few lines of native code, made by LLVM in this process.

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

_FUNCTIONS = ("aoti_torch_get_data_ptr", "aoti_torch_get_storage_offset", "aoti_torch_get_storage_size")
_LIBRARIES = {"linux": "libtorch_cpu.so", "darwin": "libtorch_cpu.dylib", "win32": "torch_cpu.dll"}
_ITEMS = tuple.__basicsize__  # where a tuple's items begin
_HANDLES = (object.__basicsize__, object.__basicsize__ + 8)  # where a tensor's pointer to PyTorch's object may be


def table(
    limits: Sequence[Limits], results: Sequence[int], at: int, fills: Sequence[tuple[int, int, int]]
) -> list[int]:
    """What :func:`gather` is to do.

    Parameters
    ----------
    limits
        Of each tensor.
    results
        Which of the results count, by their places.
    at
        Where in ``out`` the addresses go, of tensors and then of results. Before them goes the address of ``out``.
    fills
        What else to write: a position, the number of an address (-1 for that of ``out``, -2 for what stands before it,
        and so on) and an offset to add.
    """
    numbers = [len(limits), len(results), at, len(fills)]
    for row in (*limits, results, *fills):
        numbers += row
    return numbers


@cache
def gather() -> Gather | None:
    """A function of a table's address, the identities of two tuples and an address to write to.

    It returns 0, or 1 where a tensor is no longer inside its storage or lies otherwise within an element. Both tuples
    hold tensors of PyTorch's own types alone, but for results that do not count. None where this Python, this PyTorch
    or LLVM is other than it counts on.
    """
    try:
        from normgrad.cpu.native import translated  # which takes LLVM with it

        # With the interpreter's lock: nothing may happen to the tensors meanwhile.
        prototype = ctypes.PYFUNCTYPE(ctypes.c_int32, *[ctypes.c_void_p] * 4)
        (address,) = translated(_code(_handle(), _functions()), ["gather"])
        function: Gather = prototype(address)
    except Exception:
        return None
    return function if _works(function) else None


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


def _functions() -> list[int]:
    folder = Path(sys.modules["torch"].__file__ or "").parent / "lib"
    library = ctypes.CDLL(str(folder / _LIBRARIES[sys.platform]))
    addresses = [ctypes.cast(getattr(library, name), ctypes.c_void_p).value for name in _FUNCTIONS]
    return [address for address in addresses if address]


def _code(handle: int, functions: Sequence[int]) -> str:
    """The function in LLVM's language."""
    from llvmlite import ir

    word, status = ir.IntType(64), ir.IntType(32)
    module = ir.Module()
    function = ir.Function(module, ir.FunctionType(status, [word] * 4), "gather")
    table, tensors, results, out = function.args
    start = ir.IRBuilder(function.append_basic_block("start"))
    found = start.ptrtoint(start.alloca(word), word)
    asked_type = ir.FunctionType(status, [word, word]).as_pointer()
    asked = [start.inttoptr(word(address), asked_type) for address in functions]

    def pointer(build: Any, base: Any, index: Any) -> Any:
        return build.inttoptr(build.add(base, build.mul(index, word(8))), word.as_pointer())

    def load(build: Any, base: Any, index: Any) -> Any:
        return build.load(pointer(build, base, index))

    def ask(build: Any, number: int, tensor: Any) -> tuple[Any, Any]:
        """The answer, and the status, which is 0 where there is one."""
        failed = build.call(asked[number], [build.add(tensor, word(handle)), found])
        return build.load(build.inttoptr(found, word.as_pointer())), failed

    def loop(build: Any, name: str, count: Any, body: Any) -> Any:
        """Build ``for index in range(count): body``, and go on after it."""
        head, inside, after = (function.append_basic_block(name + part) for part in ("", ".body", ".after"))
        before = build.block
        build.branch(head)
        at_head = ir.IRBuilder(head)
        index = at_head.phi(word)
        index.add_incoming(word(0), before)
        at_head.cbranch(at_head.icmp_signed("<", index, count), inside, after)
        at_end = body(ir.IRBuilder(inside), index)
        index.add_incoming(at_end.add(index, word(1)), at_end.block)
        at_end.branch(head)
        return ir.IRBuilder(after)

    tensor_count, result_count, at, fill_count = (load(start, table, word(number)) for number in range(HEAD))
    addresses = start.add(out, start.mul(at, word(8)))
    start.store(out, pointer(start, addresses, word(-1)))
    limits = start.add(table, word(8 * HEAD))
    counting = start.add(limits, start.mul(tensor_count, word(32)))
    fills = start.add(counting, start.mul(result_count, word(8)))
    refused = function.append_basic_block("refused")
    ir.IRBuilder(refused).ret(status(1))

    def one_tensor(build: Any, index: Any) -> Any:
        tensor = load(build, build.add(tensors, word(_ITEMS)), index)
        (address, failed), (offset, _), (room, _) = (ask(build, number, tensor) for number in range(3))
        row = build.mul(index, word(4))
        size, reach, odd, rest = (load(build, limits, build.add(row, word(number))) for number in range(4))
        inside = build.icmp_signed("<=", build.add(build.mul(offset, size), reach), room)
        lies_as_it_did = build.icmp_signed("==", build.and_(address, odd), rest)
        build.store(address, pointer(build, addresses, index))
        going_on = function.append_basic_block("fits")
        fits = build.and_(build.and_(inside, lies_as_it_did), build.icmp_signed("==", failed, status(0)))
        build.cbranch(fits, going_on, refused)
        return ir.IRBuilder(going_on)

    def one_result(build: Any, index: Any) -> Any:
        result = load(build, build.add(results, word(_ITEMS)), load(build, counting, index))
        address, _ = ask(build, 0, result)
        build.store(address, pointer(build, addresses, build.add(index, tensor_count)))
        return build

    def one_fill(build: Any, index: Any) -> Any:
        row = build.mul(index, word(3))
        position, source, offset = (load(build, fills, build.add(row, word(number))) for number in range(3))
        build.store(build.add(load(build, addresses, source), offset), pointer(build, out, position))
        return build

    after = loop(start, "tensors", tensor_count, one_tensor)
    after = loop(after, "results", result_count, one_result)
    after = loop(after, "fills", fill_count, one_fill)
    after.ret(status(0))
    return str(module)


def _works(function: Gather) -> bool:
    """Whether it finds what PyTorch says of a few tensors."""
    torch = sys.modules["torch"]
    tensors = torch.empty(2), torch.empty(3, 3)[1:], torch.nn.Parameter(torch.empty(1))
    results = None, torch.empty(5, dtype=torch.int32)
    places = [tensor.data_ptr() for tensor in (*tensors, results[1])]
    for spare, expected in ((0, 0), (1, 1)):
        limits = [(4, tensor.numel() * 4 + spare, 3, 0) for tensor in tensors]
        numbers = array("q", table(limits, [1], 3, [(0, 3, 8), (1, 1, 0)]))
        out = array("q", bytes(8 * 7))
        at, _ = out.buffer_info()
        found = function(numbers.buffer_info()[0], id(tensors), id(results), at)
        if found != expected or (found == 0 and out.tolist() != [places[3] + 8, places[1], at, *places]):
            return False
    return True
