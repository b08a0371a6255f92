"""The base of every configuration section: frozen, typed, and closed to unknown keys."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictBool, StrictInt


class Section(BaseModel):
    """One section of the configuration. Immutable; an unknown key is a fault; fields are validated even when defaulted."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, protected_namespaces=())


def _no_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("a number is expected, not true/false")
    return value


# Integers and booleans are strict ("8" and 8.0 are faults: they usually are typing errors); floats accept an integer and a
# numeric string, because YAML 1.1 reads `1e-6` as a string.
Bool = StrictBool
Int = StrictInt
PositiveInt = Annotated[StrictInt, Field(gt=0)]
NonNegativeInt = Annotated[StrictInt, Field(ge=0)]
Float = Annotated[float, BeforeValidator(_no_bool), Field(allow_inf_nan=False)]
PositiveFloat = Annotated[float, BeforeValidator(_no_bool), Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, BeforeValidator(_no_bool), Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, BeforeValidator(_no_bool), Field(ge=0, le=1, allow_inf_nan=False)]
