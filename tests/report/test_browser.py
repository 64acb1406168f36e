"""The page in a real browser: it draws, hovers, fits a phone, and reports no error."""

from __future__ import annotations

import html
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from shoal.core.plan import Plan
from shoal.core.timeline import Moment, Timeline
from shoal.report import Report, batches, frontiers, render
from tests.report.made_up_frontier import made_up_batches, made_up_frontier

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium on PATH: install it to test the page in a browser"
)

# Hovers over the peak, then looks at the page from outside, as a reader would.
HOVER = """<script>
Plotly.Fx.hover("memory-chart", [{ curveNumber: 7, pointNumber: PEAK }]);
</script>"""


def browse(folder: Path, page: str, width: int = 1280) -> tuple[str, str]:
    """The page's document after its scripts ran, and what the browser's console said."""
    assert CHROMIUM is not None
    path = folder / "page.html"
    path.write_text(page)
    flags = (
        "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
        "--disable-component-update --disable-sync --enable-logging=stderr --virtual-time-budget=5000 --dump-dom"
    )
    done = subprocess.run(
        [
            CHROMIUM,
            *flags.split(),
            f"--user-data-dir={folder / 'profile'}",
            f"--window-size={width},900",
            path.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=850,
        check=True,
    )
    return done.stdout, "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)


def with_script(page: str, script: str) -> str:
    head, tail = page.rsplit("</body>", 1)
    return f"{head}{script}</body>{tail}"


def hover_text(document: str) -> str:
    """What the hover label shows, tags taken away."""
    layer = document.split('class="hoverlayer"', 1)[1].split("</svg>", 1)[0]
    return html.unescape(re.sub(r"<[^>]+>", " ", layer))


def test_the_page_draws_and_hovers_without_an_error(report: Report, plan: Plan, tmp_path: Path) -> None:
    peak = plan.timeline.moments.index(plan.timeline.peak)
    document, console = browse(tmp_path, with_script(render(report), HOVER.replace("PEAK", str(peak))))
    assert console == ""
    assert "data-error" not in document
    for chart in ("memory-chart", "loss-chart", "accuracy-chart"):
        assert re.search(rf'id="{chart}"[^>]*>.*?<svg class="main-svg"', document, re.DOTALL), chart
    shown = hover_text(document)
    for words in (
        "add_backward_92",
        "layer2.1, backward",
        "aten.add_backward.default",
        "370 MiB in use",
        "kept 192 MiB",
    ):
        assert words in shown


@pytest.mark.parametrize(
    ("page", "curve", "point", "words"),
    [
        (
            lambda: frontiers.render(made_up_frontier()),
            "4",
            "1",
            ("600 B", "peak 600 B", "+25.0 % of plain", "overlapping patches", "12.5 ms"),
        ),
        (
            lambda: batches.render(made_up_batches()),
            "5",
            "3",
            ("48 images", "the best", "peak 1000 B", "batch norm fused (bnff)", "200"),
        ),
    ],
    ids=["budgets", "batches"],
)
def test_the_page_of_a_frontier_draws_and_hovers_without_an_error(
    page: Callable[[], str], curve: str, point: str, words: tuple[str, ...], tmp_path: Path
) -> None:
    hover = HOVER.replace("memory-chart", "points-chart").replace("7", curve).replace("PEAK", point)
    document, console = browse(tmp_path, with_script(page(), hover))
    assert console == "" and "data-error" not in document
    for chart in ("points-chart", "uses-chart"):
        assert re.search(rf'id="{chart}"[^>]*>.*?<svg class="main-svg"', document, re.DOTALL), chart
    for word in words:
        assert word in hover_text(document)


# Moves a mouse over the lane of a direction, in the middle of its copy COPY.
POINT = """<script>
setTimeout(() => {
  const { link, memory } = JSON.parse(document.getElementById("data").textContent);
  const lane = link[LANE];
  const chart = document.getElementById("memory-chart");
  const area = chart.querySelector(".draglayer .xyAXIS .nsewdrag");
  const box = area.getBoundingClientRect();
  const middle = lane.start[COPY] + lane.seconds[COPY] / 2;
  const clientX = box.left + (box.width * middle) / memory.end;
  const at = { clientX, clientY: box.top + box.height / 2, bubbles: true };
  area.dispatchEvent(new MouseEvent("mouseover", at));
  area.dispatchEvent(new MouseEvent("mousemove", at));
}, 500);
</script>"""


@pytest.mark.parametrize(("lane", "axis"), [(0, 4), (1, 3)])
def test_pointing_at_a_lane_names_the_copy(offload_plan: Plan, tmp_path: Path, lane: int, axis: int) -> None:
    way = ("to host", "to device")[lane]
    transfers = [transfer for transfer in offload_plan.timeline.transfers if transfer.way == way]
    script = POINT.replace("LANE", str(lane)).replace("AXIS", str(axis)).replace("COPY", "5")
    page = render(Report(offload_plan.timeline, plan=offload_plan))
    document, console = browse(tmp_path, with_script(page, script))
    assert console == "" and "data-error" not in document
    shown = hover_text(document)
    assert f"{transfers[5].storage} {way}" in shown
    assert transfers[5].layer in shown
    speed = transfers[5].nbytes / transfers[5].seconds
    for words in (
        f"{transfers[5].nbytes / 2**20:.1f} MiB",
        f"at {speed / 1e9:.2f} GB/s",
        f"copy 6 of {len(transfers)}",
    ):
        assert words in shown


def test_a_wait_tells_how_long_and_for_what(offload_plan: Plan, tmp_path: Path) -> None:
    moments = offload_plan.timeline.moments
    n, wait = max(((i, m) for i, m in enumerate(moments) if m.phase == "stall"), key=lambda found: found[1].seconds)
    script = HOVER.replace("7", "8").replace("PEAK", str(n))  # the area of what is fetched comes before the pointer
    document, console = browse(tmp_path, with_script(render(Report(offload_plan.timeline, plan=offload_plan)), script))
    assert console == "" and "data-error" not in document
    shown = hover_text(document)
    assert f"stall of {1e3 * wait.seconds:.2f} ms" in shown
    assert f"waiting for the copy of {wait.op}" in shown


def test_lanes_follow_the_axis_by_op(offload_plan: Plan, tmp_path: Path) -> None:
    look = """<script>
    const chart = document.getElementById("memory-chart");
    const ends = () => chart.data.slice(-2).map((lane) => lane.x.at(-1) + lane.width.at(-1)).join();
    setTimeout(() => { document.querySelector("input[value=op]").click(); }, 400);
    setTimeout(() => { document.documentElement.dataset.ends = ends(); }, 1400);
    </script>"""
    page = render(Report(offload_plan.timeline, plan=offload_plan))
    document, console = browse(tmp_path, with_script(page, look))
    assert console == "" and "data-error" not in document
    found = re.search(r'data-ends="([\d.]+),([\d.]+)"', document)
    assert found is not None
    for end in found.groups():
        assert float(end) == pytest.approx(len(offload_plan.timeline.moments))


def test_hostile_names_do_nothing(
    make_plan: Callable[..., Plan], make_report: Callable[..., Report], tmp_path: Path
) -> None:
    harm = "document.documentElement.dataset.harm=1"
    hostile = f"<img src=x onerror={harm}><script>{harm}</script><b>bold</b>"
    plan = make_plan(model=hostile)
    graph = replace(plan.graph, ops=tuple(replace(op, layer=hostile, target=hostile) for op in plan.graph.ops))
    page = render(make_report(replace(plan, graph=graph)))
    document, console = browse(tmp_path, with_script(page, HOVER.replace("PEAK", "3")))
    assert console == "" and "data-error" not in document
    assert not re.search(r"<html[^>]*data-harm", document)
    assert f"{hostile}, forward" in hover_text(document)


def test_the_least_a_page_can_know_is_drawn_too(tmp_path: Path) -> None:
    moment = Moment("relu", "aten.relu.default", "", "forward", 0.0, 0.0, 5, 0, 0, 0, 0, 0)
    document, console = browse(tmp_path, render(Report(Timeline("", (moment,)))))
    assert console == "" and "data-error" not in document
    assert 'class="main-svg"' in document


@pytest.mark.parametrize("offloads", [False, True])
def test_a_phone_needs_no_sideways_scroll(report: Report, offload_plan: Plan, tmp_path: Path, offloads: bool) -> None:
    if offloads:
        report = Report(offload_plan.timeline, plan=offload_plan)
    # Chromium's window is never narrower than 500 px, so the phone is a frame that reports its own width, first as
    # it opens and again after it was turned upright.
    measure = (
        "<script>onmessage = () => parent.postMessage([document.documentElement.scrollWidth, innerWidth], '*')</script>"
    )
    (tmp_path / "phone.html").write_text(with_script(render(report), measure))
    frame = """<!doctype html><iframe src="phone.html" width="400" height="800" style="border: 0"></iframe><script>
    const frame = document.querySelector("iframe"), root = document.documentElement;
    const ask = () => frame.contentWindow.postMessage("", "*");
    onmessage = (event) => { root.dataset[`at${frame.width}`] = event.data.join(); };
    const turn = (width, wait) => { setTimeout(() => { frame.width = width; }, wait); setTimeout(ask, wait + 800); };
    frame.onload = () => { turn(400, 0); turn(800, 1000); turn(360, 2000); };
    </script>"""
    document, console = browse(tmp_path, frame)
    assert console == ""
    for width in (400, 800, 360):
        found = re.search(rf'data-at{width}="(\d+),(\d+)"', document)
        assert found is not None
        assert int(found[2]) == width and int(found[1]) <= width


def test_the_page_prints_and_comes_back(report: Report, tmp_path: Path) -> None:
    script = """<script>
    const width = () => document.querySelector(".main-svg").getAttribute("width");
    const seen = (when) => { document.documentElement.dataset[when] = width(); };
    dispatchEvent(new Event("beforeprint"));
    setTimeout(() => { seen("printed"); dispatchEvent(new Event("afterprint")); }, 800);
    setTimeout(() => { seen("after"); document.querySelector("input[value=op]").click(); }, 1600);
    </script>"""
    document, console = browse(tmp_path, with_script(render(report), script))
    assert console == "" and "data-error" not in document
    widths = {when: int(width) for when, width in re.findall(r'data-(printed|after)="(\d+)"', document)}
    assert widths["printed"] < 718 < widths["after"]  # A4 paper between half-inch margins, and the window
    assert "op, in the order of execution" in document


def test_a_script_that_fails_says_so_on_the_page(report: Report, tmp_path: Path) -> None:
    broken = render(report).replace("Plotly.react(", "Plotly.absent(")
    document, console = browse(tmp_path, broken)
    assert "data-error" in document and "A chart could not be drawn" in document
    assert "CONSOLE" in console
