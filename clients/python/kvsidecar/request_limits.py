"""Limits of requests that both the gateway and the worker check."""

from __future__ import annotations

from kvsidecar.errors import InvalidRequest

MAX_PROMPT_LOGPROBS = 1 << 18
"""Maximum number of log probabilities of prompts: of the prompts' tokens and their alternatives.

One takes a hundred bytes in the worker, and more in the gateway.
"""
MAX_ANSWER_LOGPROBS = 1 << 19
"""Maximum number of log probabilities of answers that the gateway keeps until the request's answers are complete."""
_MAX_STOPS = 8


def check_num_stops(number: int) -> None:
    """Raise InvalidRequest for more stop strings than a request may have.

    The gateway checks before it copies them into the request of each answer.
    """
    if number > _MAX_STOPS:
        raise InvalidRequest(f"stop has {number} strings; at most {_MAX_STOPS} are allowed", param="stop")
