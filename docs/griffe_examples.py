"""Docstrings end with an "Example:", which the site's reader of docstrings knows as "Examples:"."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object


class Examples(Extension):
    """Renames the section, so that what stands in it is shown as code."""

    def on_instance(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"(?m)^(\s*)Example:$", r"\1Examples:", obj.docstring.value)
