"""A coding agent's session in Anthropic's protocol, as Claude Code sends it.

The session has the shape of recorded sessions. Its system prompt begins with a billing header that changes with every
request. Two system blocks and the last message have ``cache_control``. There are 20 tools, 12 turns with a tool call
and its result, and a ``system`` message between the turns. The texts are passages of
``benchmarks/data/real_text.jsonl``, in their order. In real sessions, tool results have thousands of tokens. The
built-in model's context has 4,096 tokens, so all lengths are about a tenth of the real ones. Equal arguments give equal
requests.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

TURNS, NUM_TOOLS = 12, 20
_TEXTS = Path(__file__).parents[3] / "benchmarks" / "data" / "real_text.jsonl"
_SYSTEM_CHARACTERS, _RESULT_CHARACTERS = 500, 260
_MARK = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
_VERBS = ("Read", "Write", "Edit", "Find", "Run")
_OBJECTS = ("File", "Folder", "Test", "Page")


class AgentSession:
    """The requests of one session. Turns are numbered from 0."""

    def __init__(self, model: str) -> None:
        lines = _TEXTS.read_text(encoding="utf-8").splitlines()
        found = [line for line in map(json.loads, lines) if line["kind"] == "documents"]
        passages = [" ".join(line["parts"]) for line in found[: TURNS + 1]]
        self._model, self.system_text, self._results = model, passages[0][:_SYSTEM_CHARACTERS], passages[1:]
        self.tools = [_tool(verb + noun) for verb in _VERBS for noun in _OBJECTS]

    def request(self, turn: int, answers: list[list[dict[str, Any]]]) -> dict[str, Any]:
        """Return the body of a turn. ``answers`` has the contents of all earlier answers."""
        messages: list[dict[str, Any]] = [{"role": "user", "content": "Find out why the test fails."}]
        for i, answer in enumerate(answers[:turn]):
            results = [
                {
                    "type": "tool_result",
                    "tool_use_id": block["id"],
                    "content": [{"type": "text", "text": self.result_text(i)}],
                }
                for block in answer
                if block["type"] == "tool_use"
            ]
            messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": results}]
            if i == TURNS // 2:
                messages.append({"role": "system", "content": "The user opened another file."})
        last = messages[-1]
        if isinstance(last["content"], list):
            messages[-1] = {**last, "content": [*last["content"][:-1], {**last["content"][-1], **_MARK}]}
        return {
            "model": self._model,
            "max_tokens": 200,
            "system": [
                {"type": "text", "text": _billing_header(turn)},
                {"type": "text", "text": "You are an agent that writes programs."},
                {"type": "text", "text": self.system_text, **_MARK},
            ],
            "messages": messages,
            "tools": self.tools,
            "metadata": {"user_id": "user_1_session_2"},
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            "thinking": {"type": "adaptive"},
            "stream": True,
        }

    def recorded_answer(self, turn: int) -> list[dict[str, Any]]:
        """Return the content of the answer to a turn, as in the recorded session."""
        tool = self.tools[turn * 7 % NUM_TOOLS]["name"]
        call = {"path": f"src/part_{turn}/module.py", "limit": 40 + turn}
        return [
            {"type": "thinking", "thinking": f"Step {turn}.", "signature": "c2lnbmVk"},
            {"type": "text", "text": f"I look at part {turn}."},
            {"type": "tool_use", "id": f"toolu_{turn:024}", "name": tool, "input": call},
        ]

    def result_text(self, turn: int) -> str:
        """Return the text of the tool result in a turn."""
        return self._results[turn][:_RESULT_CHARACTERS]


def _tool(name: str) -> dict[str, Any]:
    properties = {"path": {"type": "string", "maxLength": 24}, "limit": {"type": "integer", "maximum": 999}}
    schema = {"type": "object", "properties": properties, "required": ["path"], "additionalProperties": False}
    return {"name": name, "description": f"{name} by path.", "input_schema": schema}


def _billing_header(turn: int) -> str:
    digest = hashlib.sha256(str(turn).encode()).hexdigest()
    return f"x-anthropic-billing-header: cc_version=2.1.159.{digest[:3]}; cc_entrypoint=cli; cch={digest[3:8]};"
