"""Program in the sandbox that runs one piece of code after another in one namespace.

`interpreter.py` starts it with the text of this file and a socket as stdin, so it imports nothing
of this package, and little else, to start quickly. Each piece of code comes after its length. The
reply is the traceback, or nothing, and a zero. What the code prints goes to stdout and stderr.
"""

from __future__ import annotations

import ast
import io
import os
import signal
import sys
import types
from contextlib import suppress

MAX_FRAMES = 5
"""Maximum number of frames in a traceback. The last ones are kept."""
MAX_TRACEBACK = 2000
"""Maximum length of a traceback in characters. Its end is kept."""


def main() -> None:
    """Run code until there is no more."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the parent ignores it
    folder, replies = os.getcwd(), os.dup(0)
    with open(os.dup(0), "rb") as codes:
        os.dup2(os.open("/dev/stdin", os.O_RDONLY), 0)  # empty
        module = sys.modules["__main__"] = types.ModuleType("__main__")
        for number, length in enumerate(codes, 1):
            code = codes.read(int(length))
            output = io.TextIOWrapper(
                io.FileIO(1, "w", closefd=False), "utf-8", line_buffering=True
            )
            sys.stdout = sys.stderr = output
            reply = _run(code, f"{folder}/call_{number}.py", vars(module))
            with suppress(OSError, ValueError):  # it is full, or the code has closed it
                output.flush()
            os.write(replies, reply.replace("\0", "?").encode("utf-8", "replace") + b"\0")


def _run(code: bytes, name: str, namespace: dict[str, object]) -> str:
    """Run code and print the value of a last expression. Return the traceback if it raises."""
    with suppress(OSError), open(name, "wb") as file:  # for tracebacks
        file.write(code)
    try:
        tree = compile(code, name, "exec", ast.PyCF_ONLY_AST, dont_inherit=True)
        assert isinstance(tree, ast.Module)
        has_value = bool(tree.body) and isinstance(tree.body[-1], ast.Expr)
        last = ast.Interactive([tree.body.pop()] if has_value else [])
        exec(compile(tree, name, "exec", dont_inherit=True), namespace)
        exec(compile(last, name, "single", dont_inherit=True), namespace)
    except SystemExit as error:
        return "" if error.code in (None, 0) else f"SystemExit: {error.code}"
    except BaseException as error:  # noqa: BLE001 - KeyboardInterrupt, too
        import traceback

        frames = error.__traceback__ and error.__traceback__.tb_next
        lines = traceback.format_exception(type(error), error, frames, limit=-MAX_FRAMES)
        return "".join(lines)[-MAX_TRACEBACK:]
    return ""


if __name__ == "__main__":
    main()
