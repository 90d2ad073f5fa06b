"""The decorators of the functions that kernels are made of. Only modules of kernels import it: it brings Numba."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba.core import types
from numba.core.compiler import CompilerBase, DefaultPassBuilder
from numba.core.compiler_machinery import PassManager
from numba.core.registry import CPUDispatcher

# No fast-math flags: contraction would make a value's bits depend on the code around it.
_OPTIONS = {
    "nopython": True,
    "nogil": True,
    "error_model": "numpy",
    "no_cpython_wrapper": True,
    "no_cfunc_wrapper": True,
}

# What Numba looks for in every function, and takes a sixth of its time for: closures, array expressions, overloads
# to inline, with-statements, ... Kernels have none of it.
_NEEDLESS = {
    "with_lifting",
    "inline_closure_likes",
    "Rewrite dynamic raises",
    "make_function_op_code_to_jit_function",
    "inline_inlinables",
    "find_literally",
    "literal_unroll",
    "LiteralPropagation",
    "inline_overloads",
    "nopython_rewrites",
    "dump_parfor_diagnostics",
}


class Pipeline(CompilerBase):
    """Numba's translation without the passes that find nothing to do in a kernel."""

    def define_pipelines(self) -> list[PassManager]:
        """The one way to native code."""
        usual = DefaultPassBuilder.define_nopython_pipeline(self.state)
        lean = PassManager("kernel")
        lean.passes = [step for step in usual.passes if step[0].name() not in _NEEDLESS]
        lean.finalize()
        return [lean]


class _Function(CPUDispatcher):
    """A function that is translated once for the types of its arguments, and not once more for every constant."""

    def get_call_template(self, args: tuple[Any, ...], kws: dict[str, Any]) -> Any:
        """How a call with arguments of these types is to be made."""
        return super().get_call_template(tuple(map(types.unliteral, args)), kws)


def _decorator(**options: bool) -> Callable[[Callable[..., Any]], Any]:
    def decorate(function: Callable[..., Any]) -> Any:
        return _Function(function, targetoptions=_OPTIONS | options, pipeline_class=Pipeline)

    return decorate


#: For the functions that kernels are made of.
device = _decorator()
#: For small layers, put in place wherever they are called.
in_place = _decorator(forceinline=True)
#: For kernels themselves: ``kernel(descriptor, *tags)``, the descriptor a pointer to int64. Never called from Python:
#: :mod:`normgrad.cpu.compile.kernel_lookup` finds their native code, or has it compiled.
kernel = device
