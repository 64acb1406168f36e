"""Where in a model PyTorch fails to trace its step: a line of text in place of a warning of dozens."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

_DETECTED = "Error detected in "  # AOTAutograd traces in anomaly mode, which warns with the stack of the forward pass
_CALLER = str(Path(__file__).with_name("dynamo.py"))  # what Dynamo traces around the model's own lines
_FRAME = re.compile(r'File "(.+?)", line (\d+), in .+\n\s*(.+)')


@contextmanager
def line_of_failure() -> Iterator[None]:
    """Around AOTAutograd: an error of the backward pass that it traces gets the model's line as a note.

    Whoever handles the error has it from `line_noted`; where Dynamo handles it, with a graph break, nothing is printed.
    """
    places: list[str] = []
    show = warnings.showwarning

    def note(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if str(message).startswith(_DETECTED):
            places.append(place_in(str(message)))
        else:
            show(message, category, filename, lineno, file, line)

    with warnings.catch_warnings():
        warnings.filterwarnings("always", _DETECTED)
        warnings.showwarning = note
        try:
            yield
        except Exception as error:
            if places:
                error.add_note(places[-1])
            raise


def line_noted(error: BaseException) -> str:
    """The model's line at which PyTorch failed, in words; "" where it is not known."""
    return next(iter(getattr(error, "__notes__", ())), "")


def place_in(stack: str) -> str:
    """The model's innermost line in a stack that was printed, in words.

    >>> place_in('File "net.py", line 3, in forward\\n return self.conv(x)\\nFile "/torch/conv.py", line 9, in f\\n x')
    'net.py:3 (return self.conv(x))'
    """
    frames = [frame for frame in _FRAME.findall(stack) if frame[0] != _CALLER]
    theirs = [frame for frame in frames if "/torch/" not in frame[0]] or frames  # else a layer of PyTorch's own
    return f"{theirs[-1][0]}:{theirs[-1][1]} ({theirs[-1][2].strip()})" if theirs else "an unknown line"
