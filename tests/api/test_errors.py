"""What is refused, and how the client learns of it."""
import openai
import pytest

from chain import CONTEXT


@pytest.mark.parametrize("options, param", [
    ({"temperature": 3}, "temperature"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"n": 0}, "n"),
    ({"logit_bias": {"no token": 1}}, "logit_bias"),
    ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"extra_body": {"grammar": "root ::= [a-z]"}}, "grammar"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]}, "tools"),
])
def test_a_bad_field_is_named(chat, options, param):
    with pytest.raises(openai.BadRequestError) as caught:
        chat("Hi", **options)
    assert caught.value.param == param and param.split(".")[0] in caught.value.message


def test_what_is_no_text_is_refused(chat):
    image = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]
    with pytest.raises(openai.BadRequestError, match="image"):
        chat([{"role": "user", "content": image}])


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_is_too_long_tells_both_numbers(chat, stream):
    with pytest.raises(openai.BadRequestError) as caught:
        chat("word " * CONTEXT, stream=stream)
    assert caught.value.code == "context_length_exceeded" and str(CONTEXT) in caught.value.message


def test_another_model_is_not_found(client):
    with pytest.raises(openai.NotFoundError, match="not served") as caught:
        client.chat.completions.create(model="other", messages=[{"role": "user", "content": "Hi"}])
    assert caught.value.code == "model_not_found"


@pytest.mark.parametrize("key", [None, "wrong", "key-of-the-test"])
def test_a_key_is_needed(chain, http, key):
    wrong = {"Authorization": f"Bearer {key}"} if key else {"Authorization": ""}
    answer = http.get("/v1/models", headers=wrong)
    assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
    assert http.get("/health", headers=wrong).status_code == 200


def test_every_key_of_the_file_works(client):
    assert client.with_options(api_key="another-key").models.list().data
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="# clients").models.list()


@pytest.mark.parametrize("method, path, body, status", [
    ("POST", "/v1/chat/completions", b"{", 400),
    ("POST", "/v1/chat/completions", b"", 400),
    ("POST", "/v1/chat/completions", b"[]", 400),
    ("GET", "/v1/chat/completions", b"", 405),
    ("POST", "/v1/nothing", b"{}", 404),
])
def test_every_error_has_the_same_form(http, method, path, body, status):
    answer = http.request(method, path, content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == status
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
