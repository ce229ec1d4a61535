"""Retrieval-augmented generation. Run it with: .venv/bin/python examples/rag.py

Retrieves documents by the words that they share with a question, and asks a model about them. The documents are a
prefix of the prompt, so a second question about the same documents computes only the question. If the model has passed
`kvsidecar verify`, the node also reuses the documents in another order; `document_separator` marks where each begins.
"""

from __future__ import annotations

import argparse
import re
from contextlib import nullcontext
from typing import Any

from local_node import LocalNode
from openai import OpenAI

DOCUMENTS = {
    "harbour": """The harbour office opens at six. Boats up to twelve metres use the northern quay and pay nine
euros a night; longer boats use the southern quay and pay fourteen. Water and electricity are included. The crane lifts
eight tonnes and must be booked a day in advance at the office. Fuel is sold between eight and noon.""",
    "museum": """The museum of fishing stands behind the market hall. It shows nets, sails and engines of two
centuries, and a whole cutter that children may enter. It is closed on Mondays. A ticket costs five euros; pupils pay
nothing. Guided tours begin at eleven and at three, and take an hour.""",
    "ferry": """The ferry to the island leaves at seven, at noon and at five, and takes forty minutes. Bicycles travel
free of charge, cars cost twenty euros. In winter the boat at noon is cancelled. Tickets are sold on board; only groups
of more than ten have to book, at the harbour office.""",
}
SEPARATOR = "\n\n---\n\n"
QUESTIONS = [
    "What does a night at the northern quay of the harbour cost?",
    "When must the crane of the harbour be booked, and where is the quay for longer boats?",
    "When does the ferry to the island leave?",
]


def words(text: str) -> set[str]:
    return {word for word in re.findall(r"[a-z]+", text.lower()) if len(word) > 3}


def retrieve(question: str, count: int) -> list[str]:
    """Returns the names of the documents that share most words with a question, in a stable order.

    The order matters: the node reuses a prefix only up to the first document that differs.
    """
    ranked = sorted(DOCUMENTS, key=lambda name: -len(words(question) & words(DOCUMENTS[name])))
    return sorted(ranked[:count])


def ask(client: OpenAI, model: str, question: str) -> tuple[str, int, int]:
    """Returns the answer, the number of prompt tokens, and the number of prompt tokens from the cache."""
    documents = SEPARATOR.join(DOCUMENTS[name] for name in retrieve(question, 2))
    system = f"Answer from these documents only.{SEPARATOR}{documents}{SEPARATOR}"
    answer: Any = client.chat.completions.create(
        model=model,
        messages=[{"role": "system", "content": system}, {"role": "user", "content": question}],
        max_tokens=48,
        temperature=0,
        extra_body={"document_separator": SEPARATOR},
    )
    usage = answer.usage
    return answer.choices[0].message.content, usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens


def main() -> None:
    parser = argparse.ArgumentParser(description="Questions about retrieved documents.")
    parser.add_argument("--url", help="base URL of a node that runs, such as http://localhost:8000/v1")
    parser.add_argument("--model", default="demo", help="the model of the node that is started without --url")
    arguments = parser.parse_args()
    with nullcontext() if arguments.url else LocalNode(arguments.model) as node:
        client = OpenAI(base_url=node.url if node else arguments.url, api_key="none")
        model = client.models.list().data[0].id
        for question in QUESTIONS:
            text, tokens, cached = ask(client, model, question)
            print(f"Q: {question}\nA: {text}\n   {cached} of {tokens} prompt tokens came from the cache\n")


if __name__ == "__main__":
    main()
