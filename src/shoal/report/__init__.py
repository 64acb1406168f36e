"""A run as one HTML page, and a step as a trace, from plain data.

Imports `core`, and the patches of `transforms.split`.
"""

from shoal.report.data import Report
from shoal.report.page import render, save_html
from shoal.report.trace import save_trace

__all__ = ["Report", "render", "save_html", "save_trace"]
