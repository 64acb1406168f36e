"""Planners as their papers have them: `hmms` and `hmms_recompute` (Split-CNN), `layerwise` (vDNN), `hascoet` (CPU
offloading), `sqrt` (Chen et al.). Kept for comparison; `joint` plans better.

Imports `planners` and `core`.
"""
