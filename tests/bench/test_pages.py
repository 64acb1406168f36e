"""Pages of figures are what the benches' files say, and a figure that is older than its code is marked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import pages
from bench.budgets_svg import budgets_svg
from bench.code_digest import changed_since, code_digests
from shoal.errors import InputError
from tests.bench.test_one_plan import found, result

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
    for page in pages.PAGES.values():
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
    assert "resnet50" in row and "-12.5 %" in row and "+5.6 %" in row and "batch norm fused (bnff)" in row
    assert "| infeasible | ≥ 7.000 MiB |" in text  # rows where Shoal loses stay
    assert "torch 2.13.0+cpu, AMD EPYC, 2 cores, 1 threads" in text


@pytest.mark.parametrize(
    ("measured", "said"),
    [
        (None, "No digest of the code was noted"),
        (NOW, "Measured with the code as it is."),
        (NOW | {"planners": "x"}, "**Older than the code it measures**: `planners` changed since."),
        (NOW | {"distributed": "x"}, "Measured with the code as it is."),  # no step on one device runs it
    ],
)
def test_a_figure_older_than_its_code_is_marked(measured: dict[str, str] | None, said: str) -> None:
    block = pages.block_of(Path("one_plan_cpu_2026-11-24.json"), one_plan(code=measured), NOW)
    assert said in block


def test_benches_of_ranks_measure_the_exchange_too() -> None:
    assert changed_since("allreduce", NOW, NOW | {"distributed": "x"}) == ["distributed"]


def test_the_digest_is_of_what_code_does() -> None:
    found = code_digests()
    assert {"core", "planners", "engine"} <= found.keys() and len(set(found.values())) == len(found)


def test_a_network_of_budgets_is_a_table_and_an_image(docs: Path) -> None:
    save(docs, "budgets-unet_amd-epyc_2026-11-21.json", budgets())
    assert run(docs) == 0
    text = (docs / "figures" / "budgets.md").read_text()
    assert "+9.5 % (6 segments)" in text and "none fits" in text and "../images/budgets-unet.svg" in text
    svg = (docs / "images" / "budgets-unet.svg").read_text()
    assert svg == budgets_svg(budgets()) and "Shoal: +4.0 % inside 66 %" in svg and "+250 %" in svg


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("other_cpu_2026-11-24.json", {}, "no page is made of other"),
        ("one_plan_cpu_2026-11-24.json", {"results": 3}, "it is not what bench.one_plan writes"),
        ("one_plan_cpu_2026-11-24.json", one_plan() | {"results": [{}]}, "it is not what bench.one_plan writes"),
    ],
)
def test_a_file_of_another_kind_is_refused(docs: Path, name: str, content: Any, said: str) -> None:
    save(docs, name, content)
    with pytest.raises(InputError, match=said):
        pages.written(docs.parent / "figures", docs, NOW)


def test_a_damaged_file_is_refused_in_one_line(docs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (docs.parent / "figures" / "one_plan_cpu_2026-11-24.json").write_text("{")
    assert run(docs) == 2
    assert capsys.readouterr().err.count("\n") == 1
