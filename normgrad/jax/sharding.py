"""What JAX tracks in the type of an array about the devices of a mesh.

Inside ``jax.shard_map`` it is the axes of the mesh over which an array varies. A foreign function's results count as
the same on all devices unless they are marked otherwise. JAX 0.10 renamed the attribute and the cast.

Outside, on a mesh of explicit axes (the default of JAX 0.10), it is how an array is sharded.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec


def varying_axes(*arrays: Any) -> frozenset[Any]:
    """Return the axes that any of the arrays varies over."""
    return frozenset().union(*map(_axes, arrays))


def _axes(array: Any) -> frozenset[Any]:
    if array is None or not hasattr(jax, "typeof"):  # JAX before 0.6, which knows no foreign function in shard_map
        return frozenset()
    typed = jax.typeof(array)
    manual = getattr(typed, "manual_axis_type", None)
    return frozenset(getattr(typed, "vma", ()) if manual is None else manual.varying)


def as_varying(array: Any, axes: frozenset[Any]) -> Any:
    """Return the array as one that varies over the axes. Its gradient is then summed over those that it did not."""
    missing = tuple(sorted(axes - _axes(array))) if array is not None else ()
    if not missing:
        return array
    if hasattr(jax.lax, "pcast"):
        return jax.lax.pcast(array, missing, to="varying")
    return jax.lax.pvary(array, missing)


def gathered(array: Any) -> Any:
    """Return an array whose type says that it is sharded as one that every device has whole.

    XLA cannot split a foreign function, and its results are sharded in no way, as the gradients of such arguments have
    to be. The gradient of what this function returns becomes sharded as its argument is.
    """
    if not hasattr(jax.sharding, "reshard"):  # JAX before 0.7
        return array
    sharding = jax.typeof(array).sharding
    if all(axis is None for axis in sharding.spec):
        return array
    return jax.sharding.reshard(array, NamedSharding(sharding.mesh, PartitionSpec()))
