"""The page is self-contained, shows hostile names as text, and takes a run of which little is known."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from shoal.core.plan import Plan
from shoal.core.timeline import Moment, Timeline
from shoal.errors import InputError
from shoal.report import Report, render, save_html
from tests.raising import raising

HOSTILE = "<script>alert(1)</script>\"'</script><!-- & {{ 7 * 7 }} <img src=x onerror=alert(2)>"


class _Page(HTMLParser):
    """Collects tags, addresses, visible text and the bodies of scripts and styles."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.bodies: dict[str, list[str]] = {"script": [], "style": []}
        self.text: list[str] = []
        self.open: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "action", "data")]
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        while tag in self.open and self.open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        inside = self.open[-1] if self.open else ""
        self.bodies.get(inside, self.text).append(data)

    @property
    def words(self) -> str:
        return " ".join(" ".join(self.text).split())


def test_the_page_loads_nothing(report: Report) -> None:
    html = render(report)
    page = _Page(html)
    assert page.addresses == ["data:,"]  # the empty icon, which keeps browsers from asking for one
    styles = "".join(page.bodies["style"])
    assert "url(" not in styles and "@import" not in styles
    assert "default-src 'none'" in html


def test_plotly_is_inside(report: Report) -> None:
    assert any("plotly.js v" in body for body in _Page(render(report)).bodies["script"])


def test_the_page_says_what_is_known_of_the_run(report: Report) -> None:
    words = _Page(render(report)).words
    assert "ResNet-18, batch 128" in words
    assert "within budget" in words
    assert "Recomputed before the backward pass of layer1.0.bn1" in words
    assert "96.1 %" in words and "AMD Zen 4" in words and "Lower bound" in words


def test_hostile_names_are_shown_as_text(make_plan: Callable[..., Plan], make_report: Callable[..., Report]) -> None:
    plan = make_plan(model=HOSTILE)
    graph = replace(plan.graph, storages=tuple(replace(s, layer=HOSTILE) for s in plan.graph.storages))
    graph = replace(graph, ops=tuple(replace(op, layer=HOSTILE, target=HOSTILE) for op in graph.ops))
    known = {"title": HOSTILE, "settings": {HOSTILE: HOSTILE}, "outcome": {HOSTILE: HOSTILE}}
    page = _Page(render(make_report(replace(plan, graph=graph), **known)))
    assert page.tags.count("script") == 4 and "img" not in page.tags
    assert "49 " not in page.words
    assert " ".join(HOSTILE.split()) in page.words
    assert json.loads(page.bodies["script"][2])["memory"]["texts"].count(HOSTILE) == 1


def test_the_page_says_what_is_offloaded(offload_plan: Plan) -> None:
    words = _Page(render(Report(offload_plan.timeline, plan=offload_plan))).words
    for told in (
        "512 MiB on the host",
        "the device waits",
        "one lane for each direction",
        "On the host from after layer1.1.bn2 until before the backward pass of layer1.1.conv2",
        "Saved, offloaded",
        "Stalls",
        "fetched",
    ):
        assert told in words.replace("\u00a0", " ")


def test_a_page_without_offloads_has_none_of_their_words(report: Report) -> None:
    words = _Page(render(report)).words
    for absent in (
        "on the host",
        "On the host",
        "the device waits",
        "lane",
        "offloaded",
        "stall",
        "Stall",
        "fetched",
        "Link",
    ):
        assert absent not in words


def test_hostile_names_of_transfers_are_shown_as_text(offload_plan: Plan) -> None:
    timeline = offload_plan.timeline
    transfers = tuple(replace(transfer, storage=HOSTILE, layer=HOSTILE) for transfer in timeline.transfers)
    page = _Page(render(Report(replace(timeline, transfers=transfers))))
    assert page.tags.count("script") == 4 and "img" not in page.tags
    assert json.loads(page.bodies["script"][2])["link"][0]["storage"][0] == HOSTILE


def test_without_plan_measurement_or_losses_those_sections_are_absent(plan: Plan) -> None:
    page = _Page(render(Report(plan.timeline)))
    for absent in ("Measured peak", "largest storages", "Training", "Outcome", "Predicted and measured peak Plain"):
        assert absent not in page.words
    for present in ("Memory over the step", "Memory at the peak", "Glossary"):
        assert present in page.words


def test_without_a_budget_there_is_no_verdict(plan: Plan) -> None:
    page = _Page(render(Report(replace(plan.timeline, budget_bytes=0), plan=replace(plan, budget_bytes=0))))
    assert "within budget" not in page.words and "predicted to" not in page.words
    assert "no budget was set" in page.words


def test_one_moment_is_enough() -> None:
    moment = Moment("relu", "aten.relu.default", "", "forward", 0.0, 0.0, 5, 0, 0, 0, 0, 0)
    assert "5 B at the peak" in _Page(render(Report(Timeline("", (moment,))))).words.replace("\u00a0", " ")


def test_no_moments_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError):
        save_html(Report(Timeline("empty", ())), tmp_path / "page.html")
    assert not list(tmp_path.iterdir())


def test_a_step_of_thousands_of_ops_stays_small(make_plan: Callable[..., Plan], report: Report) -> None:
    plan = make_plan(150)
    assert len(plan.timeline.moments) > 2500
    scripts = [len(body) for body in _Page(render(replace(report, timeline=plan.timeline, plan=plan))).bodies["script"]]
    assert sum(scripts) - max(scripts) < 3_000_000


def test_saving_replaces_an_earlier_page_and_leaves_nothing_else(report: Report, tmp_path: Path) -> None:
    path = tmp_path / "run.html"
    path.write_text("earlier")
    assert save_html(report, path) == path
    assert path.read_text() == render(report)
    assert os.listdir(tmp_path) == ["run.html"]


def test_a_timeline_saves_itself(plan: Plan, tmp_path: Path) -> None:
    assert re.search(r"at the peak", plan.save_html(tmp_path / "plan.html").read_text())


def test_a_folder_that_is_not_there_is_an_input_error(report: Report, tmp_path: Path) -> None:
    with raising(InputError, "gone/run.html"):
        save_html(report, tmp_path / "gone" / "run.html")
