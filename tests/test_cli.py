"""The command line as a whole: commands, errors, exit statuses; ``demo`` and ``info``."""

import argparse
import errno
import io
import json
import os
import platform
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest

import normgrad
from normgrad import backends, oracle
from normgrad.cli import COMMANDS, demo, demo_cases, info, main
from normgrad.cpu.compile import disk_cache
from normgrad.operators import OPERATORS
from support.terminal import run_on_terminal


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    for variable in ("NORMGRAD_PRODUCT", "NORMGRAD_BACKEND", "NORMGRAD_NUM_THREADS", "FORCE_COLOR"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("COLUMNS", "80")


on_posix = pytest.mark.skipif(os.name == "nt", reason="terminals, paths and error texts differ")


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
        (("fly",), "invalid choice: 'fly'"),
        (("demo", "--loud"), "unrecognized arguments: --loud"),
        (("run",), "required: OPERATOR, IN, -o/--output"),
        (("run", "fly", "in.npz", "-o", "out.npz"), "invalid choice: 'fly'"),
        (("run", "layer_norm", "in.npz", "-o", ""), "-o/--output: the name is empty"),
        (("check", "layer_norm", "", "out.npz"), "INPUTS: the name is empty"),
        (("cases", "layer_norm", "-o", ""), "-o/--output: the name is empty"),
        (("bench", "--json", ""), "--json: the name is empty"),
    ],
)
def test_wrong_arguments(capsys, argv, text):
    err = refused(capsys, *argv)
    assert text in err
    assert "--help tells more)" in err


def test_an_unknown_option_is_answered_with_the_help_of_its_command(capsys):
    assert refused(capsys, "info", "--jsn").endswith(
        "unrecognized arguments: --jsn (normgrad info --help tells more)\n"
    )
    assert refused(capsys, "--loud").endswith("unrecognized arguments: --loud (normgrad --help tells more)\n")


@pytest.mark.parametrize("argv", [("--help",), *((command.NAME, "--help") for command in COMMANDS)])
def test_help(capsys, argv):
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 0
    assert "usage: normgrad" in capsys.readouterr().out


@pytest.mark.parametrize("option", ["--version", "-V"])
def test_version(capsys, option):
    with pytest.raises(SystemExit):
        main([option])
    assert capsys.readouterr().out == f"normgrad {normgrad.__version__}\n"


@pytest.mark.parametrize("argv", [(), ("help",)])
def test_no_command_prints_the_help(capsys, argv):
    assert main(argv) == 0
    out = capsys.readouterr().out
    assert out.startswith("usage: normgrad [-h]")
    assert all(f"    {command.NAME} " in out for command in COMMANDS)


def test_the_help_of_a_command(capsys):
    assert main(["help", "check"]) == 0
    assert capsys.readouterr().out.startswith("usage: normgrad check [-h]")
    assert "invalid choice: 'fly'" in refused(capsys, "help", "fly")


def options_of(command):
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return [action for action in parser._actions if action.dest != "help"]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.NAME)
def test_every_option_has_a_help_text(command):
    assert all(action.help for action in options_of(command))


def test_completions_are_offered_to_a_shell_that_asks(monkeypatch, capsys):
    """By argcomplete, if it is installed; else nothing changes."""
    asked = []
    monkeypatch.setenv("_ARGCOMPLETE", "1")
    monkeypatch.setitem(sys.modules, "argcomplete", types.SimpleNamespace(autocomplete=asked.append))
    main([])
    (parser,) = asked
    assert parser.prog == "normgrad"
    monkeypatch.setitem(sys.modules, "argcomplete", None)
    assert main([]) == 0
    assert len(asked) == 1


# demo


def test_demo_passes(capsys):
    assert main(["demo"]) == 0
    out = capsys.readouterr().out
    for name in ("layer_norm_backward", "group_norm_backward", "batch_norm_elemt_backward"):
        assert sum(line.startswith(name) for line in out.splitlines()) == 2
    assert out.count("  pass\n") == 14
    assert "All 14 results are within the bound." in out
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
    assert "results are not within the bound." in out


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


def test_demo_with_a_backend_for_another_device(capsys, monkeypatch):
    monkeypatch.setenv("NORMGRAD_BACKEND", "cuda")
    assert refused(capsys, "demo") == (
        "normgrad: NORMGRAD_BACKEND is 'cuda', and the demonstration needs a backend for the CPU: cpu or reference\n"
    )


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


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([-2, -94, -877.5, -1747.5], "-2 -94 …"),
        ([-4.7684e-07] * 2, "-4.768e-07 …"),
        ([-1.2345e-300] * 2, "-1.23e-300 …"),
    ],
)
def test_demo_shows_a_value_at_least(values, text):
    assert demo._first_values(np.array(values), 12) == text


@on_posix
def test_demo_loses_nothing_on_a_narrow_terminal():
    out = run_on_terminal("demo", columns=60)
    assert max(map(len, out.splitlines())) <= 60
    assert sum(line.rstrip().endswith("  pass") for line in out.splitlines()) == 14
    for name in ("grad_input", "grad_weight", "grad_bias"):
        assert f" {name} " in out


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
    for variable in ("NORMGRAD_PRODUCT", "NORMGRAD_BACKEND", "NORMGRAD_NUM_THREADS", "NORMGRAD_CACHE_DIR"):
        assert f"  {variable}" in out
    for name in ("path", "kernel cache", "CPU features", "memory", "GPUs", "LLVM"):
        assert f"  {name}  " in out
    assert str(Path(normgrad.__file__).parent) in out


def test_info_as_json(capsys, monkeypatch):
    monkeypatch.setenv("NORMGRAD_PRODUCT", "atlas a2")
    assert main(["info", "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["package"]["version"] == normgrad.__version__
    assert content["libraries"]["numpy"] == np.__version__
    assert content["backends"]["cpu"] == "for cpu, in use"
    assert content["environment"]["NORMGRAD_PRODUCT"] == "atlas a2"
    assert content["environment"]["product in force"] == "Atlas A2"
    assert [product["product"] for product in content["products"]] == [p.label for p in normgrad.Product]
    assert content["products"][4]["operators"] == ["LayerNorm backward", "GroupNorm"]


@on_posix
def test_info_loses_nothing_on_a_narrow_terminal():
    out = run_on_terminal("info", columns=60)
    assert max(map(len, out.splitlines())) <= 60
    assert "…" not in out
    joined = "".join(out.split())
    assert platform.platform() in joined
    assert joined.count("alloperators") == 4
    assert "LayerNormbackward,GroupNorm" in joined


@on_posix
def test_info_names_the_cache_that_is_used(capsys, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.delenv("NORMGRAD_CACHE_DIR", raising=False)
    monkeypatch.setattr(disk_cache, "folders", lambda: iter([tmp_path / "file" / "cache", tmp_path / "cache"]))
    assert (
        info._cache()
        == f"{tmp_path}/cache (no kernels), since {tmp_path}/file/cache cannot be written to: Not a directory"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["file"]  # it was tried, and leaves no trace
    disk_cache.keep("kernel", "key", b"code")
    assert info._cache().startswith(f"{tmp_path}/cache (1 kernel, 0 kB), since ")


@on_posix
def test_a_file_in_place_of_the_cache_is_called_one(capsys, monkeypatch, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("NORMGRAD_CACHE_DIR", f"{tmp_path}/file")
    problem = f"{tmp_path}/file is a file, and must be a folder"
    assert info._cache() == f"none, so every process compiles its kernels: {problem}"
    assert disk_cache.keep("kernel", "key", b"code") is None
    assert problem in caplog.text


@on_posix
def test_info_says_why_the_cache_asked_for_is_not_used(capsys, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("NORMGRAD_CACHE_DIR", f"{tmp_path}/file/cache")
    assert main(["info", "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    problem = "cannot be written to: Not a directory"
    none = f"none, so every process compiles its kernels: {tmp_path}/file/cache {problem}"
    assert content["package"]["kernel cache"] == none
    assert (
        content["environment"]["NORMGRAD_CACHE_DIR"]
        == f"NORMGRAD_CACHE_DIR is '{tmp_path}/file/cache', which {problem}"
    )


def test_info_names_the_gpus(capsys, monkeypatch):
    gpu = types.SimpleNamespace(name="NVIDIA H200", major=9, minor=0, total_memory=150 * 2**30)
    monkeypatch.setattr(info, "_every_gpu", lambda: [gpu])
    assert info._gpus() == "NVIDIA H200 (compute 9.0, 150.0 GiB)"


def test_info_lists_every_library_that_an_extra_names():
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    names = {requirement.partition(">")[0] for requirement in project["dependencies"]}
    for extra, requirements in project["optional-dependencies"].items():
        if extra not in ("docs", "test", "dev"):
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
    assert "NORMGRAD_BACKEND is 'abacus', and must be one of cpu, reference" in out


# cache


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """A folder with three kernels, and a file that is not the cache's."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("NORMGRAD_CACHE_DIR", str(folder))
    for name, key in (("layer_norm-float32", "a"), ("layer_norm-float32", "b"), ("group_norm", "a")):
        disk_cache.keep(name, key, bytes(5000))
    (folder / "notes.code").write_text("mine")
    return folder


@on_posix
@pytest.mark.parametrize("action", [(), ("list",)])
def test_the_cache_is_listed(capsys, cache, action):
    assert main(["cache", *action]) == 0
    first, _, *kernels = capsys.readouterr().out.splitlines()
    assert first == f"{cache}: 3 kernels, 15 kB"
    assert [line.split()[:4] for line in kernels] == [
        ["group_norm", "5", "kB", "1"],
        ["layer_norm-float32", "10", "kB", "2"],
    ]


@on_posix
@pytest.mark.parametrize(
    ("columns", "shown"),
    [(80, ["kernel", "size", "variants", "last used"]), (70, ["kernel", "size", "variants"]), (60, ["kernel", "size"])],
)
def test_a_narrow_terminal_shows_whole_names_of_kernels(cache, columns, shown):
    longest = "batch_norm_reduce_backward-bfloat16-columns"
    disk_cache.keep(longest, "a", bytes(5000))
    header, *kernels = run_on_terminal("cache", columns=columns).splitlines()[-4:]
    assert [name for name in ("kernel", "size", "variants", "last used") if name in header] == shown
    assert [line.split()[0] for line in kernels] == [longest, "group_norm", "layer_norm-float32"]


@on_posix
def test_the_cache_is_cleared(capsys, cache):
    assert main(["cache", "clear"]) == 0
    assert capsys.readouterr().out == f"removed from {cache}: 3 kernels, 15 kB\n"
    assert [path.name for path in cache.iterdir()] == ["notes.code"]
    assert main(["cache", "clear"]) == 0
    assert capsys.readouterr().out == f"removed from {cache}: no kernels\n"


@on_posix
def test_a_cache_that_cannot_be_used(capsys, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("NORMGRAD_CACHE_DIR", f"{tmp_path}/file/cache")
    assert main(["cache"]) == 0
    out = capsys.readouterr().out
    assert out == (
        f"not used: {tmp_path}/file/cache cannot be written to: Not a directory\nEvery process compiles its kernels.\n"
    )


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
    assert "All 14 results are within the bound." in done.stdout


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_an_output_that_is_full():
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "normgrad", "info"], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 2
    assert done.stderr == "normgrad: cannot write the output: No space left on device\n"


def test_an_output_that_is_full_and_has_no_descriptor(capsys, monkeypatch):
    """As in a process that runs commands by ``main`` and collects what they print."""

    class Full(io.StringIO):
        def write(self, text):
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(sys, "stdout", Full())
    assert main(["info"]) == 2
    assert capsys.readouterr().err == "normgrad: cannot write the output: No space left on device\n"


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
