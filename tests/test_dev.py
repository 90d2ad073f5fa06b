"""``dev.py``: what it runs, what it does again and what it does without."""

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "dev.py"


@pytest.fixture
def dev(tmp_path, monkeypatch):
    """The script with a virtual environment of its own, in which nothing is really run."""
    spec = importlib.util.spec_from_file_location("dev", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.calls = []
    module.statuses = {}

    def python(*arguments):
        module.calls.append(" ".join(arguments))
        return next((status for text, status in module.statuses.items() if text in module.calls[-1]), 0)

    monkeypatch.setattr(module, "python", python)
    monkeypatch.setattr(module, "VENV", str(tmp_path))
    monkeypatch.setattr(module, "same_python", lambda: True)
    return module


def test_demo_installs_and_runs(dev):
    assert dev.main(["demo"]) == 0
    assert dev.calls == ["-m pip install -e .", "-m normgrad demo"]


def test_the_tests_come_last_and_get_the_arguments(dev):
    assert dev.main(["test", "-k", "layer_norm"]) == 0
    assert dev.calls[-1] == "-m pytest -n auto -k layer_norm"


def test_quick_leaves_out_the_documentation_and_the_slow_tests(dev, monkeypatch):
    monkeypatch.setattr(dev.os, "environ", {})
    assert dev.main(["test", "--quick", "-x"]) == 0
    assert dev.calls[-1] == "-m pytest -n auto -m not slow -x"
    assert dev.os.environ == {"NORMGRAD_TEST_EXAMPLES": "100"}
    assert not [call for call in dev.calls if "sphinx" in call]
    assert [call for call in dev.calls if "mypy" in call]


def test_a_second_run_installs_nothing(dev):
    dev.main(["test"])
    dev.calls.clear()
    dev.main(["test"])
    assert not [call for call in dev.calls if "pip" in call]


def test_a_changed_project_is_installed_again(dev, tmp_path, monkeypatch):
    dev.main(["demo"])
    (tmp_path / "pyproject.toml").write_text("changed")
    monkeypatch.setattr(dev, "ROOT", str(tmp_path))
    dev.calls.clear()
    dev.main(["demo"])
    assert dev.calls[0] == "-m pip install -e ."


def test_without_the_pinned_torch_the_tests_run_and_it_is_tried_again(dev, capsys):
    dev.statuses = {dev.TORCH: 1}
    assert dev.main(["test"]) == 0
    assert f"{dev.TORCH} is not to be had here" in capsys.readouterr().out
    assert "pytest" in dev.calls[-1]
    dev.calls.clear()
    dev.main(["test"])
    assert any(dev.TORCH in call for call in dev.calls)


def test_a_failed_installation_runs_nothing(dev, capsys):
    dev.statuses = {"pip install": 1}
    assert dev.main(["test"]) == 2
    assert len(dev.calls) == 1
    assert "the installation failed" in capsys.readouterr().err


def test_docs_are_built_with_warnings_as_errors(dev, capsys):
    assert dev.main(["docs"]) == 0
    assert dev.calls[-1].startswith("-m sphinx -q -W")
    assert "index.html" in capsys.readouterr().out
    dev.statuses = {"sphinx": 1}
    assert dev.main(["docs"]) == 1
    assert "index.html" not in capsys.readouterr().out


@pytest.mark.parametrize("check", ["ruff format", "ruff check", "mypy", "sphinx", "pytest"])
def test_every_check_counts_and_none_stops_the_others(dev, check):
    dev.statuses = {check: 1}
    assert dev.main(["test"]) == 1
    assert "pytest" in dev.calls[-1]


def test_an_old_python_is_told(dev, capsys, monkeypatch):
    assert dev.OLDEST == (3, 10)
    monkeypatch.setattr(dev, "OLDEST", (9, 0))
    assert dev.main(["demo"]) == 2
    assert "Python 9.0 or later is needed" in capsys.readouterr().err
    assert dev.calls == []


def test_usage(dev, capsys):
    assert dev.main([]) == 2
    assert dev.main(["--help"]) == 0
    assert "python3 dev.py demo" in capsys.readouterr().out
