"""Addresses of MLflow stores, and their secrets (user, password, token)."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import quote, unquote

HIDDEN = "..."
_ADDRESS = re.compile(r"([^:/?#]+://)(?:[^/?#]*@)?([^/?#]*)([^?#]*)(.*)", re.DOTALL)
"""Scheme, user, password (not a group), host, path, and the rest."""
_SEPARATORS = re.compile(r"[@:&=;?#]")


def sqlite_uri(path: Path) -> str:
    """Return the URI of a SQLite database, whatever characters its path has."""
    location = str(path.absolute())
    return "sqlite:///" + re.sub(r"[%?#\x00-\x1f]", lambda special: quote(special[0]), location)


def without_password(uri: str) -> str:
    """Return an address without user, password, query and fragment, safe to print and store.

    With a password that should have been percent-encoded (`p/w`, `p#w`, `p?w`), it is ambiguous
    where the host starts. Only the scheme is kept then.

    Example: without_password("https://me:pw@host:1/x?token=t") == "https://host:1/x"
    """
    if (match := _ADDRESS.fullmatch(uri)) is None:  # a path, or a word such as databricks
        return HIDDEN if ":" in uri and "@" in uri else uri
    scheme, host, path, rest = match.groups()
    if scheme.startswith(("sqlite", "file")) and not host:
        return uri.partition("?")[0]
    return f"{scheme}{HIDDEN}" if "@" in path + rest else scheme + host + path


def hide_password(text: str, uri: str) -> str:
    """Return `text`, the error of a library that was given `uri`, with the parts that
    `without_password` removes replaced by HIDDEN."""
    shown = without_password(uri)
    if shown == uri:
        return text
    rest = uri.partition("://")[2]
    public = set(_SEPARATORS.split(shown.partition("://")[2]))
    parts = {part for part in _SEPARATORS.split(rest) if len(part) > 1} - public
    text = text.replace(uri, shown)
    for part in sorted(parts | {unquote(part) for part in parts}, key=len, reverse=True):
        text = text.replace(part, HIDDEN)
    return text
