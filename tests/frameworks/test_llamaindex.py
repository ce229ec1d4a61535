"""LlamaIndex's OpenAILike: chats, completions, functions and structured answers."""

from __future__ import annotations

from typing import Any

import pytest

from tests.frameworks.served_node import Server

openai_like = pytest.importorskip(
    "llama_index.llms.openai_like", reason="LlamaIndex is not here; make test-frameworks runs it"
)
pydantic = pytest.importorskip("pydantic")


class Weather(pydantic.BaseModel):  # type: ignore[name-defined, misc]
    """Tells the weather of a day."""

    model_config = pydantic.ConfigDict(extra="forbid")  # or a small model invents properties until it is cut off
    city: str = pydantic.Field(max_length=12)
    days: int = pydantic.Field(ge=1, le=9)


def model(server: Server, **options: Any) -> Any:
    given: dict[str, Any] = {"is_chat_model": True, "is_function_calling_model": True, "max_tokens": 150, **options}
    return openai_like.OpenAILike(
        api_base=f"{server.url}/v1", api_key="none", model=server.model, context_window=2048, temperature=0,
        max_retries=0, **given,
    )  # fmt: skip


def test_chats_completions_and_streams(server: Server) -> None:
    from llama_index.core.llms import ChatMessage

    llm = model(server, max_tokens=8)
    said = [ChatMessage(role="user", content="What is the capital of Germany?")]
    whole = llm.chat(said).message.content
    assert "".join(part.delta or "" for part in llm.stream_chat(said)) == whole
    plain = model(server, max_tokens=8, is_chat_model=False)
    assert plain.complete("The capital of France is").text


def test_functions_are_called(server: Server) -> None:
    from llama_index.core.tools import FunctionTool

    def weather(city: str, days: int) -> str:
        """Tells the weather."""
        return f"{city}: dry for {days} days"

    llm = model(server)
    answer = llm.chat_with_tools(
        [FunctionTool.from_defaults(weather)], user_msg="How is it in Oslo?", tool_required=True,
        allow_parallel_tool_calls=False,
    )  # fmt: skip
    (call,) = llm.get_tool_calls_from_response(answer)
    assert call.tool_name == "weather"
    assert set(call.tool_kwargs) == {"city", "days"}


@pytest.mark.parametrize("by_schema", [True, False])
def test_structured_answers_are_the_class(server: Server, by_schema: bool) -> None:
    from llama_index.core.prompts import PromptTemplate

    llm = model(server, should_use_structured_outputs=by_schema)
    found = llm.structured_predict(Weather, PromptTemplate("How is the weather in {city}?"), city="Oslo")
    assert isinstance(found, Weather)
