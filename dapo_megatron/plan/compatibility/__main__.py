"""Prints docs/compatibility.md."""

from dapo_megatron.plan.compatibility.check import page

print(page(), end="")
