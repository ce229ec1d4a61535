"""Base class of all request body schemas."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

from inference_svc.gateway.unsupported_options import IGNORED, NEUTRAL

FIRST_ERROR: Any = Field(fail_fast=True)
"""Annotation of a list: validation stops at the first wrong element.

Without it, a list with a million wrong elements would produce a million errors.
"""


class BodyModel(BaseModel):
    """A JSON object that refuses unknown members. The error names one unknown member at most.

    Subclasses annotate every list with ``FIRST_ERROR``: the schema then bounds the number of errors, whatever the
    sender sends. ``parse`` accepts an option of ``neutral_options`` only with a neutral value, and an option of
    ``ignored_options`` with any value; neither needs a field in the subclass.
    """

    model_config = ConfigDict(extra="forbid")
    neutral_options: ClassVar[Mapping[str, tuple[Any, ...]]] = NEUTRAL
    ignored_options: ClassVar[Collection[str]] = IGNORED

    @model_validator(mode="before")
    @classmethod
    def _first_unknown(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        known = {field.alias or name for name, field in cls.model_fields.items()}
        if len(value) <= len(known):
            return value
        unknown = next(name for name in value if name not in known)  # among the first len(known) + 1
        return {name: part for name in known | {unknown} if (part := value.get(name, cls)) is not cls}
