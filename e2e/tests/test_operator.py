"""The operator itself: its lease, its end, its absence, its upgrade."""
import time

from conftest import SYSTEM, drop_namespace, install, new_namespace
from kube import always, eventually
from model import Model, ask, manifest

LEASE = "splitmodel-operator"
PODS = "app.kubernetes.io/name=splitmodel-operator"


def holder(kube):
    return (kube.get("lease", LEASE, SYSTEM) or {}).get("spec", {}).get("holderIdentity")


def names(kube):
    return {p["metadata"]["name"] for p in kube.get("pods", namespace=SYSTEM, selector=PODS) if "deletionTimestamp" not in p["metadata"]}


def scale(kube, replicas):
    kube.kubectl("-n", SYSTEM, "scale", "deployment", "splitmodel-operator", f"--replicas={replicas}")
    eventually(f"{replicas} operators", lambda: len(kube.get("pods", namespace=SYSTEM, selector=PODS)) == replicas, 60)
    if replicas:
        kube.kubectl("-n", SYSTEM, "rollout", "status", "deployment/splitmodel-operator", "--timeout=90s", timeout=120)


def test_one_of_two_works_and_a_killed_one_is_replaced(create, kube):
    model = create("led", stages=1)
    model.wait()
    first = eventually("somebody holds the lease", lambda: holder(kube), 30)
    assert first in names(kube) and len(names(kube)) == 2

    def children():
        return {(c["kind"], c["metadata"]["name"], c["metadata"]["uid"]) for c in model.children("statefulsets,services,configmaps,secrets")}
    starts, before = model.starts(), children()
    kube.delete("pod", first, SYSTEM, wait=False, force=True)
    began = time.monotonic()
    eventually("another one holds the lease", lambda: holder(kube) not in (None, "", first), 20, every=0.2)
    print(f"from the leader's death to another leader: {time.monotonic() - began:.1f} s")
    always("nothing is made twice or disturbed", lambda: children() == before and model.starts() == starts, 5)
    kube.patch("splitmodel", "led", {"spec": {"replicas": 0}}, model.namespace)
    eventually("the new leader works", lambda: not model.pods(), 60)
    kube.patch("splitmodel", "led", {"spec": {"replicas": 1}}, model.namespace)
    model.wait()


def test_while_the_operator_is_down_nothing_is_blocked_and_later_all_is_done(create, kube, namespace):
    stays, goes = create("stays", stages=1), create("goes", stages=1)
    stays.wait()
    goes.wait()
    scale(kube, 0)
    try:
        starts = stays.starts()
        with stays.client() as client:
            assert ask(client, max_tokens=4)
        new = Model(kube, "new", namespace)
        kube.apply(manifest("new", namespace, stages=1))
        kube.patch("splitmodel", "stays", {"spec": {"modelAliases": ["later"]}}, namespace)
        goes.delete()
        assert goes.object() is None
        assert stays.starts() == starts
    finally:
        scale(kube, 2)
    new.wait()
    eventually("what was deleted meanwhile is gone", lambda: not goes.children("statefulsets,services,configmaps,pods,secrets"), 60)

    def changed():
        if not stays.is_condition("Ready", "True")():
            return False
        return "later" in stays.names()
    eventually("what was changed meanwhile is so", changed, 120)
    new.delete()


def test_an_upgrade_restarts_no_stage(create, kube):
    model = create("kept", stages=2)
    model.wait()
    starts, operators = model.starts(), names(kube)
    try:
        install(kube, "podAnnotations.version=next", "stageImage.tag=next")
        eventually("the operators are new", lambda: not operators & names(kube) and len(names(kube)) == 2, 90)
        eventually("one leads", lambda: holder(kube) in names(kube), 30)
        always("no stage is disturbed", lambda: model.starts() == starts and model.condition("Ready").get("status") == "True", 15)
    finally:
        install(kube)
    assert model.starts() == starts


def test_what_is_deleted_is_forgotten(create, kube):
    model = create("passing", stages=1)
    model.wait()

    def serving():
        text = kube.kubectl("get", "--raw", f"/api/v1/namespaces/{SYSTEM}/pods/{holder(kube)}:8080/proxy/metrics")
        return next((float(line.split()[1]) for line in text.splitlines() if line.startswith('splitmodel_operator_models{phase="Serving"}')), None)
    before = eventually("it is counted", serving, 20)
    model.delete()
    eventually("it is not counted any more", lambda: serving() == before - 1, 60)


def test_the_operator_waits_for_its_resource(kube, operator):
    """Its metrics and health are served; readiness is what the chart's probe asks."""
    for name in names(kube):
        raw = f"/api/v1/namespaces/{SYSTEM}/pods/{name}:8080/proxy"
        assert kube.kubectl("get", "--raw", f"{raw}/healthz") is not None
        assert "splitmodel_operator" in kube.kubectl("get", "--raw", f"{raw}/metrics")


def test_an_operator_of_chosen_namespaces_has_rights_there_only(create, kube, namespace):
    other = new_namespace(kube, "not-watched")
    try:
        install(kube, f"watchNamespaces[0]={namespace}")
        assert kube.get("clusterrole", "splitmodel-operator") is None and kube.get("clusterrolebinding", "splitmodel-operator") is None
        assert kube.get("role", "splitmodel-operator", namespace) is not None
        model = create("chosen", stages=2)
        model.wait()
        with model.client() as client:
            assert ask(client, max_tokens=4)
        kube.apply(manifest("other", other, stages=1))
        outside = Model(kube, "other", other)
        always("nobody looks at what is elsewhere", lambda: not outside.status() and not outside.children("statefulsets"), 8)
    finally:
        install(kube)
        drop_namespace(kube, other)
    assert model.starts() and model.condition("Ready").get("status") == "True"
