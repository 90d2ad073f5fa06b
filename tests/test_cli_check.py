"""``normgrad check`` and ``normgrad cases``: verdicts, reports, exit statuses."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from datetime import datetime, timedelta
from pathlib import Path

import numpy as np
import pytest

import normgrad
from normgrad.cli import check, files, main
from normgrad.operators import OPERATORS
from normgrad.testing import STANDARDS
from normgrad.testing.cases import kinds_of, make_cases
from normgrad.testing.values import KINDS
from support.processes import run_python
from support.terminal import run_on_terminal

F32 = np.float32
NAME = "layer_norm_backward"
on_posix = pytest.mark.skipif(os.name == "nt", reason="terminals and closed pipes differ")


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for variable in ("NORMGRAD_PRODUCT", "NORMGRAD_BACKEND", "FORCE_COLOR"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.chdir(tmp_path)


def written(kinds: str = "normal", name: str = NAME) -> list[str]:
    """Cases in ``in`` and right results in ``out``; their names."""
    assert main(["cases", name, "-o", "in", "--kinds", *kinds.split()]) == 0
    Path("out").mkdir(exist_ok=True)
    names = sorted(path.stem for path in Path("in").iterdir())
    for case in names:
        assert main(["run", name, f"in/{case}.npz", "-o", f"out/{case}.npz"]) == 0
    return names


def break_result(path: str, name: str, index: object) -> None:
    content = files.read(Path(path))
    content[name][index] *= 1.5
    files.write(Path(path), content)


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The one line that arguments are refused with."""
    capsys.readouterr()
    assert main(["check", *argv]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("normgrad: ")
    assert err.count("\n") == 1
    return err


def test_a_case_that_passes(capsys: pytest.CaptureFixture[str]) -> None:
    written()
    capsys.readouterr()
    assert main(["check", NAME, "in/normal-float16.npz", "out/normal-float16.npz"]) == 0
    out = capsys.readouterr().out
    assert out.count("  pass  ") == 3
    assert "errors in ulp: 50 % below" in out
    assert "100 % correctly rounded" in out


def test_a_case_that_fails(capsys: pytest.CaptureFixture[str]) -> None:
    written()
    break_result("out/normal-float32.npz", "grad_input", np.s_[..., 512:])
    argv = ["check", NAME, "in/normal-float32.npz", "out/normal-float32.npz", "--worst", "2"]
    capsys.readouterr()
    assert main([*argv, "--json", "r.json", "--html", "r.html"]) == 1
    out = capsys.readouterr().out
    assert "FAIL  grad_input" in out
    assert "pass  grad_weight" in out
    assert "tail: in the last 3 of the 515 elements of rows" in out
    assert out.count("inputs: grad_out") == 2
    assert out.count("terms: rstd·g") == 2
    assert " ".join(out.split()).count(", U ") == 2
    report = json.loads(Path("r.json").read_text(encoding="utf-8"))
    assert report["version"] == normgrad.__version__
    assert report["command"] == f"normgrad {' '.join(argv)} --json r.json --html r.html"
    assert datetime.fromisoformat(report["date"]).utcoffset() == timedelta(0)
    assert (report["operator"], report["standard"], report["passed"]) == (NAME, "strict", False)
    (case,) = report["cases"]
    grad_input = case["outputs"][0]
    assert (grad_input["passed"], grad_input["wrong"]) == (False, 99)
    assert [cluster["kind"] for cluster in grad_input["errors"]["clusters"]] == ["tail", "factor"]
    assert grad_input["errors"]["worst"][0]["index"][-1] >= 512
    page = Path("r.html").read_text(encoding="utf-8")
    assert page.count("<svg") == 9
    assert "tail</span>: in the last 3" in page


def test_a_folder(capsys: pytest.CaptureFixture[str]) -> None:
    names = written("normal masks")
    capsys.readouterr()
    assert main(["check", NAME, "in", "out"]) == 0
    assert f"All {len(names)} cases passed." in capsys.readouterr().out
    break_result("out/normal-bfloat16.npz", "grad_bias", np.s_[:2])
    assert main(["check", NAME, "in", "out", "--html", "r.html", "--json", "r.json"]) == 1
    out = capsys.readouterr().out
    assert f"1 of {len(names)} cases did not pass." in out
    assert out.count("FAIL  grad_bias") == 1
    assert "pass  grad_input" not in out
    assert [c["case"] for c in json.loads(Path("r.json").read_text())["cases"] if not c["passed"]] == [
        "normal-bfloat16"
    ]
    page = Path("r.html").read_text(encoding="utf-8")
    assert page.count("<details") == len(names)
    assert page.count("<details class=card open>") == 1
    assert page.count("<svg") == 9


def test_a_case_of_a_folder_that_cannot_be_judged(capsys: pytest.CaptureFixture[str]) -> None:
    names = written()
    Path("out/normal-float16.npz").unlink()
    Path("out/normal-float32.npz").write_bytes(b"nothing")
    capsys.readouterr()
    assert main(["check", NAME, "in", "out", "--html", "r.html", "--json", "r.json"]) == 2
    out = capsys.readouterr().out
    assert out.count("CANNOT BE JUDGED") == 2
    assert f"2 of {len(names)} cases did not pass: 0 failed, 2 cannot be judged." in out
    problems = [case.get("problem", "") for case in json.loads(Path("r.json").read_text(encoding="utf-8"))["cases"]]
    assert problems[1] == "out: has no results of the name normal-float16"
    assert problems[2].startswith("out/normal-float32.npz: ")


@on_posix
def test_reports_are_there_although_nobody_reads_the_text() -> None:
    written()
    argv = ["check", NAME, "in", "out", "--html", "r.html", "--json", "r.json"]
    process = subprocess.Popen(
        [sys.executable, "-m", "normgrad", *argv], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    process.stdout.close()
    assert process.communicate(timeout=120)[1] == b""
    assert process.returncode == 141
    assert json.loads(Path("r.json").read_text())["passed"]
    assert Path("r.html").read_text(encoding="utf-8").endswith("</html>\n")


def test_json_to_the_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    written()
    capsys.readouterr()
    assert main(["check", NAME, "in/normal-float32.npz", "out/normal-float32.npz", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["passed"]
    assert not Path("-").exists()
    assert "--html - has no meaning" in refused(capsys, NAME, "in", "out", "--html", "-")


def test_text_into_a_pipe_is_neither_folded_nor_shortened(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    names = written("normal dtypes")
    break_result("out/normal-float32.npz", "grad_input", np.s_[:3])
    capsys.readouterr()
    assert main(["check", NAME, "in", "out"]) == 1
    lines = capsys.readouterr().out.splitlines()
    for name in names:
        assert any(line.split()[:1] == [name] for line in lines), name
    assert sum("99.9 % below" in line and line.endswith("correctly rounded") for line in lines) == 1
    assert not any(line != line.rstrip() for line in lines)


@on_posix
def test_names_of_cases_are_whole_on_a_narrow_terminal() -> None:
    assert main(["cases", NAME, "-o", "in", "--kinds", "special"]) == 0
    assert main(["run", NAME, "in", "-o", "out"]) == 0
    Path("out/special-float16.npz").unlink()
    Path("out/special-float32.npz").write_text("no archive")
    lines = run_on_terminal("check", NAME, "in", "out", columns=60).splitlines()
    for dtype in ("bfloat16", "float16", "float32"):
        assert any(line.startswith(f" special-{dtype} ") for line in lines)


@on_posix
def test_nothing_is_lost_on_a_narrow_terminal() -> None:
    names = written("dtypes")
    out = run_on_terminal("check", NAME, "in", "out", columns=60)
    joined = "".join(out.split())
    assert all(name in joined for name in names)
    assert "…" not in out.rpartition("Judging")[2].partition("\n")[2]


@on_posix
def test_a_dumb_terminal_gets_every_line_in_full(capsys: pytest.CaptureFixture[str]) -> None:
    written("dtypes")
    capsys.readouterr()
    assert main(["check", NAME, "in", "out"]) == 0
    assert run_on_terminal("check", NAME, "in", "out", columns=40, TERM="dumb") == capsys.readouterr().out


@on_posix
def test_progress_is_shown_on_a_terminal() -> None:
    written()
    assert "Judging" in run_on_terminal("check", NAME, "in", "out")
    assert "Judging normal-float32.npz" in run_on_terminal(
        "check", NAME, "in/normal-float32.npz", "out/normal-float32.npz"
    )


def test_a_nan_is_told_in_plain_words(capsys: pytest.CaptureFixture[str]) -> None:
    written()
    content = files.read(Path("out/normal-float32.npz"))
    content["grad_input"].flat[700] = np.nan
    files.write(Path("out/normal-float32.npz"), content)
    capsys.readouterr()
    assert main(["check", NAME, "in", "out"]) == 1
    out = capsys.readouterr().out
    assert "elements within the bound; 1 NaN where a number is right; the worst finite error is 0." in out
    assert " inf" not in out
    assert "nan ulp" not in out
    content["grad_input"][:] = np.nan
    files.write(Path("out/normal-float32.npz"), content)
    assert main(["check", NAME, "in", "out"]) == 1
    assert (
        "0 of 16995 elements within the bound; 16995 NaN where numbers are right; first at" in capsys.readouterr().out
    )


def test_a_summary_counts_a_number_out_of_place_as_special(capsys: pytest.CaptureFixture[str]) -> None:
    """Where NaN is right, the result is neither NaN nor Inf, and says so nowhere."""
    written("normal special")
    results = files.read(Path("out/special-float32.npz"))
    results["grad_input"] = np.nan_to_num(results["grad_input"], nan=1)
    files.write(Path("out/special-float32.npz"), results)
    assert main(["check", NAME, "in", "out", "--html", "r.html"]) == 1
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith(" special-float32")]
    assert line.split() == ["special-float32", "FAIL", "special", "grad_input"]
    assert "special values out of place; wrong: grad_input" in Path("r.html").read_text(encoding="utf-8")


def test_a_summary_shows_no_figure_where_nothing_was_measured(capsys: pytest.CaptureFixture[str]) -> None:
    written()
    assert main(["run", NAME, "in", "-o", "wide", "--oracle"]) == 0
    capsys.readouterr()
    assert main(["check", NAME, "in", "wide", "--html", "r.html"]) == 1
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith(" normal-float32")]
    assert line.split()[1:3] == ["FAIL", "–"]
    assert "nothing to measure; wrong: grad_input, " in Path("r.html").read_text(encoding="utf-8")


def test_help_names_standards_levels_and_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    assert set(check.STANDARDS) == set(STANDARDS)
    with pytest.raises(SystemExit):
        main(["check", "--help"])
    out = " ".join(capsys.readouterr().out.split())
    for text in (
        *check.STANDARDS.values(),
        "(default: strict)",
        "(default: L1)",
        "(default: 3)",
        "L2: max 2, mean 1.2",
    ):
        assert text in out


def test_results_may_be_of_another_format() -> None:
    pytest.importorskip("safetensors")
    written()
    for path in list(Path("out").iterdir()):
        files.write(path.with_suffix(".safetensors"), files.read(path))
        path.unlink()
    assert main(["check", NAME, "in", "out"]) == 0


@pytest.mark.parametrize("standard", ["strict", "cann", "torch", "bitwise", "cann-mere"])
def test_standards(standard: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NORMGRAD_BACKEND", "reference")  # whose bits are the oracle's, rounded
    written()
    argv = ["check", NAME, "in/normal-float16.npz", "out/normal-float16.npz", "--standard", standard]
    assert main(argv) == 0
    break_result("out/normal-float16.npz", "grad_weight", np.s_[:])
    assert main(argv) == 1


def test_a_baseline() -> None:
    written()
    argv = ["check", NAME, "in/normal-float32.npz", "out/normal-float32.npz", "--baseline", "base.npz"]
    files.write(Path("base.npz"), files.read(Path("out/normal-float32.npz")))
    assert main([*argv, "--standard", "cann-double", "--level", "L2"]) == 0
    assert main([*argv, "--standard", "bitwise"]) == 0
    break_result("out/normal-float32.npz", "grad_bias", np.s_[:1])
    assert main([*argv, "--standard", "cann-double"]) == 1
    assert main([*argv, "--standard", "bitwise"]) == 1


def test_running_statistics_are_results_too(capsys: pytest.CaptureFixture[str]) -> None:
    name = "batch_norm_gather_stats_with_counts"
    written(name=name)
    argv = ["check", name, "in/normal-float32.npz", "out/normal-float32.npz"]
    assert main(argv) == 0
    break_result("out/normal-float32.npz", "running_var", np.s_[:1])
    capsys.readouterr()
    assert main(argv) == 1
    assert "FAIL  running_var" in capsys.readouterr().out


def test_results_that_are_missing_fail(capsys: pytest.CaptureFixture[str]) -> None:
    written()
    content = files.read(Path("out/normal-float32.npz"))
    del content["grad_bias"]
    files.write(Path("out/normal-float32.npz"), content)
    capsys.readouterr()
    assert main(["check", NAME, "in/normal-float32.npz", "out/normal-float32.npz"]) == 1
    assert "is missing" in capsys.readouterr().out


def test_bad_input(capsys: pytest.CaptureFixture[str]) -> None:
    written()
    case, result = "in/normal-float32.npz", "out/normal-float32.npz"
    assert "needs another implementation's results" in refused(capsys, NAME, case, result, "--standard", "cann-double")
    assert "--baseline has no meaning with the standard cann" in refused(
        capsys, NAME, case, result, "--baseline", result, "--standard", "cann"
    )
    assert "must all be files or all be folders" in refused(capsys, NAME, "in", result)
    for argv in (("none", "out"), ("in", "none"), ("none", "none"), (case, "none", "--baseline", result)):
        assert (
            refused(capsys, NAME, *argv, "--standard", "bitwise") == "normgrad: none: there is no such file or folder\n"
        )
    assert refused(capsys, NAME, case, case).endswith("whose results are grad_input, grad_weight, grad_bias\n")
    assert "no parameter of layer_norm_backward" in refused(capsys, NAME, result, result)
    np.savez("bits.npz", grad_input=np.zeros((11, 3, 515), np.uint16))
    text = "bits.npz: grad_input is uint16; to read it as bfloat16, add the entry bfloat16=['grad_input']\n"
    assert refused(capsys, NAME, case, "bits.npz").endswith(text)
    np.savez("c.npz", gradInputOut=np.zeros((11, 3, 515), F32))
    assert refused(capsys, NAME, case, "c.npz").endswith("grad_bias; for gradInputOut write grad_input\n")
    np.savez("dumped.npz", gradInput=np.zeros((11, 3, 515), F32))
    assert refused(capsys, NAME, case, "dumped.npz").endswith("grad_bias; for gradInput write grad_input\n")
    assert "there is no folder" in refused(capsys, NAME, case, result, "--html", "none/r.html")
    assert "r: is the file of both reports" in refused(capsys, NAME, case, result, "--html", "r", "--json", "r")
    assert "unknown product 'Abacus'" in refused(capsys, NAME, case, result, "--product", "Abacus")
    Path("empty").mkdir()
    assert "holds no cases" in refused(capsys, NAME, "empty", "out")
    files.write(Path("in/normal-float32.npz"), {**files.read(Path(case)), "mean": np.zeros(2, F32)})
    assert "161002" in refused(capsys, NAME, case, result)
    assert "--worst: must be a whole number, 0 or more" in refused(capsys, NAME, case, result, "--worst", "-1")


@pytest.mark.parametrize("option", ["--html", "--json"])
def test_a_report_does_not_replace_what_it_is_about(capsys: pytest.CaptureFixture[str], option: str) -> None:
    """A slip of the hand must not cost the dump of an NPU."""
    written()
    Path("link").symlink_to("in/normal-float32.npz")
    before = {path: path.read_bytes() for path in Path().glob("*/*.npz")}
    capsys.readouterr()
    case, result = "in/normal-float32.npz", "out/normal-float32.npz"
    for argv, report in (
        ((case, result), case),
        ((case, result), result),
        ((case, result), "link"),
        (("in", "out"), case),
    ):
        assert f"{report}: is a file that is judged, and is not replaced" in refused(
            capsys, NAME, *argv, option, report
        )
    bitwise = ("--standard", "bitwise", "--baseline", "in/normal-float16.npz")
    assert "is a file that is judged" in refused(capsys, NAME, case, result, *bitwise, option, bitwise[-1])
    assert refused(capsys, NAME, "in", "out", option, "out") == "normgrad: out: is a folder, and must be a file\n"
    assert {path: path.read_bytes() for path in Path().glob("*/*.npz")} == before


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such limits")
@pytest.mark.parametrize("report", ["html", "json"])
def test_a_report_that_cannot_be_written_leaves_the_old_one(report: str) -> None:
    written()
    Path("report").write_text("old")
    code = f"""
import resource, sys
from normgrad.cli import main
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
sys.exit(main(["check", {NAME!r}, "in/normal-float32.npz", "out/normal-float32.npz", "--{report}", "report"]) - 2)
"""
    run_python(code)
    assert Path("report").read_text() == "old"
    assert sorted(path.name for path in Path().iterdir()) == ["in", "out", "report"]


def test_a_report_to_a_device(capfd: pytest.CaptureFixture[str]) -> None:
    written()
    assert main(["check", NAME, "in/normal-float32.npz", "out/normal-float32.npz", "--json", os.devnull]) == 0


@on_posix
def test_reports_of_files_whose_names_are_no_text() -> None:
    written()
    name = os.fsdecode(b"\xff\x1b.npz")
    for folder in ("in", "out"):
        Path(folder, "normal-float32.npz").rename(Path(folder, name))
    assert main(["check", NAME, f"in/{name}", f"out/{name}", "--json", "r.json", "--html", "r.html"]) == 0
    assert "out/\\udcff\\x1b.npz" in json.loads(Path("r.json").read_text(encoding="utf-8"))["command"]
    assert "out/\\udcff\\x1b.npz" in Path("r.html").read_text(encoding="utf-8")


@pytest.mark.skipif(os.name == "nt", reason="no such names there")
def test_names_with_control_characters_are_shown_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    written()
    for folder in ("in", "out"):
        for path in list(Path(folder).iterdir()):
            path.rename(path.with_name(f"\x1b[31m{path.name}"))
    Path("out/\x1b[31mnormal-float16.npz").unlink()
    capsys.readouterr()
    assert main(["check", NAME, "in", "out"]) == 2
    assert main(["check", NAME, *(f"{folder}/\x1b[31mnormal-float32.npz" for folder in ("in", "out"))]) == 0
    captured = capsys.readouterr()
    assert "\x1b" not in captured.out + captured.err
    assert "\\x1b[31mnormal-float32" in captured.out


def test_the_product_is_asked(capsys: pytest.CaptureFixture[str]) -> None:
    written(name="group_norm")
    argv = ("group_norm", "in/normal-float32.npz", "out/normal-float32.npz", "--product", "Atlas 200I/500 A2")
    assert "561003" in refused(capsys, *argv)


# cases


def test_the_help_lists_every_kind(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["cases", "--help"])
    out = " ".join(capsys.readouterr().out.split())
    assert all(f"{kind} {text}" in out for kind, text in KINDS.items())
    assert "normgrad cases --help" not in out


def test_cases_of_another_seed_do_not_replace_those_that_are_there(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["cases", NAME, "-o", "in", "--kinds", "normal", "special"]
    assert main(argv) == 0
    before = {path: path.read_bytes() for path in Path("in").iterdir()}
    assert main(argv) == 0  # the same cases once more
    capsys.readouterr()
    assert main([*argv, "--seed", "1"]) == 2
    assert "in/normal-float32.npz: has other values, such as those of another seed" in capsys.readouterr().err
    assert main(["cases", "layer_norm", "-o", "in", "--kinds", "normal"]) == 2
    assert {path: path.read_bytes() for path in Path("in").iterdir()} == before
    assert main([*argv, "--seed", "1", "--replace"]) == 0
    assert {path: path.read_bytes() for path in Path("in").iterdir()} != before


@pytest.mark.parametrize("operator", OPERATORS)
def test_cases_are_the_same_for_the_same_seed(operator: str) -> None:
    for folder, seed in (("a", "3"), ("b", "3"), ("c", "4")):
        assert main(["cases", operator, "-o", folder, "--seed", seed, "--kinds", "normal", "special"]) == 0
    for path in Path("a").iterdir():
        assert path.read_bytes() == (Path("b") / path.name).read_bytes()
        assert path.read_bytes() != (Path("c") / path.name).read_bytes()


def test_a_case_does_not_depend_on_the_others() -> None:
    alone = {case.name: case for case in make_cases(NAME, kinds=["offset"])}
    for case in make_cases(NAME):
        if case.name in alone:
            np.testing.assert_array_equal(case.arguments["input"], alone[case.name].arguments["input"])


@pytest.mark.parametrize("operator", OPERATORS)
def test_every_kind_has_cases(operator: str) -> None:
    kinds = [case.kind for case in make_cases(operator)]
    assert list(dict.fromkeys(kinds)) == kinds_of(operator)
    assert set(KINDS) - set(kinds) <= {"one-place", "masks"}


@pytest.mark.parametrize("operator", OPERATORS)
def test_every_two_tensors_meet_in_every_two_dtypes(operator: str) -> None:
    """As far as the operator takes them: BatchNorm's take any."""
    mixes = [case.arguments for case in make_cases(operator, kinds=["dtypes"])]
    tensors = [t.name for t in OPERATORS[operator].signature.tensors if t.name in mixes[0]]
    if operator.startswith("batch_norm"):
        for first, second in itertools.combinations(tensors, 2):
            pairs = [(mix[first], mix[second]) for mix in mixes]
            met = {(a.dtype, b.dtype) for a, b in pairs if a is not None and b is not None}
            assert len(met) == 9, (first, second)
    else:
        assert len({tuple(None if mix[t] is None else mix[t].dtype for t in tensors) for mix in mixes}) == len(mixes)
    assert any(
        mix[t.name] is None for t in OPERATORS[operator].signature.tensors if t.optional for mix in mixes
    ) == any(t.optional for t in OPERATORS[operator].signature.tensors)


def test_kinds_are_what_they_say() -> None:
    by_name = {case.name: case.arguments for case in make_cases(NAME)}
    offset = by_name["offset-float32"]["input"]
    assert abs(offset.mean()) > 100 * offset.std()
    assert np.ptp(by_name["constant-float16"]["input"], axis=-1).max() == 0
    assert by_name["one-column-float32"]["normalized_shape"] == [1]
    special = by_name["special-bfloat16"]["grad_out"].astype(F32)
    assert np.isnan(special).any()
    assert np.isposinf(special).any()
    assert np.isneginf(special).any()
    assert {tuple(by_name[name]["output_mask"]) for name in by_name if name.startswith("masks")} == {
        mask for mask in itertools.product((True, False), repeat=3) if any(mask)
    }
    (place,) = {case.arguments["HxW"] for case in make_cases("group_norm_backward", kinds=["one-place"])}
    assert place == 1


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        ((NAME, "-o", "d", "--kinds", "one-place"), "has no cases of the kind one-place; it has normal, uniform"),
        ((NAME, "-o", "d", "--kinds", "odd"), "invalid choice: 'odd'"),
        ((NAME, "-o", "d", "--seed", "-1"), "--seed is -1, and must not be negative"),
        ((NAME, "-o", "file"), "normgrad: file: is a file, and must be a folder\n"),
        ((NAME, "-o", "file/d"), "file/d: cannot be created"),
    ],
)
def test_cases_refused(capsys: pytest.CaptureFixture[str], argv: tuple[str, ...], text: str) -> None:
    Path("file").write_text("")
    assert main(["cases", *argv]) == 2
    assert text in capsys.readouterr().err
