"""A report as one self-contained HTML file."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import jinja2

from shoal.core.files import write_text
from shoal.core.timeline import Timeline
from shoal.errors import InputError
from shoal.report.charts import chart_data, patch_drawing
from shoal.report.data import Report
from shoal.report.tables import largest_storages, parts_of_model, variants_of_step
from shoal.report.words import fillings, glossary, headline, lede, name_of, outcomes, scales, settings, tiles


def render(report: Report) -> str:
    """The page as text.

    It contains everything it needs; a content security policy keeps it from loading anything else.

    Raises:
        InputError: the timeline has no moments.
    """
    if not report.timeline.moments:
        raise InputError("the timeline has no moments, so there is nothing to draw; expected at least one op")
    return page(
        "report.html",
        name=name_of(report),
        headline=headline(report),
        lede=lede(report),
        tiles=tiles(report),
        waits=_waits(report.timeline),
        fillings=fillings(report.timeline),
        scales=scales(report),
        storages=largest_storages(report.plan),
        parts=parts_of_model(report.timeline, report.plan),
        candidates=variants_of_step(report.plan),
        outcomes=outcomes(report),
        settings=settings(report),
        glossary=glossary(report),
        patches=patch_drawing(report),
        charts=chart_data(report),
    )


def _waits(timeline: Timeline) -> str:
    """What the device waits for, in the words of the legend; "" where it never waits."""
    found = {"stall": timeline.stall_seconds, "wait for a launch": timeline.launch_wait_seconds}
    return " or ".join(wait for wait, seconds in found.items() if seconds > 0)


def save_html(report: Report, path: str | Path) -> Path:
    """Write the page, whole or not at all.

    Args:
        report: the contents.
        path: of the file; an earlier file of that name is replaced.

    Returns:
        The path.

    Raises:
        InputError: the timeline has no moments, or the folder does not exist, is not writable, or the disk is full.

    >>> import shoal, torch
    >>> plan = shoal.plan(torch.nn.Conv2d(3, 8, 3), torch.empty(2, 3, 8, 8), hardware="p100-nvlink")
    >>> save_html(Report(plan.timeline, plan=plan), "run.html").name
    'run.html'

    Known limits: charts are drawn op by op; past some 20,000 ops the page takes seconds to open.
    """
    return write_text(path, render(report))


def page(template: str, **contents: Any) -> str:
    """A page of the folder `templates`, with everything that it needs, including plotly.js (4.8 MB).

    Args:
        template: its file, which extends `page.html`.
        contents: what that and `page.html` name.
    """
    return text_of(template, plotly=_plotly(), **contents)


def text_of(template: str, **contents: Any) -> str:
    """A file of the folder `templates`, filled in; what is no text of ours is escaped."""
    return _environment().get_template(template).render(**contents)


@cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("shoal.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {
        "sort_keys": False,
        "separators": (",", ":"),
    }  # keep the order of the stack
    return environment


@cache
def _plotly() -> str:
    from plotly.offline import get_plotlyjs

    return str(get_plotlyjs())
