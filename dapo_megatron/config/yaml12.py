"""YAML 1.2 as configs use it, on top of PyYAML, which reads YAML 1.1.

The core schema of YAML 1.2 decides what a plain scalar is: `010` is ten, `1:30` and `yes` are text,
`1e-6` is a number. Aliases and tags are refused: no config needs them, and aliases can expand
without limit. So are deep nesting and long files: every mistake is reported within a second.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import yaml

from dapo_megatron.types import ConfigError

MAX_DEPTH = 32
"""Mappings and lists inside each other. The schema has 5."""
MAX_CHARACTERS = 32_000
"""Of a file or an override. Whatever they are, they are then parsed within a second."""
MAX_DIGITS = 40
"""Of a whole number. Python refuses to print one of more than 4,300."""

_NO_CHARACTER = re.compile("[\\0\ud800-\udfff]")
_TAG = "tag:yaml.org,2002:"
# https://yaml.org/spec/1.2.2/#1032-tag-resolution, in which order does not matter.
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


class _Refusal(Exception):
    """Valid YAML that is not read, and the line it is on."""

    def __init__(self, place: yaml.Event | yaml.Node, problem: str) -> None:
        super().__init__(problem)
        self.line = place.start_mark.line + 1 if place.start_mark else 0


class _Loader(yaml.SafeLoader):
    """Resolves plain scalars by the core schema; refuses what the module's docstring names."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012, none of YAML 1.1's
    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise _Refusal(event, "anchors (&x) and aliases (*x) are not read; write the value out")
        if tag := getattr(event, "tag", None):
            raise _Refusal(event, f"the tag {tag!r:.60} is not read; remove it")
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise _Refusal(event, f"nested more than {MAX_DEPTH} deep")
        node: yaml.Node | None = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def int_value(self, node: yaml.ScalarNode) -> int:
        """Return the value of a whole number."""
        if len(node.value) > MAX_DIGITS:
            raise _Refusal(node, f"a number of {len(node.value):,} digits")
        return int(node.value, {"0o": 8, "0x": 16}.get(node.value[:2], 10))

    def text_value(self, node: yaml.ScalarNode) -> str:
        """Return the value of a text. Escapes in double quotes may name what is no character."""
        text = str(node.value)
        if _NO_CHARACTER.search(text):
            raise _Refusal(node, "a null character, or half a character (a lone surrogate)")
        return text


class _Dumper(yaml.SafeDumper):
    """Quotes every text that either version of YAML would take for something else."""

    def text_node(self, text: str) -> yaml.Node:
        """Return a text, in double quotes if it has characters that PyYAML would fold as line
        breaks elsewhere."""
        return self.represent_scalar(_TAG + "str", text, None if text.isprintable() else '"')


for _kind, _pattern, _first in _CORE_SCHEMA:
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(_TAG + _kind, re.compile(rf"^(?:{_pattern})$"), _first)
_Loader.add_constructor(_TAG + "int", _Loader.int_value)
_Loader.add_constructor(_TAG + "str", _Loader.text_value)
_Dumper.add_representer(str, _Dumper.text_node)


def parse_yaml(text: str, where: str) -> Any:
    """Return the value of one document. Raises ConfigError naming `where`, and the line if there
    is more than one, of what is not YAML or is refused here."""
    if len(text) > MAX_CHARACTERS:
        raise ConfigError(f"{where}: longer than {MAX_CHARACTERS:,} characters")
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if repeated := [] if node is None else list(_repeated(node, where)):
            raise ConfigError("\n".join(repeated))
        return None if node is None else loader.construct_document(node)
    except _Refusal as error:
        line = f", line {error.line}" if "\n" in text else ""
        raise ConfigError(f"{where}{line}: {error}") from None
    # The last two: of escapes for characters that do not exist.
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        raise ConfigError(f"{where}: not valid YAML: {error}") from error


def _repeated(node: yaml.Node, where: str, above: str = "") -> Iterator[str]:
    """Yield an error for each key given twice, which YAML itself lets pass: the last one wins."""
    if isinstance(node, yaml.MappingNode):
        seen = set()
        for key, child in node.value:
            dotted = f"{above}{key.value}"
            if dotted in seen:
                yield f"{dotted}: given twice ({where}, line {key.start_mark.line + 1})"
            seen.add(dotted)
            yield from _repeated(child, where, f"{dotted}.")
    elif isinstance(node, yaml.SequenceNode):
        for index, child in enumerate(node.value):
            yield from _repeated(child, where, f"{above}{index}.")


def dump_yaml(value: Any) -> str:
    """Return text that `parse_yaml` reads back to an equal value."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
