"""Base class of all request body schemas."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

from inference_svc.gateway.unsupported_options import IGNORED, NEUTRAL

FIRST_ERROR: Any = Field(fail_fast=True)
"""Annotates a list: validation stops at its first wrong element; a million wrong elements would give as many errors."""


class BodyModel(BaseModel):
    """An object that refuses unknown members, and reports at most one of them.

    Subclasses annotate every list with ``FIRST_ERROR``, so that the schema and not the sender bounds the number of
    errors. ``neutral_options`` and ``ignored_options`` are the API's options without a field here, as ``parse`` treats
    them.
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
