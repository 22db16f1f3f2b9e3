"""`kubectl splitmodel` on the cluster: kubectl finds the program that was built in PATH."""
import concurrent.futures
import json
import os
import pathlib
import re
import subprocess
import time

import pytest

from kube import eventually
from model import ask, manifest

BIN = pathlib.Path(os.environ["SPLITMODEL_BIN"])
QUESTION = "Name three fruits."


@pytest.fixture
def command(kube):
    """The words and the environment of a call of the plugin."""
    def words(*arguments, kubeconfig=None):
        environment = {**kube.environment, "PATH": f"{BIN}:{os.environ['PATH']}"}
        if kubeconfig:
            environment["KUBECONFIG"] = str(kubeconfig)
        return {"args": [str(kube.programs / "kubectl"), "splitmodel", *arguments], "env": environment, "text": True}
    return words


@pytest.fixture
def plugin(command):
    """Runs the plugin to its end: exit code, what it printed, what it complained about."""
    def run(*arguments, stdin="", timeout=90, **options):
        done = subprocess.run(**command(*arguments, **options), input=stdin, capture_output=True, timeout=timeout, check=False)
        return done.returncode, done.stdout, done.stderr
    return run


def rate(text):
    found = re.search(r"TOKENS/S +([0-9.]+)", text)
    return float(found[1]) if found else None


def test_status_draws_the_chain(sample, plugin, kube):
    code, text, said = plugin("status", sample.name, "-n", sample.namespace)
    assert code == 0 and said == "", said
    assert re.search(r"READY +3/3\n", text) and f"http://{sample.name}.{sample.namespace}.svc" in text, text
    for number, stage in enumerate(sample.status()["chains"][0]["stages"]):
        line = next(row for row in text.splitlines() if stage["pod"] in row)
        assert re.match(rf"^\S* *{number} +Serving +{stage['layers']} ", line.strip("┌─▶│└ ")), line
        assert stage["node"] in line and "MiB" in line, line
    assert "=" not in text, f"something is not as it should be:\n{text}"
    assert rate(text) is not None, text
    _, everywhere, _ = plugin("status", "-A")
    assert f"namespace {sample.namespace}" in everywhere


def test_status_measures_tokens(sample, plugin):
    with sample.client() as client, concurrent.futures.ThreadPoolExecutor(1) as pool:
        story = pool.submit(ask, client, "Write a long story about a fox.", max_tokens=400)
        eventually("tokens are counted", lambda: (rate(plugin("status", sample.name, "-n", sample.namespace)[1]) or 0) > 0, 60)
        assert story.result(120)


def test_status_watches(sample, command):
    watching = subprocess.Popen(**command("status", sample.name, "-n", sample.namespace, "--watch"), stdout=subprocess.PIPE)
    try:
        assert watching.stdout.readline() == f"{sample.name}  namespace {sample.namespace}\n"
        time.sleep(3)
        assert watching.poll() is None
    finally:
        watching.terminate()
        watching.wait(10)
        watching.stdout.close()


def test_plans_are_the_operators(sample, plugin, kube, tmp_path):
    status = sample.status()
    spec = sample.object()["spec"]
    file = tmp_path / "m.json"
    file.write_text(json.dumps({"apiVersion": "splitmodel.dev/v1alpha1", "kind": "SplitModel",
                                "metadata": {"name": sample.name, "namespace": sample.namespace}, "spec": spec}))
    code, text, said = plugin("plan", "-f", str(file), "--json")
    assert code == 0, said
    planned = json.loads(text)["plan"]
    assert [f"{s['first']}-{s['end'] - 1}" for s in planned["stages"]] == [s["layers"] for s in status["plan"]["stages"]]
    assert {s["device_name"] for s in planned["stages"]} == set(kube.workers)
    assert [s["bytes"]["weights"] for s in planned["stages"]] == [s["weightBytes"] for s in status["plan"]["stages"]]
    control = next(n["metadata"]["name"] for n in kube.get("nodes") if n["metadata"]["name"] not in kube.workers)
    assert control in {u["device"] for u in planned["unused"]}

    many = manifest(sample.name, sample.namespace, stages=3, stageDefaults={**spec["stageDefaults"], "gpu": {"count": 64}})
    file.write_text(json.dumps(many))
    code, text, said = plugin("plan", "-f", str(file))
    assert code == 1 and text == "" and "and a stage asks for 64" in said, said
    other = manifest("nobody", sample.namespace)
    file.write_text(json.dumps(other))
    code, _, said = plugin("plan", "-f", str(file))
    assert code == 1 and "--facts" in said, said


def test_chat_answers_as_the_unsplit_model(sample, plugin, unsplit):
    code, text, said = plugin("chat", sample.name, "-n", sample.namespace, "--temperature", "0", "--max-tokens", "24", stdin=f"{QUESTION}\n")
    assert (code, text) == (0, unsplit(QUESTION) + "\n"), said


def test_chat_goes_on_after_a_pod_was_replaced(sample, command, kube, unsplit):
    words = command("chat", sample.name, "-n", sample.namespace, "--temperature", "0", "--max-tokens", "24", "--model", sample.name)
    talking = subprocess.Popen(**words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        talking.stdin.write(f"{QUESTION}\n")
        talking.stdin.flush()
        answer = unsplit(QUESTION) + "\n"
        assert "".join(talking.stdout.readline() for _ in range(answer.count("\n"))) == answer
        uid = sample.pods()[0, 0]["metadata"]["uid"]
        kube.kubectl("-n", sample.namespace, "delete", "pod", f"{sample.name}-0-0-0")
        eventually("another pod", lambda: (0, 0) in sample.pods() and sample.pods()[0, 0]["metadata"]["uid"] != uid, 60)
        text, said = talking.communicate("Another one.\n", timeout=150)
        assert talking.returncode == 0 and text.strip(), said
    finally:
        talking.kill()
    sample.wait()


def test_rights_that_are_missing_are_named(sample, plugin, kube, tmp_path):
    namespace = sample.namespace
    rules = [{"apiGroups": ["splitmodel.dev"], "resources": ["splitmodels"], "verbs": ["get"]}]
    kube.apply({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "reader", "namespace": namespace}},
               {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role", "metadata": {"name": "reader", "namespace": namespace}, "rules": rules},
               {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "RoleBinding", "metadata": {"name": "reader", "namespace": namespace},
                "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "reader"},
                "subjects": [{"kind": "ServiceAccount", "name": "reader", "namespace": namespace}]})
    config = json.loads(kube.kubectl("config", "view", "--raw", "--minify", "-o", "json"))
    config["users"][0]["user"] = {"token": kube.kubectl("-n", namespace, "create", "token", "reader").strip()}
    reader = tmp_path / "reader"
    reader.write_text(json.dumps(config))
    code, text, _ = plugin("status", sample.name, "-n", namespace, kubeconfig=reader)
    assert code == 0 and re.search(r"READY +3/3\n", text), text
    assert "tokens/s are not known: chain 0: the cluster does not allow it" in text and rate(text) is None, text
    code, _, said = plugin("status", "-n", namespace, kubeconfig=reader)
    assert code == 1 and f"right to list splitmodels in namespace {namespace}" in said, said
    code, _, said = plugin("chat", sample.name, "-n", namespace, kubeconfig=reader)
    assert code == 1 and "right to list pods" in said, said
    code, _, said = plugin("status", "nobody", "-n", namespace)
    assert code == 1 and f"no SplitModel `nobody`; there are {sample.name}" in said, said
