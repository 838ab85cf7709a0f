"""Moved to dapo_megatron/codec.py; this name goes once nobody imports it."""

from dapo_megatron.codec import group_from_json, group_to_json

__all__ = ["group_from_json", "group_to_json"]
