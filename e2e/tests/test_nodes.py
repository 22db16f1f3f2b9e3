"""A node that goes silent. Last of all, for the cluster is disturbed meanwhile."""
import contextlib
import time

from kube import eventually
from model import SMALL, ask


@contextlib.contextmanager
def silent(kube, node):
    """Its kubelet says nothing more; what runs there goes on."""
    kube.on_node(node, "pkill", "-STOP", "-x", "kubelet")
    try:
        yield
    finally:
        kube.on_node(node, "pkill", "-CONT", "-x", "kubelet")
        kube.kubectl("wait", "--for=condition=Ready", f"node/{node}", "--timeout=120s", timeout=150)


def on_its_node(kube, node, uids):
    """Processes of stages there that see mounts of these pods."""
    script = "for p in $(pgrep -x splitmodel-stag); do grep -lE '%s' /proc/$p/mountinfo; done; true" % "|".join(uids)
    return kube.on_node(node, "sh", "-c", script).split()


def test_a_stage_moves_from_a_node_that_is_silent(create, kube):
    # Sooner than by default, which is a minute for the toleration and half a minute of grace.
    soon = [{"key": f"node.kubernetes.io/{what}", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 5} for what in ("not-ready", "unreachable")]
    model = create("moved", stages=3, stageDefaults={**SMALL, "tolerations": soon}, deadlines={"drainSeconds": 5})
    model.wait()
    pods = model.pods()
    # Not the node of stage 0, if they are apart.
    lost = next((p["spec"]["nodeName"] for p in pods.values() if p["spec"]["nodeName"] != pods[0, 0]["spec"]["nodeName"]),
                pods[0, 0]["spec"]["nodeName"])
    old = [pod["metadata"]["uid"] for pod in pods.values() if pod["spec"]["nodeName"] == lost]
    there = {key for key, pod in pods.items() if pod["spec"]["nodeName"] == lost}
    elsewhere = {k: v for k, v in model.starts().items() if k not in there}
    with silent(kube, lost):
        began = time.monotonic()
        eventually("Ready is false", lambda: model.condition("Ready")["status"] == "False", 90)
        model.wait(seconds=300)
        print(f"from the node's silence until the model serves again: {time.monotonic() - began:.0f} s")
        assert all(p["spec"]["nodeName"] != lost for p in model.pods().values())
        assert {k: v for k, v in model.starts().items() if k not in there} == elsewhere
        with model.client() as client:
            assert ask(client, max_tokens=4)
    eventually("the node's old pods are no more", lambda: not on_its_node(kube, lost, old), 120)
    assert model.wait()
