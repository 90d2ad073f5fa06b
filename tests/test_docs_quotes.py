"""The sources that docs/dev quotes: every part that a page includes is there, and is found where the page says."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"
QUOTE = re.compile(r"^```\{literalinclude\} (\S+)\n((?::.*\n)*)```$", re.MULTILINE)
QUOTES = [
    pytest.param(page, path, dict(re.findall(r"^:([\w-]+): *\"?(.*?)\"?$", options, re.MULTILINE)))
    for page in sorted(DOCS.rglob("*.md"))
    for path, options in QUOTE.findall(page.read_text(encoding="utf-8"))
]


@pytest.mark.parametrize(("page", "path", "options"), QUOTES)
def test_a_quoted_part_is_in_its_source(page: Path, path: str, options: dict[str, str]) -> None:
    """Sphinx warns of a part that is not there, but not of one that begins at another line than was meant."""
    source = (page.parent / path).read_text(encoding="utf-8")
    if "pyobject" in options:
        names = {node.name for node in ast.parse(source).body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        assert options["pyobject"] in names
        return
    lines = source.splitlines()
    (first, *_) = [index for index, line in enumerate(lines) if options["start-at"] in line]
    ends = [text for name in ("end-at", "end-before") if (text := options.get(name))]
    quoted = lines[first:]
    for text in ends:
        quoted = quoted[: next(index for index, line in enumerate(quoted) if index and text in line)]
    indents = [len(line) - len(line.lstrip()) for line in quoted if line.strip()]
    assert min(indents) == indents[0] == int(options.get("dedent", indents[0])), quoted[0]


def test_both_walk_throughs_quote_their_kernels() -> None:
    pages = [quote.values[0].stem for quote in QUOTES]  # type: ignore[union-attr]
    assert pages.count("walkthrough_cpu") >= 6
    assert pages.count("walkthrough_gpu") >= 7
