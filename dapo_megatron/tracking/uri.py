"""Addresses of MLflow stores: makes them absolute, and removes secrets (user, password, token)."""

from __future__ import annotations

import os
import re
from pathlib import Path
from urllib.parse import quote, unquote

HIDDEN = "..."
_LOCAL = ("sqlite", "file")
_END_OF_HOST = re.compile(r"[/?#]")
_SEPARATORS = re.compile(r"[@:&=;?#]")

_WORDS = ("", "databricks", "databricks-uc", "uc")
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]+:", re.IGNORECASE)
"""Two letters at least: `C:` is a part of a path, as in MLflow."""
_STORE = re.compile(r"(file|sqlite(?:\+pysqlite)?):(//)?(.*)", re.IGNORECASE | re.DOTALL)
_SQLITE_PATH = re.compile(r"(.*?)(\?\w+=[^/]*)?", re.DOTALL)
"""Path of a database and the query behind it, such as ?timeout=5."""


def absolute_uri(uri: str, folder: Path) -> str:
    """Return MLFLOW_TRACKING_URI as MLflow reads it from any working folder. Relative paths start
    in `folder`, and in any spelling: `x`, `file:x`, `file://./x`, `sqlite:x.db`, `sqlite:///x.db`.

    A path without a scheme is taken literally. With a scheme, %20 means a space, as in MLflow.

    Example: absolute_uri("sqlite:///a%20b?.db", Path("/w")) == "sqlite:////w/a b%3F.db"
    """
    if (store := _STORE.fullmatch(uri)) is None:
        is_path = uri not in _WORDS and not _SCHEME.match(uri)
        return f"file://{_quoted(folder, uri)}" if is_path else uri
    scheme, path = store[1].lower(), store[3]
    if scheme == "file":
        host = "localhost" if store[2] and path.startswith("localhost/") else ""
        return f"file://{_quoted(folder, unquote(path.removeprefix(host)))}"
    located = _SQLITE_PATH.fullmatch(path.removeprefix("/") if store[2] else path)
    assert located is not None
    if located[1] in ("", ":memory:"):
        return uri
    return sqlite_uri(folder, unquote(located[1]), scheme) + (located[2] or "")


def sqlite_uri(folder: Path, name: str, scheme: str = "sqlite") -> str:
    """Return the URI of a SQLite database, whatever characters its path has."""
    return f"{scheme}:///{_quoted(folder, name)}"


def _quoted(folder: Path, name: str) -> str:
    """Return an absolute path for a URI. Only characters with a meaning in URIs are quoted."""
    path = str(folder.absolute() / os.path.expanduser(name))
    return re.sub(r"[%?#\x00-\x1f]", lambda special: quote(special[0]), path)


def without_password(uri: str) -> str:
    """Return an address without user, password, query and fragment, safe to print and store.

    With a password that should have been percent-encoded (`p/w`, `p#w`, `p?w`), it is ambiguous
    where the host starts. Only the scheme is kept then.

    Example: without_password("https://me:pw@host:1/x?token=t") == "https://host:1/x"
    """
    scheme, separator, rest = uri.partition("://")
    if not separator:  # a path, or a word such as databricks
        return HIDDEN if ":" in uri and "@" in uri else uri
    if scheme.startswith(_LOCAL) and rest.startswith("/"):
        return f"{scheme}://{rest.partition('?')[0]}"
    host_end = match.start() if (match := _END_OF_HOST.search(rest)) else len(rest)
    host = rest[:host_end].rpartition("@")[2]
    if "@" in rest[host_end:]:
        return f"{scheme}://{HIDDEN}"
    path = re.split(r"[?#]", rest[host_end:], maxsplit=1)[0]
    return f"{scheme}://{host}{path}"


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
