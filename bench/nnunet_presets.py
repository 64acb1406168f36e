"""nnU-Net's presets M, L and XL beside Shoal's planner: which patch and batch each chooses for a card's memory.

    python -m bench.nnunet_presets                    in an environment with nnU-Net (`make build-nnunet`), here 2.8.1
    python -m bench.nnunet_presets --targets 8

The data set is a made-up one of whole-body CT: 200 volumes of 320 x 320 x 320 voxels of 1 mm, one channel, three
classes; only its fingerprint is there. nnU-Net's own planner chooses for M, L and XL at their targets of 8, 24 and 40
GB; what such a step takes without Shoal is counted by a plan that keeps everything. Shoal's planner chooses for the
same network at 8, 12 and 24 GB. The configuration is 3d_fullres, under autocast in float16, on presets of cards.
Nothing is run.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from bench.frame import Bench, Run, Unavailable, bar, integers, option
from bench.tables import cells, new_table

PRESETS = {"M": 8, "L": 24, "XL": 40}  # GB, as nnU-Net documents them
TARGETS = (8, 12, 24)
_SIDE, _CASES = 320, 200
_NAME = "Dataset001_MadeUp"


def write_data_set(root: Path) -> None:
    """The files that a planner reads: names of images, dataset.json and the fingerprint."""
    raw, preprocessed = root / "raw" / _NAME, root / "preprocessed" / _NAME
    for folder in (raw / "imagesTr", raw / "labelsTr", preprocessed, root / "results"):
        folder.mkdir(parents=True)
    for case in range(_CASES):
        (raw / "imagesTr" / f"case_{case:03}_0000.nii.gz").touch()
        (raw / "labelsTr" / f"case_{case:03}.nii.gz").touch()
    described = {
        "channel_names": {"0": "CT"},
        "labels": {"background": 0, "organ": 1, "tumour": 2},
        "numTraining": _CASES,
        "file_ending": ".nii.gz",
        "overwrite_image_reader_writer": "NibabelIO",
    }
    (raw / "dataset.json").write_text(json.dumps(described))
    properties = {
        "max": 1000,
        "mean": 0,
        "median": 0,
        "min": -1000,
        "percentile_00_5": -900,
        "percentile_99_5": 900,
        "std": 300,
    }
    fingerprint = {
        "spacings": [[1.0, 1.0, 1.0]] * _CASES,
        "shapes_after_crop": [[_SIDE] * 3] * _CASES,
        "foreground_intensity_properties_per_channel": {"0": properties},
        "median_relative_size_after_cropping": 1.0,
    }
    (preprocessed / "dataset_fingerprint.json").write_text(json.dumps(fingerprint))


def planned(planner: Any) -> dict[str, Any]:
    """What a planner chooses for the whole volumes."""
    median = [float(_SIDE)] * 3
    found: dict[str, Any] = planner.get_plans_for_configuration([1.0] * 3, median, "x", _CASES * float(_SIDE) ** 3, {})
    return found


def of_nnunet(planners: Any, ours: Any, target_gb: int) -> dict[str, Any]:
    """nnU-Net's choice at a target, and what it takes with everything kept."""
    found = planned(planners.ResEncUNetPlanner(_NAME, target_gb))
    patch, batch = [int(side) for side in found["patch_size"]], int(found["batch_size"])
    of_network = [found["architecture"][key] for key in ("network_class_name", "arch_kwargs", "_kw_requires_import")]
    counting = ours.nnUNetPlannerShoalResEncM(_NAME, 1000)  # everything fits
    made = counting._plan(tuple(patch), batch, *of_network)
    return {"patch": patch, "batch": batch, "plain_peak_bytes": made.plain_peak_bytes, "seconds": made.plain_seconds}


def of_shoal(ours: Any, target_gb: int) -> dict[str, Any]:
    """The choice of Shoal's planner at a target."""
    started = time.process_time()
    found = planned(ours.nnUNetPlannerShoalResEncM(_NAME, target_gb))
    columns = (
        "budget_bytes",
        "predicted_peak_bytes",
        "plain_peak_bytes",
        "predicted_seconds",
        "plain_seconds",
        "hardware",
    )
    chosen = {key: found["shoal"][key] for key in columns}
    patch = [int(side) for side in found["patch_size"]]
    return {"patch": patch, "batch": int(found["batch_size"]), **chosen, "cpu_seconds": time.process_time() - started}


def tables(result: Mapping[str, Any]) -> Sequence[Table]:
    """nnU-Net's choices, and Shoal's."""
    columns = "<preset | its target | patch | batch | bytes with everything kept | step"
    theirs = new_table("nnU-Net's own planner", columns)
    for preset, found in result["nnunet"].items():
        form = "{patch} | {batch} | {plain_peak_bytes:bytes} | {seconds:.2f} s"
        theirs.add_row(preset, f"{PRESETS[preset]} GB", *_shown(form, found))
    ours = new_table(
        "Shoal's planner, the same residual encoder network",
        "target | <rates of | patch | batch | predicted | with everything kept | step | with everything kept",
    )
    for target, found in result["shoal"].items():
        form = "{hardware} | {patch} | {batch} | {predicted_peak_bytes:bytes} | {plain_peak_bytes:bytes} | "
        form += "{predicted_seconds:.2f} s | {plain_seconds:.2f} s"
        ours.add_row(f"{target} GB", *_shown(form, found))
    return [theirs, ours]


def _shown(form: str, found: Mapping[str, Any]) -> list[str]:
    return cells(form, {**found, "patch": " x ".join(map(str, found["patch"]))})


def _run(run: Run) -> int:
    with tempfile.TemporaryDirectory() as folder:
        write_data_set(Path(folder))
        for name in ("raw", "preprocessed", "results"):
            os.environ[f"nnUNet_{name}"] = str(Path(folder) / name)
        try:
            from nnunetv2.experiment_planning.experiment_planners import resencUNet_planner as planners

            from shoal.hosts.nnunet import planner as ours
        except Exception as error:
            raise Unavailable(f"nnU-Net does not import here: {str(error).splitlines()[0]}") from error
        targets = run.asked.targets or TARGETS
        nnunet: dict[str, Any] = {}
        shoal: dict[str, Any] = {}
        with bar(len(PRESETS) + len(targets)) as show:
            for preset, target in PRESETS.items():
                nnunet[preset] = of_nnunet(planners, ours, target)
                run.save(nnunet=nnunet, shoal=shoal)
                show(preset, "nnU-Net's own planner", 1)
            for target in targets:
                shoal[str(target)] = of_shoal(ours, target)
                run.save(nnunet=nnunet, shoal=shoal)
                show(f"{target} GB", "Shoal's planner", 1)
    run.say(*tables(run.result))
    return 0


main = Bench(
    _run,
    option("--targets", type=integers, help="GB of Shoal's planner, comma-separated; by default 8,12,24"),
    quick=None,
)

if __name__ == "__main__":
    sys.exit(main())
