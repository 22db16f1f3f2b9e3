"""What the charts render, for every value. What an API server says of it is among the tests in e2e/."""

import itertools
import re

import jsonschema
import pytest
import yaml

from cases import CASES, DIGEST, REFUSED, VALUES
from conftest import CHARTS, ROOT

WRITES = ["create", "delete", "get", "list", "patch", "watch"]
# What the operator does, and nothing else: (group, resource) to verbs.
NAMESPACE_RIGHTS = {
    ("splitmodel.dev", "splitmodels"): ["get", "list", "patch", "watch"],
    ("splitmodel.dev", "splitmodels/status"): ["get", "patch"],
    ("apps", "statefulsets"): WRITES,
    ("", "services"): WRITES,
    ("", "configmaps"): WRITES,
    ("", "persistentvolumeclaims"): WRITES,
    ("", "pods"): WRITES,
    ("policy", "poddisruptionbudgets"): WRITES,
    ("networking.k8s.io", "networkpolicies"): WRITES,
    ("", "secrets"): ["create", "delete", "get", "patch"],
    ("events.k8s.io", "events"): ["create", "patch"],
    ("", "events"): ["list"],
}
CLUSTER_RIGHTS = {("", "nodes"): ["get", "list", "watch"], ("resource.k8s.io", "resourceslices"): ["list", "watch"]}
LEASE_RIGHTS = {("coordination.k8s.io", "leases"): ["create", "get", "patch", "update"]}


def of(objects, kind):
    return [o for o in objects if o["kind"] == kind]


def one(objects, kind):
    (found,) = of(objects, kind)
    return found


def rights(role):
    found = {}
    for rule in role["rules"]:
        assert set(rule) == {"apiGroups", "resources", "verbs"}, rule
        for group, resource in itertools.product(rule["apiGroups"], rule["resources"]):
            assert (group, resource) not in found, (group, resource)
            found[group, resource] = sorted(rule["verbs"])
    return found


@pytest.fixture(scope="module")
def rendered(helm):
    """Objects by case, rendered once."""
    done = {}

    def get(case):
        if case not in done:
            done[case] = helm.render("splitmodel", CASES[case])
        return done[case]

    return get


@pytest.mark.parametrize("case", VALUES)
def test_lint(helm, case):
    helm.run("lint", "--strict", "--quiet", str(CHARTS / "splitmodel"), values=VALUES[case])


def test_lint_of_the_definitions(helm):
    for values in [{}, {"aggregateRoles": False}]:
        helm.run("lint", "--strict", "--quiet", str(CHARTS / "splitmodel-crds"), values=values)


@pytest.mark.parametrize("case", REFUSED)
def test_bad_values_are_refused(helm, case):
    args = ["template", "splitmodel", str(CHARTS / "splitmodel")]
    done = helm.run(*args, values=REFUSED[case], ok=False)
    assert done.returncode != 0, done.stdout


def test_bad_values_of_the_definitions_are_refused(helm):
    args = ["template", "x", str(CHARTS / "splitmodel-crds")]
    assert helm.run(*args, values={"keep": False}, ok=False).returncode != 0


def test_every_value_has_a_case():
    """A value that no case sets would go unseen."""

    def paths(value, path=()):
        if isinstance(value, dict) and value and path[:1] not in [("resources",), ("podSecurityContext",)]:
            return [p for k, v in value.items() for p in paths(v, (*path, k))]
        return [path]

    def sets(case, path):
        for key in path:
            if not isinstance(case, dict) or key not in case:
                return False
            case = case[key]
        return True

    values = yaml.safe_load((CHARTS / "splitmodel/values.yaml").read_text())
    # Kept as they are: defaults that no cluster needs otherwise.
    left = {("metrics", "serviceMonitor", "scrapeTimeout"), ("podDisruptionBudget", "maxUnavailable")}
    unseen = [p for p in paths(values) if p not in left and not any(sets(c, p) for c in VALUES.values())]
    assert [p for p in unseen if p[0] != "securityContext" and p != ("image", "tag") and p != ("stageImage", "digest")] == []
    text = (CHARTS / "splitmodel/README.md").read_text()
    for path in paths(values):
        assert f"`{path[0]}" in text and path[-1] in text or path[0] in ("podSecurityContext", "securityContext"), path


@pytest.mark.parametrize("case", CASES)
def test_rendered(rendered, case):
    values, objects = CASES[case], rendered(case)
    names = [(o["kind"], o["metadata"].get("namespace"), o["metadata"]["name"]) for o in objects]
    assert len(set(names)) == len(names)
    for kind, namespace, name in names:
        assert re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", name) and len(name) <= 63, name
        assert (namespace is None) == kind.startswith("Cluster"), (kind, name)
    deployment = one(objects, "Deployment")
    template = deployment["spec"]["template"]
    selector = deployment["spec"]["selector"]["matchLabels"]
    pod, labels = template["spec"], template["metadata"]["labels"]
    assert selector.items() <= labels.items()
    for other in of(objects, "Service") + of(objects, "PodDisruptionBudget") + of(objects, "NetworkPolicy"):
        spec = other["spec"]
        chosen = spec.get("podSelector", spec["selector"] if other["kind"] != "NetworkPolicy" else None)
        assert chosen.get("matchLabels", chosen) == selector, other["kind"]

    (container,) = pod["containers"]
    security = {**pod["securityContext"], **container["securityContext"]}
    assert security["runAsNonRoot"] is True and security["readOnlyRootFilesystem"] is True
    assert security["allowPrivilegeEscalation"] is False and security["capabilities"] == {"drop": ["ALL"]}
    assert security["seccompProfile"] == {"type": "RuntimeDefault"}
    assert ("runAsUser" in security) == ("openshift" not in case)

    ports = {p["name"]: p["containerPort"] for p in container["ports"]}
    assert f"--bind=0.0.0.0:{ports['metrics']}" in container["args"]
    for probe in ["startupProbe", "livenessProbe", "readinessProbe"]:
        assert container[probe]["httpGet"]["port"] == "metrics"
    for service in of(objects, "Service"):
        assert service["spec"]["ports"] == [{"name": "metrics", "port": ports["metrics"], "targetPort": "metrics"}]

    accounts = [a["metadata"]["name"] for a in of(objects, "ServiceAccount")]
    assert accounts == ([] if "account" in case.split("+") else [pod["serviceAccountName"]])
    for binding in of(objects, "RoleBinding") + of(objects, "ClusterRoleBinding"):
        subject = {"kind": "ServiceAccount", "name": pod["serviceAccountName"], "namespace": "splitmodel-system"}
        assert binding["subjects"] == [subject]
    watched = [a.removeprefix("--namespace=") for a in container["args"] if a.startswith("--namespace=")]
    assert watched == list(dict.fromkeys(values.get("watchNamespaces", [])))


@pytest.mark.parametrize("case", CASES)
def test_rights_are_the_least(rendered, case):
    values, objects = CASES[case], rendered(case)
    roles = of(objects, "Role")
    if values.get("rbac", {}).get("create") is False:
        assert not roles and not of(objects, "ClusterRole") and not of(objects, "RoleBinding")
        return
    (lease,) = [r for r in roles if r["metadata"]["name"].endswith("-lease")]
    assert lease["metadata"]["namespace"] == "splitmodel-system" and rights(lease) == LEASE_RIGHTS
    others = [r for r in roles if r is not lease]
    if values.get("watchNamespaces"):
        assert [r["metadata"]["namespace"] for r in others] == ["default", "kube-public"]
        assert all(rights(r) == NAMESPACE_RIGHTS for r in others)
        assert not [o for o in objects if o["kind"].startswith("Cluster")]
    else:
        assert not others
        assert rights(one(objects, "ClusterRole")) == {**NAMESPACE_RIGHTS, **CLUSTER_RIGHTS}
    # Each role is bound, to the name that it has.
    bound = {(b["metadata"].get("namespace"), b["roleRef"]["name"]) for b in objects if b["kind"].endswith("Binding")}
    assert bound == {(r["metadata"].get("namespace"), r["metadata"]["name"]) for r in objects if r["kind"].endswith("Role")}
    # Said again of whatever is there, should the tables above ever grow.
    for role in [r for r in objects if r["kind"].endswith("Role")]:
        for (group, resource), verbs in rights(role).items():
            assert "*" not in (group, resource, *verbs)
            assert resource != "secrets" or not {"list", "watch", "update"} & set(verbs)
            assert resource not in ("pods/exec", "pods/log", "pods/attach", "pods/portforward", "serviceaccounts/token")
            assert not {"impersonate", "escalate", "bind"} & set(verbs)


def test_nothing_but_the_named_images(helm):
    text = helm.text("splitmodel", VALUES["images"])
    assert "ghcr.io" not in text
    objects = list(yaml.safe_load_all(text))
    pod = one([o for o in objects if o], "Deployment")["spec"]["template"]["spec"]
    assert pod["containers"][0]["image"] == f"registry.local/op@{DIGEST}"
    assert pod["containers"][0]["imagePullPolicy"] == "Never"
    assert "--stage-image=registry.local:5000/st:cuda" in pod["containers"][0]["args"]
    assert "--image-pull-policy=Always" in pod["containers"][0]["args"]
    assert pod["imagePullSecrets"] == [{"name": "registry-local"}, {"name": "other"}]
    version = yaml.safe_load((CHARTS / "splitmodel/Chart.yaml").read_text())["appVersion"]
    container = one(helm.render("splitmodel"), "Deployment")["spec"]["template"]["spec"]["containers"][0]
    assert container["image"] == f"ghcr.io/splitmodel/splitmodel-operator:{version}"
    assert f"--stage-image=ghcr.io/splitmodel/splitmodel-stage:{version}" in container["args"]


def test_versions_agree():
    cargo = re.search(r'^version = "(.+)"$', (ROOT / "Cargo.toml").read_text(), re.M)[1]
    for chart in ["splitmodel", "splitmodel-crds"]:
        about = yaml.safe_load((CHARTS / chart / "Chart.yaml").read_text())
        assert (about["name"], about["version"], about["appVersion"]) == (chart, cargo, cargo)


def test_long_and_several_releases(helm):
    def names(release, values=None):
        return {(o["kind"], o["metadata"]["name"]) for o in helm.render("splitmodel", values or {}, release=release)}

    long = names("r" * 53, CASES["replicas"])
    assert all(len(name) <= 63 for _, name in long)
    assert not names("splitmodel") & names("other")
    leases = [
        [a for a in one(helm.render("splitmodel", release=r), "Deployment")["spec"]["template"]["spec"]["containers"][0]["args"]
         if a.startswith("--lease-name=")]
        for r in ("splitmodel", "other")
    ]
    assert leases == [["--lease-name=splitmodel-operator"], ["--lease-name=other-splitmodel-operator"]]


def test_the_definition_is_kept(helm):
    objects = helm.render("splitmodel-crds")
    crd = one(objects, "CustomResourceDefinition")
    assert crd["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    assert crd["spec"] == yaml.safe_load((ROOT / "crds/splitmodel.yaml").read_text())["spec"]
    assert {r["metadata"]["name"] for r in of(objects, "ClusterRole")} == {"splitmodel-view", "splitmodel-edit"}
    assert [o["kind"] for o in helm.render("splitmodel-crds", {"aggregateRoles": False})] == ["CustomResourceDefinition"]


def plain(schema):
    """The definition's schema as jsonschema reads it: unknown fields are errors, as with --validate=strict."""
    if isinstance(schema, dict):
        out = {k: plain(v) for k, v in schema.items() if not k.startswith("x-kubernetes")}
        if isinstance(out.get("properties"), dict) and out.get("type") == "object":
            out.setdefault("additionalProperties", False)
        return out
    return [plain(v) for v in schema] if isinstance(schema, list) else schema


@pytest.mark.parametrize("case", ["defaults", "namespaced"])
def test_notes_say_what_to_type_next(helm, case):
    for served in [[], ["--api-versions", "splitmodel.dev/v1alpha1/SplitModel"]]:
        args = ["install", "splitmodel", str(CHARTS / "splitmodel"), "--dry-run=client", "-n", "splitmodel-system"]
        done = helm.run(*args, *served, values=VALUES[case], ok=False)
        if served and "unknown flag" in done.stderr:
            continue
        assert done.returncode == 0, done.stderr
        notes = done.stdout[done.stdout.index("NOTES:"):]
        namespace = "default"
        assert f"kubectl apply -n {namespace} -f - <<EOF" in notes
        assert ("helm install splitmodel-crds" in notes) == (not served)
        manifest = yaml.safe_load(re.search(r"<<EOF\n(.*?)\n  EOF", notes, re.S)[1])
        crd = yaml.safe_load((ROOT / "crds/splitmodel.yaml").read_text())
        schema = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
        jsonschema.validate(manifest["spec"], plain(schema))
