"""The resource itself on a real API server: what it takes and refuses, how it is brought and upgraded."""
import contextlib
import json
import pathlib
import re
import shutil
import subprocess

import httpx
import pytest

from conftest import BIN, ROOT, SYSTEM
from kube import Refused, eventually
from model import Model, manifest

NAME = "splitmodels.splitmodel.dev"


def cases():
    """The manifests of the crate's own tests, each with the field that a refusal must name, or None."""
    lines = subprocess.run([BIN / "examples/manifests"], check=True, capture_output=True, text=True).stdout.splitlines()
    return [(case["path"], case["manifest"]) for case in map(json.loads, lines)]


CASES = cases()
GOOD = [pytest.param(manifest, id=str(number)) for number, (path, manifest) in enumerate(CASES) if path is None]
BAD = [pytest.param(path, manifest, id=f"{number}-{path}") for number, (path, manifest) in enumerate(CASES) if path is not None]


@pytest.fixture(scope="module")
def api(kube, crd):
    """Plain HTTP to the API server: its answers name the fields at fault."""
    proxy = subprocess.Popen([kube.programs / "kubectl", "proxy", "--port=0"], env=kube.environment, stdout=subprocess.PIPE, text=True)
    try:
        port = re.search(r":(\d+)", proxy.stdout.readline())[1]
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=30) as client:
            yield client
    finally:
        proxy.terminate()
        proxy.wait()


@pytest.fixture(scope="module")
def send(api):
    """Has a manifest judged as if it were made, without making it."""
    def judge(manifest):
        return api.post("/apis/splitmodel.dev/v1alpha1/namespaces/default/splitmodels",
                        params={"dryRun": "All", "fieldValidation": "Strict"}, json=manifest)
    return judge


@pytest.mark.parametrize("manifest", GOOD)
def test_good_manifests_are_taken(send, manifest):
    answer = send(manifest)
    assert answer.status_code == 201, answer.text


def names_field(message, path):
    """Rules of a list speak of the list, so a parent of the field does; but never of the whole spec."""
    while path.count(".") >= 1:
        if re.search(re.escape(path) + r"(?![\w])", message):
            return True
        path = re.sub(r"(\[\d+\]|\.[^.\[\]]+)$", "", path)
    return False


@pytest.mark.parametrize("path, manifest", BAD)
def test_bad_manifests_are_refused_with_the_field(send, path, manifest):
    answer = send(manifest)
    assert answer.status_code in (400, 422), answer.text
    assert names_field(answer.json()["message"], path), answer.json()["message"]


def test_the_crd_can_be_applied_by_the_client(kube, crd):
    kube.kubectl("apply", "-f", ROOT / "crds/splitmodel.yaml")
    kept = kube.get("crd", NAME)["metadata"]["annotations"]["kubectl.kubernetes.io/last-applied-configuration"]
    assert json.loads(kept)["spec"]["names"]["kind"] == "SplitModel"


def test_columns_and_short_name(kube, crd):
    [version] = kube.get("crd", NAME)["spec"]["versions"]
    assert [c["name"].upper() for c in version["additionalPrinterColumns"]] == ["READY", "PHASE", "LAYERS", "URL", "AGE"]
    kube.kubectl("get", "sm", "-A")


@contextlib.contextmanager
def stored(kube, name, **spec):
    """A SplitModel that exists, in a namespace that no operator needs to look at."""
    kube.apply(manifest(name, "default", **spec))
    try:
        yield Model(kube, name, "default")
    finally:
        kube.delete("splitmodel", name, "default")


def test_an_immutable_field_is_refused_and_nothing_is_half_applied(kube, crd):
    with stored(kube, "fixed", replicas=0, cacheVolume={"persistent": True, "size": "1Gi"}) as model:
        before = model.object()["spec"]
        with pytest.raises(Refused, match=r"spec\.cacheVolume.*cannot be changed"):
            kube.patch("splitmodel", "fixed", {"spec": {"parallel": 2, "cacheVolume": {"size": "2Gi"}}}, "default")
        assert model.object()["spec"] == before
        kube.patch("splitmodel", "fixed", {"spec": {"parallel": 2}}, "default")


def test_scale_and_status_are_subresources(kube, crd):
    with stored(kube, "scaled", replicas=0) as model:
        kube.kubectl("-n", "default", "scale", "splitmodel", "scaled", "--replicas=0", "--current-replicas=0")
        kube.patch("splitmodel", "scaled", {"status": {"replicas": 7}}, "default")
        assert model.status().get("replicas", 0) != 7, "status was written with the object"


def test_the_resource_is_upgraded_by_helm_and_kept(kube, crd, tmp_path):
    with stored(kube, "kept", replicas=0) as model:
        uid = model.object()["metadata"]["uid"]
        chart = tmp_path / "splitmodel-crds"
        shutil.copytree(ROOT / "charts/splitmodel-crds", chart)
        [template] = [f for f in pathlib.Path(chart).rglob("*.yaml") if "kind: CustomResourceDefinition" in f.read_text()]
        text, count = re.subn(r"\n( +)contextLength:\n", r"\n\1fieldOfTomorrow:\n\1  type: string\n\1contextLength:\n", template.read_text(), count=1)
        assert count == 1
        template.write_text(text)

        def fields():
            schema = kube.get("crd", NAME)["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
            return schema["properties"]["spec"]["properties"]
        try:
            kube.helm("upgrade", "splitmodel-crds", chart, "-n", SYSTEM)
            eventually("the new field is there", lambda: "fieldOfTomorrow" in fields())
            kube.helm("uninstall", "splitmodel-crds", "-n", SYSTEM)
            assert "deletionTimestamp" not in kube.get("crd", NAME)["metadata"]
            assert model.object()["metadata"]["uid"] == uid
        finally:
            kube.helm("upgrade", "--install", "splitmodel-crds", ROOT / "charts/splitmodel-crds", "-n", SYSTEM)
        assert "fieldOfTomorrow" not in fields()
        assert model.object()["metadata"]["uid"] == uid
