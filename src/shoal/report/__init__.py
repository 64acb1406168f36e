"""A run as one HTML page, and a step as a trace."""

from shoal.report.page import Report, render, save_html
from shoal.report.trace import save_trace

__all__ = ["Report", "render", "save_html", "save_trace"]
