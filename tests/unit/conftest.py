"""Programs in tools/ that are several files find each other there, as when they are started."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
