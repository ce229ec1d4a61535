"""The flags of the services: what a wrong one is answered with, and what help says of each."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from kvsidecar.cli.flags import FlagParser, add_flags, describe_fields

from cache_daemon.config import DaemonConfig
from inference_svc.gateway.gateway_config import GatewayConfig
from inference_svc.node.supervisor import ServeConfig, main
from inference_svc.server.verify_command import main as verify
from inference_svc.server.verify_command import parse_options
from inference_svc.server.worker_config import WorkerConfig

SETTINGS = [DaemonConfig, WorkerConfig, GatewayConfig, ServeConfig]


@pytest.mark.parametrize(
    ("program", "given", "said"),
    [
        (main, ["--prot", "80"], "kvsidecar serve: there is no --prot (did you mean --port?)"),
        (main, ["--nonsense"], "kvsidecar serve: there is no --nonsense"),
        (main, ["--remote", "x"], "kvsidecar serve: --remote is of kvsidecar daemon: set KVSIDECAR_CACHE_REMOTE"),
        (main, ["--api-key=x"], "kvsidecar serve: --api-key is of kvsidecar gateway: set KVSIDECAR_GATEWAY_API_KEY"),
        (
            main,
            ["--tcp", "127.0.0.1:1"],
            "kvsidecar serve: --tcp is of kvsidecar daemon and kvsidecar worker: set KVSIDECAR_CACHE_TCP "
            "(the daemon's) or KVSIDECAR_WORKER_TCP (the worker's)",
        ),
        (
            main,
            ["--metrics-port=1"],
            "kvsidecar serve: --metrics-port is of kvsidecar daemon and kvsidecar worker: set "
            "KVSIDECAR_CACHE_METRICS_PORT (the daemon's) or KVSIDECAR_WORKER_METRICS_PORT (the worker's)",
        ),
        (main, ["demo", "more"], "kvsidecar serve: 'more' is one argument too many"),
        (main, ["--port"], "kvsidecar serve: argument --port: expected one argument"),
        (verify, [], "kvsidecar verify: the following arguments are required: MODEL"),
        (
            verify,
            ["a", "--model", "b"],
            "kvsidecar verify: MODEL is 'a' and --model is 'b'; give one of them",
        ),
        (verify, ["a", "--ratio", "2"], "kvsidecar verify: --ratio is 2.0; allowed are 0 to 1"),
    ],
)
def test_a_wrong_flag_is_one_line(
    program: Callable[[list[str]], int], given: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        program(given)
    assert ended.value.code == 2
    assert re.fullmatch(re.escape(said) + r"; see kvsidecar \w+ --help\n", capsys.readouterr().err)


@pytest.mark.parametrize("given", [["m"], ["--model", "m"], ["--model=m", "--json"], ["m", "--model", "m"]])
def test_a_model_is_named_with_the_flag_that_serve_has_or_without(given: list[str]) -> None:
    assert parse_options(given).model == "m"


def test_the_flags_that_the_page_on_http_names_are_there() -> None:
    text = (Path(__file__).parents[2] / "docs/http.md").read_text()
    text = re.sub(r"`kvsidecar bench [^`]*`", "", text)  # not a setting of a process
    named = {flag.replace("-", "_") for flag in re.findall(r"--([a-z][a-z-]*)", text)}
    assert {"default_max_tokens", "max_body_bytes"} <= named
    assert not named - {name for settings in SETTINGS for name in settings.model_fields}
    for flag in re.findall(r"`--([a-z-]+)[^`]*` of the gateway or of `serve`", text):
        assert flag.replace("-", "_") in ServeConfig.model_fields


@pytest.mark.parametrize("settings", SETTINGS)
def test_every_flag_says_what_it_is_and_its_default(settings: type) -> None:
    parser = FlagParser(prog="x")
    add_flags(parser, settings)
    public = [name for name, field in settings.model_fields.items() if not field.exclude]
    parser.format_help()
    texts = describe_fields(settings)
    assert [name for name in public if not texts.get(name)] == []
    helped = {action.dest: action.help or "" for action in parser._actions}
    assert [name for name in public if not re.search(r"\S.* default: \S.*\]$", helped[name])] == []


def test_a_nodes_own_flags_come_before_those_of_the_model() -> None:
    parser = FlagParser(prog="x", usage="x")
    add_flags(parser, ServeConfig)
    text = parser.format_help()
    assert text.index("the node:") < text.index("--port") < text.index("the model,") < text.index("--weights")
