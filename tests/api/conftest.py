"""Chains of 1 and 3 stages that all tests share, and clients of them."""
import httpx
import openai
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from chain import Chain

KEY = "key-of-the-tests"


@pytest.fixture(scope="session", params=[1, 3], ids=["1-stage", "3-stages"])
def chain(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp("chain")
    keys = directory / "keys"
    keys.write_text(f"# clients\n{KEY}\nanother-key\n")
    chain = Chain(directory, request.param, "--api-key-file", str(keys))
    yield chain
    assert chain.end() == 0, "\n".join(chain.lines)


@pytest.fixture(scope="session")
def client(chain):
    """The official client."""
    with openai.OpenAI(base_url=f"{chain.url}/v1", api_key=KEY, max_retries=0, timeout=180) as client:
        yield client


@pytest.fixture(scope="session")
def http(chain):
    """Plain HTTP at the root of the server."""
    with httpx.Client(base_url=chain.url, headers={"Authorization": f"Bearer {KEY}"}, timeout=180) as http:
        yield http


@pytest.fixture(scope="session")
def model(client):
    return client.models.list().data[0].id


@pytest.fixture
def chat(client, model):
    """Asks a question; greedy unless said otherwise."""
    def ask(question, **options):
        messages = question if isinstance(question, list) else [{"role": "user", "content": question}]
        options = {"temperature": 0, "max_tokens": 24, **options}
        return client.chat.completions.create(model=model, messages=messages, **options)
    return ask


@pytest.fixture
def metrics(http):
    """A reader of one metric's value, summed over its labels."""
    def read(name):
        text = http.get("/metrics").raise_for_status().text
        samples = [s for f in text_string_to_metric_families(text) for s in f.samples if s.name == name]
        assert samples, f"no metric {name}"
        return sum(s.value for s in samples)
    return read
