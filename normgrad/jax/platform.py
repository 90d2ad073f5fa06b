"""A mark on data that its program is for the CPU: compiled for another platform, the program is refused."""

from __future__ import annotations

from typing import Any

from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

_PROBLEM = (
    "normgrad.jax computes on the CPU, and this program is compiled for another platform: put the data on the CPU, "
    "with jax.default_device(jax.devices('cpu')[0]) say"
)

_on_cpu = Primitive("normgrad_on_cpu")
_on_cpu.def_impl(lambda array: array)
_on_cpu.def_abstract_eval(lambda array: array)
batching.defvectorized(_on_cpu)


def _refuse(context: Any, array: Any) -> Any:
    raise NotImplementedError(_PROBLEM)


def _refuse_derivative(primals: Any, tangents: Any) -> Any:
    raise NotImplementedError(
        "normgrad.jax has first derivatives in reverse mode alone (jax.grad, jax.vjp), and this program differentiates "
        "a gradient: write the norm in jax.numpy for it"
    )


ad.primitive_jvps[_on_cpu] = _refuse_derivative
mlir.register_lowering(_on_cpu, _refuse)
mlir.register_lowering(_on_cpu, lambda context, array: [array], platform="cpu")


def on_cpu(array: Any) -> Any:
    """The array itself, in a program that is compiled for the CPU."""
    return _on_cpu.bind(array)
