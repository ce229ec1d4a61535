"""pydantic-ai over chats and responses: tool loops, typed answers, streams."""

from __future__ import annotations

from typing import Any, Literal

import pytest

from tests.frameworks.served_node import Server

pydantic_ai = pytest.importorskip("pydantic_ai", reason="pydantic-ai is not here; make test-frameworks runs it")
pydantic = pytest.importorskip("pydantic")


class Weather(pydantic.BaseModel):  # type: ignore[name-defined, misc]
    """Tells the weather of a day."""

    model_config = pydantic.ConfigDict(extra="forbid")
    city: Literal["Oslo", "Rome"]


@pytest.fixture(params=["chat", "responses"])
def model(request: pytest.FixtureRequest, server: Server) -> Any:
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=f"{server.url}/v1", api_key="none")
    kind = OpenAIChatModel if request.param == "chat" else OpenAIResponsesModel
    return kind(server.model, provider=provider)


@pytest.mark.asyncio
async def test_a_tool_loop_ends_with_the_class(model: Any) -> None:
    """The class is a tool too, so every call is forced: perhaps the function's once, then the answer's."""
    asked: list[str] = []
    agent = pydantic_ai.Agent(model, output_type=Weather, retries=3, model_settings={"max_tokens": 200})

    async def until_asked(_: Any, tool: Any) -> Any:
        return None if asked else tool

    @agent.tool_plain(prepare=until_asked)
    def weather(city: Literal["Oslo", "Rome"]) -> str:
        """Tells the weather of a city."""
        asked.append(city)
        return "dry"

    result = await agent.run("How is the weather in Oslo? Answer with the class at last.")
    assert isinstance(result.output, Weather)
    assert result.usage.input_tokens > 0


@pytest.mark.asyncio
async def test_texts_and_streams_go_on(model: Any) -> None:
    agent = pydantic_ai.Agent(model, model_settings={"max_tokens": 8})
    first = await agent.run("What is the capital of Germany?")
    async with agent.run_stream("And of France?", message_history=first.all_messages()) as second:
        parts = [part async for part in second.stream_text(delta=True)]
    assert isinstance("".join(parts), str)
    assert second.usage.output_tokens > 0


@pytest.mark.asyncio
async def test_native_output_is_the_class(model: Any) -> None:
    agent = pydantic_ai.Agent(
        model, output_type=pydantic_ai.NativeOutput(Weather), model_settings={"max_tokens": 60}
    )  # fmt: skip
    assert isinstance((await agent.run("How is the weather in Oslo?")).output, Weather)
