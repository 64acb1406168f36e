"""The benchmark of nnU-Net's presets: the data set that it makes up, its tables, and what it says without nnU-Net."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from bench import nnunet_presets


def test_a_made_up_data_set_has_a_fingerprint_and_names_of_images(tmp_path: Path) -> None:
    nnunet_presets.write_data_set(tmp_path)
    (raw,) = (tmp_path / "raw").iterdir()
    described = json.loads((raw / "dataset.json").read_text())
    fingerprint = json.loads((tmp_path / "preprocessed" / raw.name / "dataset_fingerprint.json").read_text())
    n_images = len(list((raw / "imagesTr").iterdir()))
    assert n_images == described["numTraining"] == len(fingerprint["spacings"]) == len(fingerprint["shapes_after_crop"])


def test_tables_show_each_choice() -> None:
    own = {"patch": [128, 128, 96], "batch": 2, "plain_peak_bytes": 2**30, "seconds": 0.5}
    ours = {**own, "predicted_peak_bytes": 2**29, "predicted_seconds": 0.6, "plain_seconds": 0.5, "hardware": "a card"}
    theirs, shoal = nnunet_presets.tables({"nnunet": {"L": own}, "shoal": {"12": ours}})
    assert [next(iter(column.cells)) for column in theirs.columns][:4] == ["L", "24 GB", "128 x 128 x 96", "2"]
    assert [next(iter(column.cells)) for column in shoal.columns][:5] == [
        "12 GB", "a card", "128 x 128 x 96", "2", "512.0 MiB"
    ]  # fmt: skip


def test_without_nnunet_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "nnunetv2", None)
    for name in ("raw", "preprocessed", "results"):
        monkeypatch.setenv(f"nnUNet_{name}", "")  # put back what it sets
    assert nnunet_presets.main([]) == 3
    assert "nnU-Net does not import here" in capsys.readouterr().err
