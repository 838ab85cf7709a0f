"""Messages between the pool and its workers: JSON, one message per line, validated by field.

A worker runs untrusted code on text from a model, so its messages are never unpickled. A message
that is not exactly one of those below counts as a crash of the worker.

    pool    {"graders": [name, ...], "timeout_seconds": number}
    worker  {"refusal": text or null}
    pool    [[grader, response, truth, extra], ...]
    worker  {"score": number, "correct": bool, "pred": text, "parsed": bool}      one per grading,
            or {"cause": "error" or "memory", "detail": text}                     in the same order
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import msgspec

from dapo_megatron.types import Grade

MAX_MESSAGE_BYTES = 2**20
"""Maximum size of a worker's message. A longer one counts as a crash of the worker."""

MAX_SCORE = 1e6
"""Maximum absolute score. Rewards are float32, and advantages divide by the standard deviation of a
group: scores near the end of the float32 range would overflow to infinity."""
MAX_PRED = 4096
"""Maximum length of `Grade.pred` in characters. It goes to the trainer and into the samples."""
MAX_DETAIL = 4096
"""Maximum length of `Failure.detail` in characters."""

_GRADE = dict.fromkeys(("score", "correct", "pred", "parsed")).keys()
_TUPLE, _ITEMS, _FLOAT = _MARKS = ("__tuple__", "__items__", "__float__")


class Failure(NamedTuple):
    """A grading without a grade. The cause is "error" (the grader raised; the detail is the end of
    its traceback) or "memory"."""

    cause: str
    detail: str


def encode_task(grader: str, response: str, truth: str, extra: Mapping[str, Any]) -> bytes:
    """Encode one grading as a part of a batch. Raises TypeError or ValueError if `extra` contains
    values that JSON does not support. Tuples and number keys are supported and arrive unchanged."""
    task = [grader, response, truth, _to_json(extra)]
    try:
        return msgspec.json.encode(task)
    except (UnicodeEncodeError, OverflowError, TypeError):
        # Lone surrogates, large integers, subclasses of plain types. json is eight times slower.
        return json.dumps(task).encode()


def encode_batch(tasks: Iterable[bytes]) -> bytes:
    """Join encoded gradings into one message."""
    return b"[" + b",".join(tasks) + b"]\n"


def decode_batch(message: bytes) -> list[tuple[str, str, str, Mapping[str, Any]]]:
    """Return the gradings of a batch: (grader, response, truth, extra)."""
    return [(*texts, _from_json(extra)) for *texts, extra in json.loads(message)]


def encode(message: Mapping[str, Any]) -> bytes:
    """Encode a message of plain JSON values."""
    return json.dumps(message).encode() + b"\n"


def encode_answer(answer: Grade | Failure) -> bytes:
    """Encode a worker's answer to one grading."""
    if isinstance(answer, Failure):
        return encode(answer._asdict())
    return encode(
        {
            "score": answer.score,
            "correct": answer.correct,
            "pred": answer.pred,
            "parsed": answer.parsed,
        }
    )


def decode_answer(message: bytes) -> Grade | Failure:
    """Decode a worker's answer. Raises ValueError for an invalid message."""
    fields = _object(message)
    if isinstance(fields, dict) and fields.keys() == _GRADE:  # `match` would take 5 us more
        score, correct, pred, parsed = map(fields.__getitem__, _GRADE)
        types = (type(score), type(correct), type(pred), type(parsed))
        if types == (float, bool, str, bool) and abs(score) <= MAX_SCORE and len(pred) <= MAX_PRED:
            return Grade(score, correct, pred, parsed)
    match fields:
        case {"cause": "error" | "memory" as cause, "detail": str(detail)} as fields if (
            len(fields) == 2 and len(detail) <= MAX_DETAIL
        ):
            # Replace control characters: the text goes to logs and terminals.
            return Failure(
                cause, "".join(c if c.isprintable() or c in "\n\t" else "?" for c in detail)
            )
    raise ValueError(f"not an answer of a worker: {message[:100]!r}")


def decode_refusal(message: bytes) -> str | None:
    """Return why a worker cannot serve, or None if it can. Raises ValueError for an invalid
    message."""
    match _object(message):
        case {"refusal": (str() | None) as refusal} as fields if len(fields) == 1:
            return refusal
    raise ValueError(f"not the first message of a worker: {message[:100]!r}")


def _object(message: bytes) -> Any:
    try:
        return json.loads(message)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {message[:100]!r}") from error


def _to_json(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):  # msgspec would write null
        return {_FLOAT: repr(float(value))}
    if isinstance(value, str | int | float | None):  # the common case
        return value
    if isinstance(value, dict | Mapping):
        if all(isinstance(key, str) and key not in _MARKS for key in value):
            return {key: _to_json(item) for key, item in value.items()}
        return {_ITEMS: [[_to_json(key), _to_json(item)] for key, item in value.items()]}
    if isinstance(value, tuple):
        return {_TUPLE: [_to_json(item) for item in value]}
    if isinstance(value, list):
        return [_to_json(item) for item in value]
    raise TypeError(f"{type(value).__name__} is not JSON serializable")


def _from_json(value: Any) -> Any:
    if isinstance(value, str | int | float | None):
        return value
    match value:
        case {"__tuple__": list(items)} as fields if len(fields) == 1:
            return tuple(_from_json(item) for item in items)
        case {"__float__": str(number)} as fields if len(fields) == 1:
            return float(number)
        case {"__items__": list(items)} as fields if len(fields) == 1:
            return {_from_json(key): _from_json(item) for key, item in items}
        case dict():
            return {key: _from_json(item) for key, item in value.items()}
        case list():
            return [_from_json(item) for item in value]
    return value
