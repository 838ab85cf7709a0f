"""Fast imports of a rank's heavy libraries, without optional packages that no run uses."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import cast

UNUSED = ("scipy", "sklearn")
"""Packages that transformers (assisted generation) and vLLM (audio) import if they are installed.
MLflow installs them. Importing them takes two seconds of a rank's start."""
COMPILER = "torch._inductor.lowering"
"""Part of torch's compiler that vLLM imports and extends if it is available. Importing it takes a
second, and nothing uses it after `disable_compiler`."""
_NO_COMPILER = "TORCHDYNAMO_DISABLE"


@contextmanager
def quick_imports() -> Iterator[None]:
    """Import heavy libraries inside this block, and nothing that needs a package of UNUSED.

    Inside the block, the packages of UNUSED appear not to be installed. Garbage collection is
    paused, because it would traverse a million new objects several times without freeing any.
    Afterwards these objects are frozen, so later collections skip them; vLLM does the same after
    its own start.
    """
    unused = (*UNUSED, COMPILER) if os.environ.get(_NO_COMPILER) == "1" else UNUSED
    hidden = [name for name in unused if name not in sys.modules]
    # Python raises ModuleNotFoundError for a name that is None here, and find_spec returns None.
    sys.modules.update(dict.fromkeys(hidden, cast(ModuleType, None)))
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.freeze()
        for name in hidden:
            del sys.modules[name]


def disable_compiler() -> None:
    """Make torch.compile return functions unchanged, unless the user has set the variable.

    Without a GPU, the functions that Megatron and vLLM compile are one-liners. Inductor needs a C++
    compiler, one second to import, and 14 s to compile the first function. Call this before
    importing Megatron and vLLM.
    """
    os.environ.setdefault(_NO_COMPILER, "1")
