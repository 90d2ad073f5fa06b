"""The benchmark's command, with its tables of call overhead and start-up. Nothing here depends on speed."""

import json
import subprocess
import sys

import pytest

from normgrad.bench import overhead, runner, startup
from normgrad.bench.implementations.implementation import Role
from normgrad.cli import main
from support.bench import Altered

pytestmark = pytest.mark.usefixtures("one_thread", "on_the_reference")


# The command


SMALLEST = ("bench", "--grid", "--largest", "0.00005", "--budget", "0.001", "--dtypes", "float32", "--layouts")


def test_the_headline_counts_threads(capsys):
    assert main([*SMALLEST, "contiguous", "--operators", "layer_norm", "--threads", "1"]) == 0
    assert ", 1 thread, " in capsys.readouterr().out


def test_command(capsys, tmp_path):
    paths = {kind: tmp_path / f"b.{kind}" for kind in ("csv", "json")}
    files = [text for kind, path in paths.items() for text in (f"--{kind}", str(path))]
    assert main([*SMALLEST, "contiguous", *files]) == 0
    out = capsys.readouterr().out
    for text in (
        "backend reference",
        "layer_norm_backward",
        "All but plan.run allocate their results",
        "Largest error: ",
    ):
        assert text in out
    assert "\x1b" not in out
    content = json.loads(paths["json"].read_text(encoding="utf-8"))
    assert {"date", "processor", "cores", "threads", "versions", "backend"} <= set(content["machine"])
    assert {row["operator"] for row in content["results"]} >= {"layer_norm_backward", "batch_norm_stats"}
    assert content["overhead"][0]["seconds"]["plan.run"] > 0
    assert len(paths["csv"].read_text(encoding="utf-8").splitlines()) == len(content["results"]) + 1


def test_command_with_neither_pytorch_nor_jax(capsys, monkeypatch):
    for module in ("runner", "overhead"):
        monkeypatch.setattr(f"normgrad.bench.{module}.find_spec", lambda name: None)
    monkeypatch.setattr("normgrad.cli.bench.find_spec", lambda name: None)
    assert main([*SMALLEST, "contiguous", "--operators", "layer_norm_backward"]) == 0
    out = capsys.readouterr().out
    assert "layer_norm_backward" in out
    assert "Slower than" not in out


def test_command_fails_where_ours_is_wrong(capsys, monkeypatch):
    def scaled(made):
        made[0] *= 2

    monkeypatch.setattr(runner, "libraries", lambda settings: [Altered(scaled, Role.OURS)])
    assert main([*SMALLEST, "contiguous", "--operators", "layer_norm"]) == 1
    assert "WRONG: altered, layer_norm 2×2 float32: output: " in capsys.readouterr().out


def test_what_was_measured_before_an_interruption_is_written(capsys, monkeypatch, tmp_path):
    right = runner.run_case
    done = []

    def interrupted(case, *rest):
        if done:
            raise KeyboardInterrupt
        done.append(case)
        return right(case, *rest)

    monkeypatch.setattr(runner, "run_case", interrupted)
    assert main([*SMALLEST, "contiguous", "--csv", str(tmp_path / "b.csv")]) == 130
    assert done[0].operator in (tmp_path / "b.csv").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (("--operators", "fly"), "invalid choice: 'fly'"),
        (("--grid", "--quick"), "not allowed with argument"),
        (("--largest", "0"), "--largest: must be a number above 0, and is '0'"),
        (("--largest", "big"), "--largest: must be a number above 0, and is 'big'"),
        (("--budget", "inf"), "--budget: must be a number above 0, and is 'inf'"),
        (("--quick", "--largest", "0.001"), "nothing is left to measure"),
        (
            ("--quick", "--operators", "layer_norm"),
            "no case of the set is of these operators, dtypes, layouts and sizes; --grid has",
        ),
        (("--csv", "no_such_folder/b.csv"), "no_such_folder/b.csv: cannot be written"),
        (("--json", f"{'long' * 99}.json"), ".json: cannot be written: File name too long"),
        (("--plot", "b.txt"), "must end in .png, .svg, .pdf"),
        (("--quick", "--csv", "b", "--json", "./b"), "b: is the file of --csv and of --json, and each needs its own"),
        (("--graph",), "--graph needs --device cuda"),
        (("--threads", "0"), "must be a whole number from 1 to"),
    ],
)
def test_command_refuses(capsys, argv, text):
    if "--plot" in argv:
        pytest.importorskip("matplotlib")
    assert main(["bench", *argv]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("normgrad: ")
    assert err.count("\n") == 1
    assert text in err


def test_overhead():
    found = list(overhead.overheads(1e-3))
    assert [each.case.shape for each in found] == list(overhead.SHAPES)
    assert all(seconds > 0 for each in found for seconds in each.seconds.values())


def test_startup():
    found = startup.measure_startup("layer_norm", "bfloat16")
    assert found.first_import > 0
    assert found.cached_total == found.cached_import + found.cached_call
    assert startup.record([found])[0]["dtype"] == "bfloat16"


def test_the_package_does_not_load_the_benchmark():
    program = "import sys, normgrad; print(*(name for name in sys.modules if name.startswith('normgrad.bench')))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
