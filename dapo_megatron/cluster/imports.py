"""Import the heavy libraries of a rank quickly, and without what no run uses."""

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
MLflow installs them. They take two seconds of a rank's start."""
COMPILER = "torch._inductor.lowering"
"""Part of torch's compiler that vLLM extends when it is imported, if it can be imported. It takes a
second, and nothing uses it after `disable_compiler`."""
_NO_COMPILER = "TORCHDYNAMO_DISABLE"


@contextmanager
def quick_imports() -> Iterator[None]:
    """Import heavy libraries inside this block, and nothing that may need a package of UNUSED.

    Those packages count as not installed inside, and as usual afterwards. The garbage collector
    pauses: it would traverse a million new objects several times and find nothing to free. It
    ignores these objects from then on, as vLLM arranges after its own start.
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
    """Make torch.compile return functions as they are, unless the user has decided otherwise.

    Without a GPU the functions that Megatron and vLLM compile are one-liners. Inductor takes a
    second to import and 14 s for the first of them, and needs a C++ compiler. Set this before
    Megatron and vLLM are imported.
    """
    os.environ.setdefault(_NO_COMPILER, "1")
