"""Programs in tools/ that are several files find each other there, as when they are started."""

import sys
from pathlib import Path

TOOLS = Path(__file__).resolve().parents[2] / "tools"
sys.path[:0] = [str(TOOLS), str(TOOLS / "lab"), str(TOOLS / "bench")]
