"""Tokens between two turns of a conversation, for a policy that continues its own tokens.

Sampled tokens are never decoded and encoded again, because encoding does not invert decoding.
Instead the chat template is rendered with a mark as the assistant's turn, and what follows the mark
is encoded: the end of that turn, the messages of an environment, and the start of the next turn.
This is right only for templates in which it does not depend on the messages before. `findings`
checks this, and what else differs between templates.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from dapo_megatron.types import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, Any]
"""With the keys `role` and `content`."""
_MARK_END = "-OF-THE-MODEL"
MARK = "TURN-{}" + _MARK_END
SYSTEM = {"role": "system", "content": "be brief"}
QUESTION = {"role": "user", "content": "?"}
EARLIER = ({"role": "user", "content": "what?"}, {"role": "assistant", "content": "this"})


@dataclass(frozen=True)
class Conversation:
    """Continues the turns of a model whose chat template the tokenizer has.

    stop_ids         tokens at which the engine ends a turn
    template_kwargs  of the chat template (data.chat_template_kwargs)
    tools            descriptions of tools, as the template takes them
    """

    tokenizer: PreTrainedTokenizerBase
    stop_ids: Collection[int]
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    tools: Sequence[Mapping[str, Any]] | None = None

    def between(self, last_token: int, messages: Sequence[Message]) -> list[int]:
        """Return the tokens from a turn that ended with `last_token` to the start of the next one,
        with `messages` between the two.

        A turn that was cut off is closed first. Raises DataError if the template cannot render
        them.
        """
        tokens = self.encode(self.after_turn(messages))
        is_closed = last_token == tokens[0] or (self._has_end and last_token in self.stop_ids)
        return tokens[1:] if is_closed else tokens

    @cached_property
    def _has_end(self) -> bool:
        """Whether the template ends a turn with a token that means nothing else, so that another
        stop token stands for it. Llama has several such tokens. In GLM the token is the role of the
        next message."""
        end = self.encode(self.after_turn((), starts_turn=False))
        return bool(end) and end[0] in self.stop_ids

    def opening(self, text: str) -> list[int]:
        """Return the tokens that complete a prompt of `prompt_without_end`: a text of the
        environment, and the start of the model's turn."""
        message = {"role": "user", "content": MARK.format(0) + self.harmless(text)}
        _, rest = self._around_mark([message], "the user's message")
        return self.encode(rest)

    def prompt_without_end(self, messages: Sequence[Message]) -> str:
        """Return the text of a prompt up to the end of its last message, to which an environment
        adds. Raises DataError if that message is not the user's."""
        if not messages or messages[-1]["role"] != "user":
            raise DataError("the last message is not the user's, so that no text can follow it")
        *before, last = messages
        marked = {**last, "content": f"{last['content']}{MARK.format(0)}"}
        text, _ = self._around_mark([*before, marked], "the user's message")
        return text

    def _around_mark(
        self, messages: Sequence[Message], what: str, *, starts_turn: bool = True
    ) -> tuple[str, str]:
        """Return the text before and after the mark in a conversation. `what` has the mark."""
        text = self.render(messages, starts_turn=starts_turn)
        before, shown_mark, rest = text.rpartition(MARK.format(0))
        if not shown_mark:
            raise DataError(f"the chat template does not show the text of {what}")
        return before, rest

    def harmless(self, text: str) -> str:
        """Return a text without the special tokens that it spells out, so that what a tool prints
        cannot end its message. Our own mark is broken up, too."""
        text = text.replace(_MARK_END, f"- {_MARK_END[1:]}")
        for token in self._special:
            text = text.replace(token, f"{token[0]} {token[1:]}")
        return text

    @cached_property
    def _special(self) -> list[str]:
        added = self.tokenizer.added_tokens_decoder.items()
        return [t.content for number, t in added if t.special or number in self.stop_ids]

    def shortened(self, text: str, max_tokens: int) -> str:
        """Return a text of about `max_tokens` tokens at most. A longer one loses its middle."""
        tokens = self.encode(text)
        if len(tokens) <= max_tokens:
            return text
        start, end = tokens[: (max_tokens + 1) // 2], tokens[len(tokens) - max_tokens // 2 :]
        left_out = len(tokens) - max_tokens
        decode = self.tokenizer.decode
        return f"{decode(start)} ... ({left_out:,} tokens left out) ... {decode(end)}"

    def after_turn(
        self,
        messages: Sequence[Message],
        before: Sequence[Message] = (QUESTION,),
        *,
        starts_turn: bool = True,
    ) -> str:
        """Return the text after a turn of the model in a conversation that begins with `before`."""
        turn = {"role": "assistant", "content": MARK.format(0)}
        _, rest = self._around_mark(
            [*before, turn, *messages], "an assistant's turn", starts_turn=starts_turn
        )
        return rest

    def render(self, messages: Sequence[Message], *, starts_turn: bool) -> str:
        """Return the text of a conversation. Raises DataError if the template cannot render it."""
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    list(messages),
                    tools=None if self.tools is None else list(self.tools),
                    add_generation_prompt=starts_turn,
                    tokenize=False,
                    **self.template_kwargs,
                )
            )
        except Exception as error:  # a template is a program of the model's author
            roles = ", ".join(str(message["role"]) for message in messages)
            raise DataError(
                f"the chat template failed for the roles {roles}: {type(error).__name__}: {error}"
            ) from error

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text that may contain special ones."""
        tokens: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return tokens


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check of a template. `error` is empty if the check passed, and `note` is what
    else to know."""

    check: str
    error: str = ""
    note: str = ""


def findings(conversation: Conversation, role: str) -> Iterator[Finding]:
    """Check that conversations can be continued whose messages between turns have `role` ("tool" or
    "user"). Yields the findings up to the first error that the others depend on."""
    message, messages = _messages(role, 1), _messages(role, 2)
    try:
        tail = conversation.after_turn(message)
        tail_of_both = conversation.after_turn(messages)
    except DataError as error:
        yield Finding(f"messages of the role {role}", str(error))
        return
    yield Finding(f"messages of the role {role}")
    yield _stops(conversation, tail)
    yield _independent(conversation, message, tail)
    missing = [each["content"] for each in messages if each["content"] not in tail_of_both]
    yield Finding(
        "several messages after one turn", f"the template leaves out {missing}" if missing else ""
    )
    whole = "a conversation of three turns"
    yield _whole(conversation, messages, "{}", f"{whole} without thinking")
    yield _whole(conversation, messages, "<think>\nhm\n</think>\n\n{}", f"{whole} with thinking")


def _messages(role: str, number: int) -> list[Message]:
    return [{"role": role, "content": f"result {place}"} for place in range(number)]


def _stops(conversation: Conversation, tail: str) -> Finding:
    """Check that the engine ends a turn where the template does."""
    check = "a turn ends with a stop token"
    first = conversation.encode(tail)[0]
    shown = conversation.tokenizer.convert_ids_to_tokens(first)
    if first in conversation.stop_ids:
        return Finding(check, note=f"{shown!r}")
    return Finding(
        check,
        f"the template ends it with {shown!r}, which is no stop token, so the model would go on "
        "and write the next message itself. Add it to eos_token_id in generation_config.json",
    )


def _independent(conversation: Conversation, messages: list[Message], tail: str) -> Finding:
    """Check that what follows a turn does not depend on what was before."""
    check = "what follows a turn depends on no other turn"
    for history in ([*EARLIER, QUESTION], [*EARLIER, *messages], [SYSTEM, QUESTION]):
        try:
            other = conversation.after_turn(messages, history)
        except DataError:  # for example without system messages; such rows are refused when loaded
            continue
        if other != tail:
            return Finding(
                check, f"after {len(history)} messages it is {other!r}, after one {tail!r}"
            )
    return Finding(check)


def _whole(conversation: Conversation, messages: list[Message], text: str, check: str) -> Finding:
    """Compare a conversation of three turns, continued token by token, with its whole render."""
    history: list[Message] = [QUESTION]
    tokens = conversation.encode(conversation.render(history, starts_turn=True))
    turns = [text.format(MARK.format(number)) for number in range(3)]
    for turn in turns:
        history += [{"role": "assistant", "content": turn}, *messages]
        closing = conversation.encode(conversation.after_turn(messages))[0]
        tokens += [*conversation.encode(turn), closing]
        tokens += conversation.between(closing, messages)
    rendered = conversation.render(history, starts_turn=True)
    if tokens == conversation.encode(rendered):
        return Finding(check)
    # Templates may drop thinking and empty thinking from earlier turns. Sampled tokens stay as they
    # are. But everything after a turn must be there, as it was inserted.
    inserted = conversation.after_turn(messages, starts_turn=False)
    for number in range(3):
        _, _, rendered = rendered.partition(MARK.format(number))
        if not rendered.startswith(inserted):
            after = rendered[: len(inserted)]
            return Finding(check, f"turn {number + 1} is followed by {after!r}, not {inserted!r}")
    return Finding(check, note="the template changes earlier turns. They stay as they were sampled")
