"""A group saved as JSON is restored exactly."""

from __future__ import annotations

import json

from hypothesis import given

from dapo_megatron.rollout.serialization import group_from_json, group_to_json
from dapo_megatron.types import Group
from tests.helpers.groups import GROUPS


@given(GROUPS)
def test_a_group_survives_a_json_round_trip(group: Group) -> None:
    decoded = group_from_json(json.loads(json.dumps(group_to_json(group))))
    assert decoded == group
    # repr also distinguishes -0.0 from 0.0, 1 from True, and an enum from its value.
    assert repr(decoded) == repr(group)
