"""Pages of other sites in a browser, against a gateway without keys: none of their requests is served."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from kvsidecar.errors import ConfigurationError
from prometheus_client.parser import text_string_to_metric_families
from pydantic import ValidationError

from inference_svc.gateway.gateway_config import GatewayConfig
from inference_svc.gateway.origin_policy import OriginPolicy
from inference_svc.gateway.routes import create_app
from tests.inference_svc.gateway.browser import CHROMIUM, chromium
from tests.inference_svc.gateway.conftest import Gateway
from tests.inference_svc.gateway.fleet.peers import Peer, fleet_of

HERE, FOREIGN = "localhost:8000", "https://evil.example"
JSON, PLAIN = "application/json", "text/plain"
FORM = "application/x-www-form-urlencoded"


def refusal(config: GatewayConfig, method: str = "POST", path: str = "/v1/completions", **headers: str) -> str:
    """Why a request with these headers is refused; "" for one that is served."""
    named = {"host": HERE} | {name.replace("_", "-"): value for name, value in headers.items()}
    sent = [(name.encode(), value.encode()) for name, value in named.items() if value]
    found = OriginPolicy(config).refusal({"type": "http", "method": method, "path": path, "headers": sent})
    return "" if found is None else found.reason


@pytest.mark.parametrize(
    ("headers", "reason"),
    [
        ({"content_type": FORM}, ""),  # curl -d
        ({}, ""),
        ({"host": ""}, ""),  # HTTP/1.0
        ({"host": "127.0.0.1:8000"}, ""),
        ({"host": "[::1]:8000"}, ""),
        ({"host": "LOCALHOST"}, ""),
        ({"host": "chat.localhost:8000"}, ""),
        ({"host": "192.168.1.5:8000"}, ""),  # the address of a container, say; no DNS name of an attacker
        ({"host": "rebind.evil.example:8000"}, "host"),
        ({"host": "localhost.evil.example"}, "host"),
        ({"host": "localhost@evil.example"}, "host"),
        ({"host": "127.0.0.1.evil.example:8000"}, "host"),
        ({"host": "workstation:8000"}, "host"),
        ({"origin": f"http://{HERE}", "content_type": JSON, "sec_fetch_site": "same-origin"}, ""),
        ({"origin": f"http://{HERE}", "content_type": f"{JSON}; charset=utf-8"}, ""),
        ({"origin": f"http://{HERE}", "content_type": PLAIN}, "content_type"),
        ({"origin": f"http://{HERE}"}, "content_type"),
        ({"sec_fetch_site": "same-origin", "content_type": PLAIN}, "content_type"),
        ({"origin": FOREIGN, "content_type": JSON}, "origin"),
        ({"origin": "null", "content_type": JSON}, "origin"),
        ({"origin": "http://localhost:3000", "content_type": JSON}, "origin"),
        ({"origin": f"http://{HERE}.evil.example", "content_type": JSON}, "origin"),
        ({"sec_fetch_site": "cross-site", "content_type": JSON}, "site"),
        ({"sec_fetch_site": "same-site", "content_type": JSON}, "site"),
    ],
)
def test_a_loopback_gateway_takes_what_no_other_site_had_sent(headers: dict[str, str], reason: str) -> None:
    assert refusal(GatewayConfig(), **headers) == reason


def test_a_link_to_the_page_may_be_followed_and_nothing_else() -> None:
    followed = {"sec_fetch_site": "cross-site", "sec_fetch_mode": "navigate", "sec_fetch_dest": "document"}
    config = GatewayConfig()
    assert refusal(config, "GET", "/", **followed) == ""
    assert refusal(config, "GET", "/", **followed | {"sec_fetch_dest": "iframe"}) == "site"
    assert refusal(config, "GET", "/metrics", **followed) == "site"
    assert refusal(config, "GET", "/v1/models", sec_fetch_site="cross-site", sec_fetch_mode="no-cors") == "site"


def test_an_operator_can_let_in_hosts_and_origins() -> None:
    config = GatewayConfig(allow_hosts="models.example.com", allow_origins="https://chat.example.com")
    asked = {"host": "models.example.com", "content_type": JSON, "sec_fetch_site": "cross-site"}
    assert refusal(config, **asked, origin="https://chat.example.com") == ""
    assert refusal(config, **asked, origin=FOREIGN) == "origin"
    assert refusal(config, **asked | {"host": "other.example.com"}) == "host"
    everybody = GatewayConfig(allow_hosts="*", allow_origins="*")
    assert refusal(everybody, **asked | {"host": "other.example.com"}, origin=FOREIGN) == ""


def test_beyond_this_machine_names_of_the_local_network_are_its_own() -> None:
    config = GatewayConfig(host="0.0.0.0")
    assert refusal(config, host="kvsidecar:8000") == ""
    for service in ("kvsidecar-0.kvsidecar-nodes.default.svc:8000", "kvsidecar.default.svc.cluster.local"):
        assert refusal(config, host=service) == "", "a Service of Kubernetes"
        assert refusal(GatewayConfig(), host=service) == "host"
    assert refusal(config, host="evil-svc.example") == refusal(config, host="svc.cluster.local.example") == "host"
    assert refusal(config, host="rebind.evil.example:8000") == "host"
    assert refusal(GatewayConfig(host="models.lan"), host="models.lan:8000") == ""


@pytest.mark.parametrize("host", ["http://x", "x:8000", "a b"])
def test_what_is_no_host_is_refused(host: str) -> None:
    with pytest.raises((ValidationError, ConfigurationError), match="is no host name; write"):
        GatewayConfig(allow_hosts=host)


@pytest.mark.parametrize(
    ("keys", "key", "code"), [({}, "", 403), ({"api_key": "k"}, "k", 404), ({"api_key": "k"}, "", 401)]
)
async def test_who_is_refused_is_told_why_and_only_where_no_key_is_asked_for(
    keys: dict[str, Any], key: str, code: int
) -> None:
    app = create_app(GatewayConfig(workers="127.0.0.1:1", cache_socket=None, **keys))
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://rebind.evil.example") as client:
        answer = await client.get("/v1/responses/x", headers={"Authorization": f"Bearer {key}"})
    assert answer.status_code == code, answer.text
    if code == 403:
        assert "'rebind.evil.example' is none of this server's names" in answer.json()["error"]["message"]
        assert app.state.counters.refused.labels("host")._value.get() == 1


@pytest.mark.parametrize("origins", ["", "https://chat.example.com"])
async def test_a_private_networks_preflight_is_answered_no(origins: str) -> None:
    app = create_app(GatewayConfig(workers="127.0.0.1:1", cache_socket=None, allow_origins=origins))
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Private-Network": "true"}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
        for origin in (FOREIGN, "https://chat.example.com"):
            answer = await client.options("/v1/completions", headers=asked | {"Origin": origin})
            assert answer.status_code in (400, 403)
            assert "access-control-allow-private-network" not in answer.headers


async def test_a_fleets_gateway_does_so_too() -> None:
    peer = Peer()
    async with fleet_of(peer) as (client, _):
        body = {"messages": [{"role": "user", "content": "x"}]}
        for headers, code in (({"Origin": FOREIGN}, 403), ({"Host": "evil.example"}, 403), ({}, 200)):
            answer = await client.post("/v1/chat/completions", json=body, headers=headers)
            assert answer.status_code == code
        many = b'{"messages":[' + b"{}," * 70_000 + b"{}]}"
        answer = await client.post("/v1/chat/completions", content=many)
        assert (answer.status_code, "more than 65536 objects" in answer.text) == (400, True)


# ---- a real browser ------------------------------------------------------------------------------------------

ATTACK = """async (url) => {
  const body = JSON.stringify({prompt: "planted", max_tokens: 1}), told = [];
  const tries = {
    simple: () => fetch(url + "/v1/completions", {method: "POST", mode: "no-cors", body}),
    typed: () => fetch(url + "/v1/completions", {method: "POST", headers: {"Content-Type": "application/json"}, body}),
    read: () => fetch(url + "/v1/models").then((answer) => answer.text()),
    warm: () => fetch(url + "/kvsidecar/v1/warm", {method: "POST", mode: "no-cors", body: '{"prompt": "planted"}'}),
    beacon: async () => navigator.sendBeacon(url + "/v1/completions", body),
    image: () => new Promise((done) => {
      const image = new Image(); image.onload = image.onerror = done; image.src = url + "/metrics";
    }),
    frame: () => new Promise((done) => {
      const frame = document.createElement("iframe"); frame.onload = done; frame.src = url + "/";
      document.body.append(frame);
    }),
    form: () => new Promise((done) => {
      const frame = document.createElement("iframe"); frame.name = "f"; document.body.append(frame);
      const form = document.createElement("form"); form.method = "post"; form.enctype = "text/plain";
      form.action = url + "/v1/completions"; form.target = "f"; document.body.append(form);
      frame.onload = done; form.submit();
    }),
  };
  for (const [name, go] of Object.entries(tries)) {
    try {
      const got = await Promise.race([go(), new Promise((done) => setTimeout(done, 5000))]);
      if (typeof got === "string") told.push(name + ": " + got);
    } catch {}
  }
  return told;
}"""


class _Evil(http.server.BaseHTTPRequestHandler):
    """A page of another site."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(b"<body>nothing to see here")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def evil() -> Iterator[int]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Evil) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


def served(gateway: Gateway) -> dict[tuple[str, str], float]:
    """Requests by path and code, without those that ask for this."""
    found = text_string_to_metric_families(httpx.get(f"{gateway.url}/metrics").text)
    counts = {(s.labels["path"], s.labels["code"]): s.value for family in found for s in family.samples
              if s.name == "kvsidecar_gateway_requests_total"}  # fmt: skip
    counts.pop(("/metrics", "200"), None)
    return counts


@pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium: apt-get install chromium")
def test_a_page_of_another_site_in_a_real_browser_is_served_nothing(gateway: Gateway, evil: int) -> None:
    pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install '.[dev]'")
    before = served(gateway)
    told: dict[str, Any] = {}
    with chromium("--host-resolver-rules=MAP *.evil.example 127.0.0.1") as browser:
        page = browser.new_page()
        for site in (f"http://127.0.0.1:{evil}", f"http://localhost:{evil}", f"http://www.evil.example:{evil}"):
            page.goto(site)
            told[site] = page.evaluate(ATTACK, gateway.url)
        # The name of the attacker's page leads to the gateway now.
        rebound = f"http://rebind.evil.example:{gateway.port}"
        shown = page.goto(f"{rebound}/")
        assert shown is not None
        assert shown.status == 403
        told[rebound] = [said for said in page.evaluate(ATTACK, rebound) if "none of this server's names" not in said]
    assert not any(told.values()), told
    changed = {key: count - before.get(key, 0) for key, count in served(gateway).items() if count != before.get(key, 0)}
    assert {code for _, code in changed} <= {"403", "415"}, changed
    assert sum(changed.values()) > 15, "the browser did not even try"
