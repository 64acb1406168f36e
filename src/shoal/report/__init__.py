"""A run as one HTML page, a step as a trace, and a plan as text, from plain data.

Imports `core`, and the patches of `transforms.split`.
"""

from shoal.report.data import Report
from shoal.report.page import render, save_html
from shoal.report.plan_text import explained
from shoal.report.trace import save_trace

__all__ = ["Report", "explained", "render", "save_html", "save_trace"]
