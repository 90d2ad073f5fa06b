"""C++ programs that use the library hard, and every kind of process that it must work in."""

from __future__ import annotations

import re
import resource
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
from expected import WAYS_TO_END

import normgrad
from conftest import LIBRARIES, PROGRAMS, SAMPLES, environment, python_flags
from normgrad import sdk
from support.long_mode import LONG

SANITISER = ("-fsanitize=address", "-g")
PACKAGES = str(Path(normgrad.__file__).parents[1])


def test_every_documented_error(build, run) -> None:
    done = run(build(PROGRAMS / "errors.cpp"))
    assert done.returncode == 0, done.stdout + done.stderr
    checked = re.search(r"(\d+) checked, 0 failed", done.stdout)
    assert checked
    assert int(checked[1]) > 500


@pytest.mark.parametrize(
    "soc", ["Ascend310B1", "Ascend310P3", "Ascend910A", "Ascend910B", "Ascend910B3", "Ascend950PR"]
)
def test_every_documented_error_of_a_product(build, run, soc: str) -> None:
    done = run(build(PROGRAMS / "errors.cpp"), soc, NORMGRAD_PRODUCT=soc)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("program", ["runtime", "use"])
def test_use(build, run, program: str) -> None:
    done = run(build(PROGRAMS / f"{program}.cpp"))
    assert done.stdout == "0 failed\n", done.stdout + done.stderr
    assert (done.stderr, done.returncode) == ("", 0)


@pytest.fixture(scope="module")
def sanitised(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tree whose library reports what it does wrong with memory."""
    folder = tmp_path_factory.mktemp("sanitised")
    (folder / "empty.cpp").write_text("int main() {}")
    command = ["g++", *SANITISER, folder / "empty.cpp", "-o", folder / "empty"]
    if subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("there is no AddressSanitizer")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CFLAGS", " ".join(SANITISER))
        return sdk.build(folder / "tree")


@pytest.mark.parametrize("program", ["runtime", "use", "errors"])
def test_no_memory_errors_as_the_sanitiser_sees_them(sanitised: Path, run, program: str) -> None:
    executable = sanitised / program
    source = PROGRAMS / f"{program}.cpp"
    command = ["g++", "-std=c++11", *SANITISER, source, "-pthread", f"-I{sanitised}/include", f"-L{sanitised}/lib64"]
    subprocess.run([*command, *LIBRARIES, "-o", executable], check=True)
    # Python gives not everything back at its end; and a size that is too large is to fail, not to abort.
    options = "detect_leaks=0:allocator_may_return_null=1"
    done = run(executable, LD_LIBRARY_PATH=f"{sanitised}/lib64", ASAN_OPTIONS=options, NORMGRAD_BACKEND="reference")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ERROR" not in done.stderr


def test_bad_addresses_in_a_sandbox_that_forbids_the_copying_system_call(tmp_path: Path, run) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CFLAGS", "-DNORMGRAD_SANDBOXED")
        home = sdk.build(tmp_path / "tree")
    command = ["g++", "-std=c++11", PROGRAMS / "runtime.cpp", "-pthread", f"-I{home}/include", f"-L{home}/lib64"]
    subprocess.run([*command, *LIBRARIES, "-o", tmp_path / "runtime"], check=True)
    done = run(tmp_path / "runtime", LD_LIBRARY_PATH=f"{home}/lib64")
    assert (done.stdout, done.stderr, done.returncode) == ("0 failed\n", "", 0)


@pytest.mark.parametrize("program", ["runtime", "use", "errors"])
def test_no_memory_errors_as_memcheck_sees_them(build, home: Path, program: str, tmp_path: Path) -> None:
    if program == "errors" and not LONG:
        pytest.skip("only with NORMGRAD_TEST_LONG=1")
    if shutil.which("valgrind") is None:
        pytest.skip("there is no valgrind")
    log = tmp_path / "log"
    command = ["valgrind", "--error-exitcode=99", f"--suppressions={Path(__file__).parent}/memcheck.supp"]
    command += ["--leak-check=full", "--show-leak-kinds=definite", "--errors-for-leak-kinds=none", f"--log-file={log}"]
    # Memcheck is slow, and what is checked here is the same whatever computes.
    variables = environment(home, NORMGRAD_BACKEND="reference")
    done = subprocess.run(
        [*command, build(PROGRAMS / f"{program}.cpp")], capture_output=True, text=True, check=False, env=variables
    )
    assert done.returncode == 0, done.stdout + log.read_text()[-10_000:]
    lost = [block for block in log.read_text().split("\n\n") if "definitely lost in loss" in block]
    assert not [block for block in lost if "normgrad_allocate" in block or "normgrad_new_array" in block]


def test_eight_threads_of_a_thousand_calls(build, run) -> None:
    done = run(build(PROGRAMS / "threads.cpp"))
    assert (done.stdout, done.stderr) == ("0 failed\n", "")


def test_ten_thousand_rounds_do_not_grow(build, run) -> None:
    done = run(build(PROGRAMS / "rounds.cpp"), "10000")
    assert done.returncode == 0, done.stdout + done.stderr


def test_after_dlopen(build, run, home: Path) -> None:
    program = build(PROGRAMS / "loaded.cpp", "-ldl", libraries=())
    names = sorted((home / "lib64").iterdir())
    done = run(program, *names, LD_LIBRARY_PATH="")
    assert done.stdout == f"used {len(names)}\n", done.stdout + done.stderr


def test_in_a_program_with_a_python_of_its_own(build, run) -> None:
    done = run(build(PROGRAMS / "embeds.cpp", *python_flags()), PYTHONPATH=PACKAGES, PYTHONHOME=sys.base_prefix)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("one interpreter\n0 500000 ")
    assert "Python has ended in this process" in done.stdout


def test_other_pythons_variables_do_not_matter(build, run) -> None:
    done = run(build(SAMPLES / "layer_norm_backward.cpp"), PYTHONHOME="/nowhere", PYTHONPATH="/nowhere", LC_ALL="C")
    assert done.returncode == 0, done.stderr


def test_objects_freed_after_the_end_of_main(build, run) -> None:
    done = run(build(PROGRAMS / "statics.cpp"))
    assert (done.stdout, done.stderr, done.returncode) == ("freed: 0 0\n", "", 0)


def test_ending_with_work_under_way(build, run) -> None:
    for _ in range(5):
        done = run(build(PROGRAMS / "abandons.cpp"))
        assert (done.stdout, done.stderr, done.returncode) == ("leaving\n", "", 0)


@pytest.mark.parametrize("milliseconds", [200, 800])
def test_ending_while_a_kernel_is_compiled(build, run, tmp_path: Path, milliseconds: int) -> None:
    program = build(PROGRAMS / "abandons.cpp")
    done = run(program, str(milliseconds), timeout=120, NORMGRAD_CACHE_DIR=str(tmp_path))
    assert (done.stdout, done.stderr, done.returncode) == ("leaving\n", "", 0)


def test_a_wrong_product_is_told(build, run) -> None:
    done = run(build(SAMPLES / "layer_norm_backward.cpp"), NORMGRAD_PRODUCT="Ascend")
    assert done.returncode == 1
    assert "Acl_Error(100000): NORMGRAD_PRODUCT: unknown product 'Ascend'; known are" in done.stdout


@pytest.mark.parametrize(("name", "text"), [("NUM_THREADS", "must be a whole number"), ("BACKEND", "must be one of")])
def test_a_wrong_variable_is_told_by_acl_init(build, run, name: str, text: str) -> None:
    done = run(build(SAMPLES / "minimal.cpp"), **{f"NORMGRAD_{name}": "x"})
    assert done.returncode == 1
    assert done.stdout.startswith("aclInit(nullptr): 100000\n")
    assert f"Acl_Error(100000): NORMGRAD_{name} is 'x', and {text}" in done.stdout


def test_an_environment_that_is_gone_is_told(build, run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sdk.tree, "_PACKAGE", tmp_path / "gone" / "normgrad")
    home = sdk.build(tmp_path / "tree")
    done = run(build(SAMPLES / "layer_norm_backward.cpp"), LD_LIBRARY_PATH=f"{home}/lib64")
    assert (done.returncode, done.stderr) == (1, "")
    assert f"({tmp_path / 'gone' / 'normgrad'}): run normgrad sdk again" in done.stdout


def test_a_wrong_device_is_told(build, run) -> None:
    done = run(build(SAMPLES / "layer_norm_backward.cpp"), NORMGRAD_DEVICE="npu")
    assert done.returncode == 1
    assert "NORMGRAD_DEVICE is 'npu', and must be cpu or cuda" in done.stdout


def test_start_to_first_result(build, run) -> None:
    """From a warm cache less than 0.5 s, in time of the processor, since the machine may be busy otherwise."""
    program = build(SAMPLES / "layer_norm_backward.cpp")
    assert run(program).returncode == 0  # compiles, if nothing did before
    times = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert run(program).returncode == 0
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert statistics.median(times) < 0.5, times


@pytest.mark.parametrize("way", WAYS_TO_END)
def test_ways_to_end(build, run, way: str) -> None:
    done = run(build(PROGRAMS / "ends.cpp"), way)
    assert (done.stdout, done.stderr, done.returncode) == (f"{way}\n", "", 0)
