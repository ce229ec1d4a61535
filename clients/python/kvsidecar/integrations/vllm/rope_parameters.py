"""RoPE parameters of a model configuration, for the namespace."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

_SETTINGS = ("rope_parameters", "rope_scaling", "rope_theta")
_LONG = ("longrope", "su")


def rope_parameters(text: Mapping[str, Any], max_model_len: int) -> str:
    """Return a text model's RoPE parameters as JSON; empty for a model without RoPE.

    For LongRoPE, the result includes ``max_model_len``, because vLLM uses it to choose the long or the short factors
    for all requests.
    """
    rope: dict[str, Any] = {name: text[name] for name in _SETTINGS if text.get(name)}
    if not rope:
        return ""
    if any(f'"{kind}"' in json.dumps(rope, default=str) for kind in _LONG):
        rope["max_model_len"] = max_model_len
    return json.dumps(rope, sort_keys=True, default=str)
