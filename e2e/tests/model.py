"""A SplitModel of a test: its manifest, what the operator says of it, and the API that clients use."""
import contextlib
import socket
import time

import openai

from kube import History, eventually

GROUP = "splitmodel.dev/v1alpha1"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SOURCE = f"pvc://models/{FILE}"
LABEL = "splitmodel.dev"
# One thread: threads that wait for each other on busy cores are slow beyond all measure.
SMALL = {"cpu": "100m", "engine": {"threads": 1}}


def manifest(name, namespace, **spec):
    """The sample, small enough for a busy machine, with what a test changes."""
    spec = {"model": {"source": SOURCE}, "contextLength": 1024, "parallel": 4, "stageDefaults": SMALL,
            "api": {"serviceType": "NodePort"}, **spec}
    return {"apiVersion": GROUP, "kind": "SplitModel", "metadata": {"name": name, "namespace": namespace}, "spec": spec}


def condition(model, kind):
    """The condition of that type, or an empty one."""
    return next((c for c in model.get("status", {}).get("conditions", []) if c["type"] == kind), {})


def ready_addresses(*slices):
    return [address for s in slices for e in s.get("endpoints") or [] if e["conditions"].get("ready") for address in e["addresses"]]


class Watched:
    """What clients and users could see of a SplitModel since this began."""

    def __init__(self, models, slices):
        self.models, self.slices, self.began = models, slices, time.monotonic()

    def lost_readiness(self, seconds):
        """Seconds from the beginning until `Ready` was false and until the Service had no endpoint; fails when one did not come."""
        return (self.models.first("Ready is false", lambda m: condition(m, "Ready").get("status") == "False", self.began, seconds),
                self.slices.first("the Service has no endpoint", lambda s: not ready_addresses(s), self.began, seconds))


class Model:
    """A SplitModel on the cluster."""

    def __init__(self, kube, name, namespace):
        self.kube, self.name, self.namespace = kube, name, namespace

    @classmethod
    def create(cls, kube, name, namespace, **spec):
        kube.apply(manifest(name, namespace, **spec))
        return cls(kube, name, namespace)

    def object(self):
        return self.kube.get("splitmodel", self.name, self.namespace)

    def status(self):
        return (self.object() or {}).get("status", {})

    def condition(self, kind):
        return condition(self.object() or {}, kind)

    def is_condition(self, kind, status, reason=None):
        """Waits for it to be so of the spec as it is now."""
        def check():
            generation = self.object()["metadata"]["generation"]
            found = self.condition(kind)
            so = found.get("status") == status and found.get("observedGeneration") == generation
            return found if so and (reason is None or found["reason"] == reason) else None
        return check

    def wait(self, kind="Ready", status="True", reason=None, seconds=180):
        try:
            found = eventually(f"{kind}={status} {reason or ''} of {self.name}", self.is_condition(kind, status, reason), seconds)
        except AssertionError as error:
            raise AssertionError(f"{error}\nstatus: {self.status()}") from None
        if (kind, status) == ("Ready", "True") and self.node_port():
            # The nodes learn of the Service's endpoint a moment after the pod is ready.
            eventually("the Service takes connections", self.takes_connections, 15)
        return found

    def children(self, kind, selector=""):
        return self.kube.get(kind, namespace=self.namespace, selector=f"{LABEL}/model={self.name}" + selector)

    def pods(self, chain=None):
        """The stages' pods by (chain, stage), those that are going away left out."""
        pods = [p for p in self.children("pods", f",{LABEL}/stage") if "deletionTimestamp" not in p["metadata"]]
        keyed = {(int(p["metadata"]["labels"][f"{LABEL}/chain"]), int(p["metadata"]["labels"][f"{LABEL}/stage"])): p for p in pods}
        return {key: pod for key, pod in keyed.items() if chain is None or key[0] == chain}

    def starts(self):
        """For each stage the pod's identity, the start of its container and its restarts: what changes when it is disturbed."""
        def of(pod):
            container = (pod["status"].get("containerStatuses") or [{}])[0]
            return pod["metadata"]["uid"], container.get("state", {}).get("running", {}).get("startedAt"), container.get("restartCount")
        return {key: of(pod) for key, pod in self.pods().items()}

    def endpoints(self):
        """Addresses that the API's Service sends clients to."""
        slices = self.kube.get("endpointslices", namespace=self.namespace, selector=f"kubernetes.io/service-name={self.name}")
        return ready_addresses(*slices)

    @contextlib.contextmanager
    def watched(self):
        there = ["-n", self.namespace]
        with History(self.kube, "splitmodel", self.name, *there) as models, \
                History(self.kube, "endpointslices", *there, "-l", f"kubernetes.io/service-name={self.name}") as slices:
            eventually("the watches tell", lambda: models.told and slices.told, 20)
            yield Watched(models, slices)

    def node_port(self):
        return self.kube.get("service", self.name, self.namespace)["spec"]["ports"][0].get("nodePort")

    def takes_connections(self):
        try:
            socket.create_connection((self.kube.address(self.kube.workers[0]), self.node_port()), timeout=5).close()
        except OSError:
            return False
        return True

    def url(self):
        """The API through the Service, at a node's port."""
        return f"http://{self.kube.address(self.kube.workers[0])}:{self.node_port()}"

    def client(self, key="none"):
        return openai.OpenAI(base_url=f"{self.url()}/v1", api_key=key, max_retries=0, timeout=120)

    def names(self):
        """The models that the API lists; none while the nodes have not learnt of its endpoint, a moment after it is ready."""
        with self.client() as client:
            try:
                return [m.id for m in client.models.list().data]
            except openai.APIConnectionError:
                return []

    def delete(self, wait=True):
        self.kube.delete("splitmodel", self.name, self.namespace, wait=wait)


def ask(client, question="Name three fruits.", model=None, **options):
    """The text of a greedy answer, streamed."""
    model = model or client.models.list().data[0].id
    options = {"temperature": 0, "max_tokens": 24, **options}
    stream = client.chat.completions.create(model=model, messages=[{"role": "user", "content": question}], stream=True, **options)
    return "".join(c.choices[0].delta.content or "" for c in stream if c.choices)
