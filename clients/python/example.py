"""Asks a chat question twice; the second prompt comes from the cache.

The example streams the answers. Run it beside ``kvsidecar serve``; an argument names another worker (``unix:/PATH`` or
``host:port``).
"""

import sys

from kvsidecar import Client, KVSidecarError

MESSAGES = [{"role": "user", "content": "What is the capital of Germany?"}]


def answer(client: Client) -> None:
    for part in client.stream(MESSAGES, max_tokens=24, deadline=60):
        print(part.text, end="", flush=True)
        if part.final is not None:
            print(f"\n[{part.final.prompt_tokens} prompt tokens, {part.final.cached_tokens} from the cache]")


def main() -> int:
    try:
        with Client(sys.argv[1] if len(sys.argv) > 1 else None) as client:
            answer(client)
            answer(client)
    except KVSidecarError as error:
        if error.reason == "UNAVAILABLE":
            print("no worker is there; start one with: kvsidecar serve", file=sys.stderr)
        print(f"{error.reason}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
