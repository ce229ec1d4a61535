"""Tool call formats: detection in the chat template, markers, parameter schemas."""

from __future__ import annotations

import json
import re
from typing import Any, Literal

from kvsidecar.errors import InvalidRequest
from kvsidecar.inference.v1 import inference_pb2 as pb

from inference_svc.sequence.detokenizer import CallMarkers
from inference_svc.tool_calls.json_call_parser import HERMES, HERMES_END, LLAMA, MISTRAL
from inference_svc.tool_calls.qwen3_coder_arguments import FUNCTION, FUNCTION_END, PARAMETER

ToolCallFormat = Literal["hermes", "llama3_json", "mistral", "qwen3_coder", "json"]
# Texts in a chat template that identify its format. The first format whose text occurs is used.
_TEMPLATE_MARKS: dict[ToolCallFormat, tuple[str, ...]] = {
    "mistral": (MISTRAL,),
    "qwen3_coder": (PARAMETER,),
    "hermes": (HERMES,),
    "llama3_json": (LLAMA, "Environment: ipython", '"parameters": dictionary of argument name'),
}
# Markers of calls. Some models' vocabularies have them as special tokens.
MARKERS: dict[ToolCallFormat, tuple[str, ...]] = {
    "hermes": (HERMES, HERMES_END),
    "llama3_json": (LLAMA,),
    "mistral": (MISTRAL,),
    "qwen3_coder": (HERMES, HERMES_END),
    "json": (),
}
# JSON that begins a call: an object, or a list of objects. In a code fence, its language may be named.
_JSON = ("{", "[{")
_FENCED_JSON = tuple(f"{fence}{json_start}" for fence in ("```", "```json") for json_start in _JSON)
# Markers for the detokenizer: where stop strings have no effect.
CALLS: dict[ToolCallFormat, CallMarkers] = {
    "hermes": CallMarkers((HERMES,), (HERMES_END,)),
    "llama3_json": CallMarkers((LLAMA,), (), _JSON),
    "mistral": CallMarkers((MISTRAL,)),
    "qwen3_coder": CallMarkers((HERMES, FUNCTION), (HERMES_END, FUNCTION_END)),
    "json": CallMarkers((), (), _JSON + _FENCED_JSON),
}
_NOTHING: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


def format_of(template: str | None) -> ToolCallFormat:
    """Detect the format in a chat template; ``json`` if it is unknown."""
    for dialect, signs in _TEMPLATE_MARKS.items():
        if any(sign in (template or "") for sign in signs):
            return dialect
    return "json"


def renders_tools(template: str | None) -> bool:
    """True if the template renders tools."""
    return re.search(r"\btools\b", template or "") is not None


def parameters_schema(tool: pb.Tool) -> dict[str, Any]:
    """Parse the JSON Schema of a function's arguments. Raises InvalidRequest."""
    if not tool.parameters:
        return _NOTHING
    try:
        schema = json.loads(tool.parameters)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"the parameters of the tool {tool.name} are not JSON: {error}", param="tools") from error
    if not isinstance(schema, dict):
        raise InvalidRequest(f"the parameters of the tool {tool.name} must be a JSON schema object", param="tools")
    return {"type": "object"} | schema
