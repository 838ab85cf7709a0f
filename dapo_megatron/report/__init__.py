"""`report RUN_FOLDER`: one HTML file about a run that needs no network.

Python reads the data (run_data.py) and makes all findings and Plotly figures. page/*.js displays
the figures and contains no metric names.
"""

from __future__ import annotations
