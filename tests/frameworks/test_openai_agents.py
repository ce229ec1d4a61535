"""The OpenAI Agents SDK over chats and responses: tool loops, streams, typed answers, sessions."""

from __future__ import annotations

from typing import Any, Literal

import openai
import pytest

from tests.frameworks.served_node import Server

agents = pytest.importorskip("agents", reason="the Agents SDK is not here; make test-frameworks runs it")
pydantic = pytest.importorskip("pydantic")


class Weather(pydantic.BaseModel):  # type: ignore[name-defined, misc]
    """Tells the weather of a day."""

    city: Literal["Oslo", "Rome"]


@pytest.fixture(params=["chat", "responses"])
def model(request: pytest.FixtureRequest, server: Server) -> Any:
    agents.set_tracing_disabled(True)
    client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    kind = agents.OpenAIChatCompletionsModel if request.param == "chat" else agents.OpenAIResponsesModel
    return kind(model=server.model, openai_client=client)


def agent(model: Any, asked: list[str], **more: Any) -> Any:
    # Offered until it was called: a small model would call it for ever.
    @agents.function_tool(is_enabled=lambda *_: not asked)
    def weather(city: Literal["Oslo", "Rome"]) -> str:
        """Tells the weather of a city."""
        asked.append(city)
        return "dry"

    # The SDK resets ``required`` after the first call.
    settings = agents.ModelSettings(max_tokens=60, temperature=0, tool_choice="required", parallel_tool_calls=False)
    return agents.Agent(
        name="A", instructions="Be brief.", model=model, tools=[weather], model_settings=settings, **more
    )


@pytest.mark.asyncio
async def test_a_tool_loop_ends_with_a_text(model: Any) -> None:
    asked: list[str] = []
    result = await agents.Runner.run(agent(model, asked), "How is the weather in Oslo?", max_turns=4)
    assert len(asked) >= 1
    assert isinstance(result.final_output, str)
    assert result.context_wrapper.usage.input_tokens > 0


@pytest.mark.asyncio
async def test_a_streamed_tool_loop(model: Any) -> None:
    asked: list[str] = []
    result = agents.Runner.run_streamed(agent(model, asked), "How is the weather in Oslo?", max_turns=4)
    kinds = [event.type async for event in result.stream_events()]
    assert len(asked) >= 1
    assert "raw_response_event" in kinds
    items = [type(item).__name__ for item in result.new_items]
    assert items[:2] == ["ToolCallItem", "ToolCallOutputItem"]


@pytest.mark.asyncio
async def test_a_typed_answer_and_a_session(model: Any) -> None:
    settings = agents.ModelSettings(max_tokens=60, temperature=0)
    typed = agents.Agent(name="B", model=model, output_type=Weather, model_settings=settings)
    session = agents.SQLiteSession("s")
    for said in ("Oslo, please", "and Rome?"):
        result = await agents.Runner.run(typed, said, session=session, max_turns=2)
        assert isinstance(result.final_output, Weather)
    assert len(await session.get_items()) == 4
