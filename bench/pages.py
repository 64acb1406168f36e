"""The pages of figures, from the JSON that benches wrote: images, tables, conditions, and what is older than its code.

    python -m bench.steps --out figures           measure; the file of the day lands in figures/
    python -m bench.pages                         write docs/figures/*.md and docs/images/*.svg from figures/*.json
    python -m bench.pages --check                 write nothing; exit code 1 where a page is not what the files say

A page is generated between two comments, `<!-- figures: NAME -->` and `<!-- end of figures -->`; what stands around
them is written by hand and stays. A file's theme is its bench; `budgets-resnet50` belongs to the page of `budgets`.
`bench.themes` says what is shown of each bench. The site's own build tells anew what is older than the code.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.code_digest import ROOT, age, code_digests, theme_of
from bench.conditions import brief
from bench.frame import Bench, Run, option, switch
from bench.themes import THEMES, Theme, markdown_of, taken_over_chart, taken_over_tables
from shoal.core.files import write_text
from shoal.errors import InputError

_END = "<!-- end of figures -->"
_TAKEN_OVER = Theme("", taken_over_tables, taken_over_chart)


def image_of(path: Path) -> str:
    """The name of a file's image: without the date, so that links to it stay.

    >>> image_of(Path("budgets-resnet50_amd-epyc_2026-11-24.json"))
    'budgets-resnet50_amd-epyc.svg'
    """
    return re.sub(r"_\d{4}-\d{2}-\d{2}$", "", path.stem) + ".svg"


def shown(path: Path, result: Mapping[str, Any], now: Mapping[str, str]) -> tuple[str, str | None]:
    """What a page says of one file, and its image.

    Raises:
        InputError: the file is not what the bench of its name writes.
    """
    name = theme_of(path)
    theme = _TAKEN_OVER if "taken_over" in result else THEMES[name]
    try:
        conditions = result["conditions"]
        image = theme.chart(result) if theme.chart else None
        lines = [f"`figures/{path.name}`, {conditions['date'][:10]}. {age(name, conditions.get('code'), now)}"]
        lines.append(conditions.get("note") or f"{brief(conditions)}.")
        if image is not None:
            title = re.search(r'aria-label="([^"]*)"', image)
            lines.insert(0, f"![{title.group(1) if title else name}](../images/{image_of(path)})")
        for table in theme.tables(result):
            lines += [f"{table.title}:"] if table.title else []
            lines.append(markdown_of(table))
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise InputError(f"{path}: it is not what bench.{name} writes: {error!r}") from error
    return "\n\n".join(lines), image


def page_with(text: str, theme: str, block: str) -> str:
    """A page with its generated part replaced, or added at its end.

    >>> page_with("# Page\\n", "one_plan", "new")
    '# Page\\n\\n<!-- figures: one_plan -->\\n\\nnew\\n\\n<!-- end of figures -->\\n'
    >>> page_with(_, "one_plan", "newer").count("new")
    1
    """
    begin = f"<!-- figures: {theme} -->"
    made = f"{begin}\n\n{block}\n\n{_END}"
    if begin in text:
        before, _, rest = text.partition(begin)
        return before + made + rest.partition(_END)[2]
    return f"{text.rstrip()}\n\n{made}\n"


def _date(path: Path) -> str:
    return path.stem[-10:]


def written(figures: Path, docs: Path, now: Mapping[str, str]) -> dict[Path, str]:
    """Every file that is generated, with its text.

    Raises:
        InputError: a file of figures cannot be read, no page is made of its theme, or there is a newer one of the same.
    """
    blocks: dict[str, list[str]] = {}
    made: dict[Path, str] = {}
    for path in sorted(sorted(figures.glob("*.json")), key=_date, reverse=True):
        theme = theme_of(path)
        if theme not in THEMES:
            raise InputError(f"{path}: no page is made of {theme}; there are {', '.join(THEMES)}")
        try:
            result = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise InputError(f"{path}: {error}") from error
        block, image = shown(path, result, now)
        blocks.setdefault(theme, []).append(block)
        if image is not None:
            there = docs / "images" / image_of(path)
            if there in made:
                raise InputError(f"{path}: there is a newer file of the same bench and machine; delete this one")
            made[there] = image
    for theme, found in blocks.items():
        page = docs / "figures" / THEMES[theme].page
        made[page] = page_with(made.get(page) or page.read_text(), theme, "\n\n".join(found))
    return made


def _run(run: Run) -> int:
    stale = []
    for path, text in written(run.asked.figures, run.asked.docs, code_digests()).items():
        if not path.exists() or path.read_text() != text:
            stale.append(path)
            if not run.asked.check:
                write_text(path, text)
    verb = "is not what the figures say" if run.asked.check else "written"
    run.say(*(f"{path} {verb}" for path in stale))
    return int(run.asked.check and bool(stale))


main = Bench(
    _run,
    option("--figures", type=Path, default=ROOT / "figures", help="folder of the JSON files"),
    option("--docs", type=Path, default=ROOT / "docs", help="folder of the pages"),
    switch("--check", "write nothing; exit code 1 where a page is not what the files say"),
    quick=None,
    header=False,
)

if __name__ == "__main__":
    sys.exit(main())
