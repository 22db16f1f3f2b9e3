"""A server of models in the cluster, as slow as a test wants it, that remembers what it was asked."""
import json

from kube import eventually


class Files:
    """Serves a folder of the nodes at http://files.<namespace>.svc:8080, whatever the path before the file's name."""

    def __init__(self, kube, namespace, folder):
        self.kube, self.namespace = kube, namespace
        labels = {"app": "files"}
        kube.apply(
            {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "files", "namespace": namespace, "labels": labels},
             "spec": {"terminationGracePeriodSeconds": 0, "enableServiceLinks": False, "automountServiceAccountToken": False,
                      "containers": [{"name": "files", "image": "localhost/files:1", "imagePullPolicy": "Never", "args": ["--root=/models"],
                                      "readinessProbe": {"tcpSocket": {"port": 8080}, "periodSeconds": 1},
                                      "volumeMounts": [{"name": "models", "mountPath": "/models", "readOnly": True}]}],
                      "volumes": [{"name": "models", "hostPath": {"path": str(folder), "type": "Directory"}}]}},
            {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "files", "namespace": namespace},
             "spec": {"selector": labels, "ports": [{"port": 8080}]}})
        kube.kubectl("-n", namespace, "wait", "--for=condition=Ready", "pod/files", "--timeout=60s", timeout=90)
        self.url = f"http://files.{namespace}.svc:8080"
        self._proxy = f"/api/v1/namespaces/{namespace}/services/files:8080/proxy/-"
        eventually("the server answers", lambda: self.requests() == [], 30)

    def requests(self):
        return json.loads(self.kube.kubectl("get", "--raw", f"{self._proxy}/requests"))

    def rate(self, bytes_a_second):
        """From now on, for each connection; 0: as fast as it goes."""
        self.kube.kubectl("replace", "--raw", f"{self._proxy}/rate?bytes={bytes_a_second}", "-f", "/dev/stdin", stdin="{}")

    def sent(self):
        return sum(r["bytes"] for r in self.requests())
