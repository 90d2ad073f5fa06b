"""The decorators for kernels and the functions they call. Only kernel modules import it: it imports Numba."""

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

# Passes for closures, array expressions, overloads to inline, with-statements, ... Kernels have none of these, and the
# passes take a sixth of Numba's time.
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
    """Numba's pipeline without the passes that find nothing to do in a kernel."""

    def define_pipelines(self) -> list[PassManager]:
        """Return the only pipeline."""
        usual = DefaultPassBuilder.define_nopython_pipeline(self.state)
        lean = PassManager("kernel")
        lean.passes = [step for step in usual.passes if step[0].name() not in _NEEDLESS]
        lean.finalize()
        return [lean]


class _Function(CPUDispatcher):
    """A function that is compiled once for the types of its arguments, not again for every literal."""

    def get_call_template(self, args: tuple[Any, ...], kws: dict[str, Any]) -> Any:
        """Return how a function is called with arguments of these types."""
        return super().get_call_template(tuple(map(types.unliteral, args)), kws)


def _decorator(**options: bool) -> Callable[[Callable[..., Any]], Any]:
    def decorate(function: Callable[..., Any]) -> Any:
        return _Function(function, targetoptions=_OPTIONS | options, pipeline_class=Pipeline)

    return decorate


#: For functions that kernels call.
device = _decorator()
#: For functions that are always inlined.
inline = _decorator(forceinline=True)
#: For kernels themselves: ``kernel(descriptor, *tags)``. They are not called from Python:
#: :mod:`normgrad.cpu.compile.kernel_lookup` finds their native code, or has it compiled.
kernel = device
