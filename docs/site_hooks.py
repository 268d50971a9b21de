"""What the site takes from files of the repository: version and address from pyproject.toml, and the changelog.

mkdocs calls these functions by their names while it builds the pages (see `hooks` in mkdocs.yml). Without a `Repository` or
`Source` among `project.urls` the site has neither a link to the repository nor links to edit a page.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # comes with mypy and pip's tools; the site is built with Python 3.11 or later in CI


def on_config(config: Any) -> Any:
    """Fill in repo_url, edit_uri and the version in the footer."""
    project = tomllib.loads((Path(config.config_file_path).parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    urls = {name.lower(): url for name, url in project.get("urls", {}).items()}
    repository = urls.get("repository") or urls.get("source")
    if repository:
        config.repo_url = repository.rstrip("/")
        config.repo_name = project["name"]
        config.edit_uri = "edit/main/docs/"
        config.theme["features"].append("content.action.edit")
    config.copyright = f"fa_serve {project['version']}, {config.copyright}"
    return config


def on_page_content(html: str, **_: Any) -> str:
    """Let names in cells of tables break behind a slash or an underscore, instead of in the middle of a word."""

    def breakable(found: re.Match[str]) -> str:
        return re.sub(r"(?<=\w)([/_]+)(?=\w)", r"\1<wbr>", found[0])

    def cell(found: re.Match[str]) -> str:
        return re.sub(r"(?<=<code>)[^<]+(?=</code>)", breakable, found[0])

    return re.sub(r"<td[^>]*>.*?</td>", cell, html, flags=re.DOTALL)


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Put the changelog into its page, with links that begin in docs/ instead of the root of the repository."""
    if page.file.src_uri != "changelog.md":
        return markdown
    text = (Path(config.config_file_path).parent / "CHANGELOG.md").read_text(encoding="utf-8")
    return markdown.replace('--8<-- "CHANGELOG.md"', text.replace("](docs/", "]("))
