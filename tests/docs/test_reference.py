"""The page of the command line is what the program says of itself; the page of the API names what is public.

python tests/docs/test_reference.py      writes the page of the command line
"""

from __future__ import annotations

import html
import re
from pathlib import Path

import typer
import typer.cli

import shoal
from shoal.app.cli import app

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"


def command_line() -> str:
    """The page, as typer writes it of the program."""
    program = typer.main.get_command(app)
    context = program.make_context("shoal", [], resilient_parsing=True)
    context.ensure_object(dict)
    text = html.unescape(typer.cli.get_docs_for_click(obj=program, ctx=context, name="shoal"))
    note = "<!-- Written by `python tests/docs/test_reference.py` from the program itself. -->"
    return text.strip().replace("# `shoal`\n", f"# Command line\n\n{note}\n", 1) + "\n"


def test_the_page_of_the_command_line_is_what_the_program_says() -> None:
    assert (REFERENCE / "cli.md").read_text() == command_line(), "python tests/docs/test_reference.py"


def test_every_public_name_is_in_the_reference() -> None:
    text = (REFERENCE / "api.md").read_text()
    named = set(re.findall(r"^::: shoal\.(\w+)", text, re.M))
    named |= {name.strip() for each in re.findall(r"members: \[(.*?)\]", text) for name in each.split(",")}
    assert set(shoal.__all__) <= named


if __name__ == "__main__":
    (REFERENCE / "cli.md").write_text(command_line())
