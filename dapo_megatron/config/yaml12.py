"""Read and write YAML 1.2 with PyYAML, which by itself implements YAML 1.1.

Plain scalars follow the core schema of YAML 1.2: `010` is ten, `1:30` and `yes` are text, `1e-6` is
a number. Anchors, aliases and tags are refused, because no config needs them and aliases can expand
exponentially. Deep nesting and long files are refused, so that errors are reported within a second.
"""

from __future__ import annotations

import re
from typing import Any

import yaml
from yaml.constructor import ConstructorError

from dapo_megatron.types import ConfigError

MAX_DEPTH = 32
"""Largest nesting depth of mappings and lists. The schema needs 5."""
MAX_CHARACTERS = 32_000
"""Largest size of a file or an override. Any text of this size is parsed within a second."""
MAX_DIGITS = 40
"""Largest number of digits of an integer. Python refuses to print more than 4,300."""

_NO_CHARACTER = re.compile("[\\0\ud800-\udfff]")
_TAG = "tag:yaml.org,2002:"
# https://yaml.org/spec/1.2.2/#1032-tag-resolution. The order does not matter.
_CORE_SCHEMA = (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9]+\.[0-9]*)([eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+"
        r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
)


def _refusal(place: yaml.Event | yaml.Node, problem: str) -> ConstructorError:
    """Return the error for valid YAML that this module refuses."""
    return ConstructorError(None, None, problem, place.start_mark)  # type: ignore[arg-type]


class _Loader(yaml.SafeLoader):
    """Resolves plain scalars by the core schema. Refuses anchors, aliases, tags, deep nesting, long
    numbers and repeated keys."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012, none of YAML 1.1's
    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise _refusal(event, "anchors (&x) and aliases (*x) are not allowed; copy the value")
        if tag := getattr(event, "tag", None):
            raise _refusal(event, f"the tag {tag!r:.60} is not allowed; remove it")
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise _refusal(event, f"nested more than {MAX_DEPTH} deep")
        node: yaml.Node | None = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        """Return the value of a mapping. PyYAML accepts repeated keys and keeps the last value."""
        names = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise _refusal(key, "a list or a mapping as a key")
            if key.value in names:
                raise _refusal(key, f"{key.value} is given twice")
            names.add(key.value)
        return super().construct_mapping(node, deep)

    def int_value(self, node: yaml.ScalarNode) -> int:
        """Return the value of an integer."""
        if len(node.value) > MAX_DIGITS:
            raise _refusal(
                node, f"a number of {len(node.value):,} digits; at most {MAX_DIGITS} are allowed"
            )
        return int(node.value, {"0o": 8, "0x": 16}.get(node.value[:2], 10))

    def text_value(self, node: yaml.ScalarNode) -> str:
        """Return the value of a text. Refuse escapes for null and for lone surrogates."""
        text = str(node.value)
        if _NO_CHARACTER.search(text):
            raise _refusal(node, "a null character or a lone surrogate; remove it")
        return text


class _Dumper(yaml.SafeDumper):
    """Quotes every text that YAML 1.1 or 1.2 would read as another type."""

    def text_node(self, text: str) -> yaml.Node:
        """Return the node of a text. Text with unprintable characters is double-quoted, because
        PyYAML would otherwise fold some of them as line breaks."""
        return self.represent_scalar(_TAG + "str", text, None if text.isprintable() else '"')


for _kind, _pattern, _first in _CORE_SCHEMA:
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(_TAG + _kind, re.compile(rf"^(?:{_pattern})$"), _first)
_Loader.add_constructor(_TAG + "int", _Loader.int_value)
_Loader.add_constructor(_TAG + "str", _Loader.text_value)
_Dumper.add_representer(str, _Dumper.text_node)


def parse_yaml(text: str, where: str) -> Any:
    """Return the value of a YAML document. Raises ConfigError for invalid or refused YAML, naming
    `where` and, if `text` has several lines, the line."""
    if len(text) > MAX_CHARACTERS:
        raise ConfigError(f"{where}: longer than {MAX_CHARACTERS:,} characters")
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark if "\n" in text else None
        line = f", line {mark.line + 1}" if mark else ""
        what = "" if isinstance(error, ConstructorError) else "not valid YAML: "
        raise ConfigError(f"{where}{line}: {what}{error.problem}") from error
    # Escapes for characters that do not exist raise ValueError or OverflowError.
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        raise ConfigError(f"{where}: not valid YAML: {error}") from error


def dump_yaml(value: Any) -> str:
    """Return YAML from which `parse_yaml` reads an equal value."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
