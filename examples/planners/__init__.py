"""Planners as their papers have them, for comparison: `shoal.Options(planner="examples.planners.sqrt:sqrt")`.

`sqrt` (Chen et al.), `layerwise` (vDNN), `hascoet` (CPU offloading), `hmms` and `hmms_recompute` (Split-CNN). `joint`
plans better than any of them.
"""

# By the names that their plans and the figures have: how `shoal.compile` and `--planner` find them.
NAMES = {
    name: f"examples.planners.{name}:{name}" for name in ("sqrt", "hmms", "hmms_recompute", "layerwise", "hascoet")
}
