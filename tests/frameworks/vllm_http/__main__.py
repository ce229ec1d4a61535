"""Runs vLLM's own HTTP tests against our gateway: ``make test-vllm-http``.

``python tests/frameworks/vllm_http FOLDER [pytest's flags]`` runs the unchanged tests of vLLM's source distribution in
FOLDER. When a test starts a vLLM server, it gets the URL of our gateway instead; vLLM itself need not be installed.
``known_failures.toml`` names the tests that must fail, with reasons. The run fails if another test fails, or if one of
these tests passes. The tests in its section ``may_fail`` depend on chance, so they may pass or fail.
"""

from __future__ import annotations

import os
import sys
import tempfile
import tomllib
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent.parent.parent
OPENAI = "tests/entrypoints/openai"
# ``TestsOfVllm`` leaves out vLLM's unit tests, which send no requests to a server.
SUITES = {
    "chat and completions": [
        f"{OPENAI}/chat_completion/test_chat.py",
        f"{OPENAI}/chat_completion/test_chat_completion.py",
        f"{OPENAI}/chat_completion/test_chat_echo.py",
        f"{OPENAI}/chat_completion/test_chat_logit_bias_validation.py",
        f"{OPENAI}/completion/test_completion.py",
        f"{OPENAI}/test_chunked_prompt.py",
        f"{OPENAI}/test_return_token_ids.py",
    ],
    "responses": [
        f"{OPENAI}/responses/test_basic.py",
        f"{OPENAI}/responses/test_simple.py",
        f"{OPENAI}/responses/test_stateful.py",
        f"{OPENAI}/responses/test_structured_output.py",
    ],
    "tokenize": ["tests/entrypoints/serve/tokenize/test_tokenization.py"],
    "messages": ["tests/entrypoints/anthropic/test_messages.py"],
}


def main() -> int:
    if len(sys.argv) < 2:
        sys.exit(f"usage: python {HERE.relative_to(ROOT)} FOLDER, with vLLM's source distribution")
    folder = Path(sys.argv[1]).resolve()
    os.chdir(folder)
    # The package ``tests`` must be vLLM's.
    sys.path[:0] = [str(folder), str(HERE), str(HERE.parent)]
    import pytest
    import served_node
    import stand_ins
    from tests_of_vllm import TestsOfVllm

    # pytest must use neither vLLM's settings nor ours, which it would find in the folders above.
    flags = ["-q", "--tb=short", "--noconftest", "-c", os.devnull, "--rootdir", str(folder)]
    flags += ["-p", "no:cacheprovider", "-p", "no:warnings", "-p", "no:schemathesis"]
    known = tomllib.loads((HERE / "known_failures.toml").read_text())
    with tempfile.TemporaryDirectory() as place:
        shown = ",".join(f"{name}=smollm2" for name in stand_ins.MODELS)
        with served_node.serving(Path(place), "--alias", shown) as server:
            stand_ins.install(server)
            plugin = TestsOfVllm(SUITES, known)
            wanted = [name for names in SUITES.values() for name in names]
            pytest.main([*flags, *wanted, *sys.argv[2:]], [plugin, *stand_ins.fixtures()])
    return plugin.exit_code


if __name__ == "__main__":
    sys.exit(main())
