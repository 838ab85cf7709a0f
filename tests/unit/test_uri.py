"""Addresses of MLflow contain no password when shown, and lead to the right file."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapo_megatron.tracking.uri import (
    HIDDEN,
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


@given(st.text(st.characters(codec="utf-8", exclude_characters="/\0"), min_size=1, max_size=40))
def test_a_database_is_found_whatever_its_folder_is_called(name: str) -> None:
    from sqlalchemy import make_url

    folder = Path("/runs") / name
    uri = sqlite_uri(folder / "mlflow.db")
    assert make_url(uri).database == str(folder / "mlflow.db")
    assert without_password(uri) == uri  # a later start continues there
