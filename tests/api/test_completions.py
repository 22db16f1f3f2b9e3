"""client.completions.create"""


def test_text_and_tokens_are_the_same_prompt(client, model, http):
    text = "The capital of France is"
    tokens = http.post("/tokenize", json={"content": text, "add_special": True}).json()["tokens"]
    answers = [client.completions.create(model=model, prompt=p, temperature=0, max_tokens=8) for p in (text, tokens)]
    assert answers[0].choices[0].text == answers[1].choices[0].text
    assert answers[0].choices[0].text.startswith(" Paris")
    assert answers[0].usage.prompt_tokens == len(tokens)


def test_each_prompt_of_a_list_has_its_choice(client, model):
    answer = client.completions.create(model=model, prompt=["One, two,", "A, B,"], temperature=0, max_tokens=3, n=2,
                                       extra_body={"ignore_eos": True})
    assert [c.index for c in answer.choices] == [0, 1, 2, 3]
    assert answer.usage.completion_tokens == 12 and all(c.text for c in answer.choices)


def test_echo_begins_with_the_prompt(client, model):
    answer = client.completions.create(model=model, prompt="Naïve 🙂", echo=True, temperature=0, max_tokens=2)
    assert answer.choices[0].text.startswith("Naïve 🙂")


def test_a_stream_ends_once(client, model):
    chunks = list(client.completions.create(model=model, prompt="Once", max_tokens=4, stream=True, temperature=0))
    reasons = [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason]
    assert len(reasons) == 1 and "".join(c.choices[0].text for c in chunks if c.choices)
