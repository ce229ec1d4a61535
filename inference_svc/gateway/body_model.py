"""The base of all classes that check a request's body, or a part of one."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

FIRST_ERROR: Any = Field(fail_fast=True)
"""Annotates a list: checking ends at its first wrong element. Otherwise a million wrong ones are a million errors."""


class BodyModel(BaseModel):
    """An object that refuses unknown members, and reports one of them at most.

    Subclasses annotate every list with ``FIRST_ERROR``, so that the number of errors of a body is bounded by its
    classes and not by its sender.
    """

    model_config = ConfigDict(extra="forbid")

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
