"""Pages of figures are what the benches' files say, and a figure that is older than its code is marked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import pages
from bench.budgets_svg import budgets_svg
from bench.code_digest import aged, changed_since, code_digests
from bench.themes import THEMES
from shoal.errors import InputError
from tests.bench.test_one_plan import found, result
from tests.raising import raising

NOW = {"core": "a", "planners": "b", "distributed": "c"}
CONDITIONS = {
    "date": "2026-11-24T01:00:00+00:00",
    "torch": "2.13.0+cpu",
    "device": "AMD EPYC",
    "cores": 2,
    "threads": 1,
    "openmp": "default",
    "seed": 0,
    "malloc": "default",
    "huge_pages": "madvise",
    "load_average": 0.5,
    "code": NOW,
}


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    for folder in ("figures", "docs/figures", "docs/images"):
        (tmp_path / folder).mkdir(parents=True)
    for page in {theme.page for theme in THEMES.values()}:
        (tmp_path / "docs" / "figures" / page).write_text("# Page\n\nBy hand.\n")
    return tmp_path / "docs"


def save(docs: Path, name: str, content: Any) -> None:
    (docs.parent / "figures" / name).write_text(json.dumps(content))


def one_plan(**conditions: Any) -> dict[str, Any]:
    more = {"predicted_added_percent": 3.0, "lower_bound_percent": 2.0, "planning_seconds": 4.0}
    measured = result(5.6, exact=found(-12.5, **more), recompute=found(None))
    return {"conditions": CONDITIONS | conditions, "results": [measured]}


def budgets() -> dict[str, Any]:
    ours = {"met": True, "exceeded": False, "added_percent": 4.0, "predicted_peak_bytes": 2**20}
    rows = [
        {"share": 66.0, "shoal": ours, "checkpoint": {"met": True, "added_percent": 9.5, "setting": "6 segments"}},
        {"share": 33.0, "shoal": ours | {"added_percent": 250.0}, "checkpoint": {"met": False}},
    ]
    plain = {"peak_bytes": 2**21, "seconds": [1.0], "parameters_and_gradients_percent": 9.0}
    setting = {"batch": 2, "image": 32}
    rows = [row | {"budget_bytes": 2**20, "monet_percent": None} for row in rows]
    return {"network": "unet", "setting": setting, "plain": plain, "rows": rows, "conditions": CONDITIONS}


def run(docs: Path, *arguments: str) -> int:
    return pages.main(["--figures", str(docs.parent / "figures"), "--docs", str(docs), *arguments])


def test_a_page_has_the_rows_beside_what_is_written_by_hand(docs: Path) -> None:
    save(docs, "one_plan_amd-epyc_2026-11-24.json", one_plan())
    assert run(docs, "--check") == 1 and run(docs) == 0 and run(docs, "--check") == 0
    text = (docs / "figures" / "one-plan.md").read_text()
    assert text.startswith("# Page\n\nBy hand.\n")
    row = next(line for line in text.splitlines() if "exact" in line)
    assert "resnet50" in text and "-12.5 %" in row and "+5.6 %" in row and "batch norm fused (bnff)" in row
    assert "| infeasible | ≥ 7.000 MiB |" in text  # rows where Shoal loses stay
    assert "torch 2.13.0+cpu, AMD EPYC, one thread of 2 cores" in text
    assert (docs / "images" / "one_plan_amd-epyc.svg").exists()


@pytest.mark.parametrize(
    ("measured", "said"),
    [
        (None, "**Older than the code**: it was measured before a digest"),
        (NOW, "What it measures has not changed since."),
        (NOW | {"planners": "x"}, "**Older than the code**: `planners` changed since."),
        (NOW | {"distributed": "x"}, "What it measures has not changed since."),  # no step on one device runs it
    ],
)
def test_a_figure_older_than_its_code_is_marked(measured: dict[str, str] | None, said: str) -> None:
    block, _ = pages.shown(Path("one_plan_cpu_2026-11-24.json"), one_plan(code=measured), NOW)
    assert said in block


def test_the_site_says_anew_what_is_older(docs: Path) -> None:
    save(docs, "one_plan_amd-epyc_2026-11-24.json", one_plan(code=code_digests()))
    assert run(docs) == 0
    text = (docs / "figures" / "one-plan.md").read_text()
    assert "has not changed since" in text and aged(text, docs.parent / "figures") == text
    save(docs, "one_plan_amd-epyc_2026-11-24.json", one_plan(code=code_digests() | {"core": "x"}))
    assert "**Older than the code**: `core` changed since." in aged(text, docs.parent / "figures")


def test_a_bench_is_held_against_the_folders_that_it_measures() -> None:
    changed = NOW | {"distributed": "x", "planners": "y"}
    assert changed_since("allreduce", NOW, changed) == ["distributed"]
    assert changed_since("hmms", NOW, changed) == ["planners"]
    assert changed_since("split_cost", NOW, changed) == []


def test_the_digest_is_of_what_code_does() -> None:
    found = code_digests()
    assert {"core", "planners", "engine"} <= found.keys() and len(set(found.values())) == len(found)


def test_a_network_of_budgets_is_a_table_and_an_image(docs: Path) -> None:
    save(docs, "budgets-unet_amd-epyc_2026-11-21.json", budgets())
    assert run(docs) == 0
    text = (docs / "figures" / "budgets.md").read_text()
    assert "+9.5 % (6 segments)" in text and "no setting fits" in text and "../images/budgets-unet_amd-epyc.svg" in text
    svg = (docs / "images" / "budgets-unet_amd-epyc.svg").read_text()
    assert svg == budgets_svg(budgets()) and "Shoal, bitwise: +4.0 % inside 66 %" in svg and "+250 %" in svg


def test_a_table_taken_over_from_a_page_is_shown_and_drawn(docs: Path) -> None:
    bars = {"title": "Peaks", "about": "%", "names": [0, 1], "column": 2, "only": {"1": "40 %"}, "none": "refused"}
    rows = [["a", "60 %", "99 %"], ["a", "40 %", "**88.5 %** (least)"], ["b", "40 %", ""]]
    taken = {"columns": ["<model", "inside", "peak"], "rows": rows, "bars": bars}
    conditions = {"date": "2026-11-23", "note": "Written by hand."}
    save(docs, "models_amd-epyc_2026-11-23.json", {"conditions": conditions, "taken_over": taken})
    assert run(docs) == 0
    text = (docs / "figures" / "models.md").read_text()
    assert "| a | 60 % | 99 % |" in text and "Written by hand." in text and "**Older than the code**" in text
    svg = (docs / "images" / "models_amd-epyc.svg").read_text()
    assert "a, 40 %" in svg and "88.5 %" in svg and "refused" in svg and "60 %" not in svg


def test_rows_of_any_bench_are_a_table(docs: Path) -> None:
    rows = [{"contender": "ours", "ms": 1.23456, "seconds": [1, 2]}, {"contender": "theirs", "ms": None}]
    save(docs, "allreduce_amd-epyc_2026-11-24.json", {"conditions": CONDITIONS, "resnet18": rows})
    assert run(docs) == 0
    assert "| ours | 1.235 |\n| theirs |  |" in (docs / "figures" / "gradients.md").read_text()


def test_two_files_of_one_bench_and_machine_are_refused(docs: Path) -> None:
    for day in (21, 24):
        save(docs, f"one_plan_amd-epyc_2026-11-{day}.json", one_plan())
    with raising(InputError, "2026-11-21"):
        pages.written(docs.parent / "figures", docs, NOW)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("other_cpu_2026-11-24.json", {}, ""),
        ("one_plan_cpu_2026-11-24.json", {"results": 3}, "bench.one_plan"),
        ("one_plan_cpu_2026-11-24.json", one_plan() | {"results": [{}]}, "bench.one_plan"),
    ],
)
def test_a_file_of_another_kind_is_refused(docs: Path, name: str, content: Any, said: str) -> None:
    save(docs, name, content)
    with raising(InputError, said):
        pages.written(docs.parent / "figures", docs, NOW)


def test_a_damaged_file_is_refused_in_one_line(docs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (docs.parent / "figures" / "one_plan_cpu_2026-11-24.json").write_text("{")
    assert run(docs) == 2
    error = capsys.readouterr().err
    assert "one_plan_cpu_2026-11-24.json" in error.splitlines()[0] and "Traceback" not in error
