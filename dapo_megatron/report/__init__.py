"""`report RUN_FOLDER`: one HTML file that shows what a run did, and needs no network.

Python reads the data (folder.py) and makes all findings and Plotly figures of them. page/*.js shows
the figures and knows no metric by name.
"""

from __future__ import annotations
