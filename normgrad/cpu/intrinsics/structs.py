"""Descriptors and tags as Numba types, so that a kernel reads ``desc.input.channel_stride`` as it is declared.

In a kernel a descriptor is a pointer to its words. What ``desc.field`` is depends on the field's type: an int, a float
or the address of a `Pointer` is loaded; of a `Counter` it is the address, for atomic operations; of an array it is a
pointer to the first element; of a part, such as ``desc.input``, a pointer to that part. A tag has no value, only a
type, by its name.
"""

from llvmlite import ir
from numba.core import types
from numba.core.datamodel import models
from numba.core.imputils import lower_constant
from numba.core.typing.templates import AttributeTemplate, infer_getattr
from numba.extending import lower_getattr_generic, register_model, typeof_impl

from normgrad.cpu.descriptors import Counter, layout
from normgrad.cpu.intrinsics.llvm import DOUBLE_TYPE, I64_TYPE
from normgrad.cpu.tags import Tag


class StructPointer(types.Type):
    """The Numba type of a descriptor, or of a part of one."""

    def __init__(self, struct):
        self.struct = struct
        super().__init__(name=f"StructPointer({struct.__name__})")


def descriptor_type(kernel):
    """Return the Numba type of a kernel's descriptor, whose class is the kernel's only annotation.

    A kernel without an annotation takes a pointer to integers.
    """
    declared = next(iter(kernel.__annotations__.values()), None)
    return StructPointer(declared) if declared else types.CPointer(types.int64)


@register_model(StructPointer)
class _StructModel(models.PrimitiveModel):
    def __init__(self, dmm, fe_type):
        super().__init__(dmm, fe_type, I64_TYPE.as_pointer())


def _type_of(field):
    """Return the Numba type of ``desc.field``."""
    if field.is_struct:
        return StructPointer(field.type)
    return types.CPointer(types.int64) if field.type is tuple else types.float64 if field.type is float else types.int64


@infer_getattr
class _StructAttributes(AttributeTemplate):
    key = StructPointer

    def generic_resolve(self, pointer, name):
        field = layout(pointer.struct).get(name)
        return None if field is None else _type_of(field)


@lower_getattr_generic(StructPointer)
def _load_field(context, builder, pointer, value, name):
    """Emit ``desc.name``, with the type that `_type_of` returns."""
    field = layout(pointer.struct)[name]
    address = builder.gep(value, [ir.Constant(I64_TYPE, field.offset)])
    if field.is_struct or field.type is tuple:
        return address
    if field.type is Counter:
        return builder.ptrtoint(address, I64_TYPE)
    if field.type is float:
        return builder.load(builder.bitcast(address, DOUBLE_TYPE.as_pointer()))
    return builder.load(address)


class TagType(types.Type):
    """The Numba type of a tag; every tag has its own, and so a variant of each kernel that takes it."""

    def __init__(self, tag):
        self.tag = tag
        super().__init__(name=f"Tag({tag.name})")


@register_model(TagType)
class _TagModel(models.OpaqueModel):
    pass


@typeof_impl.register(Tag)
def _type_of_tag(tag, context):
    return TagType(tag)


@lower_constant(TagType)
def _tag_constant(context, builder, tag_type, tag):
    return context.get_dummy_value()
