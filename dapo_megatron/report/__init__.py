"""`report RUN_FOLDER`: one HTML file that shows what a run did, and needs no network.

Python makes the data (folder.py) and all charts and findings of them; page/*.js draws them and
knows no metric by name.
"""

from __future__ import annotations
