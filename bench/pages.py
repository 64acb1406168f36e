"""The pages of figures, from the JSON that benches wrote: tables, images, conditions, and what is older than its code.

    python -m bench.one_plan --out figures        measure; the file of the day lands in figures/
    python -m bench.pages                         write docs/figures/*.md and docs/images/*.svg from figures/*.json
    python -m bench.pages --check                 write nothing; exit code 1 where a page is not what the files say

A page is generated between two comments, `<!-- figures: NAME -->` and `<!-- end of figures -->`; what stands around
them is written by hand and stays. A file's theme is its bench; `budgets-resnet50` belongs to the page of `budgets`.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from bench.budgets import verdict
from bench.budgets_svg import budgets_svg
from bench.code_digest import changed_since, code_digests
from bench.conditions import describe
from bench.frame import Bench, Run, option, switch
from bench.peers import PEERS
from bench.plain import heading
from bench.tables import cells
from shoal.core.files import write_text
from shoal.errors import InputError

ROOT = Path(__file__).parents[1]
PAGES = {"one_plan": "one-plan.md", "budgets": "budgets.md"}
_END = "<!-- end of figures -->"
_DATE = len("2026-11-24")  # a file's name ends with it: the newest stand first


def theme_of(path: Path) -> str:
    """The bench that wrote a file.

    >>> theme_of(Path("one_plan_amd-epyc_2026-11-24.json")), theme_of(Path("budgets-unet_amd-epyc_2026-11-21.json"))
    ('one_plan', 'budgets')
    """
    name = re.sub(r"_[^_]+_\d{4}-\d{2}-\d{2}$", "", path.stem)
    return name.partition("-")[0]


def block_of(path: Path, result: Mapping[str, Any], now: Mapping[str, str]) -> str:
    """What a page says of one file.

    Raises:
        InputError: the file is not what the bench of its name writes.
    """
    theme = theme_of(path)
    try:
        text = _TABLES[theme](result)
        conditions = result["conditions"]
        lines = [_age(theme, conditions.get("code"), now), *_conditions(conditions), text]
    except (KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path}: it is not what bench.{theme} writes: {error!r}") from error
    return f"`figures/{path.name}`. " + "\n\n".join(filter(None, lines))


def _age(theme: str, measured: Mapping[str, str] | None, now: Mapping[str, str]) -> str:
    if measured is None:
        return "**No digest of the code was noted when this was measured: take it as older than the code.**"
    changed = changed_since(theme, measured, now)
    if not changed:
        return "Measured with the code as it is."
    return f"**Older than the code it measures**: {', '.join(f'`{name}`' for name in changed)} changed since."


def _conditions(conditions: Mapping[str, Any]) -> list[str]:
    if "note" in conditions:
        return [str(conditions["note"])]
    return [f"{describe(conditions)}."]


def one_plan_table(result: Mapping[str, Any]) -> str:
    """Each network's budgets, and what each set of means does inside them."""
    columns = "network | budget | allow | computed | predicted peak | measured | added, measured | predicted | bound | "
    lines = _head(columns + "step off | planned in | MONeT", left=4)
    for network in result["results"]:
        setting = network["setting"]
        name = f"{network['network']}, {setting['batch']} × {setting['image']} pixels"
        for row in network["rows"]:
            budget = cells("{share:g} %, {budget_bytes:bytes}", row)[0]
            for allow, found in row["contenders"].items():
                form = "{predicted_peak_bytes:bytes} | {measured_peak_bytes:bytes} | {added_percent:+.1f} % | "
                form += "{predicted_added_percent:+.1f} % | {lower_bound_percent:+.1f} % | {step_off_percent:+.0f} % | "
                form += "{planning_seconds:.0f} s | {monet_percent:+.1f} %"
                shown = cells(form, found, monet_percent=row["monet_percent"])
                shown[0] = shown[0] or cells("≥ {least_feasible_bytes:bytes}", found)[0] or "not planned"
                computed = found.get("variant", "exceeded" if found["exceeded"] else "infeasible")
                lines.append(_row([name, budget, allow, computed, *shown]))
                name = budget = ""
    return "\n".join(lines)


def budgets_table(result: Mapping[str, Any]) -> str:
    """One network's budgets, Shoal beside the peers."""
    peers = [peer for peer in PEERS if any(peer in row for row in result["rows"])]
    columns = "budget | predicted | measured | added, measured | predicted, added | bound | MONeT (its paper, GPU) | "
    lines = [f"{heading(result)}.", "", *_head(columns + " | ".join([*peers, "verdict"]))]
    for row in result["rows"]:
        form = "{share:g} %, {budget_bytes:bytes} | {predicted_peak_bytes:bytes} | {measured_peak_bytes:bytes} | "
        form += "{added_percent:+.1f} % | {predicted_added_percent:+.1f} % | {lower_bound_percent:+.1f} % | "
        form += "{monet_percent:+.1f} %"
        theirs = [
            f"{found['added_percent']:+.1f} % ({found['setting']})" if found["met"] else "none fits"
            for found in (row[peer] for peer in peers)
        ]
        lines.append(_row([*cells(form, {**row, **row["shoal"]}), *theirs, verdict(row)]))
    return "\n".join(lines)


_TABLES: dict[str, Callable[[Mapping[str, Any]], str]] = {"one_plan": one_plan_table, "budgets": budgets_table}


def _head(columns: str, left: int = 1) -> list[str]:
    names = [name.strip() for name in columns.split("|")]
    return [_row(names), _row("---" if place < left else "---:" for place in range(len(names)))]


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


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


def written(figures: Path, docs: Path, now: Mapping[str, str]) -> dict[Path, str]:
    """Every file that is generated, with its text.

    Raises:
        InputError: a file of figures cannot be read, or no page is made of its theme.
    """
    blocks: dict[str, list[str]] = {}
    made: dict[Path, str] = {}
    for path in sorted(sorted(figures.glob("*.json")), key=lambda path: path.stem[-_DATE:], reverse=True):
        theme = theme_of(path)
        if theme not in PAGES:
            raise InputError(f"{path}: no page is made of {theme}; there are {', '.join(PAGES)}")
        try:
            result = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise InputError(f"{path}: {error}") from error
        blocks.setdefault(theme, []).append(block_of(path, result, now))
        if theme == "budgets":
            name = f"budgets-{result['network']}.svg"
            made[docs / "images" / name] = budgets_svg(result)
            blocks[theme].append(f"![{result['network']}: time added inside each budget](../images/{name})")
    for theme, found in blocks.items():
        page = docs / "figures" / PAGES[theme]
        made[page] = page_with(page.read_text(), theme, "\n\n".join(found))
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
