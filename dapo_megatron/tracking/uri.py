"""Addresses of MLflow: made absolute, and shown without secrets (user, password, token)."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import quote, unquote

HIDDEN = "..."
_LOCAL = ("sqlite", "file")
_END_OF_HOST = re.compile(r"[/?#]")
_SEPARATORS = re.compile(r"[@:&=;?#]")
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):(.*)", re.DOTALL)


def absolute_uri(given: str) -> str:
    """Return an MLflow address that means the same from another working folder.

    Paths, and `file:` and `sqlite:` addresses in any spelling, are relative to the current folder;
    `~` is the user's home. Other addresses are returned unchanged.
    """
    match = _SCHEME.fullmatch(given)
    if match is None:
        is_path = given not in ("", "databricks", "databricks-uc", "uc")
        return _path_uri(Path(given).expanduser().absolute()) if is_path else given
    scheme, rest = match[1].lower(), match[2]
    if scheme == "file":
        host, _, path = rest.removeprefix("//").partition("/")
        if not rest.startswith("//"):
            path = unquote(rest)
        elif host in (".", "..", "~"):
            path = unquote(f"{host}/{path}")
        elif host in ("", "localhost"):
            path = unquote(f"/{path}")
        else:
            return given
        return Path(path).expanduser().absolute().as_uri()
    if scheme.partition("+")[0] == "sqlite":
        path, mark, query = rest.partition("?")
        path = path.removeprefix("///") if path.startswith("///") else path.removeprefix("//")
        if not path or path.startswith(":memory:"):
            return given
        return f"{sqlite_uri(Path(unquote(path)).expanduser(), scheme)}{mark}{query}"
    return given


def sqlite_uri(path: Path, scheme: str = "sqlite") -> str:
    """Return the address of a SQLite file. SQLAlchemy decodes `%` in it, and ends it at `?`."""
    return f"{scheme}:///{quote(str(path.absolute()), safe='/ #+@:=&,;!$()[]')}"


def _path_uri(path: Path) -> str:
    """Return a path as it is, unless MLflow would decode it."""
    return path.as_uri() if "%" in str(path) else str(path)


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
