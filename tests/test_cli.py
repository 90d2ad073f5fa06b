"""The command line as a whole: commands, errors, exit statuses; ``demo`` and ``info``."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import normgrad
from normgrad import backends, oracle
from normgrad.cli import COMMANDS, demo, demo_cases, info, main
from normgrad.operators import OPERATORS


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    for variable in ("NORMGRAD_PRODUCT", "NORMGRAD_BACKEND", "NORMGRAD_NUM_THREADS", "FORCE_COLOR"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("COLUMNS", "80")


def refused(capsys, *argv: str) -> str:
    """The one line that arguments are refused with."""
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("normgrad: ")
    assert err.count("\n") == 1
    return err


# Arguments


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        ((), "required: COMMAND"),
        (("fly",), "invalid choice: 'fly'"),
        (("demo", "--loud"), "unrecognized arguments: --loud"),
        (("run",), "required: OPERATOR, IN, -o/--output"),
        (("run", "fly", "in.npz", "-o", "out.npz"), "invalid choice: 'fly'"),
    ],
)
def test_wrong_arguments(capsys, argv, text):
    err = refused(capsys, *argv)
    assert text in err
    assert "--help tells more)" in err


@pytest.mark.parametrize("argv", [("--help",), *((command.NAME, "--help") for command in COMMANDS)])
def test_help(capsys, argv):
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 0
    assert "usage: normgrad" in capsys.readouterr().out


def test_version(capsys):
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"normgrad {normgrad.__version__}\n"


# demo


def test_demo_holds(capsys):
    assert main(["demo"]) == 0
    out = capsys.readouterr().out
    for name in ("layer_norm_backward", "group_norm_backward", "batch_norm_elemt_backward"):
        assert sum(line.startswith(name) for line in out.splitlines()) == 2
    assert out.count(" holds ") == 14
    assert "All 14 results hold." in out
    assert "-2 -94 -877.5 -1747.5" in out
    assert max(map(len, out.splitlines())) <= 80
    assert "\x1b" not in out


def test_demo_shows_the_values_to_check_by_hand():
    by_hand = {
        case.operator.signature.name: getattr(oracle, case.operator.signature.name)(**case.arguments)
        for case in (demo_cases.layer_norm_by_hand(), demo_cases.group_norm_by_hand(), demo_cases.batch_norm_by_hand())
    }
    grad_input, grad_weight, grad_bias = by_hand["layer_norm_backward"]
    assert grad_input.ravel().tolist() == [-2, -94, -877.5, -1747.5]
    assert (grad_weight.tolist(), grad_bias.tolist()) == ([20, 62], [6, 8])
    grad_input, grad_weight, grad_bias = by_hand["group_norm_backward"]
    assert np.abs(grad_input).max() < 1e-5
    np.testing.assert_allclose(grad_weight, [-75.896867, 2.896827, 155.849293], atol=1e-5)
    assert grad_bias.tolist() == [68, 100, 132]
    np.testing.assert_allclose(by_hand["batch_norm_elemt_backward"].ravel(), 0.9 * np.arange(8), atol=1e-12)


def test_demo_has_a_case_of_every_dtype():
    assert {case.arguments["input"].dtype.name for case in demo_cases.every_case()} == {
        "float32",
        "float16",
        "bfloat16",
    }


def test_demo_fails_where_a_result_is_wrong(capsys, monkeypatch):
    right = oracle.layer_norm_backward

    def slightly_wrong(**arguments):
        grad_input, *rest = right(**arguments)
        return (grad_input * (1 + 1e-3), *rest)

    # For the comparison alone: a backend may compute by the same oracle.
    monkeypatch.setattr(demo, "oracle", _AnotherLayerNorm(slightly_wrong))
    assert main(["demo"]) == 1
    out = capsys.readouterr().out
    assert "WRONG" in out
    assert "results do not hold." in out


class _AnotherLayerNorm:
    """The oracle with another LayerNorm."""

    def __init__(self, layer_norm_backward):
        self.layer_norm_backward = layer_norm_backward

    def __getattr__(self, name):
        return getattr(oracle, name)


def test_demo_is_the_same_whatever_product_is_set(capsys, monkeypatch):
    monkeypatch.setenv("NORMGRAD_PRODUCT", "Atlas 200I/500 A2")
    assert main(["demo"]) == 0


def test_demo_with_a_backend_that_is_unknown(capsys, monkeypatch):
    monkeypatch.setenv("NORMGRAD_BACKEND", "abacus")
    assert "NORMGRAD_BACKEND is 'abacus', and must be one of " in refused(capsys, "demo")


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([1, 2], "1 2"),
        ([1, 2, 3, 4, 5], "1 2 3 4 …"),
        ([-1.23456789e-11, -1.23456789e-11, 3], "-1.2346e-11 …"),
        ([], ""),
        ([np.nan, np.inf], "nan inf"),
    ],
)
def test_demo_shows_as_many_values_as_fit(values, text):
    assert demo._first_values(np.array(values)) == text


def test_demo_rounds_shares_down():
    assert demo._percent(0.9999) == "99.9%"
    assert demo._percent(float("inf")) == "inf"


# info


def test_info(capsys):
    assert main(["info"]) == 0
    out = capsys.readouterr().out
    assert normgrad.__version__ in out
    assert np.__version__ in out
    for name in backends.BACKENDS:
        assert f"  {name} " in out
    for product in normgrad.Product:
        assert product.label in out
    for variable in ("NORMGRAD_PRODUCT", "NORMGRAD_BACKEND", "NORMGRAD_NUM_THREADS"):
        assert f"  {variable}" in out
    assert max(map(len, out.splitlines())) <= 80


def test_info_lists_every_library_that_an_extra_names():
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    names = {requirement.partition(">")[0] for requirement in project["dependencies"]}
    for extra, requirements in project["optional-dependencies"].items():
        if extra not in ("test", "dev"):
            names |= {requirement.partition(">")[0] for requirement in requirements}
    assert names == set(info.LIBRARIES)


def test_info_says_how_to_get_a_library_that_is_missing(capsys, monkeypatch):
    monkeypatch.setitem(info.LIBRARIES, "no_such_library", "plot")
    main(["info"])
    assert "not installed: pip install 'normgrad[plot]'" in capsys.readouterr().out


def test_info_says_why_a_backend_is_missing(capsys, monkeypatch):
    monkeypatch.setitem(backends.BACKENDS, "abacus", ("normgrad.no_such_module", "cpu"))
    main(["info"])
    out = " ".join(capsys.readouterr().out.split())
    assert "abacus for cpu, missing: No module named 'normgrad.no_such_module'" in out


def test_info_says_which_backend_is_in_use(capsys, monkeypatch):
    monkeypatch.setenv("NORMGRAD_BACKEND", "reference")
    main(["info"])
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("  reference "))
    assert line.split()[1:] == ["for", "cpu,", "in", "use"]


def test_info_survives_an_environment_that_is_wrong(capsys, monkeypatch):
    monkeypatch.setattr("normgrad.threads._num_threads", None)
    monkeypatch.setenv("NORMGRAD_NUM_THREADS", "many")
    monkeypatch.setenv("NORMGRAD_PRODUCT", "Abacus")
    monkeypatch.setenv("NORMGRAD_BACKEND", "abacus")
    assert main(["info"]) == 0
    out = capsys.readouterr().out
    assert "NORMGRAD_NUM_THREADS is 'many'" in out
    assert "unknown product 'Abacus'" in out


# Processes


def command(*argv: str, **options) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "normgrad", *argv], capture_output=True, text=True, encoding="utf-8", **options
    )


def test_as_a_process(tmp_path):
    done = command("run", "layer_norm", str(tmp_path / "none.npz"), "-o", str(tmp_path / "out.npz"))
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("normgrad: ")
    assert done.stderr.count("\n") == 1


def test_a_terminal_that_knows_ascii_only():
    done = command("demo", env={**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"})
    assert done.returncode == 0, done.stderr
    assert "All 14 results hold." in done.stdout


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_an_output_that_is_full():
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "normgrad", "info"], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 2
    assert done.stderr == "normgrad: cannot write the output: No space left on device\n"


@pytest.mark.skipif(os.name == "nt", reason="a shell's redirection")
def test_no_output_at_all():
    done = subprocess.run(["sh", "-c", f"'{sys.executable}' -m normgrad info >&-"], stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.skipif(os.name == "nt", reason="a closed pipe is another error there")
def test_a_reader_that_goes_away():
    process = subprocess.Popen(
        [sys.executable, "-m", "normgrad", "demo"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    process.stdout.close()
    _, err = process.communicate(timeout=60)
    assert err == b""
    assert process.returncode == 141


def test_an_interruption(capsys, monkeypatch):
    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "every_case", interrupted)
    assert main(["demo"]) == 130
    assert capsys.readouterr().err == "normgrad: interrupted\n"


def test_a_lack_of_memory(capsys, monkeypatch):
    def too_much():
        raise MemoryError

    monkeypatch.setattr(demo, "every_case", too_much)
    assert main(["demo"]) == 2
    assert capsys.readouterr().err == "normgrad: there is not enough memory for this input\n"


def test_the_command_line_imports_no_extra():
    program = "import sys, normgrad.cli; print(*{'torch', 'safetensors', 'triton', 'cffi', 'jax'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_every_operator_can_be_run():
    assert set(OPERATORS) <= set(normgrad.__all__)


def test_an_sdk_without_a_name(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("", " "):
        assert main(["sdk", name]) == 2
        assert "the folder's name is empty" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
