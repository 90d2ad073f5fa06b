"""Build hook: the project's URLs, and a description whose links work on a package index.

README.md links to files beside it, which an index does not have. A build on GitHub links to its repository; any other
build keeps only the text of such a link.
"""

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

PAGES = {"Documentation": "docs/index.md", "Changelog": "CHANGELOG.md", "Security": "SECURITY.md"}
IMAGE = re.compile(r"!\[([^\]]*)\]\(([^):]+)\)\n*")
LINK = re.compile(r"\[([^\]]*)\]\(([^):#][^):]*)\)")


class ReadmeAndUrls(MetadataHookInterface):
    """What depends on where the repository is."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set the description and the URLs."""
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        repository = os.environ.get("GITHUB_REPOSITORY")
        metadata["readme"] = {"content-type": "text/markdown", "text": description(text, None)}
        metadata["urls"] = {}
        if repository:
            home = f"{os.environ.get('GITHUB_SERVER_URL', 'https://github.com')}/{repository}"
            commit = os.environ.get("GITHUB_SHA", "HEAD")
            metadata["readme"]["text"] = description(text, f"{home}/{{}}/{commit}")
            metadata["urls"] = {"Repository": home, "Issues": f"{home}/issues"}
            metadata["urls"] |= {name: f"{home}/blob/HEAD/{page}" for name, page in PAGES.items()}


def description(readme: str, folder: str | None) -> str:
    """Return the README with its links to files pointing into the repository, or as plain text without one.

    ``folder`` is the URL of the repository's root, with ``{}`` for how it shows a file: a page or its bytes.
    """
    if folder is None:
        return LINK.sub(r"\1", IMAGE.sub("", readme))
    readme = IMAGE.sub(rf"![\1]({folder.format('raw')}/\2)\n\n", readme)
    return LINK.sub(rf"[\1]({folder.format('blob')}/\2)", readme)
