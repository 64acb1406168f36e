"""Fragments of the changelog: towncrier knows each file's name, and each is one line that a reader can take in."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
FRAGMENTS = sorted((ROOT / "changelog.d").glob("*.md"))


def test_towncrier_takes_every_fragment() -> None:
    command = [sys.executable, "-m", "towncrier", "build", "--draft", "--version", "999"]
    drafted = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, check=True).stdout
    for fragment in FRAGMENTS:
        assert fragment.read_text().strip() in drafted, fragment.name


def test_a_fragment_is_one_line() -> None:
    for fragment in FRAGMENTS:
        text = fragment.read_text().strip()
        assert text and "\n" not in text and len(text) <= 400, fragment.name
