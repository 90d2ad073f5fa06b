"""Native code that finishes a call whose arguments fit a recipe: its results, its kernel.

Objects of Python are held and let go of as its interface for C asks; what fails leaves an exception and is 0.
"""

from __future__ import annotations

from collections.abc import Callable

from llvmlite import ir

from normgrad.cpu.native import address_of
from normgrad.operators import objects
from normgrad.operators.words import NONE, TRUE, Function, Value, of_head, python, taken

EMPTY: tuple[()] = ()  # which is held here
_FITS, _DOES_NOT, _FAILED = range(3)


def _made(module: ir.Module) -> Function:
    """The results of a call as a tuple, with the workspace where that is made so; 0 where one cannot be made."""
    write = Function(module, "made", 2)
    recipe, items = write.arguments
    head = of_head(write, recipe)
    results = write.call(python("PyTuple_New"), head("maker_count"))
    write.require(write.is_("!=", results, 0))
    inside, makers = write.add(results, objects.ITEMS), head("makers")
    with write.loop(head("maker_count")) as number:
        place = write.multiply(number, 2)
        maker, argument = write.load(makers, place), write.load(makers, write.add(place, 1))
        with write.where(write.is_("==", maker, 0)):
            is_one = write.is_("<=", 0, argument)
            one = write.load(write.chosen(is_one, write.at(items, argument), write.at(makers, place)))
            write.store(taken(write, write.chosen(is_one, one, NONE)), inside, number)
        with write.where(write.is_("!=", maker, 0)):
            result = write.call(python("PyObject_Call"), maker, argument, 0)
            with write.where(write.is_("==", result, 0)):
                write.call(python("Py_DecRef"), results)
                write.give(0)
            write.store(result, inside, number)
    write.give(results)
    return write


def _filled(module: ir.Module) -> Function:
    """Fill in a descriptor; 1 where the memory is as it must be."""
    write = Function(module, "filled", 6)
    recipe, items, tensors, results, descriptor, workspace = write.arguments
    head = of_head(write, recipe)
    write.call(address_of("memcpy"), descriptor, head("template"), write.multiply(head("numbers"), 8))
    scratch = head("scratch")
    with write.loop(head("scratch_count")) as number:
        row = write.at(scratch, write.multiply(number, 2))
        write.store(write.add(workspace, write.load(row, 1)), descriptor, write.load(row))
    addresses = write.at(descriptor, head("numbers"))
    seen_count, gather = head("seen_count"), head("gather")
    with write.where(write.is_("!=", gather, 0)):
        refused = write.call(gather, head("gather_table"), tensors, results, descriptor, returns=32)
        write.require(write.is_("==", refused, 0))
    with write.where(write.is_("==", gather, 0)):
        seen, made, fills = head("seen"), head("made"), head("fills")
        with write.loop(seen_count) as number:
            one = write.load(items, write.load(seen, number))
            write.store(write.load(write.add(one, objects.DATA)), addresses, number)
        with write.loop(head("made_count")) as number:
            one = write.load(write.add(results, objects.ITEMS), write.load(made, number))
            write.store(write.load(write.add(one, objects.DATA)), addresses, write.add(seen_count, number))
        with write.loop(head("fill_count")) as number:
            row = write.at(fills, write.multiply(number, 3))
            address = write.load(addresses, write.load(row, 1))
            write.store(write.add(address, write.load(row, 2)), descriptor, write.load(row))
    write.give(write.call(_lie_as_they_did(module), head("pairs"), head("pair_count"), addresses))
    return write


def _lie_as_they_did(module: ir.Module) -> Function:
    """1 where each pair of addresses lies apart or on one another as :class:`Sharing` found it."""
    write = Function(module, "lie_as_they_did", 3)
    pairs, count, addresses = write.arguments
    with write.loop(count) as number:
        row = write.at(pairs, write.multiply(number, 8))
        one, other = (write.load(addresses, write.load(row, place)) for place in (0, 1))
        start, end, other_start, other_end = (
            write.add(address, write.load(row, place))
            for address, place in ((one, 2), (one, 3), (other, 4), (other, 5))
        )
        apart = write.either(write.is_("<=", end, other_start), write.is_("<=", other_end, start))
        the_same = write.both(write.is_("==", one, other), write.is_("!=", write.load(row, 6), 0))
        found = write.chosen(apart, 0, write.chosen(the_same, 1, 2))
        write.require(write.is_("==", found, write.load(row, 7)))
    write.give(1)
    return write


def _room(write: Function, head: Callable[[str], Value]) -> Value:
    """Bytes of a descriptor with the addresses after it."""
    numbers = write.add(head("numbers"), write.add(head("seen_count"), head("made_count")))
    return write.multiply(numbers, 8)


def _launched(module: ir.Module, called: Function) -> Function:
    """Call a recipe's kernel with a filled descriptor, without the interpreter's lock."""
    write = Function(module, "launched", 2)
    recipe, descriptor = write.arguments
    head = of_head(write, recipe)
    state = write.call(python("PyEval_SaveThread"))
    status = write.call(head("entry"), descriptor, returns=32)
    write.call(python("PyEval_RestoreThread"), state)
    with write.where(write.is_("!=", status, 0)):
        known = [write.call(python("PyLong_FromLongLong"), number) for number in (status, descriptor)]
        found = write.call(called, head("failed"), *known)
        write.require(write.is_("!=", found, 0), _FAILED)
        write.call(python("Py_DecRef"), found)
    write.give(_FITS)
    return write


def _called(module: ir.Module) -> Function:
    """Call a function of Python's with one argument or two, which are let go of; 0 where that fails."""
    write = Function(module, "called", 3)
    function, first, second = write.arguments
    write.require(write.is_("!=", first, 0))
    arguments = write.call(python("PyTuple_New"), write.chosen(write.is_("==", second, 0), 1, 2))
    write.require(write.is_("!=", arguments, 0))
    inside = write.add(arguments, objects.ITEMS)
    write.store(first, inside)
    with write.where(write.is_("!=", second, 0)):
        write.store(second, inside, 1)
    found = write.call(python("PyObject_Call"), function, arguments, 0)
    write.call(python("Py_DecRef"), arguments)
    write.give(found)
    return write


def _on_stack(module: ir.Module, filled: Function, launched: Function) -> Function:
    """Run a kernel whose descriptor and workspace this thread alone sees."""
    write = Function(module, "on_stack", 4)
    recipe = write.arguments[0]
    head = of_head(write, recipe)
    descriptor, workspace = write.stack(_room(write, head)), write.stack(head("workspace_size"))
    fits = write.call(filled, *write.arguments, descriptor, workspace)
    write.require(write.is_("!=", fits, 0), _DOES_NOT)
    write.give(write.call(launched, recipe, descriptor))
    return write


def _in_memory(module: ir.Module, filled: Function, launched: Function, called: Function) -> Function:
    """Run a kernel with memory of the backend's and a descriptor that others may keep."""
    write = Function(module, "in_memory", 4)
    recipe = write.arguments[0]
    head = of_head(write, recipe)
    memory = write.call(python("PyObject_Call"), head("allocate"), id(EMPTY), 0)
    write.require(write.is_("!=", memory, 0), _FAILED)
    kept = write.call(python("PyBytes_FromStringAndSize"), 0, _room(write, head))
    with write.where(write.is_("==", kept, 0)):
        write.call(python("Py_DecRef"), memory)
        write.give(_FAILED)
    workspace = write.call(python("PyLong_AsLongLong"), write.load(write.add(memory, objects.ITEMS), 1))
    started = _started(module, filled, launched, called)
    status = write.call(started, *write.arguments, kept, workspace)
    write.call(python("Py_DecRef"), kept)
    write.call(python("Py_DecRef"), memory)
    write.give(status)
    return write


def _started(module: ir.Module, filled: Function, launched: Function, called: Function) -> Function:
    write = Function(module, "started", 6)
    recipe, _, _, _, kept, workspace = write.arguments
    head = of_head(write, recipe)
    descriptor = write.add(kept, objects.BYTES)
    fits = write.call(filled, *write.arguments[:4], descriptor, workspace)
    write.require(write.is_("!=", fits, 0), _DOES_NOT)
    with write.where(write.is_("==", head("call"), 0)):
        write.give(write.call(launched, recipe, descriptor))
    address = write.call(python("PyLong_FromLongLong"), descriptor)
    found = write.call(called, head("call"), taken(write, kept), address)
    write.require(write.is_("!=", found, 0), _FAILED)
    write.call(python("Py_DecRef"), found)
    write.give(_FITS)
    return write


def _finished(module: ir.Module, called: Function) -> Function:
    """Make the results of a call that fits and run its kernel: the results, None where the memory is not as it was."""
    filled, launched, made = _filled(module), _launched(module, called), _made(module)
    on_stack, in_memory = _on_stack(module, filled, launched), _in_memory(module, filled, launched, called)
    write = Function(module, "finished", 3)
    recipe, items, tensors = write.arguments
    head = of_head(write, recipe)
    results, status_at = write.call(made, recipe, items), write.stack(8)
    write.require(write.is_("!=", results, 0))
    is_small = write.is_("==", head("allocate"), 0)
    with write.where(is_small):
        write.store(write.call(on_stack, recipe, items, tensors, results), status_at)
    with write.where(write.is_("!=", head("allocate"), 0)):
        write.store(write.call(in_memory, recipe, items, tensors, results), status_at)
    status = write.load(status_at)
    with write.where(write.is_("!=", status, _FITS)):
        write.call(python("Py_DecRef"), results)
        write.require(write.is_("==", status, _DOES_NOT))
        write.give(taken(write, NONE))
    with write.where(write.is_("==", head("result_count"), 1)):
        one = taken(write, write.load(write.add(results, objects.ITEMS)))
        write.call(python("Py_DecRef"), results)
        write.give(one)
    users = write.call(python("PyTuple_GetSlice"), results, 0, head("result_count"))
    write.call(python("Py_DecRef"), results)  # and the workspace, which the work had to itself until here
    write.give(users)
    return write


def _require_true(write: Function, function: Value, arguments: Value) -> None:
    """Go on where a function of Python's says so."""
    found = write.call(python("PyObject_Call"), function, arguments, 0)
    write.require(write.is_("!=", found, 0))
    write.call(python("Py_DecRef"), found)
    with write.where(write.is_("!=", found, TRUE)):
        write.give(taken(write, NONE))


def _checked(module: ir.Module, finished: Function) -> Function:
    """Ask the kernel about this thread and PyTorch's guards about tensors before a call is finished."""
    write = Function(module, "checked", 3)
    recipe, _, tensors = write.arguments
    head = of_head(write, recipe)
    with write.where(write.is_("!=", head("is_ready"), 0)):
        _require_true(write, head("is_ready"), id(EMPTY))
    _require_true(write, head("check"), tensors)
    write.give(write.call(finished, *write.arguments))
    return write


def served(module: ir.Module) -> Function:
    """The results of a call whose arguments fit a recipe, None where the rest does not; 0 where it fails."""
    called = _called(module)
    finished = _finished(module, called)
    checked = _checked(module, finished)
    write = Function(module, "served", 2)
    recipe, arguments = write.arguments
    head = of_head(write, recipe)
    with write.where(write.is_("!=", head("serve"), 0)):
        write.give(write.call(called, head("serve"), taken(write, arguments), 0))
    items = write.add(arguments, objects.ITEMS)
    with write.where(write.is_("==", head("check"), 0)):
        write.give(write.call(finished, recipe, items, 0))
    tensors, seen = write.call(python("PyTuple_New"), head("seen_count")), head("seen")
    write.require(write.is_("!=", tensors, 0))
    with write.loop(head("seen_count")) as number:
        one = taken(write, write.load(items, write.load(seen, number)))
        write.store(one, write.add(tensors, objects.ITEMS), number)
    found = write.call(checked, recipe, items, tensors)
    write.call(python("Py_DecRef"), tensors)
    write.give(found)
    return write
