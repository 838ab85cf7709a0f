"""Hostile configs and overrides, and values that YAML 1.1 would misread. Each is rejected or read
as written."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dapo_megatron.config import Config
from dapo_megatron.config.file import dump_config, load_config, parse_config
from dapo_megatron.config.section import WEEK_SECONDS
from dapo_megatron.config.yaml12 import MAX_CHARACTERS, dump_yaml, parse_yaml
from dapo_megatron.rewards import GradingPool
from dapo_megatron.types import ConfigError

REPOSITORY = Path(__file__).resolve().parents[2]
TINY = REPOSITORY / "model_configs" / "tiny_cpu.yaml"
BASE = TINY.read_text(encoding="utf-8")
LINE_AFTER_BASE = BASE.count("\n") + 1
"""Number of the first line after BASE."""


def refusal(path: Path, *overrides: str) -> str:
    """Return the error message for a config that must be rejected."""
    with pytest.raises(ConfigError) as raised:
        load_config(path, overrides)
    return str(raised.value)


# ---------------------------------------------------------------------------- files

BILLION_LAUGHS = "\n".join(
    ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    + [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 10)]
)
ALIASES = f", line {LINE_AFTER_BASE}: anchors (&x) and aliases (*x) are not allowed"
FILES: dict[str, tuple[str | bytes, str]] = {
    "list contains itself": ("x: &a [*a]", ALIASES),
    "nested anchors": (BILLION_LAUGHS, ALIASES),
    "alias without anchor": ("x: *a", ALIASES),
    "anchor on a key": ("&a x: 1", ALIASES),
    "nested 3,000 deep": ("x: " + "[" * 3000, "nested more than 32 deep"),
    "nested by dashes": ("x: \n" + "- " * 3000, "nested more than 32 deep"),
    "Python object": ("x: !!python/object/apply:os.system ['true']", "the tag 'tag:yaml.org,2002:"),
    "YAML tag": ("seed: !!int '1'", "the tag 'tag:yaml.org,2002:int' is not allowed"),
    "tab": ("\tx: 1", f", line {LINE_AFTER_BASE}: not valid YAML: found character"),
    "two documents": ("---\nseed: 3", "found another document"),
    "invalid character": ('x: "\\UFFFFFFFF"', ": not valid YAML: "),
    "lone surrogate": ('x: "\\ud800"', "a null character or a lone surrogate"),
    "null character": ('x: "\\0"', "a null character or a lone surrogate"),
    "a list as a key": ("? [a]\n: 1", "a list or a mapping as a key"),
    "a repeated key": ("x:\n  - b: 1\n    b: 1", f", line {LINE_AFTER_BASE + 2}: b is given twice"),
    "too long": ("#" * MAX_CHARACTERS, ": longer than 32,000 characters"),
    "many digits": ("x: " + "9" * 5000, "a number of 5,000 digits"),
    "many hexadecimal digits": ("x: 0x" + "f" * 5000, "a number of 5,002 digits"),
    "Latin-1": (b"# \xe9", ": cannot be read ('utf-8' codec can't decode"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_hostile_file_is_refused_with_file_and_line(tmp_path: Path, name: str) -> None:
    content, problem = FILES[name]
    path = tmp_path / "config.yaml"
    path.write_bytes(
        BASE.encode() + (content.encode() if isinstance(content, str) else content) + b"\n"
    )
    message = refusal(path)
    assert message.startswith(str(path)) and problem in message


def test_an_unreadable_file_is_refused_with_its_path(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    assert refusal(path).startswith(f"{path}: cannot be read (No such file")
    for content in (b"", b"- 1"):
        path.write_bytes(content)
        assert refusal(path).startswith(f"{path}: the top level must be a mapping")
    path.write_bytes(b"{" + b"a," * (MAX_CHARACTERS // 2 - 10))
    assert refusal(path).startswith(f"{path}: not valid YAML: expected")


@pytest.mark.parametrize("key", ["1", "true", "null", "1.5", "2026-01-01", "<<", "=", "''"])
def test_a_key_that_is_not_a_name_is_rejected(tmp_path: Path, key: str) -> None:
    path = tmp_path / "config.yaml"
    for text in (f"{BASE}{key}: {{a: 1}}\n", BASE.replace("loss:\n", f"loss:\n  {key}: 1\n")):
        path.write_text(text, encoding="utf-8")
        refusal(path)


# ---------------------------------------------------------------------------- scalars

VALUES: dict[str, Any] = {
    "10": 10,
    "010": 10,
    "-010": -10,
    "+1": 1,
    "0o10": 8,
    "0x1F": 31,
    "1_000": "1_000",
    "1:30": "1:30",
    "1:30.5": "1:30.5",
    "0b1": "0b1",
    "-0x1": "-0x1",
    "1e3": 1000.0,
    "1E-6": 1e-6,
    "1.": 1.0,
    ".5": 0.5,
    "-.5e1": -5.0,
    ".inf": float("inf"),
    "1e400": float("inf"),
    "+.INF": float("inf"),
    "true": True,
    "FALSE": False,
    "yes": "yes",
    "No": "No",
    "on": "on",
    "off": "off",
    "y": "y",
    "tRue": "tRue",
    "null": None,
    "~": None,
    "": None,
    "nUll": "nUll",
    "2026-01-01": "2026-01-01",
    "=": "=",
    "<<": "<<",
    ".": ".",
    "e1": "e1",
    "'010'": "010",
    '"yes"': "yes",
}


@pytest.mark.parametrize("text", VALUES)
def test_plain_scalars_follow_the_core_schema_of_yaml_1_2(text: str) -> None:
    value = parse_yaml(text, "key")
    assert (value, type(value)) == (VALUES[text], type(VALUES[text]))


# ---------------------------------------------------------------------------- overrides


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("seed=1_000", "seed: Input should be a valid integer (given: '1_000')"),
        ("seed=1e3", "seed: Input should be a valid integer (given: 1000.0)"),
        ("tracking.mlflow=off", "tracking.mlflow: Input should be a valid boolean (given: 'off')"),
        ("run.stop_seconds=4:00", "run.stop_seconds: Input should be a valid number (given: '4:00"),
        ("run.stop_seconds=1e400", "run.stop_seconds: Input should be a finite number"),
        ("run.name=1e5", "run.name: must be text; quote it if YAML reads it as another type"),
        ("seed={a: *x}", "seed: anchors (&x) and aliases (*x) are not allowed; copy the value"),
        ("seed=" + "[" * 3000, "seed: nested more than 32 deep"),
        ("seed=" + "9" * 60_000, "seed: longer than 32,000 characters"),
        ("seed=" + "9" * 40, "seed: Input should be less than or equal to 2147483647 (given: 9"),
        ("model.path=" + "x" * 3000 + "\nseed: 1", "model.path, line 2: not valid YAML: "),
        ("a." * 1000 + "b=1", "a.a.a"),
        ("data.train.²=1", "data.train.²: no such entry; the list has 1 entries, numbered from 0"),
        ("data.train.01=1", "data.train.01: no such entry; the list has 1 entries"),
        ("data.train.1={}", "data.train.1: no such entry; the list has 1 entries, numbered from 0"),
        ("data.train.first.size=4", "data.train.first: no such entry; the list has 1 entries"),
        ("loss.clip_high", "'loss.clip_high': an override must have the form key.path=value"),
        ("=0.3", "'=0.3': an override must have the form key.path=value"),
        ("seed.x=3", "seed: is a single value and has no keys below it"),
        ("loss.clip_high=[", "loss.clip_high: not valid YAML"),
        ("loss..clip_high=3", "loss.: unknown key"),
        (f"data.train.{'9' * 5000}.name=x", "data.train.999"),
        ("data.train.0=1", "data.train.0: must be a mapping of keys (given: 1)"),
    ],
)
def test_a_hostile_or_ambiguous_override_is_refused_with_its_key(
    override: str, problem: str
) -> None:
    assert refusal(TINY, override).startswith(problem)


# ---------------------------------------------------------------------------- upper bounds


def number_fields(section: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, field in section.model_fields.items():
        if hasattr(field.annotation, "model_fields"):
            yield from number_fields(field.annotation, f"{prefix}{name}.")
        elif field.annotation in (int, float, int | None, float | None):
            yield f"{prefix}{name}", field


def test_every_number_has_an_upper_bound_which_is_in_the_message() -> None:
    keys = dict(number_fields(Config))
    assert len(keys) > 60
    for key, field in keys.items():
        is_float = field.annotation in (float, float | None)
        message = refusal(TINY, f"{key}=9e39" if is_float else f"{key}={10**39}")
        assert message.startswith(f"{key}: Input should be less than")


def test_the_longest_allowed_timeout_does_not_overflow() -> None:
    with GradingPool({"m": "dapo_math"}, workers=1, timeout_seconds=WEEK_SECONDS) as pool:
        pool.submit(0, "m", "Answer: 1", "1", {})
        results = pool.collect(wait=True)
    assert [grade is not None for _, grade, _ in results] == [True]


# ---------------------------------------------------------------------------- any input

PLAIN_TEXTS = st.text(
    st.sampled_from("0123456789.:_-+eExXoOyYnNtTrRuUfFaAlLsSiI~'\"#&*!|>%@[]{},? \n")
)
SCALAR_TEXTS = st.one_of(PLAIN_TEXTS, st.text(max_size=30), st.sampled_from(list(VALUES)))
KEYS = ["seed", "run.name", "loss", "loss.clip_low", "data.train", "data.train.0", "engine", "x"]


@settings(max_examples=200)
@given(st.sampled_from(KEYS), SCALAR_TEXTS)
@example("data.train.0.options", "{1: {a: [1]}}")
@example("loss", "{? {a: 1} : 2}")
def test_any_override_gives_a_config_or_a_config_error(key: str, text: str) -> None:
    try:
        config = load_config(TINY, [f"{key}={text}"])
    except ConfigError as error:
        assert str(error)
    else:
        assert parse_config(parse_yaml(dump_config(config), "dump")) == config


@settings(max_examples=100)
@given(st.text(max_size=60), st.integers(0, len(BASE)))
def test_any_file_gives_a_config_or_a_config_error(
    tmp_path_factory: pytest.TempPathFactory, text: str, position: int
) -> None:
    path = tmp_path_factory.mktemp("any") / "config.yaml"
    path.write_bytes((BASE[:position] + text + BASE[position:]).encode("utf-8", "surrogatepass"))
    try:
        load_config(path)
    except ConfigError as error:
        assert str(error)


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(10**30), 10**30)
    | st.floats(allow_nan=False)
    | SCALAR_TEXTS.filter(lambda text: "\0" not in text)
)


@settings(max_examples=300)
@given(st.dictionaries(st.text("abc", min_size=1), SCALARS | st.lists(SCALARS), max_size=3))
@example({"a": ["0o10", "1e5", "010", "1:30", "yes", "1_000", "2026-01-01", "0x1F", "<<", "="]})
@example({"a": ["\x85", "\u2028", "\ufeff", "\x1b", " a", "a ", "", "-", "\t", "'", '"']})
def test_a_dump_is_read_back_by_yaml_1_2_and_by_pyyaml(value: dict[str, Any]) -> None:
    text = dump_yaml(value)
    assert parse_yaml(text, "dump") == value
    assert yaml.safe_load(text) == value  # other programs read config.yaml, too
