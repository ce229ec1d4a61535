"""Answers of the model list, in OpenAI's or Anthropic's format.

https://platform.openai.com/docs/api-reference/models, https://platform.claude.com/docs/en/api/models/list
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi.requests import Request
from fastapi.responses import JSONResponse
from kvsidecar.errors import InvalidRequest

from inference_svc.gateway.anthropic_api.error_envelope import uses_messages_format
from inference_svc.gateway.page_limit import page_limit

_DEFAULT_LISTED, _MAX_LISTED = 20, 1000


def models_response(request: Request, entries: Sequence[Mapping[str, Any]]) -> JSONResponse:
    """Return the list of ``openai_fields.model`` entries in the request's format. Raises InvalidRequest."""
    if uses_messages_format(request.scope):
        return JSONResponse(model_page(entries, request.query_params))
    return JSONResponse({"object": "list", "data": entries})


def model_response(request: Request, entry: Mapping[str, Any]) -> JSONResponse:
    """Return one entry in the request's format."""
    return JSONResponse(model_info(entry) if uses_messages_format(request.scope) else entry)


def model_info(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return an entry of the model list in Anthropic's format."""
    created = datetime.datetime.fromtimestamp(entry["created"], datetime.UTC)
    at = created.isoformat(timespec="seconds").replace("+00:00", "Z")
    return {"type": "model", "id": entry["id"], "display_name": entry["id"], "created_at": at}


def model_page(entries: Sequence[Mapping[str, Any]], asked: Mapping[str, str]) -> dict[str, Any]:
    """Return the page of models that the query's ``limit``, ``after_id`` and ``before_id`` name.

    Raises InvalidRequest.
    """
    size, names = page_limit(asked, _DEFAULT_LISTED, _MAX_LISTED), [entry["id"] for entry in entries]
    for name in ("after_id", "before_id"):
        if name in asked and asked[name] not in names:
            raise InvalidRequest(f"{name} is {asked[name][:80]!r}, which is no model of this list", param=name)
    start = names.index(asked["after_id"]) + 1 if "after_id" in asked else 0
    end = names.index(asked["before_id"]) if "before_id" in asked else len(names)
    backwards = "before_id" in asked and "after_id" not in asked
    at = range(max(start, end - size), end) if backwards else range(start, min(end, start + size))
    data = [model_info(entries[i]) for i in at]
    return {
        "data": data,
        "has_more": len(data) < end - start,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
    }
