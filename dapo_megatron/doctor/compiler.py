"""Check the C compiler with which Triton builds a launcher for its kernels, on a node with GPUs.

vLLM's model runner and Transformer Engine run Triton kernels in every step. Without a GPU nothing
is compiled (cluster/imports.py).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Mapping
from pathlib import Path

from dapo_megatron.doctor.check_result import Check, Status

NAME = "C compiler"


def find_compiler(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the path of the compiler that Triton (3.7) would use: CC, or else gcc, or else clang.
    It does not look for cc."""
    names = [environ["CC"]] if "CC" in environ else ["gcc", "clang"]
    paths = (shutil.which(name, path=environ.get("PATH")) for name in names)
    return next(filter(None, paths), None)


def check_compiler(
    seconds: float = 60.0, environ: Mapping[str, str] = os.environ, include: str | None = None
) -> Check:
    """Compile an empty module of this Python, as Triton does, with a timeout. `include` is the
    folder of Python.h, by default that of the running interpreter."""
    compiler = find_compiler(environ)
    if compiler is None:
        tried = f"CC={environ['CC']} is not a program" if "CC" in environ else "no gcc, no clang"
        remedy = "install gcc (apt: build-essential, dnf: gcc), or set CC; Triton needs it"
        return Check(NAME, Status.FAIL, tried, remedy)
    # Triton uses this scheme, too: Debian's own scheme names a folder without the headers.
    include = include or sysconfig.get_path("include", "posix_prefix")
    if not Path(include, "Python.h").is_file():
        remedy = "install python3-dev (dnf: python3-devel) of this version, or a Python of uv"
        return Check(NAME, Status.FAIL, f"no Python.h in {include}, which Triton includes", remedy)
    with tempfile.TemporaryDirectory() as folder:
        source, module = Path(folder, "module.c"), Path(folder, "module.so")
        source.write_text("#include <Python.h>\n", encoding="utf-8")
        arguments = ["-shared", "-fPIC", f"-I{include}", str(source), "-o", str(module)]
        try:
            subprocess.run(
                [compiler, *arguments],
                check=True,
                capture_output=True,
                text=True,
                timeout=seconds,
                env=dict(environ),
            )
        except subprocess.CalledProcessError as error:
            lines = [line for line in error.stderr.splitlines() if "error" in line]
            reason = (lines or ["no message"])[0].strip()
            text = f"{compiler} cannot compile a module of Python: {reason}"
            return Check(NAME, Status.FAIL, text, "install build-essential (dnf: gcc glibc-devel)")
        except subprocess.TimeoutExpired:
            remedy = "exclude the node, or use a compiler on a local disk"
            return Check(NAME, Status.FAIL, f"{compiler}: no answer in {seconds:g} s", remedy)
    return Check(NAME, Status.OK, f"{compiler}, with {include}/Python.h")
