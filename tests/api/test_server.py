"""Everything beside the answers themselves."""


def test_models_are_listed_and_found(client, model):
    listed = client.models.list().data
    assert [m.id for m in listed] == [model] and listed[0].object == "model"
    assert client.models.retrieve(model).id == model


def test_tokenize_and_detokenize_are_inverse(http):
    for text in ("Hello, world!", "  two  spaces\n\ttab", "Grüße 🙂 世界"):
        tokens = http.post("/tokenize", json={"content": text}).json()["tokens"]
        assert http.post("/detokenize", json={"tokens": tokens}).json()["content"] == text


def test_ready_once_a_token_has_crossed_the_chain(http):
    assert http.get("/ready").json() == {"status": "ready"}
    assert http.get("/health").json() == {"status": "ok"}


def test_metrics_count_tokens(chat, metrics):
    made = metrics("splitmodel_generated_tokens_total")
    usage = chat("Count.", max_tokens=6, extra_body={"ignore_eos": True}).usage
    assert metrics("splitmodel_generated_tokens_total") >= made + usage.completion_tokens
    for name in ("splitmodel_frames_total", "splitmodel_rows_total", "splitmodel_formations_total",
                 "gen_ai_server_time_to_first_token_seconds_count"):
        assert metrics(name) > 0


def test_a_request_keeps_the_id_of_its_client(http):
    assert http.get("/v1/models", headers={"X-Request-Id": "mine-1"}).headers["x-request-id"] == "mine-1"
    assert http.get("/v1/models").headers["x-request-id"].startswith("req_")
