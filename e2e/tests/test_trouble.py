"""What goes wrong for users: too little of something, slow sources, stages that fail, and names that do not fit."""
import re
import time

import pytest

from conftest import SYSTEM
from files import Files
from kube import Refused, always, eventually
from model import FILE, SMALL, ask

HUB = f"hf://owner/models/{FILE}"


@pytest.fixture
def files(kube, namespace, models):
    return Files(kube, namespace, models)


def hub(files):
    """Pods that take the server in the cluster for the hub."""
    return {"env": [{"name": "HF_ENDPOINT", "value": files.url}]}


def stages(model, field, chain=0):
    """That field of all stages, as the status tells."""
    chains = model.status().get("chains") or []
    return [s.get(field) for s in chains[chain]["stages"]] if len(chains) > chain else []


def process(kube, pod, signal):
    """Signals the process of a stage from its node, as the kernel or an operator of machines would."""
    uid = pod["metadata"]["uid"]
    # By its name, as the kernel cuts it; a process sees the mounts of its own pod only.
    script = f"for p in $(pgrep -x splitmodel-stag); do grep -q {uid} /proc/$p/mountinfo && kill -{signal} $p; done; true"
    kube.on_node(pod["spec"]["nodeName"], "sh", "-c", script)


def test_more_gpus_than_there_are(create):
    model = create("big", stages=5, stageDefaults={**SMALL, "gpu": {}})

    told = model.wait("Planned", "False", "DoesNotFit", seconds=60)
    assert "5 stages" in told["message"] and "there are 4" in told["message"], told
    assert model.status()["phase"] == "Pending" and model.condition("Ready")["status"] == "False"
    assert not model.pods()
    model.delete()
    eventually("nothing is left", lambda: not model.children("pods,statefulsets"), 60)


def test_the_memory_that_a_driver_publishes_counts(create, kube):
    """Slices as a driver of dynamic resource allocation writes them, without a label of feature discovery: too small, then large enough."""
    label = "nvidia.com/gpu.memory"
    labels = {node: kube.get("node", node)["metadata"]["labels"][label] for node in kube.workers}

    def publish(size):
        kube.apply(*[{"apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice", "metadata": {"name": f"test-{node}"},
                      "spec": {"driver": "gpu.nvidia.com", "nodeName": node, "pool": {"name": node, "generation": 1, "resourceSliceCount": 1},
                               "devices": [{"name": "gpu-0", "capacity": {"memory": {"value": size}}}]}} for node in kube.workers])
    try:
        kube.kubectl("label", "node", *kube.workers, f"{label}-")
        publish("20Mi")
        model = create("tight", stages=3, stageDefaults={**SMALL, "gpu": {}})
        told = model.wait("Planned", "False", "DoesNotFit", seconds=60)
        assert "MiB" in told["message"] and not model.pods(), told
        publish("2Gi")
        model.wait("Planned", "True", seconds=30)
        headroom = [stage["headroomBytes"] for stage in model.status()["plan"]["stages"]]
        assert all(0 < h < 2 << 30 for h in headroom), headroom
    finally:
        for node in kube.workers:
            kube.delete("resourceslice", f"test-{node}")
            kube.kubectl("label", "--overwrite", "node", node, f"{label}={labels[node]}")


def test_slow_downloads_restart_nothing_and_a_deleted_stage_comes_back_alone(create, kube, files):
    files.rate(2_000_000)
    model = create("slow", model={"source": HUB}, pods=hub(files), stages=3)
    eventually("stages fetch", lambda: any(b and b > 1_000_000 for b in stages(model, "fetchedBytes")), 90)
    total = stages(model, "totalBytes")
    assert all(total), total
    first = stages(model, "fetchedBytes")
    eventually("bytes advance", lambda: sum(b or 0 for b in stages(model, "fetchedBytes")) > sum(b or 0 for b in first) + 2_000_000, 30)
    starts = model.starts()
    kube.kubectl("-n", model.namespace, "delete", "pod", "slow-0-1-0", "--wait=false")
    eventually("it is back", lambda: (0, 1) in model.pods() and model.starts()[0, 1][0] != starts[0, 1][0], 60)
    always("the others go on", lambda: all(model.starts()[k] == starts[k] for k in [(0, 0), (0, 2)]), 10)
    files.rate(0)
    model.wait(seconds=180)
    after = model.starts()
    assert all(after[k] == starts[k] for k in [(0, 0), (0, 2)]) and all(s[2] == 0 for s in after.values())


def test_a_slice_on_a_claim_is_resumed(create, kube, files):
    files.rate(2_000_000)
    model = create("resumed", model={"source": HUB}, pods=hub(files), stages=2, cacheVolume={"persistent": True, "size": "1Gi"})
    eventually("stage 1 has fetched a part", lambda: (stages(model, "fetchedBytes") + [0, 0])[1] or 0 > 8_000_000, 90)
    eventually("and more of it", lambda: stages(model, "fetchedBytes")[1] > 8_000_000, 60)
    kube.kubectl("-n", model.namespace, "delete", "pod", "resumed-0-1-0", "--wait=false")
    files.rate(0)
    model.wait(seconds=180)
    whole = sum(stages(model, "totalBytes"))
    # What is fetched twice is less than what was there already.
    assert files.sent() < whole + 8_000_000, (files.sent(), whole)


def test_the_operator_itself_fetches_nothing(create, kube, files, namespace):
    kube.kubectl("-n", namespace, "create", "secret", "generic", "hub-token", "--from-literal=token=hf_secret")
    model = create("private", model={"source": HUB, "credentialsSecret": "hub-token"}, pods=hub(files), stages=1)
    model.wait()
    asked = files.requests()
    assert asked and all(r.get("authorization") == "Bearer hf_secret" for r in asked)
    operators = {p["status"]["podIP"] for p in kube.get("pods", namespace=SYSTEM)}
    assert not operators & {r["from"] for r in asked}
    assert "hf_secret" not in kube.kubectl("get", "splitmodels,configmaps,statefulsets,events", "-n", namespace, "-o", "yaml")


def test_a_secret_of_another_namespace_cannot_be_named(kube, create, namespace):
    with pytest.raises(Refused, match="credentialsSecret"):
        create("thief", model={"source": HUB, "credentialsSecret": "kube-system/token"})


@pytest.mark.parametrize("source, words", [
    ("pvc://nothing/a.gguf", "nothing"), ("pvc://models/missing.gguf", "missing.gguf"), ("hf://owner/models/missing.gguf", "404"),
], ids=["claim", "file", "hub"])
def test_a_source_that_is_not_there(create, files, source, words):
    model = create("lost", model={"source": source}, pods=hub(files), stages=2)
    eventually("a condition says so", lambda: any(words in c["message"] for c in model.status().get("conditions", [])), 90)
    assert model.condition("Ready")["status"] == "False"
    assert not model.pods()


@pytest.fixture
def turned(models):
    """The sample with one tensor of a wrong shape, in the last of three stages: nothing but loading it tells."""
    name, path = b"blk.29.ffn_up.weight", models / "turned.gguf"
    data = bytearray((models / FILE).read_bytes())
    at = data.index(name) + len(name) + 4
    data[at:at + 16] = data[at + 8:at + 16] + data[at:at + 8]
    path.write_bytes(data)
    yield path
    path.unlink()


def test_a_stage_that_fails_every_time(create, kube, turned):
    """The tries are bounded and slower each time, its first words are kept, and the others are let alone."""
    model = create("broken", stages=3, model={"source": f"pvc://models/{turned.name}"})

    def failure():
        return (stages(model, "failure") + [None] * 3)[2]
    eventually("the failure is in the status", failure, 90)
    others = {k: v for k, v in model.starts().items() if k != (0, 2)}
    assert failure()["exitCode"] == 3 and any("ffn_up.weight" in line and "wrong shape" in line for line in failure()["lines"]), failure()
    first = failure()["lines"]
    assert model.condition("Ready")["status"] == "False" and not model.endpoints()
    eventually("in the end it has failed", lambda: model.status()["phase"] == "Failed", 180)
    message = " ".join(c["message"] for c in model.status()["conditions"])
    assert "stage 2" in message and "exit code 3" in message and "splitmodel.dev/retry" in message, message
    assert failure()["count"] == 3 and failure()["lines"] == first, failure()
    always("no further try", lambda: failure()["count"] == 3, 20)
    assert {k: v for k, v in model.starts().items() if k != (0, 2)} == others


def test_a_storage_class_that_does_not_exist(create):
    model = create("stored", stages=1, cacheVolume={"persistent": True, "size": "1Gi", "storageClassName": "nowhere"})
    eventually("a condition names it", lambda: any("nowhere" in c["message"] for c in model.status().get("conditions", [])), 90)
    began = time.monotonic()
    model.delete()
    assert model.object() is None and time.monotonic() - began < 20
    eventually("nothing is left", lambda: not model.children("persistentvolumeclaims,pods,statefulsets"), 60)


def test_a_quota_that_is_too_small(kube, create, namespace):
    kube.apply({"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "small", "namespace": namespace}, "spec": {"hard": {"pods": "1"}}})
    model = create("many", stages=3)
    eventually("the quota's words are in a condition",
               lambda: any("exceeded quota" in c["message"] for c in model.status().get("conditions", [])), 90)


def test_more_stages_than_layers(create):
    model = create("forty", stages=40)
    found = model.wait("Planned", "False", "DoesNotFit", seconds=90)
    assert "30" in found["message"] and "40" in found["message"], found
    assert not model.pods()


def test_a_name_that_is_too_long(create):
    with pytest.raises(Refused, match="at most 40"):
        create("n" * 63)
    create("n" * 40, stages=1).wait()


def test_a_stopped_process_is_noticed(create, kube):
    model = create("stopped", stages=3)
    model.wait()
    pod = model.pods()[0, 1]
    with model.watched() as seen:
        process(kube, pod, "STOP")
        try:
            seen.lost_readiness(60)
        finally:
            process(kube, pod, "CONT")
    model.wait(seconds=120)
    with model.client() as client:
        assert ask(client, max_tokens=4)


def test_a_stage_lost_five_times(create, kube):
    model = create("flaky", stages=3)
    model.wait()
    others = {k: v for k, v in model.starts().items() if k != (0, 1)}
    for _ in range(5):
        with model.watched() as seen:
            kube.kubectl("-n", model.namespace, "delete", "pod", "flaky-0-1-0", "--grace-period=1", timeout=90)
            seen.lost_readiness(30)
        model.wait(seconds=120)
        with model.client() as client:
            assert ask(client, max_tokens=4)
    assert {k: v for k, v in model.starts().items() if k != (0, 1)} == others


def test_a_crashing_stage_takes_readiness_within_seconds(create, kube):
    model = create("crash", stages=3)
    model.wait()
    pod = model.pods()[0, 2]
    with model.watched() as seen:
        process(kube, pod, "KILL")
        # It is back within a second, which nobody may notice; the second time it is kept waiting for ten.
        eventually("it runs again", lambda: model.starts()[0, 2][1] and model.starts()[0, 2][2] == 1, 30, every=0.2)
        process(kube, pod, "KILL")
        print("from the death of a stage until Ready is false, and until there is no endpoint: %.1f s, %.1f s" % seen.lost_readiness(15))
    model.wait(seconds=120)
    assert stages(model, "restarts") == [0, 0, 2]


def test_nonsense_never_ends_the_operator(kube, operator, namespace, create):
    """After all of this the operators are those that were there, never restarted."""
    for number, spec in enumerate([
        {"model": {"source": "https://127.0.0.1/a.gguf"}}, {"model": {"source": "oci://nowhere/x@sha256:" + "0" * 64 + "#a.gguf"}},
        {"stageList": [{"layers": "0-9999"}]}, {"stageDefaults": {"nodeSelector": {"no": "node"}}}, {"pods": {"priorityClassName": "nobody"}},
        {"api": {"keySecret": "absent"}}, {"image": "nowhere/none:1"}, {"contextLength": 16777216},
    ]):
        create(f"odd-{number}", **spec)
    time.sleep(20)
    for pod in kube.get("pods", namespace=SYSTEM):
        assert pod["status"]["containerStatuses"][0]["restartCount"] == 0
    for item in kube.get("splitmodels", namespace=namespace):
        conditions = item.get("status", {}).get("conditions", [])
        assert any(c["status"] != "True" and re.search(r"\w+ \w+", c["message"]) for c in conditions), item

