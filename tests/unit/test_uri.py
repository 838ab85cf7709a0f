"""Addresses lead MLflow to the file that the user named, and contain no password when shown."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

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


@pytest.mark.parametrize(
    ("given", "written"),
    [
        ("x", "x"),
        ("./x y", "x y"),
        ("../x", "../x"),
        ("a/../x", "x"),
        ("{here}/x", "x"),
        ("~/x", "../home/x"),
        ("100%", "100%"),
        ("a%20b", "a%20b"),
        ("a?b#c;d", "a?b#c;d"),
        ("ü", "ü"),
        ("C:/x", "C:/x"),
        ("C:\\x", "C:\\x"),
        ("runs/a:b", "runs/a:b"),
        ("file:x", "x"),
        ("file:./x", "x"),
        ("file:../x", "../x"),
        ("file:~/x", "../home/x"),
        ("file://x", "x"),
        ("file://./x", "x"),
        ("file://../x", "../x"),
        ("file:{here}/x", "x"),
        ("file://{here}/x", "x"),
        ("file://localhost{here}/x", "x"),
        ("FILE:x", "x"),
        ("file:a%20b%25", "a b%"),
        ("file:a?b#c", "a?b#c"),
        ("sqlite:x.db", "x.db"),
        ("sqlite:./x.db", "x.db"),
        ("sqlite:{here}/x.db", "x.db"),
        ("sqlite://x.db", "x.db"),
        ("sqlite:///x.db", "x.db"),
        ("sqlite:///./a/x.db", "a/x.db"),
        ("sqlite:///../x.db", "../x.db"),
        ("sqlite:///~/x.db", "../home/x.db"),
        ("sqlite:///{here}/x.db", "x.db"),
        ("sqlite+pysqlite:///x.db", "x.db"),
        ("SQLite:///x.db", "x.db"),
        ("sqlite:///x.db?timeout=5", "x.db"),
        ("sqlite:///a%20b/x.db", "a b/x.db"),
        ("sqlite:///a?b/x.db", "a?b/x.db"),
        ("sqlite:///a#b/100%.db", "a#b/100%.db"),
        ("sqlite:///C:/x.db", "C:/x.db"),
    ],
)
@pytest.mark.parametrize("folder", ["plain", "a%20b?c=d#e ü'\"&;"])
def test_mlflow_writes_where_the_user_meant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str, written: str, folder: str
) -> None:
    from mlflow.store.db.utils import create_sqlalchemy_engine
    from mlflow.tracking import MlflowClient
    from mlflow.utils.uri import get_uri_scheme

    here, elsewhere = tmp_path / folder, tmp_path / "elsewhere"
    for path in (here / "a", elsewhere, tmp_path / "home"):
        path.mkdir(parents=True)
    given = given.replace("{here}", str(here) if ":" not in given else here.as_uri()[7:])
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    uri = absolute_uri(given, here)
    assert absolute_uri(uri, elsewhere) == uri
    assert without_password(uri) == uri.partition("?")[0]  # a later start continues there
    (here / written).parent.mkdir(parents=True, exist_ok=True)
    monkeypatch.chdir(elsewhere)
    if get_uri_scheme(uri) == "sqlite":
        create_sqlalchemy_engine(uri).connect().close()
        assert (here / written).is_file()
    else:
        monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
        client = MlflowClient(uri)
        run = client.create_run(client.create_experiment("e"))
        client.log_text(run.info.run_id, "text", "artifact.txt")
        assert list((here / written).glob("*/*/artifacts/artifact.txt"))
    assert not os.listdir(elsewhere)


@pytest.mark.parametrize(
    "uri",
    [
        *("", "databricks", "databricks://profile", "uc", "http://host:5000", "HTTPS://me:w@host"),
        *("postgresql://me:word@host/db", "mysql+pymysql://host/db", "htp://x", "plugin:x"),
        *("sqlite://", "sqlite:///", "sqlite:///:memory:"),
    ],
)
def test_addresses_that_are_not_paths_are_unchanged(uri: str, tmp_path: Path) -> None:
    assert absolute_uri(uri, tmp_path) == uri


@given(st.text(st.characters(codec="utf-8", exclude_characters="/\0"), min_size=1, max_size=40))
def test_a_database_is_found_whatever_its_folder_is_called(name: str) -> None:
    from sqlalchemy import make_url

    folder = Path("/runs") / name
    uri = sqlite_uri(folder, "mlflow.db")
    assert make_url(uri).database == str(folder / "mlflow.db")
    assert absolute_uri(uri, Path("/other")) == uri
