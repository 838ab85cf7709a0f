"""`doctor template`: check that a model's chat template can continue conversations of several
turns, token by token."""

from __future__ import annotations

import json
from pathlib import Path

from dapo_megatron.config import Config
from dapo_megatron.data.conversation import Finding, findings
from dapo_megatron.doctor.check_result import Check, Status, table, to_dict, worst
from dapo_megatron.files import write_result
from dapo_megatron.literal_console import LiteralConsole
from dapo_megatron.run.build import conversation_of, environments_of

ROLES = {"tool": "results of tools", "user": "messages of a user"}
REMEDY = "write another chat_template.jinja into the folder, or answer as the other role"


def command(config: Config, json_file: Path | None) -> bool:
    """Print the findings for each environment of the config, or without any for each role of
    messages between turns. Return whether all environments, or at least one role, have no error.
    Raises DataError naming model.path if there is no template."""
    checks = {}
    if config.environments:
        for name, environment in environments_of(config).items():
            conversation = conversation_of(config, environment)
            checks[name] = list(map(_check, findings(conversation, environment.role)))
    else:
        conversation = conversation_of(config)
        for role, what in ROLES.items():
            checks[f"{what} ({role})"] = list(map(_check, findings(conversation, role)))
    LiteralConsole().print(table(f"chat template of {config.model.path}", checks))
    write_result(
        json_file, json.dumps({role: to_dict(of_role) for role, of_role in checks.items()})
    )
    is_right = [worst(each) is not Status.FAIL for each in checks.values()]
    return all(is_right) if config.environments else any(is_right)


def _check(finding: Finding) -> Check:
    if finding.error:
        return Check(finding.check, Status.FAIL, finding.error, REMEDY)
    return Check(finding.check, Status.OK, finding.note or "yes")
