"""Five questions that a newcomer has: README leads to each answer in one click, and the answer stands there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
QUESTIONS = {
    "my U-Net does not fit": ("docs/guides/volumes.md", "", "shoal.compile("),
    "which budget do I choose?": ("docs/guides/choose-a-budget.md", "", "shoal.frontier("),
    "the first step takes a minute": ("docs/faq.md", "why-is-the-first-step-slow", "timed on this machine"),
    "does it change my results?": ("docs/faq.md", "does-it-change-my-results", 'allow="bitwise"'),
    "several devices, DDP": ("docs/distributed.md", "", "DistributedDataParallel("),
}


def section(page: Path, anchor: str) -> str:
    """What stands under the heading of that anchor; the whole page without one."""
    text = page.read_text()
    if not anchor:
        return text
    parts = re.split(r"^#+ (.+)$", text, flags=re.M)
    found = dict(zip(parts[1::2], parts[2::2], strict=True))
    slugs = {re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", heading.lower())): body for heading, body in found.items()}
    return slugs[anchor]


@pytest.mark.parametrize("question", QUESTIONS)
def test_an_answer_is_one_click_from_the_readme(question: str) -> None:
    target, anchor, answer = QUESTIONS[question]
    row = next(line for line in (ROOT / "README.md").read_text().splitlines() if f"| {question}" in line)
    assert f"]({target}{'#' + anchor if anchor else ''})" in row
    assert answer in section(ROOT / target, anchor)
