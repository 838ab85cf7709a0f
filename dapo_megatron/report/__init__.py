"""`report RUN_FOLDER...`: one HTML file about one or several runs that needs no network.

Python reads the data (reading.py), judges it (findings.py), and makes all Plotly figures
(charts.py, figures.py). page/*.js displays the figures and contains no metric names.
"""

from __future__ import annotations
