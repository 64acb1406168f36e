"""What the commands belong to."""

from __future__ import annotations

import typer

app = typer.Typer(
    help="Train convolutional networks inside a byte budget.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
