"""``normgrad run``: from a file to a file."""

import ml_dtypes
import numpy as np
import pytest

import normgrad
from normgrad import oracle
from normgrad.cli import files, main
from normgrad.operators import OPERATORS
from normgrad.testing import compare, terms
from normgrad.testing.expected import as_tuple

BFLOAT16 = ml_dtypes.bfloat16
F32 = np.float32


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    for variable in ("NORMGRAD_PRODUCT", "NORMGRAD_BACKEND", "NORMGRAD_NUM_THREADS"):
        monkeypatch.delenv(variable, raising=False)


def normal(*shape, dtype=F32):
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(dtype)


def calls():
    """One call of every operator."""
    x, dy, c = normal(2, 4, 3), normal(2, 4, 3)[::-1].copy(), normal(4)
    row, pos = normal(2, 4, 1), np.abs(normal(2, 4, 1)) + 1
    sizes = {"N": 2, "C": 4, "HxW": 3, "group": 2}
    counts = np.array([3, 5], np.int32)
    return {
        "layer_norm_backward": {"grad_out": dy, "input": x, "normalized_shape": [3], "mean": row, "rstd": pos},
        "group_norm_backward": {
            "grad_out": dy,
            "input": x,
            "mean": normal(2, 2),
            "rstd": normal(2, 2),
            "weight": c,
            **sizes,
        },
        "batch_norm_elemt_backward": {
            "grad_out": dy,
            "input": x,
            "mean": c,
            "invstd": c,
            "sum_dy": c,
            "sum_dy_xmu": c,
            "counter": counts,
        },
        "layer_norm": {"input": x, "normalized_shape": [4, 3], "eps": 1e-3},
        "group_norm": {"input": x, **sizes},
        "batch_norm_stats": {"input": x},
        "batch_norm_gather_stats_with_counts": {
            "input": x,
            "mean": normal(2, 4),
            "invstd": np.abs(normal(2, 4)) + 0.5,
            "running_mean": np.zeros(4, F32),
            "running_var": np.ones(4, F32),
            "momentum": 0.1,
            "eps": 1e-5,
            "counts": counts,
        },
        "batch_norm_elemt": {"input": x, "mean": c, "invstd": c},
        "batch_norm_reduce_backward": {"grad_out": dy, "input": x, "mean": c, "invstd": c, "weight_g": False},
    }


def exact(name, arguments):
    """The oracle's results by name, and the size of their terms."""
    operator = OPERATORS[name]
    optional = {t.name: None for t in operator.signature.tensors if t.optional and not t.is_written}
    full = optional | {k: v.astype(np.float64) if k.startswith("running") else v for k, v in arguments.items()}
    sizes = getattr(terms, name)(**full)
    results = getattr(oracle, name)(**full)
    values = dict(zip([output.name for output in operator.signature.outputs], as_tuple(results), strict=True))
    values |= {k: v for k, v in full.items() if k.startswith("running")}
    return {k: (v, size) for (k, v), size in zip(values.items(), as_tuple(sizes), strict=True) if v is not None}


@pytest.mark.parametrize("name", OPERATORS)
def test_every_operator_from_file_to_file(tmp_path, name):
    arguments = calls()[name]
    np.savez(tmp_path / "in.npz", **arguments)
    assert main(["run", name, str(tmp_path / "in.npz"), "-o", str(tmp_path / "out.npz")]) == 0
    found, expected = files.read(tmp_path / "out.npz"), exact(name, arguments)
    assert set(found) == set(expected)
    for output, (value, size) in expected.items():
        assert found[output].dtype == F32
        report = compare(found[output], value, size)
        assert report, f"{output}: {report.text}"


@pytest.mark.parametrize("name", OPERATORS)
def test_every_operator_by_the_oracle(tmp_path, name):
    arguments = calls()[name]
    np.savez(tmp_path / "in.npz", **arguments)
    assert main(["run", name, str(tmp_path / "in.npz"), "-o", str(tmp_path / "out.npz"), "--oracle"]) == 0
    found, expected = files.read(tmp_path / "out.npz"), exact(name, arguments)
    assert set(found) == set(expected)
    for output, (value, _) in expected.items():
        assert found[output].dtype == np.float64
        np.testing.assert_array_equal(found[output], value)


def write_input(path, dtype):
    """A call of layer_norm_backward with attributes as the format holds them best."""
    x, mean = normal(2, 4, dtype=dtype), np.zeros((2, 1), F32)
    arrays = {"grad_out": x, "input": x, "mean": mean, "rstd": mean + 1}
    if path.suffix == ".npz":
        np.savez(path, **arrays, normalized_shape=[4], output_mask=[True, False, True])
    elif path.suffix == ".safetensors":
        numpy = pytest.importorskip("safetensors.numpy")
        numpy.save_file(arrays, path, {"normalized_shape": "[4]", "output_mask": "[true, false, true]"})
    else:
        torch = pytest.importorskip("torch")
        tensors = {name: torch.from_numpy(array.astype(F32)) for name, array in arrays.items()}
        for name in ("grad_out", "input"):
            tensors[name] = tensors[name].to(getattr(torch, np.dtype(dtype).name))
        torch.save({**tensors, "normalized_shape": (4,), "output_mask": [True, False, True]}, path)
    return x, mean


@pytest.mark.parametrize("dtype", [F32, np.float16, BFLOAT16])
@pytest.mark.parametrize("given", [".npz", ".safetensors", ".pt"])
@pytest.mark.parametrize("wanted", [".npz", ".safetensors", ".pt"])
@pytest.mark.parametrize("flags", [(), ("--oracle",)])
def test_from_any_format_to_any_other(tmp_path, given, wanted, dtype, flags):
    for suffix in (given, wanted):
        if suffix != ".npz":
            pytest.importorskip({".safetensors": "safetensors", ".pt": "torch"}[suffix])
    source, target = tmp_path / f"in{given}", tmp_path / f"out{wanted}"
    x, mean = write_input(source, dtype)
    assert main(["run", "layer_norm_backward", str(source), "-o", str(target), *flags]) == 0
    found = files.read(target)
    grad_input, _, grad_bias = normgrad.layer_norm_backward(x, x, [4], mean, mean + 1)
    if flags:
        grad_input, _, grad_bias = oracle.layer_norm_backward(x, x, [4], mean, mean + 1)
    assert set(found) == {"grad_input", "grad_bias"}
    assert found["grad_input"].dtype == grad_input.dtype
    assert found["grad_input"].tobytes() == grad_input.tobytes()
    assert found["grad_bias"].tobytes() == grad_bias.tobytes()


def test_attributes_may_be_arrays_in_every_format(tmp_path):
    numpy = pytest.importorskip("safetensors.numpy")
    x = normal(2, 4, 3)
    sizes = {"N": np.array(2), "C": np.array([4]), "HxW": np.array(3, np.int32), "group": np.array(2, np.uint8)}
    numpy.save_file({"input": x, **sizes, "eps": np.array(1e-3)}, tmp_path / "in.safetensors")
    assert main(["run", "group_norm", str(tmp_path / "in.safetensors"), "-o", str(tmp_path / "out.npz")]) == 0
    expected = normgrad.group_norm(x, None, None, 2, 4, 3, 2, eps=1e-3)
    assert files.read(tmp_path / "out.npz")["output"].tobytes() == expected[0].tobytes()


def test_running_statistics_that_share_memory_in_the_file(tmp_path):
    torch = pytest.importorskip("torch")
    both = torch.zeros(1).expand(4)
    call = calls()["batch_norm_gather_stats_with_counts"]
    tensors = {k: torch.from_numpy(v) if isinstance(v, np.ndarray) else v for k, v in call.items()}
    torch.save({**tensors, "running_mean": both, "running_var": both}, tmp_path / "in.pt")
    name = "batch_norm_gather_stats_with_counts"
    assert main(["run", name, str(tmp_path / "in.pt"), "-o", str(tmp_path / "out.npz")]) == 0
    found = files.read(tmp_path / "out.npz")
    np.testing.assert_allclose(found["running_mean"], 0.1 * found["mean_all"], rtol=1e-6)


def test_nothing_wanted_is_an_empty_file(tmp_path):
    call = calls()["layer_norm_backward"]
    np.savez(tmp_path / "in.npz", **call, output_mask=[False] * 3)
    assert main(["run", "layer_norm_backward", str(tmp_path / "in.npz"), "-o", str(tmp_path / "out.npz")]) == 0
    assert files.read(tmp_path / "out.npz") == {}


# Refused


def refused(capsys, tmp_path, arguments, *flags, name="layer_norm_backward") -> str:
    """The one line that a call is refused with; no output is left."""
    np.savez(tmp_path / "in.npz", **arguments)
    assert main(["run", name, str(tmp_path / "in.npz"), "-o", str(tmp_path / "out.npz"), *flags]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("normgrad: ")
    assert err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["in.npz"]
    return err


@pytest.mark.parametrize("flags", [(), ("--oracle",)])
@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"mean": normal(3)}, "mean has 3 elements (shape (3,)), and must have 8"),
        ({"rstd": normal(2, 4, 1, dtype=np.float16)}, "rstd is float16, and must be float32"),
        ({"input": normal(2, 4, 3, dtype=np.float64)}, "input is float64, and must be float32"),
        ({"normalized_shape": [4.5]}, "normalized_shape is 4.5: an element is 4.5, and must be an integer"),
        ({"output_mask": [True, True]}, "output_mask has 2 elements, and must have 3"),
        ({"normalized_shape": "3"}, "normalized_shape is '3'"),
    ],
)
def test_a_broken_rule_is_told_with_its_status(capsys, tmp_path, changes, text, flags):
    err = refused(capsys, tmp_path, {**calls()["layer_norm_backward"], **changes}, *flags)
    assert f"layer_norm_backward: {text}" in err
    assert err.endswith("(ACLNN_ERR_PARAM_INVALID, 161002)\n")


@pytest.mark.parametrize(
    ("name", "left_out"),
    [
        ("layer_norm_backward", ("normalized_shape",)),
        ("layer_norm_backward", ("grad_out", "rstd")),
        ("group_norm_backward", ("N", "group")),
        ("batch_norm_gather_stats_with_counts", ("momentum",)),
    ],
)
def test_what_is_missing_is_named(capsys, tmp_path, name, left_out):
    arguments = {k: v for k, v in calls()[name].items() if k not in left_out}
    err = refused(capsys, tmp_path, arguments, name=name)
    assert f"{name} needs {', '.join(left_out)}, which the file does not hold" in err


def test_names_that_are_unknown(capsys, tmp_path):
    err = refused(capsys, tmp_path, {**calls()["batch_norm_stats"], "epsilon": 1.0}, name="batch_norm_stats")
    assert "in.npz: epsilon: no parameter of batch_norm_stats, whose parameters are input, eps\n" in err


def test_names_of_the_c_interface_are_answered_with_those_of_python(capsys, tmp_path):
    arguments = calls()["layer_norm_backward"]
    arguments["gradOut"] = arguments.pop("grad_out")
    err = refused(capsys, tmp_path, arguments)
    assert "gradOut: no parameter of layer_norm_backward, whose parameters are grad_out, input, " in err
    assert err.endswith(", output_mask; for gradOut write grad_out\n")


@pytest.mark.parametrize(
    ("operator", "written", "right"),
    [
        ("layer_norm_backward", "normalizedshape", "normalized_shape"),
        ("layer_norm_backward", "Mean", "mean"),
        ("group_norm_backward", "gamma", "weight"),
        ("group_norm_backward", "hxw", "HxW"),
    ],
)
def test_other_spellings_are_answered_with_the_name(operator, written, right, capsys, tmp_path):
    arguments = calls()[operator]
    arguments[written] = arguments.pop(right)
    assert refused(capsys, tmp_path, arguments, name=operator).endswith(f"; for {written} write {right}\n")


def test_bits_of_bfloat16_that_are_not_listed(capsys, tmp_path):
    bits = normal(2, 4, 3).astype(BFLOAT16).view(np.uint16)
    err = refused(capsys, tmp_path, {**calls()["layer_norm_backward"], "input": bits})
    assert "in.npz: input is uint16; to read it as bfloat16, add the entry bfloat16=['input']\n" in err


def test_names_with_control_characters_are_shown_escaped(capsys, tmp_path):
    name = "\x1b[31mred\x07\x9b"
    err = refused(capsys, tmp_path, {**calls()["batch_norm_stats"], name: 1.0}, name="batch_norm_stats")
    assert "in.npz: \\x1b[31mred\\x07\\x9b: no parameter" in err


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
@pytest.mark.parametrize("command", ["run", "check"])
def test_an_eps_beyond_float64(capsys, tmp_path, suffix, command):
    path = tmp_path / f"in{suffix}"
    if suffix == ".pt":
        pytest.importorskip("torch").save({"input": pytest.importorskip("torch").ones(2, 4), "eps": 10**400}, path)
    else:
        save = pytest.importorskip("safetensors.numpy").save_file
        save({"input": normal(2, 4)}, path, metadata={"eps": str(10**400)})
    np.savez(tmp_path / "out.npz")
    other = ["-o", str(tmp_path / "out.npz")] if command == "run" else [str(tmp_path / "out.npz")]
    assert main([command, "batch_norm_stats", str(path), *other]) == 2
    err = capsys.readouterr().err
    assert "eps is an integer of 1329 bits, and must be a real number within float64's range" in err
    assert err.count("\n") == 1


def test_outputs_are_no_parameters(capsys, tmp_path):
    err = refused(capsys, tmp_path, {**calls()["batch_norm_stats"], "mean": normal(4)}, name="batch_norm_stats")
    assert "mean: no parameter of batch_norm_stats" in err


def test_a_tensor_under_an_attributes_name(capsys, tmp_path):
    err = refused(capsys, tmp_path, {"input": normal(2, 4), "eps": normal(1000)}, name="batch_norm_stats")
    assert "eps has 1000 elements, and is an attribute, not a tensor" in err


def test_a_plain_value_under_a_tensors_name(capsys, tmp_path):
    torch = pytest.importorskip("torch")
    torch.save({"input": 3}, tmp_path / "in.pt")
    assert main(["run", "batch_norm_stats", str(tmp_path / "in.pt"), "-o", str(tmp_path / "out.npz")]) == 2
    assert "input is of type int, and must be a NumPy array" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [(), ("--oracle",)])
def test_the_product_is_asked(capsys, tmp_path, flags, monkeypatch):
    call = calls()["group_norm"]
    for product in ("Atlas 200I/500 A2", "Ascend310B1"):
        err = refused(capsys, tmp_path, call, "--product", product, *flags, name="group_norm")
        assert "Atlas 200I/500 A2 has no aclnnGroupNorm;" in err
        assert err.endswith("(ACLNN_ERR_INNER_FIND_KERNEL_ERROR, 561003)\n")
    monkeypatch.setenv("NORMGRAD_PRODUCT", "Atlas 200I/500 A2")
    assert "561003" in refused(capsys, tmp_path, call, *flags, name="group_norm")
    argv = ["run", "group_norm", str(tmp_path / "in.npz"), "-o", str(tmp_path / "out.npz"), *flags]
    assert main([*argv, "--product", "Atlas A2"]) == 0


def test_a_product_is_in_force_for_the_run_alone(capsys, tmp_path):
    refused(capsys, tmp_path, calls()["group_norm"], "--product", "Ascend310B", name="group_norm")
    assert normgrad.contract.products.current_product() is None


@pytest.mark.parametrize(
    ("variable", "flags", "text"),
    [
        ("NORMGRAD_PRODUCT", (), "unknown product 'Abacus'; known are"),
        ("NORMGRAD_BACKEND", (), "NORMGRAD_BACKEND is 'Abacus', and must be one of"),
        ("NORMGRAD_NUM_THREADS", (), "NORMGRAD_NUM_THREADS is 'Abacus', and must be a whole number"),
        (None, ("--product", "Abacus"), "unknown product 'Abacus'; known are"),
    ],
)
def test_names_of_products_and_backends_that_are_unknown(capsys, tmp_path, monkeypatch, variable, flags, text):
    monkeypatch.setattr("normgrad.threads._num_threads", None)
    if variable:
        monkeypatch.setenv(variable, "Abacus")
    assert text in refused(capsys, tmp_path, calls()["batch_norm_stats"], *flags, name="batch_norm_stats")


@pytest.mark.parametrize("target", ["out.txt", "none/out.npz"])
def test_an_output_that_cannot_be_written_is_refused_before_the_input_is_read(capsys, tmp_path, target):
    (tmp_path / "in.npz").write_text("no archive")
    assert main(["run", "batch_norm_stats", str(tmp_path / "in.npz"), "-o", str(tmp_path / target)]) == 2
    assert target.rpartition("/")[2] in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["in.npz"]


# Folders


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of three cases, the second of which breaks a rule."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in").mkdir()
    call = calls()["batch_norm_stats"]
    np.savez("in/a.npz", **call)
    np.savez("in/b.npz", input=normal(3))
    files.write(tmp_path / "in" / "c.npz", call)
    (tmp_path / "in" / "notes.txt").write_text("no case")
    return tmp_path / "in"


def test_a_folder_of_cases(folder, tmp_path, capsys):
    (folder / "b.npz").unlink()
    assert main(["run", "batch_norm_stats", "in", "-o", "made/out"]) == 0
    assert capsys.readouterr() == ("2 of 2 calls of batch_norm_stats run; the results are in made/out\n", "")
    assert sorted(path.name for path in (tmp_path / "made/out").iterdir()) == ["a.npz", "c.npz"]
    expected = normgrad.batch_norm_stats(**calls()["batch_norm_stats"])
    assert files.read(tmp_path / "made/out/a.npz")["mean"].tobytes() == expected[0].tobytes()
    assert main(["run", "batch_norm_stats", "in", "-o", "exact", "--oracle"]) == 0
    assert files.read(tmp_path / "exact/c.npz")["mean"].dtype == np.float64
    assert main(["check", "batch_norm_stats", "in", "made/out"]) == 0


def test_a_case_that_cannot_be_run_does_not_keep_the_others_from_it(folder, tmp_path, capsys):
    assert main(["run", "batch_norm_stats", "in", "-o", "out"]) == 2
    out, err = capsys.readouterr()
    assert out == "2 of 3 calls of batch_norm_stats run; the results are in out\n"
    assert err.count("\n") == 1
    assert err.startswith("normgrad: in/b.npz: batch_norm_stats: input has 1 dimension (")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["a.npz", "c.npz"]


def test_where_no_call_can_be_run_no_results_are_announced(folder, tmp_path, capsys):
    assert main(["run", "layer_norm", "in", "-o", "out"]) == 2
    assert capsys.readouterr().out == "0 of 3 calls of layer_norm run\n"


@pytest.mark.parametrize(
    ("source", "target", "text"),
    [
        ("in", "in", "in: is IN, whose files would be replaced by their results"),
        ("in", "in/a.npz", "in/a.npz: is a file, and must be a folder, as IN is"),
        ("in", "out.npz", "out.npz: has the name of a file, and must name a folder, as IN is one"),
        ("in/a.npz", "in", "in: is a folder, and must be a file, as IN is"),
        ("in/a.npz", "in/a.npz", "in/a.npz: is IN, which would be replaced by its results; choose another file"),
        ("in/a.npz", "in/../in/a.npz", "in/../in/a.npz: is IN, which would be replaced by its results"),
        ("empty", "out", "empty: holds no cases (.npz, .safetensors, .pt)"),
        ("none", "out", "normgrad: none: there is no such file or folder\n"),
        ("in", "in/a.npz/out", "in/a.npz/out: cannot be created"),
    ],
)
def test_folders_that_are_refused(folder, tmp_path, capsys, source, target, text):
    (tmp_path / "empty").mkdir()
    before = {path: path.read_bytes() for path in folder.iterdir()}
    assert main(["run", "batch_norm_stats", source, "-o", target]) == 2
    assert text in capsys.readouterr().err
    assert {path: path.read_bytes() for path in folder.iterdir()} == before
    assert not (tmp_path / "out.npz").exists()
