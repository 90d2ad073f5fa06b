"""What README.md and docs/ show is true: examples in Python and on the command line are run, links lead somewhere."""

import doctest
import importlib.util
import re
import shlex
from pathlib import Path

import pytest

from normgrad.cli import main
from normgrad.operators import OPERATORS

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")])
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
BLOCK = re.compile(r"^```([^\s`]*)[^\n]*\n(.*?)^```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\[[^\]]*\]\(([^)#]+)(#[^)]*)?\)")

page_of = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())


@page_of
def test_examples(page, tmp_path, monkeypatch, capsys):
    """The blocks of a page in order, in one folder and with one set of Python names."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("normgrad.contract.products._choices", [])  # a page may choose one for good
    for variable in ("NORMGRAD_PRODUCT", "NORMGRAD_BACKEND", "NORMGRAD_NUM_THREADS"):
        monkeypatch.delenv(variable, raising=False)
    names: dict = {}
    text = page.read_text(encoding="utf-8")
    for block in BLOCK.finditer(text):
        language, content = block.groups()
        line = text.count("\n", 0, block.start(2))
        if language == "pycon" and not needs_missing_library(content):
            run_python(content, names, page, line)
        elif language == "console":
            run_commands(content, capsys)


def needs_missing_library(content: str) -> bool:
    modules = re.findall(r"^>>> import (torch|jax|safetensors)", content, re.MULTILINE)
    return any(importlib.util.find_spec(module) is None for module in modules)


def run_python(content: str, names: dict, page: Path, line: int) -> None:
    parsed = doctest.DocTestParser().get_doctest(content, {}, page.name, str(page), line)
    parsed.globs = names
    report: list[str] = []
    doctest.DocTestRunner(optionflags=OPTIONS).run(parsed, out=report.append, clear_globs=False)
    assert not report, "".join(report)


def run_commands(content: str, capsys: pytest.CaptureFixture) -> None:
    """Every ``$ normgrad …`` line, against the output and the exit status (``$ echo $?``) shown under it, if any."""
    shown = re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", content, re.MULTILINE)
    for (command, expected), (following, status_shown) in zip(shown, [*shown[1:], ("", "")], strict=True):
        if not command.startswith("normgrad "):
            assert command == "echo $?", command
            continue
        status = main(shlex.split(command)[1:])
        out, err = capsys.readouterr()
        usual = 2 if expected.startswith("normgrad: ") else 0
        assert status == (int(status_shown) if following == "echo $?" else usual), err
        if expected:
            assert doctest.OutputChecker().check_output(expected, out + err, OPTIONS), f"{command}\n{out}{err}"


@page_of
def test_every_python_block_is_run(page):
    """Code that is not run may rot: Python is shown with its prompts."""
    for block in BLOCK.finditer(page.read_text(encoding="utf-8")):
        assert block[1] not in ("py", "python"), block[0]
        assert block[1] == "pycon" or ">>>" not in block[2], block[0]


@page_of
def test_links(page):
    for target, _ in LINK.findall(page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target


@pytest.mark.parametrize("name", OPERATORS)
def test_every_operator_has_a_page(name):
    page = (ROOT / "docs" / "operators" / f"{name}.md").read_text(encoding="utf-8")
    signature = OPERATORS[name].signature
    assert page.startswith(f"# {name}\n")
    assert signature.c_name in page
    for parameter in signature.parameters:
        assert f"`{parameter.name}`" in page, parameter.name
        assert f"`{parameter.c_name}`" in page, parameter.c_name
    assert f"operators/{name}.md" in (ROOT / "docs" / "index.md").read_text(encoding="utf-8")


def test_the_pages_name_every_environment_variable():
    text = (ROOT / "docs" / "command_line.md").read_text(encoding="utf-8")
    for variable in ("NORMGRAD_PRODUCT", "NORMGRAD_BACKEND", "NORMGRAD_NUM_THREADS"):
        assert f"`{variable}`" in text
