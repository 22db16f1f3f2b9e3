"""client.chat.completions.create"""
import json
from concurrent.futures import ThreadPoolExecutor

import jsonschema
import pytest

from chain import LANES, eventually

ENDLESS = {"ignore_eos": True}  # so that an answer has the length that a test needs


def deltas(stream):
    return "".join(c.choices[0].delta.content or "" for c in stream if c.choices)


def test_an_answer_has_its_parts(chat, model):
    answer = chat("Name three fruits.", max_tokens=60)
    choice, usage = answer.choices[0], answer.usage
    assert (answer.object, answer.model, len(answer.choices)) == ("chat.completion", model, 1)
    assert choice.message.role == "assistant" and "Bananas" in choice.message.content
    assert choice.finish_reason == "stop"
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


def test_a_stream_carries_what_the_plain_answer_has(chat):
    plain = chat("Name three rivers.", max_tokens=20)
    chunks = list(chat("Name three rivers.", max_tokens=20, stream=True, stream_options={"include_usage": True}))
    with_choices = [c for c in chunks if c.choices]
    assert with_choices[0].choices[0].delta.role == "assistant"
    assert deltas(chunks) == plain.choices[0].message.content
    reasons = [c.choices[0].finish_reason for c in with_choices if c.choices[0].finish_reason]
    assert reasons == [plain.choices[0].finish_reason]
    assert len({c.id for c in chunks}) == 1
    assert [c.usage.completion_tokens for c in chunks if c.usage] == [plain.usage.completion_tokens]
    assert len(with_choices) > 5, "tokens must come one by one"


def test_max_tokens_ends_with_length(chat):
    answer = chat("Count.", max_tokens=9, extra_body=ENDLESS)
    assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (9, "length")


def test_a_stop_string_ends_the_text_before_it(chat):
    question = "Write a sentence about the sea."
    whole = chat(question).choices[0].message.content
    stop = whole[len(whole) // 2:][:5]
    before = whole[:whole.index(stop)]
    plain = chat(question, stop=[stop, "never said"]).choices[0]
    assert (plain.message.content, plain.finish_reason) == (before, "stop")
    assert deltas(chat(question, stop=stop, stream=True)) == before


def test_what_only_begins_like_a_stop_string_is_not_lost(chat):
    whole = chat("Write a sentence about the sea.").choices[0].message.content
    longer = whole[-4:] + "\x00"
    assert deltas(chat("Write a sentence about the sea.", stop=longer, stream=True)) == whole


def test_content_parts_are_one_text(chat):
    parts = [{"role": "user", "content": [{"type": "text", "text": "Say "}, {"type": "text", "text": "hello."}]}]
    joined = chat("Say hello.")
    assert chat(parts).choices[0].message.content == joined.choices[0].message.content


def test_system_and_turns_reach_the_template(chat):
    system, last = {"role": "system", "content": "You are terse."}, {"role": "user", "content": "Bye"}
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hi."}]
    tokens = [chat(m, max_tokens=1).usage.prompt_tokens for m in ([system, last], [system, *turns, last])]
    assert tokens[1] > tokens[0] + 8


def test_a_seed_repeats_and_another_differs(chat):
    def story(seed):
        return chat("Tell a story.", temperature=1, seed=seed, max_tokens=16).choices[0].message.content
    assert story(7) == story(7)
    assert len({story(seed) for seed in (7, 8, 9)}) > 1


def test_n_choices_bill_the_prompt_once(chat):
    one = chat("Tell a story.", max_tokens=5)
    three = chat("Tell a story.", n=3, temperature=1, seed=1, max_tokens=5, extra_body=ENDLESS)
    assert [c.index for c in three.choices] == [0, 1, 2]
    assert (three.usage.prompt_tokens, three.usage.completion_tokens) == (one.usage.prompt_tokens, 15)


def test_logit_bias_chooses_the_token(chat, http):
    [token] = http.post("/tokenize", json={"content": " yes"}).json()["tokens"]
    answer = chat("Well?", logit_bias={str(token): 100}, max_tokens=3)
    assert answer.choices[0].message.content == " yes yes yes"


def test_logprobs_come_with_alternatives(chat):
    content = chat("What is 1 + 1?", logprobs=True, top_logprobs=3, max_tokens=4).choices[0].logprobs.content
    assert len(content) == 4
    for token in content:
        tops = [t.logprob for t in token.top_logprobs]
        assert tops == sorted(tops, reverse=True) and len(tops) == 3
        assert token.logprob <= 0 and token.top_logprobs[0].token == token.token


def test_a_json_schema_binds_the_answer(chat):
    schema = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
              "required": ["name", "age"], "additionalProperties": False}
    answer = chat("Describe Ann, aged 30, as JSON.", max_tokens=100, response_format={
        "type": "json_schema", "json_schema": {"name": "person", "schema": schema, "strict": True}})
    jsonschema.validate(json.loads(answer.choices[0].message.content), schema)


@pytest.mark.parametrize("text", ["naïve café", "日本語のテキスト", "👩‍🚀 flies 🛰️"])
def test_no_character_is_torn(chat, text):
    schema = {"type": "string", "const": text}
    chunks = list(chat("Say it.", max_tokens=200, stream=True, response_format={
        "type": "json_schema", "json_schema": {"name": "text", "schema": schema}}))
    assert json.loads(deltas(chunks)) == text
    assert "\ufffd" not in deltas(chunks)


def test_more_requests_than_lanes_are_all_answered(chat):
    def ask(i):
        return chat(f"Write about the number {i}.", max_tokens=8, extra_body=ENDLESS).usage.completion_tokens
    with ThreadPoolExecutor(2 * LANES) as pool:
        assert list(pool.map(ask, range(2 * LANES))) == [8] * (2 * LANES)


def test_a_client_that_goes_away_frees_its_lane(chat, metrics):
    stream = chat("Write a long story.", max_tokens=1500, stream=True, extra_body=ENDLESS)
    for _ in range(3):
        next(iter(stream))
    assert metrics("splitmodel_sessions_running") == 1
    stream.close()
    eventually(lambda: metrics("splitmodel_sessions_running") == 0, "no session runs")
    eventually(lambda: metrics("splitmodel_lanes_in_use") == 0, "no lane is in use")
