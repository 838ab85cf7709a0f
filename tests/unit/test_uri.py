"""Addresses of MLflow: relative ones end where the user meant, and shown ones have no password."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy.engine import make_url

from dapo_megatron.tracking.uri import (
    HIDDEN,
    absolute_uri,
    hide_password,
    sqlite_uri,
    without_password,
)

PASSWORDS = st.text(st.characters(codec="utf-8", exclude_categories=["Cc"]), min_size=4)


@pytest.mark.parametrize(
    ("uri", "shown"),
    [
        ("http://host", "http://host"),
        ("http://[::1]:5000/", "http://[::1]:5000/"),
        ("https://me:word@host:1/x", "https://host:1/x"),
        ("https://me:w@rd@host", "https://host"),
        ("https://token@host", "https://host"),
        ("https://me:w/rd@host", "https://..."),
        ("https://me:w#rd@host", "https://..."),
        ("https://me:w?rd@host", "https://..."),
        ("https://me:12?34@host", "https://..."),
        ("https://me:w@r/d@host", "https://..."),
        ("postgresql://me:word@host/db", "postgresql://host/db"),
        ("postgresql+psycopg2://me:word@/db?host=/x", "postgresql+psycopg2:///db"),
        ("postgresql://host/db?user=me&password=word", "postgresql://host/db"),
        ("postgresql://host/db?password=w@rd", "postgresql://..."),
        ("http://host/?token=word", "http://host/"),
        ("http://host/#word", "http://host/"),
        ("https:me:word@host", "..."),
        ("sqlite:////a@b/run#1/mlflow.db", "sqlite:////a@b/run#1/mlflow.db"),
        ("databricks", "databricks"),
        ("/home/me@site/mlruns", "/home/me@site/mlruns"),
    ],
)
def test_an_address_is_shown_without_its_secrets(uri: str, shown: str) -> None:
    assert without_password(uri) == shown


@given(PASSWORDS)
def test_no_password_is_shown(password: str) -> None:
    uri = f"https://me:{password}@host.example:8080/path"
    assert without_password(uri) in ("https://host.example:8080/path", f"https://{HIDDEN}")
    query = f"postgresql://host.example/path?user=me&password={password}"
    assert without_password(query) in ("postgresql://host.example/path", f"postgresql://{HIDDEN}")


@given(PASSWORDS.filter(lambda text: not set(text) & set("@:&=;?#")))
def test_an_error_that_quotes_the_address_hides_the_password(password: str) -> None:
    for uri in (f"https://me:{password}@host/x", f"https://host/x?token={password}"):
        for quoted in (uri, f"{uri}/api/2.0", password):
            shown = hide_password(f"cannot reach {quoted}", uri)
            assert shown.replace(HIDDEN, "").count(password) == "cannot reach".count(password)


def test_an_error_without_secrets_is_unchanged() -> None:
    assert hide_password("cannot reach http://host", "http://host") == "cannot reach http://host"


FILES = {  # address -> folder, in the folder in which the user is
    "x": "x",
    "./x": "x",
    "../x": "../x",
    "x/y z": "x/y z",
    "~/x": "~/x",
    "a%20b/x": "a%20b/x",
    "a?b/x": "a?b/x",
    "a#b": "a#b",
    "ü": "ü",
    "file:x": "x",
    "file:./x": "x",
    "FILE:x": "x",
    "file:a%20b": "a b",
    "file://./x": "x",
    "file://../x": "../x",
    "file://~/x": "~/x",
    "file:///abs/x": "/abs/x",
    "file:/abs/x": "/abs/x",
    "file://localhost/abs/x": "/abs/x",
    "file:///a%20b": "/a b",
    "file:///a%2520b": "/a%20b",
    "/abs/x": "/abs/x",
    "/a%20b": "/a%20b",
}
DATABASES = {
    "sqlite:///x.db": "x.db",
    "sqlite:///./x.db": "x.db",
    "sqlite:///../x.db": "../x.db",
    "sqlite:///a/x.db": "a/x.db",
    "sqlite:////abs/x.db": "/abs/x.db",
    "sqlite:x.db": "x.db",
    "sqlite:./x.db": "x.db",
    "sqlite://x.db": "x.db",
    "sqlite:/abs/x.db": "/abs/x.db",
    "SQLite:///x.db": "x.db",
    "sqlite+pysqlite:///x.db": "x.db",
    "sqlite:///~/x.db": "~/x.db",
    "sqlite:///a%20b/x.db": "a b/x.db",
    "sqlite:////a%2520b/x.db": "/a%20b/x.db",
    "sqlite:///a b#ü/x.db": "a b#ü/x.db",
    "sqlite:////a%3Fb/x.db": "/a?b/x.db",
    "sqlite:///x.db?timeout=5": "x.db",
}


def meant(path: str) -> str:
    return os.path.normpath(Path(path).expanduser().absolute())


@pytest.mark.parametrize("given_uri", FILES)
def test_a_file_store_is_where_the_user_meant(
    given_uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow.utils.file_utils import local_file_uri_to_path

    monkeypatch.chdir(tmp_path)
    uri, expected = absolute_uri(given_uri), meant(FILES[given_uri])
    monkeypatch.chdir("/")
    assert os.path.normpath(local_file_uri_to_path(uri)) == expected
    assert absolute_uri(uri) == uri


@pytest.mark.parametrize("given_uri", DATABASES)
def test_a_database_is_where_the_user_meant(
    given_uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    url, expected = make_url(absolute_uri(given_uri)), meant(DATABASES[given_uri])
    # MLflow's SQLAlchemy decodes the path, as a URL's.
    assert os.path.normpath(unquote(urlsplit(str(url)).path.removeprefix("/"))) == expected
    assert url.get_dialect().name == "sqlite"
    assert dict(url.query) == ({"timeout": "5"} if "timeout" in given_uri else {})


@pytest.mark.parametrize(
    "uri",
    [
        *("", "databricks", "databricks://profile", "http://host:1/x", "https://me:pw@host"),
        *("postgresql://me:pw@host/db", "mysql+pymysql://host/db", "file://server/share"),
        *("sqlite:///:memory:", "sqlite://", "htp://x"),
    ],
)
def test_other_addresses_are_unchanged(uri: str) -> None:
    assert absolute_uri(uri) == uri


@pytest.mark.parametrize("name", ["plain", "a%20b", "a?b", "a#b", "a b", "a%b", "ü&=+"])
def test_mlflow_writes_into_the_database_of_a_folder(name: str, tmp_path: Path) -> None:
    from mlflow import MlflowClient

    folder = tmp_path / name
    folder.mkdir()
    MlflowClient(sqlite_uri(folder / "mlflow.db")).create_experiment("x")
    assert (folder / "mlflow.db").stat().st_size > 0
