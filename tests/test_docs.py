"""What README.md and docs/ show is true: examples in Python and on the command line are run, links lead somewhere."""

import doctest
import importlib
import importlib.util
import json
import re
import shlex
import sys
from itertools import chain
from pathlib import Path

import pytest

from normgrad.cli import main
from normgrad.operators import OPERATORS

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
CHINESE = {ROOT / "README.zh-CN.md": ROOT / "README.md"} | {
    page: DOCS / page.relative_to(DOCS / "zh") for page in (DOCS / "zh").rglob("*.md")
}
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *(ROOT / "examples").rglob("*.md")])
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
BLOCK = re.compile(r"^```([^\s`]*)[^\n]*\n(.*?)^```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\[[^\]]*\]\(([^)#]+)(#[^)]*)?\)")


def shown(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


page_of = pytest.mark.parametrize("page", PAGES, ids=shown)


@pytest.mark.parametrize("page", [page for page in PAGES if page not in CHINESE], ids=shown)
def test_examples(page, tmp_path, monkeypatch, capsys):
    """The blocks of a page in order, in one folder and with one set of Python names; translations have the same."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("normgrad.contract.products._choices", [])  # a page may choose one for good
    for variable in ("NORMGRAD_PRODUCT", "NORMGRAD_BACKEND", "NORMGRAD_NUM_THREADS"):
        monkeypatch.delenv(variable, raising=False)
    names: dict = {}
    text = page.read_text(encoding="utf-8")
    skipped = -1  # the section whose blocks are skipped from here on, because a library is not installed
    for block in BLOCK.finditer(text):
        language, content = block.groups()
        section = text.count("\n## ", 0, block.start())
        if language == "pycon" and needs_missing_library(content):
            skipped = section
        elif language == "pycon" and section != skipped:
            run_python(content, names, page, text.count("\n", 0, block.start(2)))
        elif language == "console":
            run_commands(content, capsys)


def needs_missing_library(content: str) -> bool:
    modules = re.findall(r"^>>> (?:import|from) (torch|jax|safetensors)", content, re.MULTILINE)
    return any(importlib.util.find_spec(module) is None for module in modules)


def run_python(content: str, names: dict, page: Path, line: int) -> None:
    parsed = doctest.DocTestParser().get_doctest(content, {}, page.name, str(page), line)
    parsed.globs = names
    report: list[str] = []
    doctest.DocTestRunner(optionflags=OPTIONS).run(parsed, out=report.append, clear_globs=False)
    assert not report, "".join(report)


def run_commands(content: str, capsys: pytest.CaptureFixture) -> None:
    """Every ``$ normgrad …`` line, against the output and the exit status (``$ echo $?``) shown under it, if any."""
    commands = re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", content, re.MULTILINE)
    for (command, expected), (following, status_shown) in zip(commands, [*commands[1:], ("", "")], strict=True):
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


# Translations


translation = pytest.mark.parametrize(("page", "original"), CHINESE.items(), ids=map(shown, CHINESE))


@translation
def test_a_translation_has_the_headings_of_its_original(page, original):
    """The same levels in the same order: a section that is added to one must be added to the other."""
    assert levels(page) == levels(original)


def levels(page: Path) -> list[int]:
    return [len(marks) for marks in re.findall(r"^(#+) ", without_blocks(page), re.MULTILINE)]


def without_blocks(page: Path) -> str:
    return BLOCK.sub("", page.read_text(encoding="utf-8"))


@translation
def test_a_translation_has_the_code_of_its_original(page, original):
    """The same blocks, to the letter; what Sphinx reads (lists of pages) may differ."""
    assert code(page) == code(original)


def code(page: Path) -> list[tuple[str, str]]:
    blocks = (block.groups() for block in BLOCK.finditer(page.read_text(encoding="utf-8")))
    return [(language, content) for language, content in blocks if not language.startswith("{")]


@translation
def test_a_translation_has_the_tables_of_its_original(page, original):
    """As many tables, each with as many rows and columns, and the same code and figures in every row."""
    ours, theirs = tables(page), tables(original)
    assert [len(rows) for rows in ours] == [len(rows) for rows in theirs]
    for row, counterpart in zip(chain(*ours), chain(*theirs), strict=True):
        assert row.count("|") == counterpart.count("|"), row
        for pattern in (r"`[^`]+`", r"\d{3,}"):
            assert sorted(re.findall(pattern, row)) == sorted(re.findall(pattern, counterpart)), row


def tables(page: Path) -> list[list[str]]:
    found = re.findall(r"^(?:\|.*\n)+", without_blocks(page), re.MULTILINE)
    return [table.replace(r"\|", "").splitlines() for table in found]


@translation
def test_a_translation_has_the_bullets_of_its_original(page, original):
    assert len(bullets(page)) == len(bullets(original))


def bullets(page: Path) -> list[str]:
    return re.findall(r"^(?:-|\d+\.) ", without_blocks(page), re.MULTILINE)


@translation
def test_both_languages_link_to_each_other(page, original):
    for here, there in ((page, original), (original, page)):
        links = [(here.parent / target).resolve() for target, _ in LINK.findall(here.read_text(encoding="utf-8"))]
        assert there in links, here


def test_what_is_translated():
    wanted = ["index", "install", "guides/judging", "guides/sdk"]
    wanted += [f"ascend/{name}" for name in ("index", "products", "errors", "decisions")]
    assert set(CHINESE) == {ROOT / "README.zh-CN.md", *(DOCS / "zh" / f"{name}.md" for name in wanted)}


# Figures and lists


@pytest.mark.parametrize("module", ["speed_pages", "accuracy_page"])
def test_figures_and_charts_are_those_of_the_results(module, monkeypatch):
    """``python benchmarks/pages.py`` would change nothing."""
    pytest.importorskip("torch")
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
    for path, content in importlib.import_module(module).written().items():
        assert path.read_text(encoding="utf-8") == content, f"run benchmarks/pages.py: {path} differs"


@pytest.mark.parametrize("page", ["docs/install.md", "docs/zh/install.md"])
def test_the_times_of_the_first_call_are_those_of_the_table(page):
    _, _, table = (ROOT / "docs/evidence/cpu.md").read_text(encoding="utf-8").partition("The first call in a fresh")
    rows = re.findall(r"^\| \w+ \| \w+ \| [\d.]+ s \| ([\d.]+) s \| [\d.]+ s \| ([\d.]+) s \|$", table, re.M)
    compiling, cached = ([float(time) for time in times] for times in zip(*rows, strict=True))
    text = (ROOT / page).read_text(encoding="utf-8").replace(" 到 ", " to ")
    assert f"{min(compiling):.1f} to {max(compiling):.1f} " in text
    assert f"{min(cached):.2f} to {max(cached):.2f} " in text


@pytest.mark.parametrize("name", OPERATORS)
def test_every_operator_has_a_page(name):
    page = (DOCS / "reference" / "operators" / f"{name}.md").read_text(encoding="utf-8")
    signature = OPERATORS[name].signature
    assert page.startswith(f"# {name}\n")
    assert signature.c_name in page
    for parameter in signature.parameters:
        assert f"`{parameter.name}`" in page, parameter.name
        assert f"`{parameter.c_name}`" in page, parameter.c_name
    assert f"operators/{name}.md" in (DOCS / "reference" / "index.md").read_text(encoding="utf-8")
    assert f"`{signature.c_name}`" in (DOCS / "ascend" / "index.md").read_text(encoding="utf-8")
    assert f"autofunction:: {name}\n" in (DOCS / "reference" / "api.md").read_text(encoding="utf-8")


def test_a_page_names_every_environment_variable():
    text = (DOCS / "reference" / "environment.md").read_text(encoding="utf-8")
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "normgrad").rglob("*.py"))
    found = set(re.findall(r'"(NORMGRAD_[A-Z_]+)"', sources))
    assert len(found) >= 5
    assert {f"`{variable}`" for variable in found} <= set(re.findall(r"`[A-Z_]+`", text))


def test_the_version_is_in_the_changelog_and_the_citation():
    import normgrad

    assert f"## {normgrad.__version__}\n" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"version: {normgrad.__version__}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")


def text_of(page: str) -> str:
    """A page without its line breaks."""
    return " ".join((ROOT / page).read_text(encoding="utf-8").split())


def test_what_is_said_of_a_call_on_four_elements() -> None:
    table = (DOCS / "evidence" / "cpu.md").read_text(encoding="utf-8")
    (times,) = re.findall(r"^\| layer_norm_backward 2×2 float32 \|(.*)\|$", table, re.MULTILINE)
    plan, from_numpy, from_torch, dispatched, theirs = (float(time) for time in times.split("|"))
    assert f"on 2×2 elements took {from_numpy} µs, and a plan {plan} µs" in text_of("docs/guides/numpy.md")
    said = f"takes {from_torch / theirs:.1f} times as long as PyTorch's operator, one of `torch.ops.normgrad` "
    assert f"{said}{dispatched / theirs:.1f}" in text_of("docs/evidence/speed.md")


def test_what_is_said_of_training_steps_on_a_gpu() -> None:
    """The gain of ResNet-50 with 16-bit output, the loss of small models, the number of models."""
    results = json.loads((ROOT / "benchmarks" / "results" / "model_steps_h200.json").read_text(encoding="utf-8"))
    gains = {(each["model"], each["mode"]): each["speedup"] for each in results["results"] if each["speedup"]}
    model, last = "resnet50_group_norm", "resnet50_group_norm_channels_last"
    modules16, last16 = gains[model, "modules16"], gains[last, "modules16"]
    assert f"is then {modules16:.1f} times faster" in text_of("README.md")
    assert f"in `channels_last` {last16:.1f} times (" in text_of("README.md")
    guide = text_of("docs/guides/pytorch.md")
    assert f"from {gains[model, 'modules']:.1f} to {modules16:.1f} times the speed of PyTorch's norms" in guide
    assert f"in `channels_last` from {gains[last, 'modules']:.1f} to {last16:.1f} times" in guide
    families = {
        "LayerNorm": ("gpt2", "vit_b_16", "swin_t", "convnext_tiny_channels_last"),
        "GroupNorm": ("resnet50_group_norm", "unet"),
        "GroupNorm, `channels_last`": ("resnet50_group_norm_channels_last", "unet_channels_last"),
    }
    for family, models in families.items():
        plain, half = (
            [gains[m, mode + bits] for m in models for mode in ("override", "modules")] for bits in ("", "16")
        )
        row = f"| {family} | {min(plain):.2f} to {max(plain):.2f} | {min(half):.2f} to {max(half):.2f} |"
        assert row in guide, row
    lost = max(1 - gain for (_, mode), gain in gains.items() if mode in ("override", "override16"))
    assert guide.count(f"lost up to {100 * lost:.0f} %") == 2
    assert len({model for model, _ in gains}) == 10
    assert "the times of ten models" in text_of("docs/help/faq.md")


def test_what_is_said_of_the_largest_gains_on_a_cpu() -> None:
    """GroupNorm backward on 16-bit data in channels_last: two sizes of five raise the mean."""
    results = json.loads((ROOT / "benchmarks" / "results" / "cpu_2_cores.json").read_text(encoding="utf-8"))["results"]
    seconds: dict[tuple[str, str], dict[str, float]] = {}
    for each in results:
        if each["operator"] == "group_norm_backward" and each["layout"] == "channels_last":
            seconds.setdefault((each["dtype"], each["shape"]), {})[each["implementation"]] = each["seconds"]
    gains = {
        dtype: sorted(times["PyTorch"] / times["normgrad"] for (of, _), times in seconds.items() if of == dtype)
        for dtype in ("float16", "bfloat16")
    }
    assert all(len(found) == 5 and found[3] > 20 for found in gains.values())
    least, most = (f(found[i] for found in gains.values()) for f, i in ((min, 0), (max, 2)))
    assert f"At the other three sizes it takes {least:.0f} to {most:.0f} times" in text_of("docs/evidence/cpu.md")
    least, _, most, *_ = gains["bfloat16"]
    assert f"at the others the gain is {least:.1f} to {most:.1f}." in text_of("docs/evidence/speed.md")


def test_what_is_said_of_training_steps_on_a_cpu() -> None:
    """Of all steps on two cores two are faster by more than 3 %, by override() or with modules."""
    speed = (DOCS / "evidence" / "speed.md").read_text(encoding="utf-8")
    table = speed[speed.index("steps_cpu_2_cores.svg") : speed.index("<!-- end of steps -->")]
    rows = [line.split("|")[1:-1] for line in table.splitlines() if re.match(r"\|.*\d \|$", line)]
    faster = [row for row in rows if max(float(row[5]), float(row[7])) > 1.03]
    for page in (ROOT / "README.md", DOCS / "index.md", DOCS / "guides" / "pytorch.md"):
        text = " ".join(page.read_text(encoding="utf-8").split())
        assert f"of {len(rows)} training steps of ten models two became faster by more than 3 %" in text
    assert len(rows) == 2 * 10
    channels_last = ["ResNet-50 with GroupNorm, channels_last", "U-Net with GroupNorm, channels_last"]
    assert [(row[0].strip(), row[1].strip()) for row in faster] == [(model, "bfloat16") for model in channels_last]
