"""Groups survive JSON to the last bit."""

from __future__ import annotations

import json

from hypothesis import given

from dapo_megatron.rollout.serialization import group_from_json, group_to_json
from dapo_megatron.types import Group
from tests.helpers.groups import GROUPS


@given(GROUPS)
def test_a_group_comes_back_equal(group: Group) -> None:
    back = group_from_json(json.loads(json.dumps(group_to_json(group))))
    assert back == group
    # Equality is not enough: -0.0 == 0.0, 1 == True, and a list of an enum's value would do.
    assert repr(back) == repr(group)
