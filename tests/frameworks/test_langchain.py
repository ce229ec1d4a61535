"""LangChain's ChatOpenAI: answers, streams, tools and structured output."""

from __future__ import annotations

import uuid
from typing import Any

import pytest

from tests.frameworks.served_node import Server

langchain_openai = pytest.importorskip("langchain_openai", reason="LangChain is not here; make test-frameworks runs it")
pydantic = pytest.importorskip("pydantic")


class Weather(pydantic.BaseModel):  # type: ignore[name-defined, misc]
    """Tells the weather of a day."""

    model_config = pydantic.ConfigDict(extra="forbid")  # or a small model invents properties until it is cut off
    city: str = pydantic.Field(max_length=12)
    days: int = pydantic.Field(ge=1, le=9)


def chat(server: Server, **options: Any) -> Any:
    return langchain_openai.ChatOpenAI(
        base_url=f"{server.url}/v1", api_key="none", model=server.model, max_retries=0, temperature=0,
        **{"max_tokens": 150, **options},
    )  # fmt: skip


def test_answers_and_streams_agree(server: Server) -> None:
    model = chat(server, max_tokens=8)
    whole = model.invoke("What is the capital of Germany?")
    assert "".join(part.content for part in model.stream("What is the capital of Germany?")) == whole.content
    assert whole.usage_metadata["input_tokens"] > 0


def test_a_stream_says_what_came_from_the_cache(server: Server) -> None:
    """As clients/README.md has it: with ``stream_usage``, and a salt whose cache is nobody else's."""
    model = chat(server, max_tokens=8, stream_usage=True, extra_body={"cache_salt": uuid.uuid4().hex})

    def cached() -> int:
        told = [part.usage_metadata for part in model.stream("What is the capital of Germany?") if part.usage_metadata]
        return int(told[-1]["input_token_details"].get("cache_read", 0))

    assert cached() == 0
    assert cached() > 0


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output_is_the_class(server: Server, method: str) -> None:
    structured = chat(server).with_structured_output(Weather, method=method)
    found = structured.invoke("How is the weather in Oslo for 3 days?")
    assert isinstance(found, Weather)


@pytest.mark.parametrize("choice", ["any", "Weather"])
def test_tools_are_called_and_their_results_read(server: Server, choice: str) -> None:
    model = chat(server).bind_tools([Weather], tool_choice=choice, strict=True, parallel_tool_calls=False)
    answer = model.invoke("How is the weather in Oslo for 3 days?")
    (call,) = answer.tool_calls
    assert isinstance(Weather(**call["args"]), Weather)
    told: list[Any] = [("user", "How is the weather?"), answer]
    told.append({"role": "tool", "tool_call_id": call["id"], "content": "dry"})
    assert isinstance(chat(server, max_tokens=4).invoke(told).content, str)


def test_strict_tools_may_be_left_alone(server: Server) -> None:
    answer = chat(server, max_tokens=10).bind_tools([Weather], strict=True).invoke("Say hello.")
    assert answer.content or answer.tool_calls or answer.invalid_tool_calls
