"""The sample over three stages on two workers: how it comes up, where it runs, what it answers, and that it then rests."""
import concurrent.futures
import re
import time

import pytest

from kube import always, eventually
from model import FILE, ask

PHASES = ["Pending", "Planned", "Scheduled", "Fetching", "Loading", "Linked", "Serving"]
QUESTIONS = ["Name three fruits.", "What is the capital of France?"]


def test_phases_come_in_order(sample):
    seen = [s["phase"] for s in sample.seen if "phase" in s]
    assert set(seen) <= set(PHASES), seen
    assert seen == sorted(seen, key=PHASES.index), seen
    assert seen[-1] == "Serving" and len(set(seen)) >= 3, seen
    by_stage = {}
    for status in sample.seen:
        for chain in status.get("chains", []):
            for number, stage in enumerate(chain["stages"]):
                by_stage.setdefault(number, []).append(stage["phase"])
    for number, phases in by_stage.items():
        assert phases == sorted(phases, key=PHASES.index), (number, phases)


def test_ready_comes_with_the_endpoint_and_not_before(sample):
    for status in sample.seen:
        ready = next((c["status"] for c in status.get("conditions", []) if c["type"] == "Ready"), "False")
        assert (ready == "True") == (status.get("phase") == "Serving"), status
    assert len(sample.endpoints()) == 1


def test_status_says_what_runs_where(sample):
    status = sample.status()
    assert status["ready"] == "3/3" and status["replicas"] == 1
    layers = [int(n) for n in status["layers"].split("/")]
    assert sum(layers) == 30 and len(layers) == 3
    assert [c["type"] for c in status["conditions"]] and all(c.get("observedGeneration") for c in status["conditions"])
    planned = status["plan"]["stages"]
    assert [p["layers"] for p in planned] == [s["layers"] for s in status["chains"][0]["stages"]]
    assert all(p["weightBytes"] > 0 and p["kvBytes"] > 0 and p["computeBytes"] > 0 for p in planned)
    pods = sample.pods()
    assert sorted(pods) == [(0, 0), (0, 1), (0, 2)]
    for (chain, number), pod in pods.items():
        told = status["chains"][chain]["stages"][number]
        assert told["pod"] == pod["metadata"]["name"] == f"sample-{chain}-{number}-0"
        assert told["node"] == pod["spec"]["nodeName"] and told["restarts"] == 0


def test_stages_take_a_gpu_each_on_both_workers(sample, kube):
    pods = sample.pods().values()
    assert {p["spec"]["nodeName"] for p in pods} == set(kube.workers)
    assert all(p["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "1" for p in pods)


def test_pods_are_restricted(sample):
    for pod in sample.pods().values():
        assert pod["spec"]["automountServiceAccountToken"] is False
        [container] = pod["spec"]["containers"]
        rights = {**pod["spec"]["securityContext"], **container["securityContext"]}
        assert rights["runAsNonRoot"] and rights["readOnlyRootFilesystem"] and rights["allowPrivilegeEscalation"] is False
        assert rights["capabilities"] == {"drop": ["ALL"]} and rights["seccompProfile"] == {"type": "RuntimeDefault"}


def test_each_stage_holds_only_its_slice(sample, kube, models):
    whole = (models / FILE).stat().st_size
    held = []
    for (_, number), pod in sorted(sample.pods().items()):
        told = sample.status()["chains"][0]["stages"][number]
        folder = f"/var/lib/kubelet/pods/{pod['metadata']['uid']}/volumes"
        sizes = kube.on_node(pod["spec"]["nodeName"], "find", folder, "-type", "f", "-size", "+1M", "-path", "*cache*", "-printf", "%s\n")
        held.append(sum(map(int, sizes.split())))
        assert told["fetchedBytes"] == told["totalBytes"] and abs(held[-1] - told["totalBytes"]) < 2e6, (held, told)
        assert held[-1] < 0.7 * whole
    # The embedding is in the first and the last stage.
    assert whole * 0.9 < sum(held) < whole * 1.5, held


@pytest.mark.parametrize("question", QUESTIONS)
def test_the_official_client_streams_the_unsplit_models_text(sample, unsplit, question):
    with sample.client() as client:
        assert ask(client, question) == unsplit(question)


def test_clients_reach_it_by_name_in_the_cluster(sample):
    assert sample.status()["url"].startswith(f"http://sample.{sample.namespace}.svc")
    assert ":8000" in sample.status()["url"]


def test_a_steady_state_writes_nothing(sample, kube):
    """Counted by the API server, for 60 s, of all kinds that the operator writes; its lease is the only exception."""
    kinds = "splitmodels|statefulsets|services|configmaps|persistentvolumeclaims|pods|poddisruptionbudgets|networkpolicies|secrets|events"
    pattern = re.compile(rf'^apiserver_request_total{{.*resource="({kinds})".*verb="(APPLY|PATCH|POST|PUT|DELETE)"}} (\S+)$', re.M)

    def writes():
        return {m[0].rsplit(" ", 1)[0]: float(m[3]) for m in pattern.finditer(kube.kubectl("get", "--raw", "/metrics"))}

    def quiet():
        before = writes()
        time.sleep(5)
        return writes() == before
    eventually("other controllers have settled", quiet, 60)
    before, objects = writes(), {c["metadata"]["name"]: c["metadata"]["resourceVersion"] for c in sample.children("statefulsets,services,configmaps")}
    time.sleep(60)
    after = writes()
    assert {k: v for k, v in after.items() if before.get(k) != v} == {}
    assert {c["metadata"]["name"]: c["metadata"]["resourceVersion"] for c in sample.children("statefulsets,services,configmaps")} == objects


def test_a_second_writer_is_left_alone(sample, kube):
    """A label that somebody adds stays, and starts no tug of war."""
    name = sample.children("statefulsets")[0]["metadata"]["name"]
    kube.kubectl("-n", sample.namespace, "label", "statefulset", name, "example.org/injected=yes")
    version = kube.get("statefulset", name, sample.namespace)["metadata"]["resourceVersion"]
    always("the label is there and nobody wrote",
           lambda: kube.get("statefulset", name, sample.namespace)["metadata"]["resourceVersion"] == version, 10)


def test_a_child_that_is_taken_away_comes_back(sample, kube):
    starts = sample.starts()
    kube.delete("service", sample.name, sample.namespace)
    eventually("the Service is back", lambda: kube.get("service", sample.name, sample.namespace), 20)
    eventually("it has an endpoint", sample.endpoints, 20)
    eventually("it answers", sample.names, 20)
    assert sample.starts() == starts


def test_a_stages_pod_is_replaced_alone_and_streams_go_on(sample, kube, unsplit):
    question = "Write a long story about a fox."
    long = {"max_tokens": 900, "extra_body": {"ignore_eos": True}}
    before, pieces, arrived, ends = sample.starts(), [], [], []

    def stream(client):
        messages = [{"role": "user", "content": question}]
        for chunk in client.chat.completions.create(model="sample", messages=messages, temperature=0, stream=True, **long):
            pieces.append(chunk.choices[0].delta.content or "")
            arrived.append(time.monotonic())
            ends.append(chunk.choices[0].finish_reason)
    with sample.client() as client, concurrent.futures.ThreadPoolExecutor(1) as pool:
        running = pool.submit(stream, client)
        eventually("the stream flows", lambda: len(pieces) > 20, 60, every=0.05)
        with sample.watched() as seen:
            kube.kubectl("-n", sample.namespace, "delete", "pod", "sample-0-1-0", "--wait=false")
            seen.lost_readiness(30)
        assert not running.done(), "the stream was over too soon for this test"
        running.result(180)
        # While the stage was away no token came: the longest pause since.
        since = [at for at in arrived if at >= seen.began]
        pause, end = max((b - a, b) for a, b in zip([seen.began, *since], since))
        told = "".join(piece for piece, at in zip(pieces, arrived) if at < end)
        print(f"from the deletion of a stage's pod to the next token of the stream: {end - seen.began:.1f} s, a pause of {pause:.1f} s")
        sample.wait(seconds=120)
    assert ends[-1] == "length"
    # What came before is the unsplit model's; after it the batches have other shapes, and texts may part.
    assert unsplit(question, **long).startswith(told) and len(told) > 20
    after = sample.starts()
    assert after[0, 1] != before[0, 1]
    assert {k: v for k, v in after.items() if k != (0, 1)} == {k: v for k, v in before.items() if k != (0, 1)}


def test_it_is_deleted_whole_and_nothing_else_is(sample, kube):
    kept = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "bystander", "namespace": sample.namespace}}
    kube.apply(kept)
    sample.delete()
    kinds = "statefulsets,services,configmaps,persistentvolumeclaims,pods,poddisruptionbudgets,networkpolicies,secrets"
    eventually("all children are gone", lambda: not sample.children(kinds), 90)
    left = {o["metadata"]["name"] for o in kube.get("secrets,services,configmaps", namespace=sample.namespace)}
    assert left <= {"bystander", "kube-root-ca.crt"}, left
    assert kube.get("configmap", "bystander", sample.namespace)

