"""How a known call ends: the part of a recipe's table after it is clear that the arguments fit."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from normgrad.contract.arrays import Make
from normgrad.contract.plan import failure
from normgrad.operators import gathering
from normgrad.operators.recipes import AnyRecipe, Arguments

if TYPE_CHECKING:
    from normgrad.cpu.steps import OneStep

_MOST_ON_STACK = 1 << 15  # bytes of workspace
_EMPTY: tuple[()] = ()


def in_python(serve: Callable[[Arguments], Any]) -> Mapping[str, Any]:
    """With a function of the arguments, which gives None where they do not fit after all."""
    return {"serve": serve}


def in_native_code(
    recipe: AnyRecipe, step: OneStep, outputs: Sequence[Make | int | None], seen: Sequence[str], made: Sequence[str]
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
    fills = [(position, views[source], offset) for position, source, offset in step.fills]
    made_places = [place for place, output in enumerate(outputs) if callable(output)]
    pairs = [_maker(output) for output in outputs]
    head: dict[str, Any] = {
        "makers": [number for function, given in pairs for number in (_number(function), _number(given))],
        "result_count": len(outputs),
        "made": made_places,
        "made_count": len(made_places),
        "fills": [number for fill in fills for number in fill],
        "fill_count": len(fills),
        "kept": tuple(pairs),
    }
    if recipe.sharing is not None:
        head["pairs"] = recipe.sharing.rows(views)
        head["pair_count"] = len(head["pairs"]) // 8
    if recipe.guard is not None:
        head |= _of_tensors(recipe, made_places, step, fills)
    return head | _of_step(recipe, step)


def _number(thing: Any) -> int:
    return thing if isinstance(thing, int) else id(thing)


def _maker(output: Make | int | None) -> tuple[Any, Any]:
    """How a result comes about: a function and its arguments, or 0 and an argument's place, -1 for none."""
    if output is None or isinstance(output, int):
        return 0, -1 if output is None else output
    if isinstance(output, partial) and not output.keywords:
        return output.func, output.args
    return output, _EMPTY


def _of_tensors(
    recipe: AnyRecipe, made: Sequence[int], step: OneStep, fills: Sequence[tuple[int, int, int]]
) -> dict[str, Any]:
    guard, gather = recipe.guard, gathering.gather()
    assert guard is not None
    table = array("q", gathering.table(guard.counting_on(step.counted_on), made, step.numbers, fills))
    return {
        "check": guard.holds,
        "gather": ctypes.cast(gather, ctypes.c_void_p).value or 0,  # type: ignore[arg-type]
        "gather_table": table,
    }


def _of_step(recipe: AnyRecipe, step: OneStep) -> dict[str, Any]:
    problem, size, only = recipe.problem, step.workspace_size, step.step

    def allocate() -> tuple[Any, int]:
        try:
            memory = recipe.backend.allocate(size, problem.device) if size else None
        except Exception as error:
            raise failure(problem, error) from error
        return memory, step.aligned(memory.address) if memory else 0

    def call(descriptor: Any, address: int) -> None:
        try:
            step.call(descriptor, address)
        except Exception as error:
            raise failure(problem, error) from error

    def fail(status: int) -> None:
        error = only.gave_up(status)
        raise failure(problem, error) from error

    alone = only.alone
    return {
        "numbers": step.numbers,
        "template": only.template,
        "scratch": [number for pair in only.scratch for number in pair],
        "scratch_count": len(only.scratch),
        "workspace_size": size,
        "allocate": 0 if alone and size <= _MOST_ON_STACK else allocate,
        "entry": alone,
        "call": 0 if alone else call,
        "fail": fail,
    }
