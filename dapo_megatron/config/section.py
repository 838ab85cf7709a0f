"""What every section of the configuration is: frozen, strict, unknown keys refused."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

# Upper bounds refuse what would fail late, when a library overflows or a machine has no room.
Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
WholeNumber = Annotated[int, Field(ge=0, le=2**31 - 1)]
Tokens = Annotated[int, Field(ge=1, le=2**24)]
"""Engine and policy allocate by the longest sequence; no model has 16 million positions."""
Processes = Annotated[int, Field(ge=1, le=1024)]
"""Started on one machine."""
Seed = Annotated[int, Field(ge=0, le=2**31 - 1)]
"""numpy takes 32 bits, and each rank adds its number."""
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Beta = Annotated[float, Field(ge=0.0, lt=1.0)]
Positive = Annotated[float, Field(gt=0.0, le=1e30)]
"""Computed with in float32, which ends at 3.4e38."""
NonNegative = Annotated[float, Field(ge=0.0, le=1e30)]
"""See Positive."""
WEEK_SECONDS = 7 * 86_400.0
"""Longest wait. The system call `poll` overflows at 24 days, other timers at 292 years."""
Seconds = Annotated[float, Field(gt=0.0, le=WEEK_SECONDS)]


class Section(BaseModel):
    """A node of the tree: frozen, strict about types, unknown keys refused."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )
