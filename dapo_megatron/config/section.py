"""Base class of the configuration's sections, and their number types with bounds."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError

# Upper bounds refuse values that would only fail later, by an overflow in a library or a lack of
# memory.
Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
WholeNumber = Annotated[int, Field(ge=0, le=2**31 - 1)]
Tokens = Annotated[int, Field(ge=1, le=2**24)]
"""Engine and policy allocate memory for the longest sequence; no model has 16 million positions."""
Processes = Annotated[int, Field(ge=1, le=1024)]
"""Number of processes on one machine."""
Seed = Annotated[int, Field(ge=0, le=2**31 - 1)]
"""numpy takes 32-bit seeds, and each rank adds its index."""
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Beta = Annotated[float, Field(ge=0.0, lt=1.0)]
Positive = Annotated[float, Field(gt=0.0, le=1e30)]
"""Bounded because computations are in float32, whose largest value is 3.4e38."""
NonNegative = Annotated[float, Field(ge=0.0, le=1e30)]
"""Bounded for the same reason as Positive."""
WEEK_SECONDS = 7 * 86_400.0
"""Longest timeout. The system call `poll` overflows at 24 days, other timers at 292 years."""
Seconds = Annotated[float, Field(gt=0.0, le=WEEK_SECONDS)]


def _check_bounds(bounds: tuple[float, float]) -> tuple[float, float]:
    if bounds[0] < bounds[1]:
        return bounds
    raise PydanticCustomError("bounds", "must be [low, high] with low < high")


Bounds = Annotated[tuple[Positive, Positive], Field(strict=False), AfterValidator(_check_bounds)]
"""Lower and upper bound of a ratio. Both are allowed values."""


class Section(BaseModel):
    """Base class of the sections: frozen, strict about types, unknown keys refused."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )
