"""A cluster with the operator installed, which all tests share; each test has a namespace of its own."""
import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

from kube import History, Kube, Refused, eventually
from model import FILE, SMALL, Model, ask, condition

ROOT = pathlib.Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "e2e/cluster"
CACHE = pathlib.Path(os.environ.get("SPLITMODEL_CACHE", pathlib.Path.home() / ".cache/splitmodel"))
BIN = pathlib.Path(os.environ["SPLITMODEL_BIN"])
KEEP = os.environ.get("E2E_KEEP") == "1"
SYSTEM = "splitmodel-system"
sys.path.insert(0, str(ROOT / "tests/api"))


def script(*command, timeout):
    """A script of the cluster; what it says goes to the terminal."""
    subprocess.run([str(c) for c in command], check=True, timeout=timeout, stdin=subprocess.DEVNULL)


@pytest.fixture(scope="session")
def kube():
    """The cluster. E2E_KEEP=1 leaves it running, and takes the one that runs already."""
    run = CACHE / "cluster/runs" / ("keep" if KEEP else str(os.getpid()))
    try:
        script(SCRIPTS / "up.sh", run, os.environ.get("E2E_CLUSTER", "any"), timeout=3600)
        programs = subprocess.run([SCRIPTS / "where.sh"], check=True, capture_output=True, text=True).stdout.strip()
        yield Kube(run, programs, SCRIPTS)
    finally:
        if not KEEP:
            script(SCRIPTS / "down.sh", run, timeout=120)


@pytest.fixture(scope="session")
def crd(kube):
    """The resource alone, by its chart."""
    kube.helm("upgrade", "--install", "splitmodel-crds", ROOT / "charts/splitmodel-crds", "-n", SYSTEM, "--create-namespace")
    kube.kubectl("wait", "--for=condition=Established", "crd/splitmodels.splitmodel.dev", "--timeout=30s")


@pytest.fixture(scope="session")
def images(kube):
    """The images of the binaries that were built, on every node."""
    script(ROOT / "e2e/images.sh", kube.run, timeout=600)


def install(kube, *settings):
    """Installs or upgrades the operator and waits until it is ready."""
    values = ["image.repository=splitmodel-operator", "image.tag=test", "image.pullPolicy=Never", "stageImage.repository=splitmodel-stage",
              "stageImage.tag=test", "stageImage.pullPolicy=Never", "replicas=2", "log.level=info\\,splitmodel_operator=debug", *settings]
    kube.helm("upgrade", "--install", "splitmodel", ROOT / "charts/splitmodel", "-n", SYSTEM, "--create-namespace",
              *[f for v in values for f in ("--set-string" if v.endswith("tag=test") else "--set", v)])
    kube.kubectl("-n", SYSTEM, "rollout", "status", "deployment/splitmodel-operator", "--timeout=120s", timeout=150)


@pytest.fixture(scope="session")
def operator(kube, crd, images):
    install(kube)


def slug(text):
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:40].strip("-")


def new_namespace(kube, name):
    kube.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    eventually("the default account", lambda: kube.get("serviceaccount", "default", name))
    kube.live.append(name)
    return name


def drop_namespace(kube, name):
    kube.live.remove(name)
    kube.delete("namespace", name, wait=False)


@pytest.fixture
def namespace(request, kube):
    """A namespace of the test's own, gone after it."""
    name = new_namespace(kube, slug(request.node.name.removeprefix("test_")))
    yield name
    drop_namespace(kube, name)


@pytest.fixture(scope="session")
def models(kube):
    """The folder that nodes see as the models' volume, with the sample in it."""
    script(ROOT / "scripts/model.sh", timeout=600)
    folder = kube.run / "volumes/models"
    folder.mkdir(exist_ok=True)
    if not (folder / FILE).exists():
        subprocess.run(["cp", "--reflink=auto", CACHE / "models" / FILE, folder / FILE], check=True)
    return folder


def claim_models(kube, namespace, folder):
    """A claim `models` in the namespace for a folder of the nodes."""
    name = f"models-{namespace}"
    kube.apply(
        {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": name},
         "spec": {"capacity": {"storage": "1Gi"}, "accessModes": ["ReadOnlyMany"], "storageClassName": "none",
                  "persistentVolumeReclaimPolicy": "Retain", "hostPath": {"path": str(folder), "type": "Directory"},
                  "claimRef": {"namespace": namespace, "name": "models"}}},
        {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "models", "namespace": namespace},
         "spec": {"accessModes": ["ReadOnlyMany"], "storageClassName": "none", "volumeName": name,
                  "resources": {"requests": {"storage": "1Gi"}}}})


@pytest.fixture
def create(kube, operator, namespace, models):
    """Makes a SplitModel in the test's namespace, where a claim has the sample; all are deleted after the test."""
    claim_models(kube, namespace, models)
    made = []

    def make(name="m", **spec):
        made.append(Model.create(kube, name, namespace, **spec))
        return made[-1]
    yield make
    for model in made:
        model.delete(wait=False)
    kube.delete("pv", f"models-{namespace}", wait=False)


@pytest.fixture(scope="module")
def sample(request, kube, operator, models):
    """The sample over three stages with a GPU each, shared by the tests of a module; `sample.seen` are the states it went through."""
    namespace = new_namespace(kube, slug(request.node.name.removeprefix("test_").removesuffix(".py")))
    claim_models(kube, namespace, models)
    with History(kube, "splitmodels", "-n", namespace) as history:
        model = Model.create(kube, "sample", namespace, stages=3, stageDefaults={**SMALL, "gpu": {}})
        model.wait(seconds=240)
        eventually("the watch has told so", lambda: condition(history.told[-1][1], "Ready").get("status") == "True", 20)
    model.seen = [o["status"] for _, o in history.told if "status" in o]
    yield model
    model.delete()
    kube.delete("pv", f"models-{namespace}", wait=False)
    drop_namespace(kube, namespace)


@pytest.fixture(scope="session")
def unsplit(tmp_path_factory):
    """The text of the model in one process on this machine, by question."""
    from chain import Chain  # the API tests' own
    chain, told = Chain(tmp_path_factory.mktemp("unsplit"), 1), {}
    import openai
    client = openai.OpenAI(base_url=f"{chain.url}/v1", api_key="none", max_retries=0, timeout=120)

    def text(question, **options):
        key = json.dumps([question, options], sort_keys=True)
        if key not in told:
            told[key] = ask(client, question, **options)
        return told[key]
    yield text
    chain.end()


ORDER = ["test_resource", "test_chart", "test_sample", "test_plugin", "test_changes", "test_trouble", "test_operator", "test_nodes"]


def pytest_collection_modifyitems(items):
    """What is cheap and tells most first, what disturbs the cluster last."""
    items.sort(key=lambda item: ORDER.index(item.path.stem))


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    """A failure comes with what the cluster shows."""
    report = (yield).get_result()
    kube = getattr(item, "funcargs", {}).get("kube")
    if report.failed and kube is not None:
        folder = kube.run / "log/failures"
        folder.mkdir(parents=True, exist_ok=True)
        try:
            text = kube.dump(*kube.live)
        except (Refused, subprocess.TimeoutExpired) as error:
            text = f"nothing could be dumped: {error}"
        (folder / f"{slug(item.name)}-{report.when}.txt").write_text(text)
        report.sections.append(("cluster", text[-20000:]))
