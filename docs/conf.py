"""Sphinx configuration of the documentation; ``python3 dev.py docs`` builds it."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
sys.path.insert(0, str(DOCS.parent))

import normgrad  # noqa: E402 - of this working copy

project = "normgrad"
author = "the normgrad developers"
release = version = normgrad.__version__
language = "en"

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
exclude_patterns = ["_build"]
templates_path = ["_templates"]
html_static_path = ["_static"]
html_css_files = ["normgrad.css"]

myst_heading_anchors = 4
nitpicky = False
# Code blocks show signatures, programs and the output of commands; lexers need not understand all of it.
suppress_warnings = ["misc.highlighting_failure"]

napoleon_google_docstring = False
napoleon_use_rtype = False
autodoc_typehints = "none"  # the docstrings say more: dtypes and shapes
autodoc_member_order = "bysource"
if any(importlib.util.find_spec(name) is None for name in ("torch", "jax")):
    suppress_warnings += ["autodoc", "autodoc.import_object"]  # their part of the API page stays empty

copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

html_theme = "pydata_sphinx_theme"
html_title = "normgrad"
html_show_sourcelink = False
html_theme_options: dict[str, Any] = {
    "logo": {"text": "normgrad"},
    "header_links_before_dropdown": 9,
    "navbar_persistent": ["search-button"],
    "navbar_end": ["language.html", "theme-switcher.html"],
    "show_prev_next": True,
    "footer_start": ["copyright.html"],
    "footer_end": [],
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
}
html_sidebars = {"index": [], "install": []}
copyright = "the normgrad developers, Apache-2.0. Not affiliated with Huawei"

CHINESE = "zh/"


def counterpart(name: str) -> str | None:
    """Return the page that is this one in the other language, if there is one."""
    other = name.removeprefix(CHINESE) if name.startswith(CHINESE) else CHINESE + name
    return other if (DOCS / f"{other}.md").exists() else None


def add_language(app: Any, name: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """Tell the templates a page's language and its counterpart; Sphinx itself knows one language per build."""
    context["counterpart"] = counterpart(name)
    context["is_chinese"] = name.startswith(CHINESE)
    if context["is_chinese"]:
        context["language"] = "zh-CN"
    if name == "zh/index":  # nor do its previous and next pages know where one language ends
        context["prev"] = None
    if (context.get("next") or {}).get("link", "").endswith("zh/index.html"):
        context["next"] = None


def setup(app: Any) -> dict[str, bool]:
    """Connect what templates need."""
    app.connect("html-page-context", add_language)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
