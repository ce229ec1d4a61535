"""What schemathesis thinks up from our own OpenAPI document: every answer is one that the document has."""

from __future__ import annotations

from typing import Any

import pytest

from tests.frameworks.served_node import Server

schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not here; make test-frameworks runs it")

from hypothesis import HealthCheck, given, settings  # noqa: E402
from schemathesis.checks import not_a_server_error  # noqa: E402
from schemathesis.specs.openapi.checks import (  # noqa: E402
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
# What takes long is none of its business.
SHORT = {
    "/v1/chat/completions": "max_completion_tokens",
    "/v1/completions": "max_tokens",
    "/v1/responses": "max_output_tokens",
    "/v1/messages": "max_tokens",
}
SLOW = settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)


@pytest.mark.timeout(1200)
def test_every_answer_is_one_of_the_documents(server: Server) -> None:
    document = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    asked = 0
    for found in document.get_all_operations():
        operation = found.ok()

        @SLOW
        @given(case=operation.as_strategy())
        def check(case: Any) -> None:
            nonlocal asked
            asked += 1
            if case.operation.path in SHORT and isinstance(case.body, dict):
                # Or hardly any model is one that is served.
                case.body = {**case.body, SHORT[case.operation.path]: 2, "model": server.model}
            case.call_and_validate(checks=CHECKS, timeout=60)

        check()
    assert asked > 50
