"""A hook of mkdocs: links from docs/ to other files of the repository lead to where the repository is shown. One to a
file that does not exist fails the build."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
_OUTSIDE = re.compile(r"\]\(((?:\.\./)+[^)#\s]+)(#[^)\s]*)?\)")


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Raises PluginError: a link leads nowhere."""
    folder = Path(page.file.abs_src_path).parent

    def replaced(found: re.Match[str]) -> str:
        target = (folder / found[1]).resolve()
        if target.is_relative_to(ROOT / "docs"):
            return found[0]
        if not target.exists():
            from mkdocs.exceptions import PluginError

            raise PluginError(f"{page.file.src_path}: the link to {found[1]} leads nowhere")
        kind = "tree" if target.is_dir() else "blob"
        return f"]({config['repo_url']}/{kind}/main/{target.relative_to(ROOT)}{found[2] or ''})"

    return _OUTSIDE.sub(replaced, markdown)
