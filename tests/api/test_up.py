"""`splitmodel up` itself, with real stages."""
import json
import os
import signal
import subprocess
import time

import openai
import pytest

from chain import BIN, MANIFEST, ROOT, Chain, eventually


def runs(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rsplit(")", 1)[1].split()[0] != "Z"


def status(chain):
    told = subprocess.run([BIN / "splitmodel", "status", "--json", "--state-dir", chain.state],
                          capture_output=True, text=True, timeout=60)
    return json.loads(told.stdout)


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    chain = Chain(tmp_path_factory.mktemp("own"), 3)
    yield chain
    chain.end(signal.SIGKILL)


def test_the_curl_line_works_as_printed(own):
    [line] = own.find(r"^\s*(curl .*)")
    answer = subprocess.run(line[1], shell=True, capture_output=True, text=True, timeout=120)
    assert answer.returncode == 0 and "content" in answer.stdout, answer


def test_status_shows_every_stage(own):
    [run] = status(own)
    assert run["url"] == own.url
    layers = [s["layers"] for s in run["stages"]]
    assert layers[0][0] == 0 and all(a[1] == b[0] for a, b in zip(layers, layers[1:])) and len(layers) == 3
    assert [s["phase"] for s in run["stages"]] == ["serving", "linked", "linked"]


def test_chat_answers_from_a_pipe(own):
    answer = subprocess.run([BIN / "splitmodel", "chat", "--url", own.url, "--temperature", "0", "--max-tokens", "40"],
                            input="Name three fruits.\n", capture_output=True, text=True, timeout=120)
    assert answer.returncode == 0 and "Bananas" in answer.stdout, answer


def test_the_log_names_the_request_of_a_stream(own):
    client = openai.OpenAI(base_url=f"{own.url}/v1", api_key="none", max_retries=0, timeout=120)
    with client:
        list(client.chat.completions.create(model="smollm2", messages=[{"role": "user", "content": "Hi"}], max_tokens=2,
                                            stream=True, extra_headers={"X-Request-Id": "stream-1"}))
    [log] = own.state.glob("run/*/stage-0.log")
    eventually(lambda: any("stream-1" in line and "answer ended" in line for line in log.read_text().splitlines()),
               "the answer's end is logged with the id of its request")


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_killed_stage_comes_back(own, stage):
    """A stream that runs meanwhile goes on, if its own stage 0 is not the one that died."""
    ready = len(own.find("^ready again"))
    client = openai.OpenAI(base_url=f"{own.url}/v1", api_key="none", max_retries=0, timeout=120)
    with client, client.chat.completions.create(
            model="smollm2", messages=[{"role": "user", "content": "Count."}], max_tokens=300, temperature=0, stream=True,
            stream_options={"include_usage": True}, extra_body={"ignore_eos": True}) as stream:
        for _ in range(3):
            next(stream)
        os.kill(own.pid(stage), signal.SIGKILL)
        if stage == 0:
            with pytest.raises(Exception):
                list(stream)
        else:
            assert [c.usage.completion_tokens for c in stream if c.usage] == [300]
    own.until("^ready again", ready + 1)
    assert [s["phase"] for s in status(own)[0]["stages"]] == ["serving", "linked", "linked"]


def test_a_hanging_stage_is_started_again(tmp_path):
    """A stream that runs meanwhile goes on to its end."""
    chain = Chain(tmp_path, 3, "--hang-deadline", "6")
    client = openai.OpenAI(base_url=f"{chain.url}/v1", api_key="none", max_retries=0, timeout=120)
    ask = {"model": "smollm2", "messages": [{"role": "user", "content": "Name three rivers."}], "max_tokens": 200,
           "temperature": 0, "stream": True, "stream_options": {"include_usage": True}, "extra_body": {"ignore_eos": True}}
    with client, client.chat.completions.create(**ask) as stream:
        next(stream)
        hangs = chain.pid(1)
        os.kill(hangs, signal.SIGSTOP)
        assert [c.usage.completion_tokens for c in stream if c.usage] == [200]
    chain.until(r"^stage 1: no sign of life for 6 s, so it is killed")
    chain.until("^ready again")
    assert not runs(hangs) and chain.pid(1) != hangs
    assert chain.end() == 0


def link(chain, *flags):
    return subprocess.run([BIN / "splitmodel", "link", "--state-dir", chain.state, *flags], capture_output=True, text=True,
                          timeout=60, check=True).stdout.splitlines()


def test_links_can_be_made_slow(own):
    client = openai.OpenAI(base_url=f"{own.url}/v1", api_key="none", max_retries=0, timeout=120)
    ask = {"model": "smollm2", "prompt": "One, two,", "max_tokens": 6, "temperature": 0, "extra_body": {"ignore_eos": True}}
    with client:
        text = client.completions.create(**ask).choices[0].text
        assert link(own, "--all", "--delay", "100ms") == [
            f"stage {a} to stage {b}: delay 100ms, no limit" for a, b in [(0, 1), (1, 2), (2, 0)]]
        begun = time.monotonic()
        slow = client.completions.create(**ask).choices[0].text
        assert time.monotonic() - begun >= 6 * 3 * 0.1 and slow == text
        assert all(line.endswith(": nothing injected") for line in link(own, "--all", "--clear"))
        assert client.completions.create(**ask).choices[0].text == text


@pytest.mark.parametrize("name", ["smollm2", "smollm2-layers", "smollm2-tuned"])
def test_an_example_can_be_planned(name):
    plan = subprocess.run([BIN / "splitmodel", "plan", ROOT / "examples" / f"{name}.yaml"], capture_output=True, text=True)
    assert plan.returncode == 0 and "STAGE" in plan.stdout, plan


def test_a_port_in_use_is_named(own, tmp_path):
    second = subprocess.run([BIN / "splitmodel", "up", MANIFEST, "--port", str(own.port), "--state-dir", tmp_path],
                            capture_output=True, text=True, timeout=60)
    assert second.returncode != 0 and f"127.0.0.1:{own.port} is in use" in second.stderr, second


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_the_end_leaves_nothing_behind(tmp_path, how):
    chain = Chain(tmp_path, 3)
    pids = [chain.pid(stage) for stage in range(3)]
    code = chain.end(how)
    eventually(lambda: not any(map(runs, pids)), "no stage runs")
    if how != signal.SIGKILL:
        assert code == 0 and not (chain.state / "run").exists()
