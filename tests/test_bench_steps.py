"""``normgrad bench --models``: which models and modes run, that losses are compared, what is written. No test times."""

import contextlib
import csv
import importlib
import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from normgrad.bench import model_steps, models
from normgrad.bench.model_steps import (
    EAGER,
    MODES,
    MODES_16,
    MODULES,
    MODULES_16,
    OVERRIDE,
    OVERRIDE_16,
    Settings,
    Training,
    run_model,
)
from normgrad.cli import main

torch = pytest.importorskip("torch")
normgrad_torch = pytest.importorskip("normgrad.torch")

pytestmark = pytest.mark.usefixtures("one_thread")

ONCE = Settings(modes=(EAGER, OVERRIDE, MODULES), rounds=1)


@pytest.fixture
def quickly_compiled(monkeypatch):
    """Trace the models as torch.compile does, and generate no code."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))


def by_mode(result):
    return {each.mode: each for each in result.results}


# Losses


@pytest.mark.parametrize("dtype", model_steps.ROUNDINGS)
def test_every_mode_trains_as_eager_mode_does(dtype, quickly_compiled):
    found = by_mode(run_model("tiny", dtype, Settings(rounds=1)))
    assert list(found) == list(MODES)
    for mode in MODES_16:
        assert found.pop(mode).problem == "there is no 16-bit output without autocast on a GPU"
    for mode, result in found.items():
        assert result.problem == "", mode
        assert len(result.losses) == 10
        assert result.losses[-1] < result.losses[0]
        assert result.seconds > 0
        assert 0 <= result.difference <= result.allowed < 0.1
        assert (result.speedup is None) == (mode == EAGER)


def test_modules_with_16_bit_output(monkeypatch):
    options = []
    monkeypatch.setattr(normgrad_torch, "replace_norms", lambda model, **given: options.append(given))
    for mode in (MODULES, MODULES_16):
        Training(models.build("tiny", "cpu"), mode, "bfloat16", "cpu")
    assert [given["autocast_dtype"] for given in options] == [torch.float32, torch.bfloat16]


def test_an_override_with_16_bit_output():
    for mode, dtype in ((OVERRIDE, ""), (OVERRIDE_16, ", autocast_dtype=torch.bfloat16")):
        with Training(models.build("tiny", "cpu"), mode, "bfloat16", "cpu").in_force() as override:
            assert repr(override) == f"<override: on{dtype}; no calls>"


def scaling(factor):
    """Return a ``replace_norms`` whose modules have their gradients times a factor."""
    right = normgrad_torch.replace_norms

    def replace_norms(model, **options):
        replaced = right(model, **options)
        for module in replaced.values():
            module.weight.register_hook(lambda gradient: gradient * factor)
            module.register_full_backward_hook(lambda module, grad_input, grad_output: (grad_input[0] * factor,))
        return replaced

    return replace_norms


@pytest.mark.parametrize(("dtype", "factor"), [("float32", 1.001), ("bfloat16", 1.5), ("float32", float("nan"))])
def test_a_wrong_gradient_gets_no_time(monkeypatch, dtype, factor):
    monkeypatch.setattr(normgrad_torch, "replace_norms", scaling(factor))
    found = by_mode(run_model("tiny", dtype, ONCE))
    assert found[MODULES].is_wrong
    assert found[MODULES].problem.startswith("a loss differs from eager mode's by ")
    assert found[MODULES].seconds is None
    assert found[EAGER].seconds > 0
    assert found[OVERRIDE].speedup > 0


def test_a_mode_that_cannot_run_is_no_wrong_result(monkeypatch):
    def broken(model):
        raise RuntimeError("no compiler\nand a long trace")

    monkeypatch.setattr(torch, "compile", broken)
    found = by_mode(run_model("tiny", "float32", Settings(modes=("compile",), rounds=1)))
    assert found["compile"].problem == "RuntimeError: no compiler"
    assert not found["compile"].is_wrong


# Turns


def test_modes_take_turns_and_the_override_is_in_force_in_its_own_alone(monkeypatch):
    events = []

    @contextlib.contextmanager
    def override(autocast_dtype):
        events.append("enter")
        yield
        events.append("exit")

    monkeypatch.setattr(normgrad_torch, "override", override)
    task = models.build("tiny", "cpu")
    trainings = {}
    for mode in ONCE.modes:
        training = model_steps.Training(task, mode, "float32", "cpu")
        training._loss = lambda model, mode=mode: events.append(mode) or task.loss(model)
        trainings[mode] = training
    times = model_steps.timed(trainings, Settings(modes=ONCE.modes, rounds=2, steps=2))
    assert {mode: len(found) for mode, found in times.items()} == dict.fromkeys(ONCE.modes, 2)
    around = ["enter", OVERRIDE, OVERRIDE, "exit"]
    assert events == [EAGER, EAGER, *around, MODULES, MODULES, EAGER, EAGER, MODULES, MODULES, *around]


# The models


def test_the_unet_has_its_channels_at_its_resolutions():
    from normgrad.bench.networks import UNet

    network = UNet().to("meta")
    seen = set()
    for module in network.modules():
        if isinstance(module, torch.nn.GroupNorm):
            module.register_forward_hook(lambda module, args, output: seen.add((output.shape[1], output.shape[2])))
    x = torch.empty(1, 4, 64, 64, device="meta")
    assert network(x).shape == x.shape
    assert {(320, 64), (640, 32), (1280, 16)} <= seen


def test_the_same_seed_builds_the_same_model():
    once, again = (models.build("tiny", "cpu") for _ in range(2))
    assert all(map(torch.equal, once.model.parameters(), again.model.parameters()))
    assert torch.equal(once.loss(once.model), again.loss(again.model))


@pytest.mark.parametrize("name", models.MODELS)
def test_every_model_has_a_loss_and_norms(name):
    package = models.MODELS[name].package
    if package is not None:
        pytest.importorskip(package)
    task = models.build(name, "cpu")
    assert torch.isfinite(task.loss(task.model))
    assert normgrad_torch.replace_norms(task.model)


# The command


def test_the_command_writes_a_table_and_files(capsys, tmp_path):
    paths = {kind: tmp_path / f"m.{kind}" for kind in ("csv", "json")}
    files = [text for kind, path in paths.items() for text in (f"--{kind}", str(path))]
    modes = ("--modes", EAGER, MODULES)
    assert main(["bench", "--models", "tiny", "--dtypes", "float32", "--rounds", "1", *modes, *files]) == 0
    out = capsys.readouterr().out
    assert "tiny   float32  4×3×32×32" in out
    assert "Losses: the largest difference from eager mode is " in out
    content = json.loads(paths["json"].read_text(encoding="utf-8"))
    assert content["skipped"] == {}
    eager, modules = content["results"]
    assert (eager["mode"], eager["baseline"], eager["loss_difference"]) == (EAGER, None, 0.0)
    assert (modules["mode"], modules["baseline"], modules["problem"]) == (MODULES, EAGER, None)
    assert modules["speedup"] > 0
    with paths["csv"].open(newline="", encoding="utf-8") as stream:
        assert [row["mode"] for row in csv.DictReader(stream)] == [EAGER, MODULES]


def test_the_command_fails_where_losses_differ(capsys, monkeypatch):
    monkeypatch.setattr(normgrad_torch, "replace_norms", scaling(2.0))
    assert main(["bench", "--models", "tiny", "--dtypes", "float32", "--rounds", "1", "--modes", MODULES]) == 1
    assert "WRONG: tiny, float32, modules: a loss differs " in capsys.readouterr().out


def test_a_missing_package_is_said_and_skipped(capsys, monkeypatch):
    monkeypatch.setattr(model_steps, "find_spec", lambda name: None)
    assert main(["bench", "--models", "swin_t", "gpt2"]) == 0
    out = capsys.readouterr().out
    assert "skipped: swin_t: torchvision is not installed" in out
    assert "skipped: gpt2: transformers is not installed" in out


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (("--models", "fly"), "invalid choice: 'fly'"),
        (("--models", "tiny", "--modes", "fly"), "invalid choice: 'fly'"),
        (("--models", "tiny", "--data"), "--data has no meaning with --models"),
        (("--models", "tiny", "--budget", "1"), "--budget has no meaning with --models"),
        (("--models", "tiny", "--rounds", "0"), "--rounds: must be a whole number above 0, and is '0'"),
        (("--models", "tiny", "--steps", "two"), "--steps: must be a whole number above 0, and is 'two'"),
        (("--models", "tiny", "--dtypes", "float16"), "float16 would need the loss scaled"),
        (("--modes", "eager"), "--modes has no meaning without --models"),
        (("--data", "--steps", "3"), "--steps has no meaning without --models"),
    ],
)
def test_the_command_refuses(capsys, argv, text):
    assert main(["bench", *argv]) == 2
    assert text in capsys.readouterr().err


def test_models_and_their_packages_are_imported_when_asked():
    program = (
        "import sys, normgrad.cli.bench, normgrad.bench.models, normgrad.bench.model_steps\n"
        "print(*{'torch', 'torchvision', 'transformers'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


# The page


def test_the_page_gets_a_table_and_a_chart(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[1] / "benchmarks"))
    pages = importlib.import_module("speed_pages")
    results = tmp_path / "model_steps_cpu_2_cores.json"
    argv = ("--models", "tiny", "--rounds", "1", "--modes", EAGER, OVERRIDE, MODULES, "--json", str(results))
    assert main(["bench", *argv]) == 0
    section, charts = pages.training_steps(tmp_path)
    assert "| model | dtype | batch | eager, ms | override, ms | × eager | modules, ms | × eager |" in section
    assert section.count("| tiny | float32 | 4×3×32×32 |") == 1
    assert section.count("| tiny | bfloat16 | 4×3×32×32 |") == 1
    assert section.count("(steps_cpu_2_cores.svg)") == 1
    (chart,) = charts.values()
    assert chart.count(" ×</text>") == 4  # two dtypes, two modes
    assert "override()" in chart
    assert "both compiled" not in chart  # was not measured
