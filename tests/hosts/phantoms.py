"""A small data set in nnU-Net's raw format: ellipsoids of two kinds in noise. The same every time."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

SHAPE, CASES = (16, 24, 24), 5


def write_phantoms(folder: Path) -> None:
    """Images and labels as NIfTI files, and dataset.json, under `folder`/Dataset001_Ellipsoids."""
    import nibabel

    root = folder / "Dataset001_Ellipsoids"
    for name in ("imagesTr", "labelsTr"):
        (root / name).mkdir(parents=True)
    random = np.random.default_rng(0)
    grid = np.indices(SHAPE).astype(float)
    for case in range(CASES):
        labels = np.zeros(SHAPE, np.uint8)
        for label in (1, 2):
            centers = [random.uniform(0.3, 0.7) * side for side in SHAPE]
            radii = [random.uniform(0.15, 0.3) * side for side in SHAPE]
            inside = sum(((axis - at) / radius) ** 2 for axis, at, radius in zip(grid, centers, radii, strict=True))
            labels[inside < 1] = label
        image = (labels + random.normal(0, 0.3, SHAPE)).astype(np.float32)
        for place, values in ((f"imagesTr/case_{case:03}_0000", image), (f"labelsTr/case_{case:03}", labels)):
            nibabel.save(nibabel.Nifti1Image(values, np.eye(4)), root / f"{place}.nii.gz")
    described = {
        "channel_names": {"0": "MR"},
        "labels": {"background": 0, "small": 1, "large": 2},
        "numTraining": CASES,
        "file_ending": ".nii.gz",
    }
    (root / "dataset.json").write_text(json.dumps(described))
