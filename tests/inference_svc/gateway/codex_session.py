"""A coding agent's session over ``/v1/responses``, as Codex sends it.

The session has the shape of Codex' requests. Each request has ``store: false``, ``include`` of encrypted reasoning,
separate instructions, and the whole history. Two system blocks are developer messages. Of the 20 tools, four are no
functions. There are 12 turns with a tool call and its result; a reasoning item comes before each call. Ids in
``client_metadata`` change with every request. The texts are passages of ``benchmarks/data/real_text.jsonl``, in their
order. In real sessions, tool results have thousands of tokens. The built-in model's context has 4,096 tokens, so all
lengths are about a tenth of the real ones. Equal arguments give equal requests.
"""

from __future__ import annotations

import json
from typing import Any

from tests.inference_svc.gateway.agent_session import TURNS, AgentSession

_KEY = "0197c2f1-2a55-7a10-b1a2-5d1f6a3f0001"
_SKIPPED: list[dict[str, Any]] = [
    {"type": "custom", "name": "apply_patch", "description": "Edits files.", "format": {"type": "text"}},
    {"type": "local_shell"},
    {"type": "namespace", "name": "mcp", "tools": []},
    {"type": "web_search", "external_web_access": False},
]


class CodexSession:
    """The requests of one session. Turns are numbered from 0."""

    def __init__(self, model: str) -> None:
        self._of_agent, self._model = AgentSession(model), model
        functions = [
            {
                "type": "function", "name": tool["name"], "description": tool["description"],
                "parameters": tool["input_schema"], "strict": False,
            }
            for tool in self._of_agent.tools[len(_SKIPPED) :]
        ]  # fmt: skip
        self.tools = [*functions, *_SKIPPED]

    def request(self, turn: int, outputs: list[list[dict[str, Any]]]) -> dict[str, Any]:
        """Return the body of a turn. ``outputs`` has the items of all earlier answers."""
        blocks = ("Sandbox: workspace-write. Network: off.", self._of_agent.system_text)
        items: list[dict[str, Any]] = [_message("developer", "input_text", text) for text in blocks]
        items.append(_message("user", "input_text", "Find out why the test fails."))
        for i, output in enumerate(outputs[:turn]):
            items += output
            for call in output:
                if call["type"] == "function_call":
                    result = {"output": self._of_agent.result_text(i), "metadata": {"exit_code": 0}}
                    items.append(
                        {"type": "function_call_output", "call_id": call["call_id"], "output": json.dumps(result)}
                    )
            if i == TURNS // 2:
                items.append(_message("user", "input_text", "I opened another file."))
        return {
            "model": self._model,
            "instructions": "You are an agent that writes programs.",
            "input": items,
            "tools": self.tools,
            "tool_choice": "auto",
            "parallel_tool_calls": True,
            "reasoning": {"effort": "medium", "summary": "auto"},
            "include": ["reasoning.encrypted_content"],
            "store": False,
            "stream": True,
            "prompt_cache_key": _KEY,
            "text": {"verbosity": "medium"},
            "client_metadata": {"x-codex-turn": str(turn), "x-codex-installation-id": _KEY},
        }

    def recorded_answer(self, turn: int) -> list[dict[str, Any]]:
        """Return the items of the answer to a turn, as in the recorded session."""
        _, text, call = self._of_agent.recorded_answer(turn)
        thought = {"summary": [{"type": "summary_text", "text": f"**Step {turn}**"}], "encrypted_content": "gAAAA"}
        return [
            {"type": "reasoning", "id": f"rs_{turn:024}", **thought},
            _message("assistant", "output_text", text["text"]),
            {
                "type": "function_call", "name": call["name"], "arguments": json.dumps(call["input"]),
                "call_id": f"call_{turn:024}", "id": f"fc_{turn:024}",
            },
        ]  # fmt: skip


def _message(role: str, kind: str, text: str) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}
