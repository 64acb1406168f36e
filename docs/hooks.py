"""What mkdocs needs to make the site of the files as they are read on a code host: README, changes, source, figures.

README.md, CONTRIBUTING.md and CHANGELOG.md become pages, and every source file that a page links to becomes one too, so
that each link leads somewhere within the site. Pages of figures say what is older than the code that is here now.
"""

from __future__ import annotations

import json
import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from bench.code_digest import aged  # noqa: E402

PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
_LINK = re.compile(r"(\[[^\]]*\]\()([^)\s#]+)(#[^)]*)?\)")
_LANGUAGES = {".py": "python", ".cpp": "cpp", ".h": "cpp", ".sh": "sh", ".toml": "toml"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of the repository's root, and of the source files that any page links to."""
    linked: set[str] = set()
    for file in files.documentation_pages():
        linked |= _beyond(file.src_uri, file.content_string)
    for source, page in PAGES.items():
        text = (ROOT / source).read_text()
        linked |= {target for target in _targets(text, "") if not target.startswith("docs/")}
        files.append(File.generated(config, page, content=_moved(text, "", page)))
    for target in sorted(linked - PAGES.keys()):
        path = ROOT / target
        if path.is_file():
            made = File.generated(config, _page_of(target), content=_source_page(target, path))
            made.inclusion = InclusionLevel.NOT_IN_NAV
            files.append(made)
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links that leave the folder of the docs lead to the pages made above."""
    if page.file.generated_by:
        return markdown
    if page.file.src_uri.startswith("figures/"):
        page.meta["hide"] = ["toc"]  # tables take its place
        markdown = aged(markdown, ROOT / "figures")
    notebook = ROOT / "docs" / Path(page.file.src_uri).with_suffix(".ipynb")
    if notebook.exists():
        markdown = _with_outputs(markdown, json.loads(notebook.read_text())["cells"])
    return _moved(markdown, "docs/" + posixpath.dirname(page.file.src_uri), page.file.src_uri)


def _with_outputs(markdown: str, cells: list[dict[str, Any]]) -> str:
    """A tutorial with what its notebook printed under each block."""
    printed = iter(
        ["".join("".join(o.get("text", "")) for o in c["outputs"]) for c in cells if c["cell_type"] == "code"]
    )

    def shown(match: re.Match[str]) -> str:
        text = next(printed, "").rstrip()
        return match.group(0) + (f"\n\n```text\n{text}\n```" if text else "")

    return re.sub(r"^```python\n.*?^```$", shown, markdown, flags=re.S | re.M)


def _beyond(uri: str, text: str) -> set[str]:
    """Files of the repository, outside of docs/, that a page of docs/ links to."""
    folder = posixpath.join("docs", posixpath.dirname(uri))
    return {target for target in _targets(text, folder) if not target.startswith("docs/")}


def _targets(text: str, folder: str) -> set[str]:
    found = (match.group(2) for match in _LINK.finditer(text))
    return {posixpath.normpath(posixpath.join(folder, each)) for each in found if "://" not in each}


def _moved(text: str, folder: str, page: str) -> str:
    """The text with its links, which were written in `folder` of the repository, as they are on `page` of the site."""

    def moved(match: re.Match[str]) -> str:
        label, target, anchor = match.group(1), match.group(2), match.group(3) or ""
        if "://" in target or target.startswith("mailto:"):
            return match.group(0)
        there = posixpath.normpath(posixpath.join(folder, target))
        if there in PAGES:
            there = PAGES[there]
        elif there.startswith("docs/"):
            there = there.removeprefix("docs/")
        elif (ROOT / there).is_file():
            there = _page_of(there)
        else:
            return label.removesuffix("](").removeprefix("[").removeprefix("!")  # a folder: its name alone
        return f"{label}{posixpath.relpath(there, posixpath.dirname(page) or '.')}{anchor})"

    return _LINK.sub(moved, text)


def _page_of(target: str) -> str:
    return f"source/{target}.md"


def _source_page(target: str, path: Path) -> str:
    language = _LANGUAGES.get(path.suffix, "text")
    text = path.read_text()
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall(r"`+", text)), default=0))
    return f'---\nsearch:\n  exclude: true\n---\n\n# {target}\n\n{fence}{language} linenums="1"\n{text}\n{fence}\n'
