"""What an operator consists of besides its table, and where each piece is written.

``missing_pieces`` says for a declared operator what is still to be written, so that a new one needs no list to follow.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import normgrad
from normgrad import oracle
from normgrad.cpu import backend as cpu_backend
from normgrad.operators import OPERATORS
from normgrad.sdk.prototypes import read_headers
from normgrad.testing import cases, terms
from support.recipes import RECIPES

_DOCS = Path(__file__).resolve().parents[2] / "docs" / "reference" / "operators"


class Piece(NamedTuple):
    """A part of an operator: whether the operator of that name has it, and the sentence that says what to write."""

    exists: Callable[[str], bool]
    sentence: str


def _c_name(name: str) -> str:
    return OPERATORS[name].signature.c_name


def _in_cuda(name: str) -> bool:
    from normgrad.cuda.backend import OPERATORS

    return name in OPERATORS


def _in_torch(module: str) -> Callable[[str], bool]:
    def exists(name: str) -> bool:
        import importlib

        return hasattr(importlib.import_module(f"normgrad.torch.{module}"), name)

    return exists


PIECES = (
    Piece(lambda name: hasattr(normgrad, name), "import {name} in normgrad/__init__.py and add it to __all__"),
    Piece(lambda name: hasattr(oracle, name), "write its formula in float64, oracle.{name}, in normgrad/oracle/"),
    Piece(
        lambda name: hasattr(terms, name), "write the sizes of its terms, T and U, {name} in normgrad/testing/terms.py"
    ),
    Piece(lambda name: name in cpu_backend._PREPARE, "write its CPU kernel, and name it in normgrad/cpu/backend.py"),
    Piece(_in_cuda, "write its GPU kernels and their launches, and name them in OPERATORS of normgrad/cuda/backend.py"),
    Piece(
        _in_torch("formulas"), "write its formula in differentiable operations, {name} in normgrad/torch/formulas.py"
    ),
    Piece(_in_torch("outputs"), "write the layout of its outputs, {name} in normgrad/torch/outputs.py"),
    Piece(lambda name: name in RECIPES, "write how its valid calls are made, {name} in tests/support/recipes.py"),
    Piece(lambda name: name in cases._BUILDERS, "write its test inputs, and name them in normgrad/testing/cases.py"),
    Piece(
        lambda name: _c_name(name) in {function.name for function in read_headers()},
        "declare {c_name} in normgrad/sdk/include/",
    ),
    Piece(lambda name: (_DOCS / f"{name}.md").exists(), "write its page, docs/reference/operators/{name}.md"),
)


def missing_pieces(name: str) -> list[str]:
    """Return what is to be written for a declared operator, a sentence for each piece that it lacks."""
    if name not in OPERATORS:
        return [
            f"{name}: declare it under @operator in normgrad/operators/, and add it to OPERATORS in its __init__.py"
        ]
    missing = [piece.sentence for piece in PIECES if not piece.exists(name)]
    return [f"{name}: {sentence.format(name=name, c_name=_c_name(name))}" for sentence in missing]
