"""A chat that outlives its node. Run it with: .venv/bin/python examples/chat_over_restart.py

Plays some turns, stops the whole node (gateway, worker and cache daemon), and starts the node again on the same store.
The next question then loads the history from the disk instead of computing it.
"""

from __future__ import annotations

import argparse
from typing import Any

from local_node import LocalNode
from openai import OpenAI

TURNS = [
    "Tell me about the harbour of a small town: who works there, and what do they do in the morning?",
    "What do the boats bring, and who buys it?",
    "And what happens in the harbour in winter?",
]
AFTER_RESTART = "Which season is the best one for a visit?"


class Chat:
    """A conversation; ``ask`` sends the whole conversation and appends the answer."""

    def __init__(self, url: str) -> None:
        self._client = OpenAI(base_url=url, api_key="none")
        self._messages: list[Any] = []

    def ask(self, text: str) -> float:
        """Asks a question and prints the answer; returns the share of the prompt that came from the cache."""
        self._messages.append({"role": "user", "content": text})
        answer: Any = self._client.chat.completions.create(
            model=self._client.models.list().data[0].id, messages=self._messages, max_tokens=40, temperature=0
        )
        self._messages.append({"role": "assistant", "content": answer.choices[0].message.content})
        usage = answer.usage
        cached = usage.prompt_tokens_details.cached_tokens
        print(f"Q: {text}\nA: {self._messages[-1]['content']}")
        print(f"   first token after {answer.timings['ttft_ms']:.0f} ms; {cached} of {usage.prompt_tokens} cached\n")
        return float(cached / usage.prompt_tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description="A chat that continues after a restart of the node.")
    parser.add_argument("--model", default="demo")
    with LocalNode(parser.parse_args().model) as node:
        chat = Chat(node.url)
        for text in TURNS:
            chat.ask(text)
        node.stop()
        print("--- the node was stopped; it starts again ---\n")
        node.start()
        share = chat.ask(AFTER_RESTART)
    print(f"{share:.0%} of the first prompt after the restart came from the disk")


if __name__ == "__main__":
    main()
