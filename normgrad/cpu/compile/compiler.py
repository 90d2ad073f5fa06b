"""From a kernel's Python to native object code: Numba translates, LLVM optimises the linked whole once.

Numba by itself optimises every function it compiles, with all that the function calls: a function is optimised again
for every caller, and machine code is generated for each. Here Numba's libraries stay as they are, are linked when the
kernel is complete, and are optimised together.

Numba's classes for this are not public. :func:`try_out` finds out whether the installed Numba has them.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import llvmlite.binding as llvm
import numba
from numba.core import compiler, types
from numba.core.codegen import JITCodeLibrary, JITCPUCodegen
from numba.core.compiler import CompilerBase, DefaultPassBuilder
from numba.core.compiler_lock import global_compiler_lock
from numba.core.compiler_machinery import PassManager
from numba.core.registry import CPUDispatcher, cpu_target

from normgrad.cpu.compile.object_code import loaded, target_machine
from normgrad.cpu.intrinsics.structs import descriptor_type

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


class _Pipeline(CompilerBase):
    """Numba's pipeline without the passes that find nothing to do in a kernel."""

    def define_pipelines(self) -> list[PassManager]:
        usual = DefaultPassBuilder.define_nopython_pipeline(self.state)
        lean = PassManager("kernel")
        lean.passes = [step for step in usual.passes if step[0].name() not in _NEEDLESS]
        lean.finalize()
        return [lean]


class _Function(CPUDispatcher):
    """A function that is compiled once for the types of its arguments, not again for every literal."""

    def get_call_template(self, args: tuple[Any, ...], kws: dict[str, Any]) -> Any:
        return super().get_call_template(tuple(map(types.unliteral, args)), kws)


def decorator(options: dict[str, bool | str]) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator as ``numba.jit`` does, for functions that :func:`compiled` compiles."""
    return lambda function: _Function(function, targetoptions=options, pipeline_class=_Pipeline)


class _Untouched(JITCodeLibrary):
    """A function's LLVM code as Numba writes it: not optimised, not linked, not made executable."""

    def _optimize_functions(self, ll_module: Any) -> None:
        ll_module.data_layout = self._codegen._data_layout

    def finalize(self) -> None:
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int:
        return 0


class _Codegen(JITCPUCodegen):
    _library_class = _Untouched

    def set_env(self, env_name: str, env: Any) -> None:
        """Store no environment: kernels use no Python objects."""


@contextmanager
def _untouched_libraries() -> Iterator[Any]:
    """Keep Numba from optimising; hold its lock, so that nothing else is compiled meanwhile."""
    context = cpu_target.target_context
    with global_compiler_lock, _no_collections():
        usual = context._internal_codegen
        context._internal_codegen = _Codegen("normgrad")
        try:
            yield context
        finally:
            context._internal_codegen = usual


@contextmanager
def _no_collections() -> Iterator[None]:
    """Disable garbage collection: scanning the millions of objects that Numba keeps takes 10 % of the time."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def compiled(module: str, name: str, tags: tuple[Any, ...], symbol: str, is_loop_body: bool = False) -> bytes:
    """Return the object code of a kernel for its tags: ``int32 symbol(int64 *descriptor)``.

    For a loop's body: ``int32 symbol(int64 begin, int64 end, int64 *descriptor)``. The annotation of the kernel's
    descriptor is the class that declares it (:mod:`normgrad.cpu.descriptors`).
    """
    function = getattr(import_module(module), name).py_func
    leading = (*[types.int64] * (2 * is_loop_body), descriptor_type(function))
    arguments = (*leading, *(numba.typeof(tag) for tag in tags))
    flags = compiler.Flags()
    flags.error_model, flags.no_cpython_wrapper, flags.no_cfunc_wrapper = "numpy", True, True
    with _untouched_libraries() as context:
        result = compiler.compile_extra(
            cpu_target.typing_context, context, function, arguments, types.void, flags, {}, pipeline_class=_Pipeline
        )
        whole = _linked(result.library)
    _add_entry(whole, whole.get_function(result.fndesc.llvm_func_name), len(leading), symbol)
    machine = target_machine()
    _optimise(whole, machine)
    return bytes(machine.emit_object(whole))


def _linked(library: Any) -> Any:
    """Return the code of a library and of all that it calls, in one module."""
    found = {library: None}  # in order, so that the same source gives the same code
    waiting = [library]
    while waiting:
        for callee in waiting.pop()._linking_libraries:
            if callee not in found:
                found[callee] = None
                waiting.append(callee)
    whole = llvm.parse_assembly("")
    whole.triple, whole.data_layout = llvm.get_process_triple(), library._codegen._data_layout
    for part in found:
        whole.link_in(part._final_module, preserve=True)
    return whole


def _add_entry(whole: Any, kernel: Any, leading: int, symbol: str) -> None:
    """Add the one function that is visible from outside. A kernel's tags are types alone, so any value will do."""
    result, problem, *arguments = (str(argument.type) for argument in kernel.arguments)
    given = ", ".join(f"{kind} %argument{number}" for number, kind in enumerate(arguments[:leading]))
    tags = "".join(f", {tag} zeroinitializer" for tag in arguments[leading:])
    entry = llvm.parse_assembly(f"""
        declare i32 @"{kernel.name}"({", ".join([result, problem, *arguments])})
        define i32 @{symbol}({given}) {{
            %result = alloca i64
            %problem = alloca i64
            %status = call i32 @"{kernel.name}"({result} %result, {problem} %problem, {given}{tags})
            ret i32 %status
        }}
    """)
    whole.link_in(entry)
    for part in (*whole.functions, *whole.global_variables):
        if not part.is_declaration and part.name != symbol:
            part.linkage = "internal"
    for function in whole.functions:  # Numba writes a generator's state in an order that differs between processes
        if "generator_28func" in function.name and not function.is_declaration:
            function.add_function_attribute("alwaysinline")


def _optimise(module: Any, machine: Any) -> None:
    options = llvm.create_pipeline_tuning_options(speed_level=3)
    options.loop_vectorization = options.loop_interleaving = options.slp_vectorization = True
    builder = llvm.create_pass_builder(machine, options)
    builder.getModulePassManager().run(module, builder)


@decorator({"nopython": True})
def _store_one(address):
    address[0] = 1


@decorator({"nopython": True})
def _trial(address):
    _store_one(address)


def try_out() -> None:
    """Compile, load and call a kernel of one line. Raise an error if this is not the Numba that is expected."""
    stored = ctypes.c_int64(0)
    loaded(compiled(__name__, "_trial", (), "normgrad_trial"), "normgrad_trial")(ctypes.addressof(stored))
    if stored.value != 1:
        raise RuntimeError("a compiled function has no effect")
