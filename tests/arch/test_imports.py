"""Test which room may import which, how long files may be, and that no machine is named."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
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
    f"{LOW} text config model algo data rewards rollout policy engine bridge checkpoints cluster "
    "tracking report doctor plan run loop"
)
ROOMS = {
    "__init__": room(),
    "types": room(
        "", "torch numpy"
    ),  # annotations only, see test_light_modules_import_nothing_heavy
    "files": room("types"),
    "text": room(),
    "literal_console": room("text", "rich"),
    "protocols": room("types", "torch"),
    "config": room("types", "pydantic pydantic_core yaml"),
    "model": room("types files config", "torch"),  # torch for annotations only
    "algo": room("types", "torch"),
    "data": room(
        "types files protocols config algo rewards",
        "torch transformers tokenizers numpy pyarrow datasets reasoning_gym",
    ),
    # cluster for child processes.
    "rewards": room("types files cluster", "math_verify msgspec reasoning_gym sympy"),
    "cluster": room(f"{LOW} text", "torch msgspec psutil rich zmq"),
    "plan": room("types files literal_console config model bridge", "torch rich"),
    # cluster for ranks that fail together.
    "bridge": room("types protocols config cluster", "torch zmq"),
    "checkpoints": room(f"{LOW} config model cluster", "torch safetensors yaml"),
    # plan for the layout only.
    "policy": room(
        "types files protocols config model plan bridge checkpoints cluster",
        "torch megatron transformer_engine safetensors triton",
    ),
    # data for the tokenizer, rewards for the graders of a server, bridge for its weights.
    "engine": room(f"{LOW} config model data cluster bridge rewards", "torch vllm numpy zmq"),
    # engine for its messages, bridge for sending weights, checkpoints for the manifest of a folder,
    # pandas for annotations only.
    "rollout": room(
        f"{LOW} config algo data rewards cluster engine bridge checkpoints",
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
        f"{LOW} literal_console config model algo data rewards rollout policy cluster plan "
        "tracking run",
        "torch transformers rich",
    ),
    # rewards for the causes of missing grades, doctor for whether a run is alive, cluster for who
    # has made a folder.
    "report": room(
        "types files text literal_console config cluster rewards rollout doctor tracking",
        "jinja2 msgspec numpy pandas plotly tokenizers yaml markupsafe rich",
    ),
    "run": room(EVERYTHING, "torch transformers rich"),
    "__main__": room(EVERYTHING, "typer rich"),
}

MAX_FILE_LINES = 450
MAX_FUNCTION_LINES = 60
LONG_FILES: dict[str, tuple[int, str]] = {"types.py": (636, "all records of a run, in one file")}
LONG_FUNCTIONS: dict[str, tuple[int, str]] = {}


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


def functions(file: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(parsed(file)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


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


def test_every_room_is_in_the_table() -> None:
    assert {room_of(file) for file in FILES} <= set(ROOMS)


@pytest.mark.parametrize("name", sorted(ROOMS))
def test_a_room_imports_what_the_table_allows(name: str) -> None:
    allowed = ROOMS[name]
    wrong = []
    for file in (file for file in FILES if room_of(file) == name):
        for imported in imports(file):
            package = imported.module.partition(".")[0]
            if imported.room is not None:
                # The package itself holds only its version, which every room may import.
                is_allowed = imported.room in {*allowed.rooms, name, "__init__", "__version__"}
            else:
                is_allowed = package in {*allowed.packages, *sys.stdlib_module_names}
            if not is_allowed:
                wrong.append(f"{shown(file, imported.line)} imports {imported.module}")
    assert not wrong, "\n".join(wrong)


def module_name(file: Path) -> str:
    parts = file.relative_to(REPOSITORY).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_modules() -> dict[str, set[str]]:
    """Return the modules of the package that each one imports, also inside functions and under
    TYPE_CHECKING."""
    modules = {module_name(file) for file in FILES}

    def module_of(name: str) -> str:
        while name not in modules:
            name = name.rpartition(".")[0]
        return name

    return {
        module_name(file): {
            module_of(imported.module) for imported in imports(file) if imported.room is not None
        }
        - {module_name(file)}
        for file in FILES
    }


def cycle(graph: dict[str, set[str]]) -> list[str]:
    """Return the nodes of a cycle, or an empty list."""
    try:
        tuple(TopologicalSorter(graph).static_order())
    except CycleError as error:
        return list(error.args[1])
    return []


def test_modules_import_each_other_without_cycles() -> None:
    assert not cycle(imported_modules())


def test_rooms_import_each_other_without_cycles() -> None:
    rooms: dict[str, set[str]] = {}
    for file in FILES:
        others = {imported.room for imported in imports(file) if imported.room is not None}
        rooms.setdefault(room_of(file), set()).update(others - {room_of(file)})
    assert not cycle(rooms)


def test_top_level_files_are_those_of_the_architecture() -> None:
    names = {path.name for path in PACKAGE.glob("*.py")}
    assert names == {
        "__init__.py",
        "__main__.py",
        "files.py",
        "literal_console.py",
        "loop.py",
        "protocols.py",
        "text.py",
        "types.py",
    }


def test_every_room_has_a_docstring() -> None:
    folders = {file.parent for file in FILES}
    assert all(ast.get_docstring(parsed(folder / "__init__.py")) for folder in folders)


@pytest.mark.parametrize("name", sorted(ROOMS.keys() - {"run", "__main__"}))
def test_the_table_allows_no_room_that_is_not_imported(name: str) -> None:
    used = {imported.room for file in FILES if room_of(file) == name for imported in imports(file)}
    assert ROOMS[name].rooms <= used


def test_loop_and_rollout_name_no_backend() -> None:
    backends = re.compile(r"(torch\.distributed|megatron|vllm|mlflow)(\.|$)")
    wrong = [
        f"{shown(file, imported.line)} imports {imported.module}"
        for file in FILES
        if room_of(file) in {"loop", "rollout", "algo", "data", "rewards"}
        for imported in imports(file)
        if backends.match(imported.module)
    ]
    assert not wrong, "\n".join(wrong)


def test_megatron_vllm_and_mlflow_are_each_imported_in_one_room() -> None:
    home = {"megatron": "policy", "vllm": "engine", "mlflow": "tracking"}
    wrong = [
        f"{shown(file, imported.line)} imports {imported.module}"
        for file in FILES
        for imported in imports(file)
        if home.get(imported.module.partition(".")[0], room_of(file)) != room_of(file)
    ]
    assert not wrong, "\n".join(wrong)


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


@pytest.mark.parametrize(
    ("module", "backends"),
    [
        ("policy.device", {"megatron"}),
        ("run.models", {"megatron", "vllm"}),
        ("engine.server", {"megatron", "vllm"}),
    ],
)
def test_trainers_import_no_vllm_and_servers_no_megatron(module: str, backends: set[str]) -> None:
    """They import the policy and the engine later, in functions."""
    code = f"import sys, dapo_megatron.{module}; print(*{backends} & set(sys.modules))"
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    assert ran.stdout.split() == []


def test_the_rollouts_use_only_the_messages_of_the_engine() -> None:
    used = {
        imported.module.rpartition(".")[0]
        for file in FILES
        if room_of(file) == "rollout"
        for imported in imports(file)
        if imported.room == "engine"
    }
    assert used == {"dapo_megatron.engine.messages"}


def test_files_are_short() -> None:
    lines = {
        str(file.relative_to(PACKAGE)): len(file.read_text(encoding="utf-8").splitlines())
        for file in FILES
    }
    wrong = {
        name: count
        for name, count in lines.items()
        if count > LONG_FILES.get(name, (MAX_FILE_LINES, ""))[0]
    }
    assert not wrong
    # Remove an exception that is not needed any more.
    assert all(lines[name] > MAX_FILE_LINES for name in LONG_FILES)


def test_functions_are_short() -> None:
    lengths = {
        f"{file.relative_to(PACKAGE)}:{function.name}": (function.end_lineno or 0)
        - function.lineno
        + 1
        for file in FILES
        for function in functions(file)
    }
    wrong = {
        name: count
        for name, count in lengths.items()
        if count > LONG_FUNCTIONS.get(name, (MAX_FUNCTION_LINES, ""))[0]
    }
    assert not wrong
    assert all(lengths[name] > MAX_FUNCTION_LINES for name in LONG_FUNCTIONS)


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
