"""README and docs name things that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dapo_megatron.__main__ import __file__ as main_file

REPOSITORY = Path(__file__).resolve().parents[2]
PAGES = sorted([*REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/**/*.md")])
README = (REPOSITORY / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_mark_is_left_to_be_filled(page: Path) -> None:
    assert not re.findall(r"@[A-Z][A-Z0-9_]+@", page.read_text(encoding="utf-8"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8"))
    broken = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert not broken


def test_make_targets_of_the_readme_exist() -> None:
    makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    named = set(re.findall(r"(?:^|`)make ([a-z-]+)", README, re.MULTILINE))
    assert {"quickstart", "test"} <= named
    assert named <= targets


def test_commands_of_the_readme_exist() -> None:
    source = Path(main_file).read_text(encoding="utf-8")
    commands = re.findall(r"python -m dapo_megatron ([a-z]+)(?: (\S+\.yaml))?", README)
    assert {"train", "evaluate", "doctor"} <= {command for command, _ in commands}
    for command, config in commands:
        assert re.search(rf'def {command}\(|name="{command}"', source), command
        assert not config or (REPOSITORY / config).is_file(), config
