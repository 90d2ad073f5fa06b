"""Train a small network with normgrad's LayerNorm in JAX, on the CPU.

python examples/jax_training.py
"""

from __future__ import annotations

import sys

import jax
import jax.numpy as jnp

from normgrad.jax import layer_norm

WIDTH, SAMPLES, STEPS, RATE = 32, 128, 60, 0.1

Parameters = dict[str, jax.Array]


def initial(key: jax.Array) -> Parameters:
    """Return the parameters of a network with one hidden layer."""
    first, second = jax.random.split(key)
    return {
        "hidden": jax.random.normal(first, (4, WIDTH)) / 2,
        "scale": jnp.ones(WIDTH),
        "shift": jnp.zeros(WIDTH),
        "out": jax.random.normal(second, (WIDTH, 1)) / WIDTH**0.5,
    }


def loss(parameters: Parameters, x: jax.Array, target: jax.Array) -> jax.Array:
    """Return the mean squared error."""
    hidden = layer_norm(x @ parameters["hidden"], WIDTH, parameters["scale"], parameters["shift"])
    return ((jax.nn.gelu(hidden) @ parameters["out"] - target) ** 2).mean()


def main() -> int:
    """Train, and check that the loss falls."""
    key, data = jax.random.split(jax.random.key(0))
    x = jax.random.normal(data, (SAMPLES, 4))
    target = jnp.sin(x.sum(1, keepdims=True))
    parameters = initial(key)
    step = jax.jit(jax.value_and_grad(loss))
    losses = []
    for number in range(STEPS):
        value, gradients = step(parameters, x, target)
        losses.append(float(value))
        parameters = jax.tree.map(lambda parameter, gradient: parameter - RATE * gradient, parameters, gradients)
        if number % 10 == 0:
            print(f"step {number:3}: loss {losses[-1]:.4f}")
    print(f"loss after {STEPS} steps: {losses[-1]:.4f}")
    return 0 if losses[-1] < losses[0] / 2 else 1


if __name__ == "__main__":
    sys.exit(main())
