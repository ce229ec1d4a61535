"""Structured output options: OpenAI's ``response_format``, vLLM's ``structured_outputs`` and ``guided_*``."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from kvsidecar.errors import InvalidRequest, UnsupportedOption
from kvsidecar.inference.v1 import inference_pb2 as pb
from kvsidecar.requests import MAX_GRAMMAR_BYTES
from pydantic import Field

from inference_svc.gateway.body_model import FIRST_ERROR, BodyModel

_ANY_OBJECT = {"type": "object"}


class JsonSchema(BodyModel):
    """``response_format.json_schema``.

    Answers always follow the schema, even if ``strict`` is false. ``name`` and ``description`` have no effect.
    """

    name: str = ""
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(BodyModel):
    """``response_format``. As in llama.cpp, ``json_object`` may have a ``schema``."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")

    def grammar(self) -> pb.Grammar | None:
        if self.type == "text":
            return None
        if self.type == "json_object":
            return json_grammar(self.schema_ or _ANY_OBJECT)
        if self.json_schema is None or self.json_schema.schema_ is None:
            raise InvalidRequest(
                "response_format.json_schema.schema is missing", param="response_format.json_schema.schema"
            )
        return json_grammar(self.json_schema.schema_)


class StructuredOutputs(BodyModel):
    """vLLM's ``structured_outputs``.

    Requests that set ``structural_tag`` or ``disable_additional_properties`` are refused.
    """

    json_: str | dict[str, Any] | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: Annotated[list[str], FIRST_ERROR] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    structural_tag: Any = None

    def kinds(self) -> dict[str, Any]:
        """Return each kind of grammar with its value, or None if the kind is not set. Raises UnsupportedOption.

        The kinds are json, regex, choice and grammar.
        """
        for name in ("structural_tag", "disable_additional_properties"):
            if getattr(self, name):
                where = f"structured_outputs.{name}"
                raise UnsupportedOption(f"{where} is not supported by this server; leave it out", param=where)
        if self.json_object and self.json_ is None:
            return {"json": _ANY_OBJECT, "regex": self.regex, "choice": self.choice, "grammar": self.grammar}
        return {"json": self.json_, "regex": self.regex, "choice": self.choice, "grammar": self.grammar}

    @property
    def whitespace(self) -> str | None:
        return "" if self.disable_any_whitespace else self.whitespace_pattern


def one_grammar(
    response_format: ResponseFormat | None,
    structured: StructuredOutputs | None,
    guided: dict[str, Any],
    guided_whitespace: str | None,
) -> tuple[str, pb.Grammar | None]:
    """Return the name of the option that sets the request's grammar, and the grammar.

    Raises InvalidRequest if several options set a grammar, or if the grammar is too large.
    """
    found: list[tuple[str, pb.Grammar]] = []
    wanted = response_format.grammar() if response_format is not None else None
    if wanted is not None:
        found.append(("response_format", wanted))
    if structured is not None:
        kinds, space = structured.kinds(), structured.whitespace
        found += [(f"structured_outputs.{k}", _grammar(k, v, space)) for k, v in kinds.items() if v is not None]
    found += [(f"guided_{k}", _grammar(k, v, guided_whitespace)) for k, v in guided.items() if v is not None]
    if len(found) > 1:
        names = " and ".join(name for name, _ in found)
        raise InvalidRequest(f"{names} are set; the answer can be kept to one of them", param=found[1][0])
    if not found:
        return "", None
    (name, grammar), size = found[0], found[0][1].ByteSize()
    if size > MAX_GRAMMAR_BYTES:
        raise InvalidRequest(f"{name} has {size} bytes; at most {MAX_GRAMMAR_BYTES} are allowed", param=name)
    return name, grammar


def json_grammar(schema: dict[str, Any] | bool | str, whitespace: str | None = None) -> pb.Grammar:
    """Return the grammar of all JSON texts that follow a schema."""
    try:
        text = schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False)
    except RecursionError as error:
        raise InvalidRequest("the JSON schema is nested too deeply") from error
    return pb.Grammar(json_schema=text, json_whitespace=whitespace)


def _grammar(kind: str, value: Any, whitespace: str | None) -> pb.Grammar:
    if kind == "json":
        return json_grammar(value, whitespace)
    if kind == "choice":
        return pb.Grammar(choice=pb.Choices(texts=value))
    return pb.Grammar(regex=value) if kind == "regex" else pb.Grammar(grammar=value)
