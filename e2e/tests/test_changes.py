"""Changes of a SplitModel that serves: scale, roll, other shapes; requests are answered meanwhile."""
import concurrent.futures
import contextlib
import threading
import time

import openai
import pytest

from kube import eventually
from model import ask


@contextlib.contextmanager
def asking(model, pause=0.3):
    """Asks all the time; gives the list of what went wrong and the number of answers."""
    stop, told = threading.Event(), {"answers": 0, "errors": []}

    def run():
        with model.client() as client:
            while not stop.is_set():
                try:
                    ask(client, "Say yes.", model=model.name, max_tokens=6)
                    told["answers"] += 1
                except openai.OpenAIError as error:
                    told["errors"].append(f"{time.monotonic():.1f}: {error!r}")
                stop.wait(pause)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        running = pool.submit(run)
        try:
            yield told
        finally:
            stop.set()
            running.result(150)


def test_scale_up_and_down_by_kubectl(create, kube):
    model = create("scaled", stages=2)
    model.wait()
    first = model.starts()
    with asking(model) as told:
        kube.kubectl("-n", model.namespace, "scale", "splitmodel", "scaled", "--replicas=2")
        eventually("two chains serve", lambda: model.status().get("replicas") == 2 and len(model.endpoints()) == 2, 180)
        assert {k: v for k, v in model.starts().items() if k[0] == 0} == first
        kube.kubectl("-n", model.namespace, "scale", "splitmodel", "scaled", "--replicas=1")
        eventually("chain 1 is gone", lambda: sorted(model.pods()) == [(0, 0), (0, 1)] and not model.children("statefulsets", ",splitmodel.dev/chain=1"), 120)
    assert told["errors"] == [] and told["answers"] > 3
    assert model.starts() == first
    selector = kube.get("splitmodel", "scaled", model.namespace)["status"]["selector"]
    assert {p["metadata"]["labels"]["splitmodel.dev/stage"] for p in kube.get("pods", namespace=model.namespace, selector=selector)} == {"0"}


def test_an_autoscaler_owns_the_replicas(create, kube):
    """A second writer sets them; the operator follows and never writes them back."""
    model = create("auto", stages=1)
    model.wait()
    kube.kubectl("-n", model.namespace, "patch", "splitmodel", "auto", "--subresource=scale", "--type=merge", "-p", '{"spec":{"replicas":0}}',
                 "--field-manager=autoscaler")
    eventually("no chain is left", lambda: not model.pods() and not model.endpoints(), 90)
    assert model.object()["spec"]["replicas"] == 0
    owners = {f["manager"] for f in kube.kubectl_json("get", "splitmodel", "auto", "-n", model.namespace, "--show-managed-fields")["metadata"]["managedFields"]
              if "f:replicas" in f["fieldsV1"].get("f:spec", {})}
    assert not any("operator" in o for o in owners), owners


def test_a_change_rolls_one_chain_at_a_time_and_no_request_is_lost(create, kube):
    model = create("rolled", stages=2, replicas=2)
    model.wait(seconds=240)
    before = {c["index"]: c["revision"] for c in model.status()["chains"]}
    pods = {p["metadata"]["uid"] for p in model.pods().values()}
    most, least = 0, 2
    with asking(model) as told:
        kube.patch("splitmodel", "rolled", {"spec": {"contextLength": 768}}, model.namespace)

        def rolled():
            nonlocal most, least
            alive = model.children("pods", ",splitmodel.dev/stage")
            most, least = max(most, len(alive)), min(least, len(model.endpoints()))
            chains = model.status().get("chains", [])
            return len(chains) == 2 and all(c["revision"] != before[c["index"]] and c["phase"] == "Serving" for c in chains) \
                and model.is_condition("Ready", "True")()
        eventually("both chains follow the new spec", rolled, 300)
    assert told["errors"] == [] and told["answers"] > 3
    assert least >= 1, "for a moment no chain served"
    assert most <= 4, "a roll took more pods than two chains have"
    assert not pods & {p["metadata"]["uid"] for p in model.pods().values()}
    assert len(model.children("configmaps", ",splitmodel.dev/chain")) == 2, "configurations of the old revision are left"


def test_a_stream_that_outlasts_the_grace_is_told(create, kube):
    model = create("brief", stages=2, deadlines={"drainSeconds": 2})
    model.wait()
    pieces = []

    def stream(client):
        messages = [{"role": "user", "content": "Count to a thousand."}]
        for chunk in client.chat.completions.create(model="brief", messages=messages, stream=True, max_tokens=980, extra_body={"ignore_eos": True}):
            pieces.append(chunk.choices[0].delta.content or "")
    with model.client() as client, concurrent.futures.ThreadPoolExecutor(1) as pool:
        running = pool.submit(stream, client)
        eventually("the stream flows", lambda: len(pieces) > 10, 60, every=0.05)
        kube.patch("splitmodel", "brief", {"spec": {"contextLength": 1056}}, model.namespace)
        with pytest.raises(openai.APIError, match="shutting down"):
            running.result(120)
    assert 10 < len(pieces) < 980
    model.wait(seconds=240)
    with model.client() as client:
        assert ask(client)


def test_fewer_stages(create, kube):
    model = create("fewer", stages=3)
    model.wait()
    old = model.status()["chains"][0]["revision"]
    kube.patch("splitmodel", "fewer", {"spec": {"stages": 2}}, model.namespace)

    def changed():
        now = model.object()
        status = now["status"]
        [ready] = [c for c in status["conditions"] if c["type"] == "Ready"]
        serves = ready["status"] == "True" and ready["observedGeneration"] == now["metadata"]["generation"]
        if serves:
            # Pods of the old shape never count for the new revision.
            [chain] = status["chains"]
            assert chain["revision"] != old and len(chain["stages"]) == 2 and status["ready"] == "2/2", status
        return serves and not model.children("statefulsets,services", ",splitmodel.dev/stage=2")
    eventually("two stages serve and nothing of the third is left", changed, 180)
    assert sorted(model.pods()) == [(0, 0), (0, 1)]
    assert sum(int(n) for n in model.status()["layers"].split("/")) == 30
    with model.client() as client:
        assert ask(client)


@pytest.mark.parametrize("change", [{"modelAliases": ["other-name"]}, {"pods": {"labels": {"team": "a"}}}], ids=["aliases", "labels"])
def test_small_changes_arrive(create, kube, change):
    model = create("small", stages=1)
    model.wait()
    kube.patch("splitmodel", "small", {"spec": change}, model.namespace)

    def arrived():
        if not model.is_condition("Ready", "True")():
            return False
        if "pods" in change:
            return all(p["metadata"]["labels"].get("team") == "a" for p in model.pods().values())
        return "other-name" in model.names()
    eventually("the change is there", arrived, 150)
