"""Harness for `verifiers` that asks the model in its own process, without tools.

Those of verifiers start a program for each turn of the model, which takes seconds of a CPU, and
install it from a package index.
"""

from __future__ import annotations

from typing import Any

from openai import APIError, AsyncOpenAI
from verifiers.v1.configs.harness import HarnessConfig
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harness import Harness
from verifiers.v1.runtimes import ProgramResult

__all__ = ["ChatHarness"]


class ChatHarness(Harness[HarnessConfig]):  # type: ignore[misc]
    """Sends the conversation to the model once. verifiers calls it again for each turn."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: Any,
    ) -> ProgramResult:
        """Ask the model."""
        system, prompt = self.resolve_prompt(data)
        messages: list[Any] = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += map(message_to_wire, prompt or [])
        try:
            async with AsyncOpenAI(base_url=endpoint, api_key=secret) as client:
                await client.chat.completions.create(model=ctx.model, messages=messages)
        except APIError as error:
            return ProgramResult(1, "", str(error))
        return ProgramResult(0, "", "")
