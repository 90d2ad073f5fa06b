"""The decorator `emitted`, which makes intrinsics, and the LLVM types, conversions and pointers that they are built of.

The functions here write LLVM code while a kernel is compiled: their `builder` appends instructions, and what they
return are LLVM values. Kernels do not call them; they call the intrinsics in `memory`, `vectors` and `pairs`.

Addresses are in bytes, indices in elements.
"""

from functools import wraps

from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba.core import cgutils, types
from numba.extending import intrinsic

from normgrad.cpu.tags import BF16, F16, F32, F64, I32, I64

LANES = 16
HAS_AVX512 = bool(get_host_cpu_features().get("avx512f"))

I16_TYPE, I32_TYPE, I64_TYPE = ir.IntType(16), ir.IntType(32), ir.IntType(64)
HALF_TYPE, FLOAT_TYPE, DOUBLE_TYPE = ir.HalfType(), ir.FloatType(), ir.DoubleType()


class BFloatType(ir.Type):
    """LLVM's bfloat, which its binding has no class for: the result of one instruction, bitcast to integers at once."""

    def _to_string(self):
        return "bfloat"


#: Placeholders for types in a call of `emitted`.
TAG, SAME = object(), object()


def emitted(result, *parameters):
    """Make an intrinsic of a function `emit(builder, *values)`, which writes its LLVM code and returns its result.

    `result` and each of `parameters` is one of these:

    - a Numba type, to which the argument is converted;
    - TAG: the argument is a tag; `emit` gets the tag itself, no LLVM value;
    - SAME: an argument of any type; all parameters and results that are SAME have the type of the last such argument;
    - a function that returns a Numba type for the last tag, such as the type that an element is loaded as.

    `emit` returns None for a void result, and a sequence of two values for a pair of vectors.
    """

    def decorate(emit):
        @intrinsic
        @wraps(emit)
        def define(typingctx, *given):
            own = dict(zip(parameters, given))  # of which own[TAG] and own[SAME] are looked up

            def meant(each):
                return own[SAME] if each is SAME else each if isinstance(each, types.Type) else each(own[TAG].tag)

            def codegen(context, builder, sig, args):
                values = (one.tag if each is TAG else value for each, one, value in zip(parameters, given, args))
                value = emit(builder, *values)
                if isinstance(sig.return_type, types.UniTuple):
                    return context.make_tuple(builder, sig.return_type, value)
                return context.get_dummy_value() if value is None else value

            converted = (one if each is TAG else meant(each) for each, one in zip(parameters, given))
            return meant(result)(*converted), codegen

        return define

    return decorate


#: How elements are stored, by the tag of their dtype.
STORAGE = {F32: FLOAT_TYPE, F16: HALF_TYPE, BF16: I16_TYPE, F64: DOUBLE_TYPE, I32: I32_TYPE, I64: I64_TYPE}


def vector_of(element, lanes=LANES):
    return ir.VectorType(element, lanes)


def splatted(builder, scalar, lanes=LANES):
    """Return a vector with one value in all lanes."""
    vector_type = vector_of(scalar.type, lanes)
    single = builder.insert_element(ir.Constant(vector_type, ir.Undefined), scalar, ir.Constant(I32_TYPE, 0))
    return builder.shuffle_vector(single, single, constant(vector_of(I32_TYPE, lanes), 0))


def same_shape(like, element):
    """Return the type of as many of these elements as a type has: a vector type for a vector type."""
    return vector_of(element, like.count) if isinstance(like, ir.VectorType) else element


def constant(like, value):
    """Return a constant of a scalar type, or of a vector type in all lanes."""
    return ir.Constant(like, [value] * like.count if isinstance(like, ir.VectorType) else value)


def _bfloat_to_float(builder, raw):
    """Convert the bits of bfloat16, which are the high half of a float32's."""
    wide = same_shape(raw.type, I32_TYPE)
    shifted = builder.shl(builder.zext(raw, wide), constant(wide, 16))
    return builder.bitcast(shifted, same_shape(raw.type, FLOAT_TYPE))


def rounded_to_bfloat(builder, value):
    """Round float32 to bfloat16, to nearest even, in the high half of each word; the low half has no meaning.

    A NaN gets its quiet bit, so that it stays a NaN.
    """
    int_type = same_shape(value.type, I32_TYPE)
    bits = builder.bitcast(value, int_type)
    odd = builder.and_(builder.lshr(bits, constant(int_type, 16)), constant(int_type, 1))
    rounded = builder.add(builder.add(bits, constant(int_type, 0x7FFF)), odd)
    quiet = builder.or_(bits, constant(int_type, 0x400000))
    return builder.select(builder.fcmp_unordered("uno", value, value), quiet, rounded)


def _half_to_float(builder, raw):
    """Convert float16 to float32.

    Whole vectors are converted by an x86 intrinsic that LLVM does not see through. It would merge an ordinary
    conversion with one to float64 after it into a single instruction, which takes three times as long as the two.
    """
    if not (HAS_AVX512 and isinstance(raw.type, ir.VectorType) and raw.type.count == LANES):
        return builder.fpext(raw, same_shape(raw.type, FLOAT_TYPE))
    bits, singles = builder.bitcast(raw, vector_of(I16_TYPE)), vector_of(FLOAT_TYPE)
    usual_rounding = ir.Constant(I32_TYPE, 4)  # _MM_FROUND_CUR_DIRECTION: the processor's current mode
    arguments = [bits, ir.Constant(singles, None), ir.Constant(I16_TYPE, 0xFFFF), usual_rounding]
    return call_intrinsic(builder, "llvm.x86.avx512.mask.vcvtph2ps.512", singles, arguments)


def widened(builder, tag, raw):
    """Convert values as they are stored to float32; float64 and int64 stay as they are."""
    if tag == BF16:
        return _bfloat_to_float(builder, raw)
    if tag == F16:
        return _half_to_float(builder, raw)
    if tag == I32:
        return builder.sitofp(raw, same_shape(raw.type, FLOAT_TYPE))
    return raw


def narrowed(builder, tag, value):
    """Round float32 values to the dtype that they are stored in; other values stay as they are."""
    if tag == BF16:
        words = rounded_to_bfloat(builder, value)
        return builder.trunc(builder.lshr(words, constant(words.type, 16)), same_shape(words.type, I16_TYPE))
    if tag == F16:
        return builder.fptrunc(value, same_shape(value.type, HALF_TYPE))
    return value


def size_of(dtype):
    """Return the bytes of an element."""
    return {HALF_TYPE: 2, I16_TYPE: 2, FLOAT_TYPE: 4, I32_TYPE: 4, DOUBLE_TYPE: 8, I64_TYPE: 8}[STORAGE[dtype]]


def pointer_to(builder, dtype, address, index, lanes=1):
    """Return a pointer to element `index` after byte `address`, or to a vector that begins with it."""
    element = STORAGE[dtype]
    pointer = builder.gep(builder.inttoptr(address, element.as_pointer()), [index])
    return pointer if lanes == 1 else builder.bitcast(pointer, vector_of(element, lanes).as_pointer())


def load_raw(builder, dtype, address, index, lanes=1):
    """Load an element or several as they are stored; no alignment needed."""
    return builder.load(pointer_to(builder, dtype, address, index, lanes), align=size_of(dtype))


def call_intrinsic(builder, name, return_type, args):
    """Call an intrinsic of LLVM by its name, and declare it where the module does not yet."""
    function_type = ir.FunctionType(return_type, [a.type for a in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, function_type, name), args)


def prefetch(builder, pointer):
    """Prefetch the cache line of a byte into the L2 cache."""
    read, locality, data = (ir.Constant(I32_TYPE, v) for v in (0, 2, 1))
    call_intrinsic(builder, "llvm.prefetch.p0", ir.VoidType(), [pointer, read, locality, data])


def type_suffix(llvm_type):
    """Return how the name of an intrinsic ends for a type, such as ``v16f32``."""
    element = llvm_type.element if isinstance(llvm_type, ir.VectorType) else llvm_type
    lanes = f"v{llvm_type.count}" if isinstance(llvm_type, ir.VectorType) else ""
    return lanes + {HALF_TYPE: "f16", I16_TYPE: "i16", FLOAT_TYPE: "f32", I32_TYPE: "i32", DOUBLE_TYPE: "f64"}[element]


def call_math(builder, name, *operands):
    """Call an LLVM intrinsic whose result has the type of its operands."""
    llvm_type = operands[0].type
    return call_intrinsic(builder, f"llvm.{name}.{type_suffix(llvm_type)}", llvm_type, list(operands))
