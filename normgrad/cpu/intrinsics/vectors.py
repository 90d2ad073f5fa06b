"""Vectors of 16 float32 or float64 lanes: loads, stores, arithmetic.

Kernels do their arithmetic on these vectors and leave none to LLVM's auto-vectoriser. So an element gets the same bits
whatever its alignment, its tile, and the overlap of tensors.
"""

import operator

from llvmlite import ir
from numba.core import types
from numba.core.datamodel import models
from numba.core.types import float32, float64, int64, void
from numba.core.typing import signature
from numba.core.typing.templates import AbstractTemplate, infer_global
from numba.extending import intrinsic, lower_builtin, register_model

from normgrad.cpu.intrinsics import llvm
from normgrad.cpu.intrinsics.llvm import SAME, TAG, emitted
from normgrad.cpu.tags import F32, F64


class Vector(types.Type):
    """The Numba type of a vector of 16 lanes."""

    def __init__(self, name: str, element: ir.Type):
        self.element = element
        super().__init__(name=name)


f32x16 = Vector("f32x16", llvm.FLOAT_TYPE)
f64x16 = Vector("f64x16", llvm.DOUBLE_TYPE)


@register_model(Vector)
class VectorModel(models.PrimitiveModel):
    """Kept in a vector register."""

    def __init__(self, dmm, fe_type):
        super().__init__(dmm, fe_type, ir.VectorType(fe_type.element, llvm.LANES))


def _loaded(dtype):
    """Return the type of 16 elements once they are loaded."""
    return f64x16 if dtype == F64 else f32x16


@emitted(_loaded, TAG, int64, int64)
def vload(builder, dtype, address, index):
    """Load 16 consecutive elements; no alignment needed."""
    return llvm.widened(builder, dtype, llvm.load_raw(builder, dtype, address, index, llvm.LANES))


@emitted(void, TAG, int64, int64, _loaded)
def vstore(builder, dtype, address, index, value):
    """Store 16 consecutive elements, rounded to nearest even."""
    pointer = llvm.pointer_to(builder, dtype, address, index, llvm.LANES)
    builder.store(llvm.narrowed(builder, dtype, value), pointer, align=llvm.size_of(dtype))


@emitted(f32x16, float32)
def splat_f32(builder, value):
    """Return a float32 in all lanes."""
    return llvm.splatted(builder, value)


@emitted(f64x16, float64)
def splat_f64(builder, value):
    """Return a float64 in all lanes."""
    return llvm.splatted(builder, value)


@intrinsic
def widen(typingctx, value):
    """Convert float32 to float64: a scalar, or all lanes of a vector."""
    wide = f64x16 if value == f32x16 else float64

    def codegen(context, builder, sig, args):
        return builder.fpext(args[0], context.get_value_type(wide))

    return wide(value), codegen


@emitted(f32x16, f64x16)
def narrow(builder, value):
    """Round float64 lanes to float32, to nearest even."""
    return builder.fptrunc(value, llvm.vector_of(llvm.FLOAT_TYPE))


@emitted(SAME, SAME, SAME)
def power_of_two(builder, value, mean):
    """Return the largest power of two p with p/2 <= |value| and p/2*|mean| <= 2^126, within 2^-126 .. 2^127.

    For float64 or f64x16. Coefficients of x - mean are split by it (:mod:`normgrad.cpu.kernels.channel.coefficients`):
    mean*p stays in float32's range, and the factor that remains is value/p. A NaN sets no limit (`minnum` returns
    the other operand). Where the mean sets none, |value/p| is below 1, so its product with a weight does not overflow.
    """
    size, mean_size = (llvm.call_math(builder, "fabs", each) for each in (value, mean))
    largest = llvm.constant(size.type, 2.0**126)
    limited = llvm.call_math(builder, "minnum", size, builder.fdiv(largest, mean_size))
    limited = llvm.call_math(builder, "minnum", limited, largest)
    word = llvm.same_shape(size.type, llvm.I64_TYPE)
    exponent = builder.and_(builder.bitcast(limited, word), llvm.constant(word, 0x7FF0000000000000))
    above = builder.fmul(builder.bitcast(exponent, size.type), llvm.constant(size.type, 2.0))
    return llvm.call_math(builder, "maxnum", above, llvm.constant(size.type, 2.0**-126))


@emitted(SAME, SAME)
def saturated(builder, value):
    """Bring a float64 or f64x16 into float32's range: finite values beyond it become its largest, Inf and NaN stay."""
    size, largest = llvm.call_math(builder, "fabs", value), llvm.constant(value.type, (2 - 2.0**-23) * 2.0**127)
    is_finite = builder.fcmp_ordered("<", size, llvm.constant(size.type, float("inf")))
    beyond = builder.and_(builder.fcmp_ordered(">", size, largest), is_finite)
    return builder.select(beyond, llvm.call_math(builder, "copysign", largest, value), value)


@emitted(SAME, SAME, SAME)
def replace_negative(builder, value, replacement):
    """Return the replacement where a float64 or f64x16 is negative, and the value elsewhere: 0 and NaN too."""
    is_negative = builder.fcmp_ordered("<", value, llvm.constant(value.type, 0.0))
    return builder.select(is_negative, replacement, value)


@emitted(f64x16, f64x16)
def square_roots(builder, value):
    """Return the square root of every lane."""
    return llvm.call_math(builder, "sqrt", value)


@emitted(SAME, SAME, SAME, SAME)
def fma(builder, a, b, c):
    """Return a*b + c with one rounding; vectors or scalars, all of one type."""
    return llvm.call_math(builder, "fma", a, b, c)


@emitted(SAME, TAG, SAME, SAME, SAME, SAME)
def scaled(builder, dtype, value, factor, low, offset):
    """Return value*(factor + low) + offset, where `low` is what rounding took off the factor.

    Before a 16-bit store `low` is left out: it would not show.
    """
    if dtype == F32:
        offset = llvm.call_math(builder, "fma", value, low, offset)
    return llvm.call_math(builder, "fma", value, factor, offset)


def _folded(builder, run, vector, other=None):
    """Add the second half of every `run` lanes to the first half: half as many lanes remain, in the same order.

    The lanes of a second vector follow those of the first.
    """
    lanes = vector.type.count * (1 if other is None else 2)
    firsts = [start + i for start in range(0, lanes, run) for i in range(run // 2)]
    halves = [
        builder.shuffle_vector(
            vector, other or vector, ir.Constant(llvm.vector_of(llvm.I32_TYPE, lanes // 2), [i + shift for i in firsts])
        )
        for shift in (0, run // 2)
    ]
    return builder.fadd(*halves)


@intrinsic
def hsum(typingctx, value):
    """Sum the lanes, halves added pairwise (16 -> 8 -> 4 -> 2 -> 1), always in that order."""
    scalar = float64 if value == f64x16 else float32

    def codegen(context, builder, sig, args):
        vector = args[0]
        while vector.type.count > 1:
            vector = _folded(builder, vector.type.count, vector)
        return builder.extract_element(vector, ir.Constant(llvm.I32_TYPE, 0))

    return scalar(value), codegen


@emitted(void, int64, f64x16, f64x16, f64x16, f64x16)
def store_sums(builder, address, a, b, c, d):
    """Store the sums of the lanes of four f64x16, each added in the order of `hsum`, as four float64 at an address."""
    a, b, c, d = (_folded(builder, 16, vector) for vector in (a, b, c, d))
    pairs = _folded(builder, 4, _folded(builder, 8, a, b), _folded(builder, 8, c, d))
    sums = _folded(builder, 2, pairs)
    builder.store(sums, llvm.pointer_to(builder, F64, address, ir.Constant(llvm.I64_TYPE, 0), 4), align=8)


class _VectorOperator(AbstractTemplate):
    def generic(self, args, kws):
        if not kws and args and isinstance(args[0], Vector) and all(a == args[0] for a in args):
            return signature(args[0], *args)
        return None


def _define_operators():
    emitters = {
        operator.add: "fadd",
        operator.sub: "fsub",
        operator.mul: "fmul",
        operator.truediv: "fdiv",
        operator.neg: "fneg",
    }
    for function, emitter in emitters.items():
        infer_global(function)(type("VectorOperator", (_VectorOperator,), {"key": function}))
        arity = 1 if function is operator.neg else 2
        lower_builtin(function, *[Vector] * arity)(
            lambda context, builder, sig, args, emitter=emitter: getattr(builder, emitter)(*args)
        )


_define_operators()
