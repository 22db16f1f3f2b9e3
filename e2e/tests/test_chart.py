"""The operator's chart: what it renders is strictly valid, and gives no more rights than needed."""
import json
import re
import sys

import pytest

from conftest import ROOT, SYSTEM
from kube import Refused

sys.path.insert(0, str(ROOT / "tests/charts"))
from cases import VALUES  # noqa: E402  the values that the charts' own tests render

CHART = ROOT / "charts/splitmodel"
ACCOUNT = f"system:serviceaccount:{SYSTEM}:splitmodel-operator"
VARIANTS = {
    "defaults": [],
    "namespaced": ["watchNamespaces={default,kube-public}"],
    "everything": ["replicas=2", "podDisruptionBudget.enabled=true", "networkPolicy.enabled=true", "clusterDomain=cluster.local",
                   "serviceAccount.annotations.a=b", "nodeSelector.a=b", "log.format=text"],
}


def render(kube, settings):
    return kube.helm("template", "splitmodel", CHART, "-n", SYSTEM, *[f for s in settings for f in ("--set", s)])


@pytest.mark.parametrize("case", VALUES)
def test_what_is_rendered_is_strictly_valid(kube, crd, tmp_path, case):
    values = tmp_path / "values.json"
    values.write_text(json.dumps(VALUES[case]))
    text = kube.helm("template", "splitmodel", CHART, "-n", SYSTEM, "--values", values)
    # Comes with Prometheus' operator, which is not here.
    text = "\n---\n".join(d for d in re.split(r"^---$", text, flags=re.M) if "kind: ServiceMonitor" not in d)
    kube.kubectl("apply", "--dry-run=server", "--validate=strict", "-f", "-", stdin=text)


def test_a_value_that_is_unknown_is_refused(kube):
    with pytest.raises(Refused, match="replica"):
        render(kube, ["replica=2"])


def rules(kube, settings):
    """The roles and bindings among what is rendered."""
    text = kube.kubectl("create", "--dry-run=client", "-o", "json", "-f", "-", stdin=render(kube, settings))
    found, position = [], 0
    while position < len(text.rstrip()):
        one, position = json.JSONDecoder().raw_decode(text, position)
        position += len(text[position:]) - len(text[position:].lstrip())
        found += one["items"] if one["kind"] == "List" else [one]
    return [o for o in found if o["kind"] in ("ClusterRole", "Role", "ClusterRoleBinding", "RoleBinding")]


def test_no_right_is_a_wildcard(kube, crd):
    for settings in VARIANTS.values():
        for role in rules(kube, settings):
            for rule in role.get("rules", []):
                assert "*" not in [*rule["apiGroups"], *rule["resources"], *rule["verbs"]], (role["metadata"]["name"], rule)
                assert not {"pods/exec", "pods/log", "pods/attach", "nodes/proxy"} & set(rule["resources"]), rule


def test_with_namespaces_named_there_are_roles_only(kube, crd):
    kinds = {(r["kind"], r["metadata"]["namespace"]) for r in rules(kube, VARIANTS["namespaced"])}
    assert {k for k, _ in kinds} == {"Role", "RoleBinding"}
    assert {n for _, n in kinds} == {"default", "kube-public", SYSTEM}


@pytest.mark.parametrize("verb, what, may", [
    ("list", "secrets", "no"), ("watch", "secrets", "no"), ("get", "secrets", "yes"), ("create", "pods/exec", "no"), ("get", "pods/log", "no"),
    ("*", "*", "no"), ("create", "clusterroles", "no"), ("delete", "nodes", "no"), ("patch", "nodes", "no"), ("delete", "splitmodels", "no"),
    ("patch", "splitmodels/status", "yes"), ("list", "nodes", "yes"), ("patch", "statefulsets", "yes"),
])
def test_what_the_operator_may(kube, operator, verb, what, may):
    what, _, part = what.partition("/")
    try:
        told = kube.kubectl("auth", "can-i", verb, what, *([f"--subresource={part}"] if part else []), "-n", "default", "--as", ACCOUNT)
    except Refused:
        told = "no"
    assert told.strip() == may
