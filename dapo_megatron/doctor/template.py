"""`doctor template`: check that a model's chat template can continue conversations of several
turns, token by token."""

from __future__ import annotations

import json
from pathlib import Path

from dapo_megatron.config import Config
from dapo_megatron.data.conversation import Conversation, Finding, findings
from dapo_megatron.data.prompts import check_template
from dapo_megatron.data.tokenizer import load_tokenizer
from dapo_megatron.doctor.check_result import Check, Status, table, to_dict, worst
from dapo_megatron.files import write_result
from dapo_megatron.literal_console import LiteralConsole
from dapo_megatron.model import stop_ids

ROLES = {"tool": "results of tools", "user": "messages of a user"}
REMEDY = "write another chat_template.jinja into the folder, or answer as the other role"


def command(config: Config, json_file: Path | None) -> bool:
    """Print the findings for each role of messages between turns. Return whether at least one role
    has no error. Raises DataError naming model.path if there is no template."""
    folder = Path(config.model.path)
    tokenizer = load_tokenizer(folder, "model.path")
    check_template(tokenizer, "model.path")
    conversation = Conversation(
        tokenizer, stop_ids(folder, tokenizer.eos_token_id), config.data.chat_template_kwargs
    )
    checks = {
        f"{what} ({role})": list(map(_check, findings(conversation, role)))
        for role, what in ROLES.items()
    }
    LiteralConsole().print(table(f"chat template of {folder}", checks))
    write_result(
        json_file, json.dumps({role: to_dict(of_role) for role, of_role in checks.items()})
    )
    return any(worst(of_role) is not Status.FAIL for of_role in checks.values())


def _check(finding: Finding) -> Check:
    if finding.error:
        return Check(finding.check, Status.FAIL, finding.error, REMEDY)
    return Check(finding.check, Status.OK, finding.note or "yes")
