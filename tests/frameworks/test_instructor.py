"""instructor in every mode that it has for OpenAI's API."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

import openai
import pytest

from tests.frameworks.served_node import Server

instructor = pytest.importorskip("instructor", reason="instructor is not here; make test-frameworks runs it")
pydantic = pytest.importorskip("pydantic")


class Weather(pydantic.BaseModel):  # type: ignore[name-defined, misc]
    """Tells the weather of a day."""

    model_config = pydantic.ConfigDict(extra="forbid")  # or a small model invents properties until it is cut off
    city: str = pydantic.Field(max_length=12)
    days: int = pydantic.Field(ge=1, le=9)


# Of these the server keeps the answer to the schema; with the others the model is only asked, and a small one fails.
KEPT = ["TOOLS", "TOOLS_STRICT", "JSON_SCHEMA", "RESPONSES_TOOLS"]
ASKED = ["JSON", "MD_JSON", "PARALLEL_TOOLS"]


@pytest.mark.parametrize("mode", KEPT)
def test_what_comes_is_the_class(server: Server, mode: str) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        asked = instructor.from_openai(client, mode=getattr(instructor.Mode, mode))
        found = asked.chat.completions.create(
            model=server.model, response_model=Weather, max_retries=0, max_tokens=150, temperature=0,
            messages=[{"role": "user", "content": "How is the weather in Oslo for 3 days?"}],
        )  # fmt: skip
    assert isinstance(found, Weather)


@pytest.mark.parametrize("mode", ASKED)
def test_what_it_sends_is_served(server: Server, mode: str) -> None:
    """The answer is a model's that is too small for it: what instructor says of that is no error of the server."""
    seen: list[object] = []
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        asked = instructor.from_openai(client, mode=getattr(instructor.Mode, mode))
        asked.on("completion:response", seen.append)
        with contextlib.suppress(Exception):  # instructor's own: of a wrong answer, or that none came
            asked.chat.completions.create(
                model=server.model, response_model=Iterable[Weather] if mode == "PARALLEL_TOOLS" else Weather,
                max_retries=0, max_tokens=60, temperature=0,
                messages=[{"role": "user", "content": "The weather in Oslo?"}],
            )  # fmt: skip
    assert seen, "it was refused before an answer came"
