"""How a known call ends: the part of a recipe's table after it is clear that the arguments fit."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from normgrad.contract.arrays import Make
from normgrad.contract.plan import OneStep, Problem, counted_on, failure
from normgrad.operators import gathering
from normgrad.operators.recipes import Arguments, Recipe

_MOST_ON_STACK = 1 << 15  # bytes of workspace
_EMPTY: tuple[()] = ()


def in_python(serve: Callable[[Arguments], Any]) -> Mapping[str, Any]:
    """With a function of the arguments, which gives None where they do not fit after all."""
    return {"serve": serve}


def in_native_code(
    recipe: Recipe, step: OneStep, outputs: Sequence[Make | int | None], seen: Sequence[str], made: Sequence[str]
) -> Mapping[str, Any]:
    """With a kernel of one step.

    Parameters
    ----------
    recipe
        Of the call, which lets no tensor be written that the caller brings.
    outputs
        How each result comes about.
    seen, made
        The names of the arrays or tensors among the arguments, and of the results that the library makes.
    """
    numbers = {name: number for number, name in enumerate((*seen, *made))}
    views = [numbers[name] for name in recipe.problem.views]
    fills = [
        (position, source if source < 0 else views[source], offset)  # what is no tensor's stands before the addresses
        for position, source, offset in step.fills
    ]
    bits = counted_on(recipe.kernel, recipe.problem)
    places = [place for place, output in enumerate(outputs) if callable(output)]
    results = [(place, bits[name]) for place, name in zip(places, made, strict=True)]
    pairs = [_maker(output) for output in outputs]
    if step.workspace is not None:
        results.append((len(pairs), step.alignment - 1))
        pairs.append(_maker(_working(step.workspace, recipe.problem)))
        fills += [(position, len(numbers), offset) for position, offset in step.scratch]
    head: dict[str, Any] = {
        "makers": [number for function, given in pairs for number in (_number(function), _number(given))],
        "maker_count": len(pairs),
        "result_count": len(outputs),
        "made": [place for place, _ in results],
        "made_count": len(results),
        "fills": [number for fill in fills for number in fill],
        "fill_count": len(fills),
        "kept": tuple(pairs),
    }
    if recipe.sharing is not None:
        head["pairs"] = recipe.sharing.rows(views)
        head["pair_count"] = len(head["pairs"]) // 8
    if recipe.guard is not None:
        gather: Any = gathering.gather()
        head |= {
            "is_ready": step.is_ready or 0,
            "check": recipe.guard.holds,
            "gather": ctypes.cast(gather, ctypes.c_void_p).value or 0,
            "gather_table": array("q", gathering.table(recipe.guard.limits, results, step.numbers, fills)),
        }
    return head | _of_step(recipe, step)


def _working(make: Make, problem: Problem) -> Make:
    """Part of the work, so that it fails as that does."""

    def made() -> Any:
        try:
            return make()
        except Exception as error:
            raise failure(problem, error) from error

    return made


def _number(thing: Any) -> int:
    return thing if isinstance(thing, int) else id(thing)


def _maker(output: Make | int | None) -> tuple[Any, Any]:
    """How a result comes about: a function and its arguments, or 0 and an argument's place, -1 for none."""
    if output is None or isinstance(output, int):
        return 0, -1 if output is None else output
    if isinstance(output, partial) and not output.keywords:
        return output.func, output.args
    return output, _EMPTY


def _of_step(recipe: Recipe, step: OneStep) -> dict[str, Any]:
    problem = recipe.problem
    size, scratch = (step.workspace_size, step.scratch) if step.workspace is None else (0, ())

    def allocate() -> tuple[Any, int]:
        try:
            memory = recipe.backend.allocate(size, problem.device) if size else None
        except Exception as error:
            raise failure(problem, error) from error
        return memory, -(-memory.address // step.alignment) * step.alignment if memory else 0

    def call(descriptor: Any, address: int) -> None:
        assert step.call is not None
        try:
            step.call(descriptor, address)
        except Exception as error:
            raise failure(problem, error) from error

    def failed(status: int, address: int) -> None:
        try:
            step.failed(status, address)
        except Exception as error:
            raise failure(problem, error) from error

    on_stack = size <= _MOST_ON_STACK and step.call is None
    return {
        "numbers": step.numbers,
        "template": step.template,
        "scratch": [number for pair in scratch for number in pair],
        "scratch_count": len(scratch),
        "workspace_size": size,
        "allocate": 0 if on_stack else allocate,
        "entry": step.entry,
        "call": 0 if step.call is None else call,
        "failed": failed,
    }
