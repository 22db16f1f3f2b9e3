"""The port before the model is loaded, and clients that are odd about their connections."""
import json
import socket
import time

import httpx
import pytest

from chain import Chain, eventually


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """A chain, and what its API said while it came up."""
    chain = Chain(tmp_path_factory.mktemp("start"), 2, wait=False)
    said = []
    try:
        with httpx.Client(base_url=chain.url, timeout=30) as http:
            def up():
                try:
                    return http.get("/health").status_code == 200
                except httpx.TransportError:
                    return False
            eventually(up, "the API answers", 120)
            ready = http.get("/ready")
            while ready.status_code != 200:
                said.append((ready, http.get("/v1/models"), http.get("/metrics")))
                time.sleep(0.02)
                ready = http.get("/ready")
        yield chain, said
    finally:
        chain.end()


def test_the_api_answers_before_it_has_a_model(start):
    _, said = start
    ready, models, metrics = said[0]
    assert ready.status_code == 503 and ready.json()["phase"] in ("planned", "fetching", "loading", "loaded")
    assert models.status_code == 503 and models.json()["error"]["code"] == "model_loading"
    assert int(models.headers["retry-after"]) > 0
    assert metrics.status_code == 200 and metrics.text.endswith("# EOF\n")
    # From the load on the model is there, even if the chain is not.
    statuses = [models.status_code for _, models, _ in said]
    assert statuses == sorted(statuses, reverse=True) and set(statuses) <= {503, 200}


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_only_sends_no_more_gets_its_answer(start, stream):
    chain, _ = start
    body = json.dumps({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 20, "temperature": 0,
                       "ignore_eos": True, "stream": stream}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n" \
           f"content-length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", chain.port), timeout=120) as client:
        client.sendall(head.encode() + body)
        client.shutdown(socket.SHUT_WR)
        answer = b"".join(iter(lambda: client.recv(65536), b"")).decode()
    assert "HTTP/1.1 200 OK" in answer
    assert '"finish_reason":"length"' in answer and ("[DONE]" in answer) == stream


def test_a_large_schema_is_refused_and_a_mid_sized_one_is_not(start):
    chain, _ = start
    def ask(n):
        properties = {f"property_{i}": {"type": "integer"} for i in range(n)}
        schema = {"type": "object", "properties": properties, "additionalProperties": False}
        return httpx.post(f"{chain.url}/v1/chat/completions", timeout=120, json={
            "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4,
            "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}})
    large = ask(10_000)
    assert large.status_code == 400
    error = large.json()["error"]
    assert error["param"] == "response_format.json_schema.schema" and "10000 properties" in error["message"]
    assert ask(300).status_code == 200


def test_a_prompt_of_fifteen_megabytes_is_refused(start):
    chain, _ = start
    body = {"messages": [{"role": "user", "content": "word " * 3_000_000}]}
    error = httpx.post(f"{chain.url}/v1/chat/completions", timeout=120, json=body)
    assert error.status_code == 400 and error.json()["error"]["code"] == "context_length_exceeded"
