"""LayerNorm and GroupNorm for JAX, forward and backward on normgrad's kernels for the CPU.

>>> import jax, jax.numpy as jnp
>>> from normgrad.jax import layer_norm
>>> x = jnp.array([[0.0, 2.0, 4.0, 10.0]])
>>> gradient = jax.jit(jax.grad(lambda x: layer_norm(x, 4)[0, 0]))(x)
>>> [round(value, 3) for value in gradient[0].tolist()]
[0.124, -0.105, -0.067, 0.048]
"""

try:
    import jax as _jax
except ImportError as error:
    raise ImportError("normgrad.jax needs JAX, which is not installed: pip install 'normgrad[jax]'") from error

if not hasattr(_jax, "ffi"):
    raise ImportError(f"normgrad.jax needs JAX 0.5 or later, and this is {_jax.__version__}")

from normgrad.jax.norms import group_norm, layer_norm

__all__ = ["group_norm", "layer_norm"]
