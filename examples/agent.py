"""An agent with tools. Run it with: .venv/bin/python examples/agent.py

The model reads files by calling tools until it has seen enough, then answers. Every step sends the whole history again,
as agents do. The node computes only the text that the previous step has added.
"""

from __future__ import annotations

import argparse
import json
from contextlib import nullcontext
from typing import Any

from local_node import LocalNode
from openai import OpenAI

FILES = {
    "orders.csv": "customer,item,price\nMiller,oil,9\nMiller,rope,14\nChen,anchor,80\nMiller,paint,21\n",
    "customers.csv": "name,town\nMiller,Kiel\nChen,Emden\n",
    "notes.txt": "Miller pays at the end of the month. Chen has paid.\n",
}
TASK = "How much does the customer in Kiel owe? Read the files that you need."


def read_file(name: str) -> str:
    return FILES[name]


def sum_prices(customer: str) -> str:
    rows = [line.split(",") for line in FILES["orders.csv"].splitlines()[1:]]
    return str(sum(int(price) for who, _, price in rows if who == customer))


TOOLS = {"read_file": read_file, "sum_prices": sum_prices}


def described(name: str, description: str, argument: str, values: list[str]) -> dict[str, Any]:
    """Describes a tool with one argument. The node's grammar makes every call use one of the enumerated ``values``."""
    schema = {
        "type": "object",
        "properties": {argument: {"type": "string", "enum": values}},
        "required": [argument],
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


DESCRIBED: Any = [
    described("read_file", "Returns the text of a file.", "name", list(FILES)),
    described("sum_prices", "Adds up the prices of a customer's orders.", "customer", ["Miller", "Chen"]),
]


def step(client: OpenAI, model: str, messages: list[Any], must_call: bool) -> Any:
    """Sends one request with the whole history; prints how much of the history was cached."""
    answer: Any = client.chat.completions.create(
        model=model,
        messages=messages,
        tools=DESCRIBED,
        tool_choice="required" if must_call else "none",
        parallel_tool_calls=False,
        max_tokens=256 if must_call else 64,
        temperature=0,
    )
    usage = answer.usage
    cached = usage.prompt_tokens_details.cached_tokens
    print(f"   {cached} of {usage.prompt_tokens} prompt tokens came from the cache")
    return answer.choices[0].message


def run(client: OpenAI, model: str, calls: int) -> str:
    """Lets the model call tools ``calls`` times, then asks for the answer."""
    messages: list[Any] = [
        {"role": "system", "content": "You answer questions about a small shop. Use the tools."},
        {"role": "user", "content": TASK},
    ]
    for _ in range(calls):
        message = step(client, model, messages, must_call=True)
        messages.append(message)
        for call in message.tool_calls:
            arguments = json.loads(call.function.arguments)
            result = TOOLS[call.function.name](**arguments)
            print(f"{call.function.name}({arguments}) -> {result!r}")
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return str(step(client, model, messages, must_call=False).content)


def main() -> None:
    parser = argparse.ArgumentParser(description="An agent that calls tools.")
    parser.add_argument("--url", help="base URL of a node that runs, such as http://localhost:8000/v1")
    parser.add_argument("--model", default="demo", help="the model of the node that is started without --url")
    parser.add_argument("--calls", type=int, default=3, help="how many times the model calls tools")
    arguments = parser.parse_args()
    with nullcontext() if arguments.url else LocalNode(arguments.model) as node:
        client = OpenAI(base_url=node.url if node else arguments.url, api_key="none")
        print(f"A: {run(client, client.models.list().data[0].id, arguments.calls)}")


if __name__ == "__main__":
    main()
