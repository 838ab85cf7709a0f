"""Chat templates and special tokens of model families, on a tokenizer of bytes.

tests/contracts/test_renderers.py compares them with another implementation of these families.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from dapo_megatron.data.conversation import Conversation, Message

THOUGHT = """
{%- set last = namespace(user=-1) %}
{%- for m in messages %}
{%- if m.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}
{%- endfor %}
{%- macro thought(m) %}
{%- if m.reasoning_content is string %}{{ m.reasoning_content }}
{%- elif '</think>' in m.content %}{{ m.content.split('</think>')[0].split('<think>')[-1] }}
{%- endif %}
{%- endmacro %}
{%- macro said(m) %}
{%- if m.reasoning_content is string or '</think>' not in m.content %}{{ m.content }}
{%- else %}{{ m.content.split('</think>')[-1].lstrip('\n') }}
{%- endif %}
{%- endmacro %}"""
"""The last message of the user, and what the model thought and said."""

QWEN3 = """
{%- if tools or messages[0].role == 'system' %}
{{- '<|im_start|>system\n' }}
{%- if messages[0].role == 'system' %}
{{- messages[0].content + ('\n\n' if tools else '') }}
{%- endif %}
{%- if tools %}
{{- '# Tools\n\nYou may call one or more functions to assist with the user query.\n\n' }}
{{- 'You are provided with function signatures within <tools></tools> XML tags:\n<tools>' }}
{%- for tool in tools %}{{ '\n' + tool | tojson }}{% endfor %}
{{- '\n</tools>\n\nFor each function call, return a json object with function name and arguments' }}
{{- ' within <tool_call></tool_call> XML tags:\n<tool_call>\n' }}
{{- '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>' }}
{%- endif %}
{{- '<|im_end|>\n' }}
{%- endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}
{%- if messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}
{%- elif m.role == 'assistant' %}
{{- '<|im_start|>assistant\n' }}
{%- if loop.index0 > last.user and (loop.last or thought(m)) %}
{{- '<think>\n' + thought(m).strip('\n') + '\n</think>\n\n' + said(m).lstrip('\n') }}
{%- else %}{{ said(m) }}
{%- endif %}
{%- for call in m.tool_calls or [] %}
{{- '\n' if said(m) or not loop.first else '' }}
{{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson + '}\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- elif m.role == 'user' or not loop.first %}
{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\n' }}
{%- if enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}
{%- endif %}"""

LLAMA3 = """
{%- macro head(role) %}{{ '<|start_header_id|>' + role + '<|end_header_id|>\n\n' }}{% endmacro %}
{%- set starts_with_system = messages[0].role == 'system' %}
{{- '<|begin_of_text|>' + head('system') }}
{%- if tools %}{{ 'Environment: ipython\n' }}{% endif %}
{{- 'Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n' }}
{%- if starts_with_system %}{{ messages[0].content | trim }}{% endif %}
{{- '<|eot_id|>' }}
{%- for m in messages %}
{%- if m.role == 'tool' %}{{ head('ipython') + m.content | tojson + '<|eot_id|>' }}
{%- elif m.tool_calls %}
{%- if m.tool_calls | length != 1 %}{{ raise_exception('only one call in a turn') }}{% endif %}
{%- set function = m.tool_calls[0].function %}
{{- head('assistant') + '{"name": "' + function.name + '", "parameters": ' }}
{{- function.arguments | tojson + '}<|eot_id|>' }}
{%- elif not loop.first or not starts_with_system %}
{{- head(m.role) }}
{%- if tools and loop.index0 == (1 if starts_with_system else 0) %}
{{- 'Given the following functions, please respond with a JSON for a function call with its ' }}
{{- 'proper arguments that best answers the given prompt.\n\nRespond in the format ' }}
{{- '{"name": function name, "parameters": dictionary of argument name and its value}.' }}
{{- 'Do not use variables.\n\n' }}
{%- for tool in tools %}{{ tool | tojson(indent=4) + '\n\n' }}{% endfor %}
{%- endif %}
{{- m.content | trim + '<|eot_id|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ head('assistant') }}{% endif %}"""

GLM45 = """
{{- '[gMASK]<sop>' }}
{%- if tools %}
{{- '<|system|>\n# Tools\n\nYou may call one or more functions to assist with the user query.\n' }}
{{- '\nYou are provided with function signatures within <tools></tools> XML tags:\n<tools>\n' }}
{%- for tool in tools %}{{ tool | tojson + '\n' }}{% endfor %}
{{- '</tools>\n\nFor each function call, output the function name and arguments within the ' }}
{{- 'following XML format:\n<tool_call>{function-name}\n' }}
{%- for number in (1, 2) %}
{{- '<arg_key>{arg-key-%d}</arg_key>\n' | format(number) }}
{{- '<arg_value>{arg-value-%d}</arg_value>\n' | format(number) }}
{%- endfor %}
{{- '...\n</tool_call>' }}
{%- endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}
{%- if messages[loop.index0 - 1].role != 'tool' %}{{ '<|observation|>' }}{% endif %}
{{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
{%- elif m.role == 'assistant' %}
{%- set thinking = thought(m).strip() if loop.index0 > last.user else '' %}
{{- '<|assistant|>\n<think>' + thinking + '</think>' }}
{%- if said(m).strip() %}{{ '\n' + said(m).strip() }}{% endif %}
{%- for call in m.tool_calls or [] %}
{{- '\n<tool_call>' + call.function.name + '\n' }}
{%- for name, value in call.function.arguments.items() %}
{{- '<arg_key>' + name + '</arg_key>\n<arg_value>' }}
{{- (value if value is string else value | tojson) + '</arg_value>\n' }}
{%- endfor %}
{{- '</tool_call>' }}
{%- endfor %}
{%- else %}
{{- '<|' + m.role + '|>\n' + m.content }}
{%- if m.role == 'user' and enable_thinking is false and not m.content.endswith('/nothink') %}
{{- '/nothink' }}
{%- endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|assistant|>' + ('\n<think></think>' if enable_thinking is false else '') }}
{%- endif %}"""


@dataclass(frozen=True)
class Family:
    """A family's template and tokens.

    special      tokens that decoding can leave out; the first `num_stops` of them end a turn
    added        other tokens of several letters
    is_parallel  whether a turn can have several calls
    """

    template: str
    special: tuple[str, ...]
    num_stops: int
    added: tuple[str, ...] = ()
    is_parallel: bool = True

    @property
    def thinks(self) -> bool:
        return "<think>" in self.added

    @property
    def stops(self) -> list[str]:
        return list(self.special[: self.num_stops])


TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
ARGUMENTS = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
FAMILIES = {
    "qwen3": Family(THOUGHT + QWEN3, ("<|im_end|>", "<|endoftext|>", "<|im_start|>"), 2, TAGS),
    "llama3": Family(
        LLAMA3,
        (
            *("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|begin_of_text|>"),
            *("<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>"),
        ),
        3,
        is_parallel=False,
    ),
    "glm45": Family(
        THOUGHT + GLM45,
        (
            *("<|endoftext|>", "<|user|>", "<|observation|>", "<|assistant|>", "<|system|>"),
            *("[gMASK]", "<sop>"),
        ),
        3,
        (*TAGS, *ARGUMENTS),
    ),
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Adds \u201cnumbers\u201d.",
            "parameters": {
                "type": "object",
                "properties": {"number": {"type": "integer"}, "text": {"type": "string"}, **more},
                "required": ["number"],
            },
        },
    }
    for name, more in {
        "add": {},
        "add_all": {"numbers": {"type": "array"}, "options": {"type": "object"}},
    }.items()
]


def byte_tokenizer(
    template: str, special: Sequence[str], added: Sequence[str] = ()
) -> PreTrainedTokenizerBase:
    """Return a tokenizer whose tokens are bytes, `special` ones and `added` ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    plain = Tokenizer(models.BPE({letter: place for place, letter in enumerate(alphabet)}, []))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=plain, chat_template=template, clean_up_tokenization_spaces=False
    )
    tokenizer.add_special_tokens({"additional_special_tokens": list(special)})
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in added])
    return tokenizer


def family_conversation(
    name: str, kwargs: Mapping[str, Any] | None = None, tools: Sequence[Any] | None = None
) -> Conversation:
    """Return a conversation of a family, with template variables and tools."""
    family = FAMILIES[name]
    tokenizer = byte_tokenizer(family.template, family.special, family.added)
    stops = tokenizer.convert_tokens_to_ids(family.stops)
    return Conversation(tokenizer, stops, kwargs or {}, tools)


def sampled_turn(
    talk: Conversation, history: Sequence[Message], turn: Message, following: Sequence[Message]
) -> list[int]:
    """Return the tokens of a turn after `history` as the model would sample them, up to and
    including the token that ends it before the messages `following`."""
    prompt = talk.encode(talk.render(history, starts_turn=True))
    whole = talk.encode(talk.render([*history, turn], starts_turn=False))
    assert whole[: len(prompt)] == prompt
    end = talk.encode(talk.after_turn(following))[0]
    tokens = whole[len(prompt) :]
    return [*(tokens[: tokens.index(end)] if end in tokens else tokens), end]
