"""Prints docs/compatibility.md."""

from dapo_megatron.compatibility.check import page

print(page(), end="")
