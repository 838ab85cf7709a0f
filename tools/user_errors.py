"""Errors of a tool's user as a message, without a traceback."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import typer

from dapo_megatron.types import DapoError


@contextmanager
def user_errors(options: Mapping[str, str]) -> Iterator[None]:
    """End the program at errors of the user with exit code 2, and at interrupts (SIGINT, SIGTERM)
    with 130. `options` maps words of a message, such as a config key, to the tool's own."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    except DapoError as error:
        text = str(error)
        for words, option in options.items():
            text = text.replace(words, option)
        print(f"error: {text}", file=sys.stderr)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        print("interrupted; no incomplete files are left", file=sys.stderr)
        raise typer.Exit(130) from None
