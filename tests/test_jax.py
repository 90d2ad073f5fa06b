"""LayerNorm and GroupNorm for JAX, against the plain formula in float64 and its gradients by JAX."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import normgrad
from normgrad import ContractError
from normgrad.testing import ulp
from support.processes import run_python

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402

from normgrad.jax import frame, group_norm, layer_norm  # noqa: E402
from normgrad.jax.calls import call, result  # noqa: E402
from normgrad.jax.frame import handler  # noqa: E402

in_float64 = jax.enable_x64 if hasattr(jax, "enable_x64") else jax.experimental.enable_x64
EPS = 1e-5
DTYPES = ["float32", "float16", "bfloat16"]
PARAMETERS = {"both": (True, True), "weight": (True, False), "bias": (False, True), "none": (False, False)}


def plain_layer_norm(x: Any, weight: Any, bias: Any) -> Any:
    y = normalised(x, (-1,))
    return y * (1 if weight is None else weight) + (0 if bias is None else bias)


def plain_group_norm(group: int, x: Any, weight: Any, bias: Any) -> Any:
    y = normalised(x.reshape(x.shape[0], group, -1), (2,)).reshape(x.shape)
    along = (1, -1, *(1 for _ in x.shape[2:]))
    y = y if weight is None else y * weight.reshape(along)
    return y if bias is None else y + bias.reshape(along)


def normalised(x: Any, axes: tuple[int, ...]) -> Any:
    mean = x.mean(axes, keepdims=True)
    return (x - mean) / jnp.sqrt(((x - mean) ** 2).mean(axes, keepdims=True) + EPS)


CASES: dict[str, tuple[Callable, Callable, tuple[int, ...], int]] = {
    "layer_norm": (lambda x, w, b: layer_norm(x, x.shape[-1], w, b, EPS), plain_layer_norm, (3, 5, 24), 24),
    "group_norm": (
        lambda x, w, b: group_norm(x, 3, w, b, EPS),
        partial(plain_group_norm, 3),
        (4, 6, 5, 2),
        6,
    ),
}
every_case = pytest.mark.parametrize("case", CASES)


def values(case: str, dtype: str, given: tuple[bool, bool] = (True, True), vectors: str | None = None) -> list[Any]:
    """Input, weight, bias and what the output is multiplied with."""
    _, _, shape, size = CASES[case]
    rng = np.random.default_rng(size)
    # Few digits, so that every dtype holds the same values.
    x, upstream = (jnp.asarray(rng.normal(0.3, 1.5, shape).round(1), "bfloat16").astype(dtype) for _ in range(2))
    weight, bias = (jnp.asarray(rng.normal(1, 0.5, size), "bfloat16").astype(vectors or dtype) for _ in range(2))
    return [x, weight if given[0] else None, bias if given[1] else None, upstream]


def output_and_gradients(function: Callable, x: Any, weight: Any, bias: Any, upstream: Any) -> list[Any]:
    output, pull = jax.vjp(function, x, weight, bias)
    return [output, *(gradient for gradient in pull(upstream) if gradient is not None)]


@cache
def exact(case: str, given: tuple[bool, bool]) -> list[np.ndarray]:
    with in_float64(True):
        wide = [None if a is None else jnp.asarray(np.asarray(a, np.float64)) for a in values(case, "float32", given)]
        return [np.asarray(a) for a in jax.jit(partial(output_and_gradients, CASES[case][1]))(*wide)]


def assert_close(actual: list[Any], expected: list[np.ndarray]) -> None:
    for ours, theirs in zip((np.asarray(a) for a in actual), expected, strict=True):
        # Two steps, each rounded to float32: the largest value stands for the terms of both.
        allowed = 0.5 * ulp(theirs, str(ours.dtype)) + 64 * 2.0**-24 * np.abs(theirs).max()
        assert (np.abs(ours.astype(np.float64) - theirs) <= allowed).all()


@every_case
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("given", PARAMETERS.values(), ids=PARAMETERS)
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_output_and_gradients(case: str, dtype: str, given: tuple[bool, bool], wrap: Callable) -> None:
    actual = wrap(partial(output_and_gradients, CASES[case][0]))(*values(case, dtype, given))
    assert {str(array.dtype) for array in actual} == {dtype}
    assert_close(actual, exact(case, given))


@every_case
@pytest.mark.parametrize("given", [(True, True), (False, True)], ids=["both", "bias"])
def test_float32_parameters_of_16_bit_data_get_float32_gradients(case: str, given: tuple[bool, bool]) -> None:
    arguments = values(case, "bfloat16", given, vectors="float32")
    actual = jax.jit(partial(output_and_gradients, CASES[case][0]))(*arguments)
    assert [str(array.dtype) for array in actual] == ["bfloat16"] * 2 + ["float32"] * sum(given)
    assert_close(actual, exact(case, given))


@every_case
def test_the_bits_are_the_operators_own(case: str) -> None:
    x, weight, bias, upstream = values(case, "float16")
    output, grad_input, *_ = output_and_gradients(CASES[case][0], x, weight, bias, upstream)
    x, weight, bias, upstream = (np.asarray(a) for a in (x, weight, bias, upstream))
    if case == "layer_norm":
        expected, mean, rstd = normgrad.layer_norm(x, [24], weight, bias, EPS)
        gradient = normgrad.layer_norm_backward(upstream, x, [24], mean, rstd, weight)[0]
    else:
        expected, mean, rstd = normgrad.group_norm(x, weight, bias, 4, 6, 10, 3, EPS)
        gradient = normgrad.group_norm_backward(upstream, x, mean, rstd, weight, 4, 6, 10, 3)[0]
    np.testing.assert_array_equal(output, expected)
    np.testing.assert_array_equal(grad_input, gradient)


AXES = {
    "data": (0, None, None, 0),
    "data on another axis": (2, None, None, 1),
    "weight": (None, 0, None, None),
    "bias and upstream": (None, None, 0, 0),
    "all": (0, 0, 0, 0),
}


@every_case
@pytest.mark.parametrize("axes", AXES.values(), ids=AXES)
def test_vmap_is_the_loop_bit_for_bit(case: str, axes: tuple[int | None, ...]) -> None:
    arguments = values(case, "float32")
    batched = [
        a if axis is None else jnp.stack([a, 2 * a, a - 1], axis) for a, axis in zip(arguments, axes, strict=True)
    ]
    function = partial(output_and_gradients, CASES[case][0])
    for wrap in (lambda f: f, jax.jit):
        together = wrap(jax.vmap(function, axes))(*batched)
        for i in range(3):
            own = [a if axis is None else jnp.take(a, i, axis) for a, axis in zip(batched, axes, strict=True)]
            for one, alone in zip(together, function(*own), strict=True):
                np.testing.assert_array_equal(one[i], alone)


@every_case
def test_vmap_in_vmap(case: str) -> None:
    x, weight, bias, upstream = values(case, "float32")
    xs = jnp.stack([jnp.stack([x, x + 1, 3 * x]), jnp.stack([-x, x - 1, x / 2])])
    weights = jnp.stack([weight, -weight])
    function = partial(output_and_gradients, CASES[case][0])
    inner = jax.vmap(function, (0, None, None, None))
    together = jax.jit(jax.vmap(inner, (0, 0, None, None)))(xs, weights, bias, upstream)
    for i in range(2):
        for j in range(3):
            for one, alone in zip(together, function(xs[i, j], weights[i], bias, upstream), strict=True):
                np.testing.assert_array_equal(one[i, j], alone)


@every_case
def test_a_forward_pass_under_vmap_is_one_launch(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from normgrad.jax import calls

    launches: list[Any] = []
    monkeypatch.setattr(calls, "launch", lambda *args: launches.append(args))
    x, weight, bias, _ = values(case, "float32")
    jax.block_until_ready(jax.vmap(CASES[case][0], (0, None, None))(jnp.stack([x] * 7), weight, bias))
    assert len(launches) == 1


@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (0, 0)])
def test_empty_data(shape: tuple[int, int]) -> None:
    x, weight = jnp.zeros(shape), jnp.ones(shape[1])
    output, grad_input, grad_weight = output_and_gradients(
        lambda x, w, b: layer_norm(x, shape[1], w), x, weight, None, x
    )
    assert output.shape == grad_input.shape == shape
    np.testing.assert_array_equal(grad_weight, np.zeros(shape[1]))
    if shape[1]:
        assert group_norm(x, 2, weight).shape == shape


def test_normalized_shape_of_several_dimensions_and_data_of_one_row() -> None:
    x = jnp.arange(24.0).reshape(2, 3, 4)
    weight = jnp.arange(12.0).reshape(3, 4)
    expected = layer_norm(x.reshape(2, 12), 12, weight.reshape(12)).reshape(2, 3, 4)
    np.testing.assert_array_equal(layer_norm(x, (3, 4), weight), expected)
    np.testing.assert_array_equal(layer_norm(x[0].reshape(-1), 12, weight.reshape(12)), expected[0].reshape(-1))


def test_under_scan_remat_and_many_at_once() -> None:
    x = jnp.asarray(np.random.default_rng(0).normal(size=(64, 512)), jnp.float32)

    @jax.checkpoint
    def block(h: Any, scale: Any) -> tuple[Any, Any]:
        return h + layer_norm(h * scale, 512), None

    def loss(x: Any) -> Any:
        deep, _ = jax.lax.scan(block, x, jnp.arange(1.0, 9.0))
        wide = sum(layer_norm(x * i, 512) for i in range(1, 9))
        return (deep * wide).sum()

    step = jax.jit(jax.grad(loss))
    first = step(x)
    for other in [step(x) for _ in range(20)]:  # dispatched without waiting
        np.testing.assert_array_equal(first, other)


REFUSED = {
    "float64": lambda x: layer_norm(np.zeros((2, 4)), 4),
    "is int32": lambda x: layer_norm(x.astype(int), 4),
    "must equal the last dimensions of input": lambda x: layer_norm(x, 3),
    "weight has the shape": lambda x: layer_norm(x, 4, x[:, 0]),
    "bias is float32": lambda x: layer_norm(x.astype(jnp.bfloat16), 4, x[0].astype(jnp.bfloat16), x[0]),
    "must divide C = 4": lambda x: group_norm(x, 3),
    "weight has 2 elements": lambda x: group_norm(x, 2, x[:, 0]),
    r"input is key<fry>, and must be float32": lambda x: layer_norm(jax.random.key(0)[None], 1),
}


@pytest.mark.parametrize(("text", "wrong"), REFUSED.items(), ids=REFUSED)
def test_a_broken_rule_is_told_when_traced(text: str, wrong: Callable) -> None:
    with in_float64(text == "float64"), pytest.raises(ContractError, match=text):
        jax.eval_shape(wrong, jnp.zeros((2, 4), jnp.float32))


def test_data_without_channels_is_refused() -> None:
    with pytest.raises(ValueError, match=r"group_norm: input has the shape \(4,\), and must have 2 dimensions"):
        group_norm(jnp.zeros(4), 2)


def test_the_product_counts() -> None:
    with (
        normgrad.use_product("Atlas 200I/500 A2"),
        pytest.raises(ContractError, match="Atlas 200I/500 A2 has no aclnnGroupNorm"),
    ):
        group_norm(jnp.zeros((2, 4)), 2)


@every_case
@pytest.mark.parametrize("platform", ["cuda", "rocm", "tpu"])
def test_another_platform_is_refused(case: str, platform: str) -> None:
    function = CASES[case][0]
    traced = jax.jit(jax.grad(lambda x: function(x, None, None).sum())).trace(values(case, "float32")[0])
    with pytest.raises(
        NotImplementedError, match="computes on the CPU, and this program is compiled for another platf"
    ):
        traced.lower(lowering_platforms=(platform,))


@pytest.mark.parametrize("text", ["no room for the workspace", "no file \udcff"])  # a name that is not UTF-8
def test_what_fails_at_work_is_told(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    from normgrad.jax import calls

    def fail(*args: Any) -> None:
        raise MemoryError(text)

    monkeypatch.setattr(calls, "launch", fail)
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"MemoryError: {text[:7]}"):
        jax.block_until_ready(layer_norm(jnp.zeros((2, 4)), 4))


def test_results_must_fit_the_operator() -> None:
    x = jnp.zeros((2, 4))
    wrong = {"output": result((2, 4), jnp.float16), "mean": result((2, 1)), "rstd": result((2, 1))}
    with pytest.raises(ContractError, match="output is float16, and must be float32"):
        call("layer_norm", {"input": x}, wrong, eps=EPS)


def test_a_program_that_ends_with_work_under_way_ends_well() -> None:
    code = """
import jax, jax.numpy as jnp
from normgrad.jax import layer_norm
step = jax.jit(lambda x: layer_norm(x, 1024))
x = jnp.ones((4096, 1024))
for _ in range(5):
    x = step(x)
print("ended")
"""
    assert run_python(code).strip() == "ended"


def test_an_unknown_major_version_of_foreign_functions_is_refused(tmp_path: Path) -> None:
    header = tmp_path / "xla" / "ffi" / "api" / "c_api.h"
    header.parent.mkdir(parents=True)
    header.write_text("#define XLA_FFI_API_MAJOR 1\n#define XLA_FFI_API_MINOR 0\n")
    with pytest.raises(ImportError, match="knows version 0 of XLA's foreign functions, and this JAX has 1"):
        handler(lambda *args: None, str(tmp_path))


def test_a_jax_without_foreign_functions_is_refused() -> None:
    code = """
import jax
del jax.ffi
try:
    import normgrad.jax
except ImportError as error:
    print(error)
"""
    assert run_python(code).startswith("normgrad.jax needs JAX 0.5 or later, and this is ")


_SHARDED = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, PartitionSpec as P
from normgrad.jax import group_norm, layer_norm

mesh = Mesh(np.array(jax.devices()), ("d",))
x = jax.random.normal(jax.random.PRNGKey(0), (16, 16))
weight, bias = jnp.linspace(0.5, 1.5, 16), jnp.linspace(-1, 1, 16)

def over(body, in_specs, out_specs, **options):
    return jax.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=out_specs, **options)

for norm in (lambda *args: layer_norm(args[0], 16, *args[1:]), lambda *args: group_norm(args[0], 4, *args[1:])):
    def loss(*args):
        return (norm(*args) ** 3).sum()
    right = jax.grad(loss, (0, 1, 2))(x, weight, bias)
    def sharded_loss(x, weight, bias):
        return (over(norm, (P("d"), P(), P()), P("d"))(x, weight, bias) ** 3).sum()
    def data_parallel(x, weight, bias):
        return jax.grad(loss, (1, 2))(x, weight, bias)  # whose sum over the devices is JAX's
    np.testing.assert_array_equal(over(norm, (P("d"), P(), P()), P("d"))(x, weight, bias), norm(x, weight, bias))
    for found, expected in (
        (jax.grad(sharded_loss, (0, 1, 2))(x, weight, bias), right),
        (jax.jit(over(data_parallel, (P("d"), P(), P()), (P(), P())))(x, weight, bias), right[1:]),
    ):
        for one, other in zip(found, expected):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
    try:
        over(norm, (P("d"), P(), P()), P())(x, weight, bias)
        print("a result that differs from device to device was taken for the same on all")
    except ValueError as error:
        assert "out_specs" in str(error), error
print("right")
"""


@pytest.mark.skipif(not hasattr(jax, "shard_map"), reason="this JAX has no shard_map that tracks varying axes")
def test_under_shard_map() -> None:
    assert run_python(_SHARDED, XLA_FLAGS="--xla_force_host_platform_device_count=4") == "right\n"


_EXPLICITLY_SHARDED = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, PartitionSpec as P
from normgrad.jax import group_norm, layer_norm

jax.set_mesh(jax.make_mesh((2, 2), ("d", "e"), axis_types=(AxisType.Explicit,) * 2))
whole, weight = jax.random.normal(jax.random.PRNGKey(0), (4, 6, 8)), jnp.linspace(0.5, 1.5, 8)
norms = (
    lambda x, weight: layer_norm(x, 8, weight, weight) ** 3,
    lambda x, weight: group_norm(jnp.moveaxis(x, 2, 1), 4, weight, weight) ** 3,
)
for spec in (P("d"), P(None, "e"), P("d", "e"), P("e", None, "d")):
    x = jax.sharding.reshard(whole, spec)
    for norm in norms:
        np.testing.assert_array_equal(norm(x, weight), norm(whole, weight))
        for transform in (jax.grad, lambda *args: jax.jit(jax.grad(*args))):
            found, expected = (transform(lambda *args: norm(*args).sum(), (0, 1))(data, weight) for data in (x, whole))
            for one, other in zip(found, expected):
                np.testing.assert_array_equal(one, other)
            assert jax.typeof(found[0]) == jax.typeof(x), (jax.typeof(found[0]), jax.typeof(x))
print("right")
"""


@pytest.mark.skipif(not hasattr(jax.sharding, "reshard"), reason="this JAX cannot change how an array is sharded")
def test_data_that_is_sharded_in_its_type() -> None:
    assert run_python(_EXPLICITLY_SHARDED, XLA_FLAGS="--xla_force_host_platform_device_count=4") == "right\n"


@pytest.mark.parametrize("size", [np.int64(4), np.array(4), [np.int32(4)], (4,), 4])
def test_normalized_shape_in_integers_of_any_kind(size: Any) -> None:
    np.testing.assert_array_equal(layer_norm(jnp.ones((2, 4)), size), np.zeros((2, 4)))


def test_gradients_of_gradients_and_symbolic_shapes_are_refused_in_our_words() -> None:
    with pytest.raises(NotImplementedError, match=r"normgrad\.jax has first derivatives in reverse mode alone"):
        jax.grad(lambda x: jax.grad(lambda x: (layer_norm(x, 4) ** 3).sum())(x).sum())(jnp.ones((2, 4)))
    export = pytest.importorskip("jax.export")
    (rows,) = export.symbolic_shape("n")
    symbolic = jax.ShapeDtypeStruct((rows, 4), jnp.float32)
    for norm in (lambda x: layer_norm(x, 4), lambda x: group_norm(x, 2)):
        with pytest.raises(NotImplementedError, match=r"shape \(n, 4\), and every dimension must be a number"):
            export.export(jax.jit(norm))(symbolic)


_CreateError = dict(frame._Api._fields_)["create_error"]


def _answer(extensions: list[int]) -> tuple[str, list[tuple[int, int]]]:
    """What our function answers to a call frame with extensions of these types: an error's text, the versions told."""
    errors: list[str] = []

    @_CreateError
    def create_error(arguments: Any) -> int:
        errors.append(arguments.contents.message.decode())
        return 1

    api = frame._Api(create_error=create_error)
    call_frame = frame._CallFrame(api=ctypes.pointer(api))
    metadata = [frame._Metadata() for _ in extensions]
    chain = [
        frame._Extension(ctypes.sizeof(frame._Extension), kind, None, ctypes.pointer(each))
        for kind, each in zip(extensions, metadata, strict=True)
    ]
    for each, following in itertools.pairwise(chain):
        each.next = ctypes.addressof(following)
    call_frame.extension = ctypes.addressof(chain[0])
    served: list[Any] = []
    handle = handler(lambda *args: served.append(args), jax.ffi.include_dir())
    returned = handle(ctypes.pointer(call_frame))
    assert not served
    assert bool(returned) == bool(errors)
    return " ".join(errors), [(each.version.major, each.version.minor) for each in metadata]


def test_extensions_of_the_call_frame() -> None:
    """A question for our version is answered; a call with an extension that is not understood is not done silently."""
    error, ((major, minor),) = _answer([frame._METADATA])
    assert (error, major) == ("", 0)
    assert minor > 0
    assert "an extension of type 7, which normgrad.jax does not know" in _answer([7])[0]
    assert "an extension of type 7" in _answer([frame._METADATA, 7])[0]
