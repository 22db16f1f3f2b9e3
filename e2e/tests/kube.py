"""kubectl and helm by their commands: objects go in and come out as JSON, and everything has a deadline."""
import json
import os
import pathlib
import subprocess
import threading
import time


class Refused(Exception):
    """A command failed; the text is what it said."""


class Kube:
    """One cluster. `run` is the folder of its state, which e2e/cluster/up.sh filled."""

    def __init__(self, run, programs, scripts):
        self.run, self.programs, self.scripts = pathlib.Path(run), pathlib.Path(programs), pathlib.Path(scripts)
        self.environment = {**os.environ, "KUBECONFIG": str(self.run / "kubeconfig"), "HELM_CACHE_HOME": str(self.run / "helm"),
                            "HELM_CONFIG_HOME": str(self.run / "helm"), "HELM_DATA_HOME": str(self.run / "helm"), "NO_PROXY": "*"}
        self.live = []  # namespaces of tests that run
        self.workers = (self.run / "workers").read_text().split()

    def command(self, *command, stdin=None, timeout=60):
        done = subprocess.run([str(c) for c in command], input=stdin, capture_output=True, text=True, timeout=timeout,
                              env=self.environment, check=False)
        if done.returncode != 0:
            raise Refused(f"{' '.join(map(str, command[:6]))}: {done.stderr.strip() or done.stdout.strip()}")
        return done.stdout

    def kubectl(self, *arguments, stdin=None, timeout=60):
        return self.command(self.programs / "kubectl", *arguments, stdin=stdin, timeout=timeout)

    def kubectl_json(self, *arguments):
        return json.loads(self.kubectl(*arguments, "-o", "json"))

    def helm(self, *arguments, timeout=180):
        return self.command(self.programs / "helm", *arguments, timeout=timeout)

    def on_node(self, node, *command, timeout=60):
        return self.command(self.scripts / "node.sh", self.run, node, *command, timeout=timeout)

    def get(self, kind, name=None, namespace=None, selector=None):
        """One object, or None where it is not there; without a name a list of objects."""
        arguments = ["get", kind, *([name] if name else []), "-o", "json", "--ignore-not-found",
                     *(["-n", namespace] if namespace else []), *(["-l", selector] if selector else [])]
        text = self.kubectl(*arguments)
        if name:
            return json.loads(text) if text.strip() else None
        return json.loads(text)["items"] if text.strip() else []

    def apply(self, *objects, dry_run=None, server_side=False, manager=None):
        flags = ["--dry-run=" + dry_run] if dry_run else []
        flags += ["--server-side"] if server_side else []
        flags += ["--field-manager=" + manager] if manager else []
        listed = {"apiVersion": "v1", "kind": "List", "items": list(objects)}
        text = self.kubectl("apply", "-o", "json", *flags, "-f", "-", stdin=json.dumps(objects[0] if len(objects) == 1 else listed))
        return json.loads(text)

    def patch(self, kind, name, patch, namespace=None, subresource=None):
        self.kubectl("patch", kind, name, "--type=merge", "-p", json.dumps(patch), *(["-n", namespace] if namespace else []),
                     *(["--subresource=" + subresource] if subresource else []))

    def delete(self, kind, name, namespace=None, wait=True, force=False):
        self.kubectl("delete", kind, name, "--ignore-not-found", f"--wait={str(wait).lower()}", *(["-n", namespace] if namespace else []),
                     *(["--grace-period=0", "--force"] if force else []), timeout=120)

    def address(self, node):
        """The node's address, which this machine reaches."""
        addresses = self.get("node", node)["status"]["addresses"]
        return next(a["address"] for a in addresses if a["type"] == "InternalIP")

    def dump(self, *namespaces):
        """What a reader of a failure wants to see."""
        parts = []

        def show(title, *arguments):
            try:
                parts.append(f"== {title}\n{self.kubectl(*arguments, timeout=30)}")
            except (Refused, subprocess.TimeoutExpired) as error:
                parts.append(f"== {title}\n{error}")

        show("pods", "get", "pods", "-A", "-o", "wide")
        show("the operator's log", "-n", "splitmodel-system", "logs", "-l", "app.kubernetes.io/component=operator", "--tail=150",
             "--prefix", "--all-containers")
        for namespace in namespaces:
            show(f"SplitModels in {namespace}", "-n", namespace, "get", "splitmodels", "-o", "yaml", "--show-managed-fields=false")
            show(f"children in {namespace}", "-n", namespace, "get", "statefulsets,services,endpointslices,configmaps,pvc,secrets,pdb")
            show(f"events in {namespace}", "-n", namespace, "get", "events", "--sort-by=.lastTimestamp")
            show(f"pods in {namespace}", "-n", namespace, "describe", "pods")
            for pod in self.get("pods", namespace=namespace):
                name = pod["metadata"]["name"]
                show(f"log of {name}", "-n", namespace, "logs", name, "--tail=60", "--all-containers")
                show(f"earlier log of {name}", "-n", namespace, "logs", name, "--tail=60", "--all-containers", "--previous")
        return "\n".join(parts)


class History:
    """All that a watch of objects told since it began: pairs of the time and the object. No state is too short to be seen."""

    def __init__(self, kube, *arguments):
        self.told = []
        self.process = subprocess.Popen([str(kube.programs / "kubectl"), "get", *arguments, "--watch", "-o", "json"], env=kube.environment,
                                        stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True)
        self.reader = threading.Thread(target=self.read, daemon=True)
        self.reader.start()

    def read(self):
        text, decoder = "", json.JSONDecoder()
        for line in self.process.stdout:
            text += line
            if line.rstrip() != "}":
                continue
            told, _ = decoder.raw_decode(text)
            # It begins with a list of what is there where no name is given.
            self.told += [(time.monotonic(), o) for o in (told["items"] if told["kind"] == "List" else [told])]
            text = ""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.terminate()
        self.process.wait(10)
        self.reader.join(10)
        self.process.stdout.close()

    def first(self, what, check, since, seconds):
        """How long after `since` an object first was so."""
        def found():
            return next(((at - since,) for at, o in list(self.told) if at > since and check(o)), None)
        return eventually(what, found, seconds, every=0.1)[0]


def eventually(what, check, seconds=60, every=0.5):
    """The first true result of check(); fails after so many seconds, telling what it gave last."""
    end = time.monotonic() + seconds
    last = None
    while True:
        try:
            last = check()
        except (Refused, subprocess.TimeoutExpired) as error:
            last = error
        else:
            if last:
                return last
        assert time.monotonic() < end, f"after {seconds} s still not so: {what}; last: {last!r}"
        time.sleep(every)


def always(what, check, seconds, every=1.0):
    """Fails as soon as check() is not true."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        assert check(), f"no longer so: {what}"
        time.sleep(every)
