"""The benchmark of models' normalisation calls, and the pages made of results. Nothing here depends on speed."""

import csv
import importlib
import json
import sys
from pathlib import Path

import pytest

import normgrad
from normgrad.bench.cases import Shapes
from normgrad.bench.models import build
from normgrad.bench.patterns import NORMAL
from normgrad.cli import main as normgrad_main

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.usefixtures("one_thread")

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture(autouse=True)
def scripts(monkeypatch):
    monkeypatch.setenv("NORMGRAD_BACKEND", "reference")
    monkeypatch.syspath_prepend(str(BENCHMARKS))


@pytest.fixture
def model_calls():
    return importlib.import_module("model_calls")


def recorded(model_calls, precision="float32"):
    return model_calls.record("tiny", precision, build("tiny", "cpu"), "cpu")


# Recording


def test_every_call_of_both_passes_is_recorded(model_calls):
    found = recorded(model_calls)
    totals = {}
    for call, count in found.counts.items():
        totals[call.operator] = totals.get(call.operator, 0) + count
    assert totals == {"group_norm": 1, "layer_norm": 3, "layer_norm_backward": 3, "group_norm_backward": 1}
    assert set(found.samples) == set(found.counts)
    (twice,) = (call for call, count in found.counts.items() if count == 2)
    assert (twice.operator, twice.input.shape) == ("layer_norm", (4, 65, 16))


def test_strides_are_those_that_reach_aten(model_calls):
    backward = [call for call in recorded(model_calls).counts if call.operator == "layer_norm_backward"]
    strides = {(call.input.strides, call.layout("grad_out").strides) for call in backward}
    assert ((1024, 8, 1, 64), (1040, 128, 16, 1)) in strides  # channels after an image's, tokens behind the class token
    assert ((1040, 16, 1), (16, 64, 1)) in strides  # attention swaps the outer axes


def test_autocast_changes_what_is_recorded(model_calls):
    dtypes = {call.input.dtype for call in recorded(model_calls, "autocast").counts}
    assert torch.bfloat16 in dtypes


def test_samples_are_the_arguments_of_the_first_call(model_calls):
    found = recorded(model_calls)
    for call, arguments in found.samples.items():
        described = tuple(map(model_calls._described, arguments))
        assert described == call.arguments
    (final,) = (
        arguments
        for call, arguments in found.samples.items()
        if call.operator == "layer_norm_backward" and call.layout("grad_out").strides == (1040, 16, 1)
    )
    # Of the final norm's output the loss depends on the class token alone.
    assert final[0][:, 0].any()
    assert not final[0][:, 1:].any()


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x,
        lambda x: x.transpose(0, 1),
        lambda x: x[:, ::2],
        lambda x: x[:, :1].expand(4, 6, 5),
        lambda x: x[0, 0, 0].expand(3, 2),
        lambda x: x[:0],
    ],
)
def test_a_copy_has_the_same_elements_and_strides(model_calls, view):
    tensor = view(torch.randn(4, 6, 5))
    copy = model_calls.copied(tensor)
    assert copy.stride() == tensor.stride()
    assert torch.equal(copy, tensor)
    assert tensor.numel() == 0 or copy.data_ptr() != tensor.data_ptr()


# Verification and timing


def test_every_distinct_call_is_timed(model_calls):
    for precision in model_calls.PRECISIONS:
        found = recorded(model_calls, precision)
        lines = [model_calls.timed(found, call, None, rounds=1) for call in found.samples]
        assert len(lines) == 7
        for line in lines:
            assert line.problem == ""
            assert 0 < line.error_of_bound <= 1
            assert min(line.pytorch_us, line.normgrad_us, line.copy_us, line.time_over_pytorch, line.of_copy) > 0
            assert (line.grad_out_strides == "") == (not line.operator.endswith("backward"))


def test_a_wrong_result_gets_no_time(model_calls, monkeypatch):
    right = normgrad.layer_norm_backward

    def altered(*arguments):
        grad_input, grad_weight, grad_bias = right(*arguments)
        grad_weight[-1] += 1
        return grad_input, grad_weight, grad_bias

    monkeypatch.setattr(normgrad, "layer_norm_backward", altered)
    found = recorded(model_calls)
    for call in found.samples:
        line = model_calls.timed(found, call, None, rounds=1)
        wrong = call.operator == "layer_norm_backward"
        assert line.problem.startswith("grad_weight: ") == wrong
        assert (line.normgrad_us is None) == (line.time_over_pytorch is None) == wrong
        assert (model_calls.cells(line)[-1] == "WRONG") == wrong


def test_what_is_slow_against_pytorch_comes_first(model_calls):
    found = recorded(model_calls)
    line = model_calls.timed(found, next(iter(found.samples)), None, rounds=1)
    ratios = (0.5, None, 2.0, 1.0)
    lines = [model_calls.Timed(**(vars(line) | {"time_over_pytorch": ratio})) for ratio in ratios]
    assert [each.time_over_pytorch for each in model_calls.worst_first(lines)] == [None, 2.0, 1.0, 0.5]


# The scripts


def run(monkeypatch, module, *argv):
    monkeypatch.setattr(sys, "argv", [module.__name__, *map(str, argv)])
    return module.main()


def test_the_script_writes_a_table_and_files(model_calls, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(model_calls, "ROUNDS", 1)
    files = ("--csv", tmp_path / "m.csv", "--json", tmp_path / "m.json")
    assert run(monkeypatch, model_calls, "--device", "cpu", "--models", "tiny", *files) == 0
    out = capsys.readouterr().out
    assert "tiny, float32: 8 calls, 7 distinct" in out
    assert "of 14 distinct calls take longer than PyTorch's." in out
    stored = json.loads((tmp_path / "m.json").read_text(encoding="utf-8"))
    assert len(stored["results"]) == 14
    assert {"date", "processor", "versions"} <= set(stored["machine"])
    with (tmp_path / "m.csv").open(newline="", encoding="utf-8") as stream:
        assert [row["operator"] for row in csv.DictReader(stream)] == [row["operator"] for row in stored["results"]]


@pytest.mark.parametrize(("model", "package"), [("swin_t", "torchvision"), ("gpt2", "transformers")])
def test_a_missing_package_is_named(model_calls, monkeypatch, capsys, model, package):
    monkeypatch.setitem(sys.modules, package, None)
    assert run(monkeypatch, model_calls, "--device", "cpu", "--models", model) == 2
    assert package in capsys.readouterr().err


def test_a_missing_gpu_is_named(model_calls, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run(monkeypatch, model_calls, "--models", "tiny") == 2
    assert "needs a CUDA GPU" in capsys.readouterr().err


def test_the_tables_of_the_page(model_calls, monkeypatch, capsys, tmp_path):
    pages = importlib.import_module("speed_pages")
    monkeypatch.setattr(model_calls, "ROUNDS", 1)
    monkeypatch.setattr("normgrad.cli.bench._QUICK_ROUNDS", 1)
    monkeypatch.setattr("normgrad.cli.bench._SUBNORMAL_BUDGET", 1e-3)
    shapes = Shapes([(5, 7)], [], [], [], forward=True, dtypes=("float32",))
    monkeypatch.setitem(importlib.import_module("normgrad.bench.cases").QUICK_PATTERN_SETS, "cpu", shapes)
    patterns, models = tmp_path / "d.json", tmp_path / "m.json"
    assert normgrad_main(["bench", "--data", "--quick", "--json", str(patterns)]) == 0
    run(monkeypatch, model_calls, "--device", "cpu", "--models", "tiny", "--precisions", "float32", "--json", models)
    text = pages.patterns(json.loads(patterns.read_text(encoding="utf-8")))
    assert text.count("| `layer_norm_backward` | 5×7 | float32 | contiguous |") == 1
    assert f"| {NORMAL.name} |" not in text
    stored = json.loads(models.read_text(encoding="utf-8"))
    stored["machine"]["versions"] |= {"triton": "3"}  # which a run on a CPU does without
    assert pages.model_calls(stored).count("| tiny | float32 |") == 7


def test_what_is_between_markers_is_replaced():
    replaced = importlib.import_module("page_parts").replaced
    page = "above\n<!-- part -->\nold\n<!-- end of part -->\nbelow\n"
    once = replaced(page, "part", "new\n")
    assert once == replaced(once, "part", "new\n") == page.replace("old", "new")
    with pytest.raises(ValueError, match="must have <!-- other --> and <!-- end of other --> once"):
        replaced(page, "other", "new\n")
