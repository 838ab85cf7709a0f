"""Test which room may import which, how long files may be, and that no machine is named."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGE = REPOSITORY / "dapo_megatron"
FILES = sorted(PACKAGE.rglob("*.py"))


@dataclass(frozen=True)
class Room:
    """The rooms (besides itself) and packages that the files of a room may import."""

    rooms: frozenset[str]
    packages: frozenset[str]


def room(rooms: str = "", packages: str = "") -> Room:
    return Room(frozenset(rooms.split()), frozenset(packages.split()))


LOW = "types files protocols"
EVERYTHING = (
    f"{LOW} segments text config model algo data rewards rollout policy engine bridge checkpoints "
    "cluster tracking report doctor plan run loop environments"
)
ROOMS = {
    "__init__": room(),
    "types": room(
        "segments", "torch numpy"
    ),  # annotations only, see test_light_modules_import_nothing_heavy
    "segments": room("", "numpy"),  # annotations only
    "files": room("types"),
    "text": room(),
    "literal_console": room("text", "rich"),
    "protocols": room("types", "torch"),
    "config": room("types", "pydantic pydantic_core yaml"),
    "model": room("types files config", "torch"),  # torch for annotations only
    "algo": room("types", "torch"),
    "data": room(
        "types segments files protocols config algo rewards",
        "torch transformers tokenizers numpy pyarrow datasets reasoning_gym",
    ),
    # cluster for child processes.
    "rewards": room("types files cluster", "math_verify msgspec reasoning_gym sympy"),
    # cluster for child processes, rewards for what they inherit.
    "environments": room("types cluster rewards", "msgspec pydantic transformers verifiers openai"),
    "cluster": room(f"{LOW} text", "torch msgspec psutil pynvml rich zmq"),
    "plan": room("types files literal_console config model bridge", "torch rich"),
    # cluster for ranks that fail together.
    "bridge": room("types protocols config cluster", "torch zmq"),
    "checkpoints": room(f"{LOW} config model cluster", "torch safetensors yaml"),
    # plan for the layout only.
    "policy": room(
        "types files protocols config model plan bridge checkpoints cluster",
        "torch numpy megatron transformer_engine safetensors triton fla",
    ),
    # data for the tokenizer, rewards for the graders of a server, bridge for its weights.
    "engine": room(
        f"{LOW} segments config model data cluster bridge rewards environments",
        "torch vllm transformers numpy zmq aiohttp pydantic",
    ),
    # engine for its messages, bridge for sending weights, checkpoints for the manifest of a folder,
    # pandas for annotations only.
    "rollout": room(
        f"{LOW} segments config algo data rewards cluster engine bridge checkpoints",
        "torch numpy pandas pyarrow zmq",
    ),
    # checkpoints and cluster for annotations only.
    "loop": room("types protocols config algo data rollout checkpoints cluster"),
    # rollout for the file format of a group, checkpoints for the names of their folders, model for
    # FLOPs, torch for the name of the GPU.
    "tracking": room(
        f"{LOW} literal_console config model data cluster checkpoints rollout",
        "mlflow rich torch numpy pyarrow",
    ),
    "doctor": room(
        f"{LOW} segments literal_console config model algo data rewards rollout policy cluster "
        "plan tracking run",
        "torch transformers rich",
    ),
    # rewards for the causes of missing grades, doctor for whether a run is alive, cluster for who
    # has made a folder.
    "report": room(
        "types segments files text literal_console config cluster rewards rollout doctor tracking",
        "jinja2 msgspec numpy pandas plotly tokenizers yaml markupsafe rich",
    ),
    "run": room(EVERYTHING, "torch transformers rich"),
    "__main__": room(EVERYTHING, "typer rich"),
}


MAX_LINES = {"types.py": 700}
"""Allowed lines of a file, if they are more than 600. This one has all records of a run."""
MAX_FUNCTION_LINES = 60


@dataclass(frozen=True)
class Import:
    """One import of a file. `module` includes the name: `dapo_megatron.algo.loss.dapo_loss`."""

    module: str
    line: int

    @property
    def room(self) -> str | None:
        """Room of the module, or None for a module of another package."""
        package, _, rest = self.module.partition(".")
        return (rest.partition(".")[0] or "__init__") if package == "dapo_megatron" else None


def room_of(file: Path) -> str:
    first = file.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


@cache
def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def imports(file: Path) -> Iterator[Import]:
    for node in ast.walk(parsed(file)):
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: use an absolute import"
            # `from a import b` may name a module, a.b.
            yield from (Import(f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def shown(file: Path, line: int) -> str:
    return f"{file.relative_to(REPOSITORY)}:{line}"


def tracked_text() -> Iterator[tuple[Path, str]]:
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    for name in filter(None, listed.stdout.split("\0")):
        path = REPOSITORY / name
        try:
            yield path, path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, FileNotFoundError):  # binary, or deleted without a commit
            continue


def used_rooms(name: str) -> set[str]:
    """Return the rooms that the files of a room import."""
    files = (file for file in FILES if room_of(file) == name)
    return {imported.room for file in files for imported in imports(file) if imported.room}


@pytest.mark.parametrize("name", sorted({room_of(file) for file in FILES}))
def test_a_room_imports_what_the_table_allows_and_no_less(name: str) -> None:
    # The package itself holds only its version, which every room may import.
    rooms = {*ROOMS[name].rooms, name, "__init__", "__version__"}
    packages = {*ROOMS[name].packages, *sys.stdlib_module_names}
    wrong = [
        f"{shown(file, imported.line)} imports {imported.module}"
        for file in FILES
        if room_of(file) == name
        for imported in imports(file)
        if imported.room not in rooms
        and (imported.room or imported.module.partition(".")[0] not in packages)
    ]
    assert not wrong, "\n".join(wrong)
    if name not in ("run", "__main__"):
        assert ROOMS[name].rooms <= used_rooms(name)


def test_neither_rooms_nor_modules_import_each_other_in_a_cycle() -> None:
    """Count imports inside functions and under TYPE_CHECKING, too."""
    names = {
        ".".join(file.relative_to(REPOSITORY).with_suffix("").parts).removesuffix(".__init__"): file
        for file in FILES
    }
    modules: dict[str, set[str]] = {name: set() for name in names}
    for name, file in names.items():
        for imported in imports(file):
            module = imported.module  # a module, or a name in it
            module = module if module in names else module.rpartition(".")[0]
            modules[name] |= {module} & names.keys() - {name}
    rooms = {name: used_rooms(name) - {name} for name in ROOMS}
    for graph in (modules, rooms):
        assert list(TopologicalSorter(graph).static_order())  # raises CycleError


def test_files_and_functions_are_short() -> None:
    wrong = []
    for file in FILES:
        name = str(file.relative_to(PACKAGE))
        if len(file.read_text(encoding="utf-8").splitlines()) > MAX_LINES.get(name, 600):
            wrong.append(name)
        for node in ast.walk(parsed(file)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                if node.end_lineno - node.lineno >= MAX_FUNCTION_LINES:
                    wrong.append(f"{shown(file, node.lineno)} {node.name}")
    assert not wrong


HEAVY = "torch transformers vllm megatron mlflow datasets reasoning_gym math_verify pyarrow numpy"
LIGHT = (
    "types protocols config config.file model plan.layout plan.compatibility "
    "rollout.record run.folder cluster.collectives cluster.curve cluster.launch "
    "cluster.ranks cluster.servers rewards run.session __main__"
)


def test_light_modules_import_nothing_heavy() -> None:
    # One interpreter for all modules reports the first one that imports something heavy.
    code = f"""
import importlib, sys
for name in {LIGHT.split()!r}:
    importlib.import_module("dapo_megatron." + name)
    heavy = sorted(set({HEAVY.split()!r}) & set(sys.modules))
    assert not heavy, f"dapo_megatron.{{name}} imports {{heavy}}"
"""
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr


def test_trainers_import_no_vllm_and_servers_no_megatron() -> None:
    """They import the policy and the engine later, in functions."""
    modules = "dapo_megatron.policy.device, dapo_megatron.run.models, dapo_megatron.engine.server"
    code = f"import sys, {modules}; print(*{{'megatron', 'vllm'}} & set(sys.modules))"
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    assert ran.stdout.split() == []


@pytest.mark.skipif(
    not (REPOSITORY / ".git").exists(), reason="needs git to list the tracked files"
)
def test_no_tracked_file_names_the_machine_it_was_written_on() -> None:
    machine = re.compile(r"(?<![\w.-])/(?:work|root)/|/tmp/[w]\b")
    # Lock files name packages, but must not name the registry of the machine that wrote them.
    registry = re.compile(
        r"--(?:extra-)?index-url[ =]|PIP_(?:EXTRA_)?INDEX_URL=|https?://[^\s/]*"
        r"(?:py[p]i|pythonhosted|artifactory|nexus|jfrog)"
    )
    wrong = [
        shown(path, text.count("\n", 0, match.start()) + 1)
        for path, text in tracked_text()
        for pattern in (machine, registry)
        for match in pattern.finditer(text)
    ]
    assert not wrong, wrong
