"""Environments as users write them: a class with one instance per completion.

    class Calculator:
        repeatable = True                          # a call may be made again after a crash
        # or stateless = True: calls depend on nothing but their arguments

        def reset(self, row: dict) -> str | None:  # optional; a text follows the prompt
            ...

        def calculate(self, expression: str) -> str:
            \"\"\"Evaluate an arithmetic expression.

            Args:
                expression: for example 3 * (4 + 5)
            \"\"\"

Public methods are tools; their types and docstrings describe them to the model. A class with a
method `step(self, turn: str) -> Reply` has no tools: it reads each turn and answers it.

Or a function, an agent that calls the model itself, as often as it likes:

    async def run(row: dict, base_url: str, api_key: str) -> float | dict:
        client = AsyncOpenAI(base_url=base_url, api_key=api_key)
        ...
        return reward
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import msgspec

from dapo_megatron.rewards.sandbox import check_sandbox
from dapo_megatron.types import AGENT, VERIFIERS, ConfigError

BUILT_IN = {
    "python": "dapo_megatron.environments.interpreter:Python",
    "python_notebook": "dapo_megatron.environments.interpreter:PythonNotebook",
}
"""Environments of this package that need no module in their name. They get the time limit."""
RESERVED = ("reset", "step", "close")
"""Public methods that are not tools."""


@dataclass(frozen=True, slots=True)
class Reply:
    """Answer of `step` to a turn. `done` ends the completion. A `reward` takes the place of the
    grader's score, if there is no grader. The means of an agent's `numbers` become metrics."""

    text: str = ""
    done: bool = False
    reward: float | None = None
    numbers: Mapping[str, float] = field(default_factory=dict)


class Described(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How an environment looks.

    is_repeatable  whether calls may be made again, to rebuild the state of a lost instance
    is_stateless   whether the answer to a call depends on nothing but its arguments, so that there
                   is no state to rebuild
    has_step       whether it answers whole turns instead of calls of tools
    has_reset      whether a text of it may follow the prompt
    is_agent       whether it calls the model, instead of being called
    tools          as chat templates take them, by name
    """

    name: str
    is_repeatable: bool = False
    is_stateless: bool = False
    has_step: bool = False
    has_reset: bool = False
    is_agent: bool = False
    tools: dict[str, dict[str, Any]] = {}

    @property
    def role(self) -> str:
        """Role of its messages in the chat template."""
        return "user" if self.has_step or self.is_agent else "tool"

    @property
    def writes(self) -> Literal["", "end", "all"]:
        """Part of the prompts that it writes."""
        return "all" if self.is_agent else "end" if self.has_reset else ""

    @property
    def gives_reward(self) -> bool:
        """Whether it may take the place of a grader."""
        return self.has_step or self.is_agent

    @property
    def descriptions(self) -> list[dict[str, Any]] | None:
        """Its tools, as chat templates take them; None without tools."""
        return list(self.tools.values()) or None


@dataclass(frozen=True)
class Environment:
    """A class, checked.

    looks   how it looks, without its tools
    kind    the class, or a function that returns an instance
    tools   methods by name, which check their arguments
    """

    looks: Described
    kind: Callable[[], Any]
    tools: Mapping[str, Callable[..., Any]] = field(default_factory=dict)

    def described(self) -> Described:
        """Return how it looks, with its tools. Raises ConfigError if types or docstring of one lack
        something."""
        from transformers.utils import get_json_schema

        tools: dict[str, dict[str, Any]] = {}
        for name, method in self.tools.items():
            try:
                tools[name] = get_json_schema(method)
            except Exception as error:  # of several kinds, from transformers and from annotations
                raise ConfigError(
                    f"environment {self.looks.name!r}: its tool {name} needs a docstring, and for "
                    f"each argument a type and a line under 'Args:' ({error})"
                ) from error
            # Chat templates show everything, and no model was trained with the type of the result.
            tools[name]["function"].pop("return", None)
        return msgspec.structs.replace(self.looks, tools=tools)

    def call(self, instance: object, tool: str, arguments: Mapping[str, Any]) -> str:
        """Return the result of a tool as text. Raises ValueError for an unknown tool and for wrong
        arguments, saying what is right, and whatever the tool raises."""
        from pydantic import ValidationError

        if tool not in self.tools:
            raise ValueError(f"there is no tool {tool!r}; the tools are {', '.join(self.tools)}")
        method = self.tools[tool]
        try:
            result = method(instance, **arguments)
        except ValidationError as error:
            if error.title != method.__qualname__:  # raised inside the tool
                raise
            faults = (
                f"{'.'.join(map(str, fault['loc'])) or 'arguments'}: {fault['msg']}"
                for fault in error.errors(include_url=False, include_input=False)
            )
            raise ValueError(f"{tool}: {'; '.join(faults)}") from error
        return result if isinstance(result, str) else str(result)


class Agent:
    """Instance of an agent: `reset` runs it, and returns what it returned."""

    def __init__(self, run: Callable[..., Any]) -> None:
        self._run = run

    def reset(self, row: dict[str, Any]) -> Reply:
        """Run the agent. `row` has the key and the address of its session, too."""
        base_url, api_key = row.pop("base_url"), row.pop("api_key")
        os.environ |= {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": api_key}
        result = self._run(row, base_url, api_key)
        if inspect.iscoroutine(result):
            result = asyncio.run(result)
        numbers = dict(result) if isinstance(result, Mapping) else {"reward": result}
        if numbers.get("reward") is None:
            raise ValueError(f"it returned {result!r:.100}, not a reward or a dict with one")
        return Reply(done=True, reward=numbers.pop("reward"), numbers=numbers)


def _load_agent(name: str) -> Environment:
    """Return the agent `agent:module:function`, or that of an environment of the package verifiers.
    Raises ConfigError."""
    if name.startswith(VERIFIERS):
        from dapo_megatron.environments.verifiers import load_episodes

        return _as_agent(name, load_episodes(name))
    run = _imported(name, name.removeprefix(AGENT))
    if not callable(run) or inspect.isclass(run):
        raise ConfigError(f"environment {name!r}: it is not a function")
    return _as_agent(name, run)


def _as_agent(name: str, run: Callable[..., Any]) -> Environment:
    if "openai" in sys.modules:  # its parts would be imported by each agent
        with suppress(ImportError):
            importlib.import_module("openai.resources.chat.completions")
    is_repeatable = bool(getattr(run, "repeatable", False))
    looks = Described(name, is_repeatable, is_agent=True)
    return Environment(looks, partial(Agent, run))


def _imported(name: str, path: str) -> Any:
    """Return `module:object` of the environment `name`. Raises ConfigError."""
    module_name, _, object_name = path.partition(":")
    if not module_name or not object_name:
        raise ConfigError(
            f"environment {name!r}: write module:Class, {{agent: module:function}}, or "
            f"{' or '.join(BUILT_IN)}"
        )
    try:
        return getattr(importlib.import_module(module_name), object_name)
    except Exception as error:  # a user's module may raise anything
        raise ConfigError(
            f"environment {name!r}: cannot be imported: {type(error).__name__}: {error}"
        ) from error


def load_environment(name: str, timeout_seconds: float = 10.0) -> Environment:
    """Return the environment `module:Class`, an agent, or a built-in one.

    timeout_seconds   the caller's limit of one answer; built-in ones end programs before that

    Raises ConfigError naming the environment and what is wrong.
    """
    where = f"environment {name!r}"
    if name in BUILT_IN:
        check_sandbox(where)
    if name.startswith((AGENT, VERIFIERS)):
        return _load_agent(name)
    from pydantic import validate_call

    kind = _imported(name, BUILT_IN.get(name, name))
    if not inspect.isclass(kind):
        raise ConfigError(f"{where}: it is not a class")
    has_step = callable(getattr(kind, "step", None))
    methods = {
        method: function
        for method, function in inspect.getmembers(kind, callable)
        if not method.startswith("_") and method not in RESERVED and not inspect.isclass(function)
    }
    if has_step and methods:
        raise ConfigError(
            f"{where}: it has the method step and the tools {', '.join(methods)}; begin names of "
            "methods that are not tools with an underscore"
        )
    if not has_step and not methods:
        raise ConfigError(f"{where}: it has neither a tool (a public method) nor the method step")
    for method, function in methods.items():
        is_plain = inspect.isfunction(inspect.getattr_static(kind, method))
        if not is_plain or inspect.iscoroutinefunction(function):
            raise ConfigError(f"{where}: its tool {method} must be a method, and not async")
    make: Callable[..., Any] = kind
    if name in BUILT_IN:
        make = partial(make, timeout_seconds)
    is_stateless = bool(getattr(kind, "stateless", False))
    looks = Described(
        name,
        is_repeatable=is_stateless or bool(getattr(kind, "repeatable", False)),
        is_stateless=is_stateless,
        has_step=has_step,
        has_reset=callable(getattr(kind, "reset", None)),
    )
    tools = {method: validate_call(function) for method, function in methods.items()}
    return Environment(looks, make, tools)
