"""Values of the operator's chart: each away from its default, alone and in pairs of what interacts, and those that are refused."""

import itertools

DIGEST = "sha256:" + "ab" * 32

# Each value away from its default, alone and (below) in pairs of what interacts.
VALUES = {
    "defaults": {},
    "namespaced": {"watchNamespaces": ["default", "kube-public", "default"]},
    "replicas": {"replicas": 2, "podDisruptionBudget": {"enabled": True}},
    "images": {
        "image": {"repository": "registry.local/op", "digest": DIGEST, "pullPolicy": "Never"},
        "stageImage": {"repository": "registry.local:5000/st", "tag": "cuda", "pullPolicy": "Always"},
        "imagePullSecrets": ["registry-local", "other"],
    },
    "account": {"serviceAccount": {"create": False, "name": "mine"}},
    "account-named": {"serviceAccount": {"name": "mine", "annotations": {"example.org/role": "x"}}},
    "no-rbac": {"rbac": {"create": False}},
    "no-service": {"metrics": {"service": {"enabled": False}}},
    "metrics": {
        "metrics": {
            "port": 9100,
            "service": {"annotations": {"prometheus.io/scrape": "true"}},
            "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}, "interval": "15s"},
        }
    },
    "network-policy": {
        "networkPolicy": {
            "enabled": True,
            "apiServerPorts": [6443],
            "metricsFrom": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}],
        }
    },
    "network-policy-open": {"networkPolicy": {"enabled": True}},
    "logs": {"log": {"format": "text", "level": "info,splitmodel_operator=debug"}, "clusterDomain": "k8s.example"},
    "extras": {"extraEnv": [{"name": "HTTPS_PROXY", "value": "http://proxy:3128"}]},
    "placement": {
        "priorityClassName": "system-cluster-critical",
        "nodeSelector": {"kubernetes.io/os": "linux"},
        "tolerations": [{"key": "node-role.kubernetes.io/control-plane", "operator": "Exists", "effect": "NoSchedule"}],
        "affinity": {
            "podAntiAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": [
                    {
                        "topologyKey": "kubernetes.io/hostname",
                        "labelSelector": {"matchLabels": {"app.kubernetes.io/name": "splitmodel-operator"}},
                    }
                ]
            }
        },
        "topologySpreadConstraints": [
            {
                "maxSkew": 1,
                "topologyKey": "topology.kubernetes.io/zone",
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": {"app.kubernetes.io/name": "splitmodel-operator"}},
            }
        ],
        "terminationGracePeriodSeconds": 10,
    },
    "pod": {
        "podLabels": {"team": "ml", "app.kubernetes.io/name": "other"},
        "podAnnotations": {"example.org/note": "x: y"},
        "resources": {"requests": {"cpu": 1}, "limits": {"memory": "1Gi"}},
    },
    "openshift": {"podSecurityContext": {"runAsUser": None, "runAsGroup": None}},
    "names": {"nameOverride": "other"},
    "full-name": {"fullnameOverride": "sm"},
}
PAIRS = [
    (a, b)
    for a, b in itertools.combinations(VALUES, 2)
    if {a, b} != {"no-service", "metrics"} and {a, b} & {"namespaced", "account", "metrics", "full-name"} and "defaults" not in (a, b)
]


def merge(a, b):
    return {
        k: merge(a[k], b[k]) if isinstance(a.get(k), dict) and isinstance(b.get(k), dict) else (b[k] if k in b else a[k])
        for k in {**a, **b}
    }


CASES = {**VALUES, **{f"{a}+{b}": merge(VALUES[a], VALUES[b]) for a, b in PAIRS}}

REFUSED = {
    "unknown": {"replicaCount": 2},
    "unknown-inside": {"image": {"name": "x"}},
    "replicas": {"replicas": 9},
    "replicas-text": {"replicas": "2"},
    "digest": {"image": {"digest": "sha256:12"}},
    "tag": {"stageImage": {"tag": "a b"}},
    "repository": {"image": {"repository": "a b"}},
    "policy": {"stageImage": {"pullPolicy": "Sometimes"}},
    "namespace": {"watchNamespaces": ["A"]},
    "namespace-empty": {"watchNamespaces": [""]},
    "format": {"log": {"format": "xml"}},
    "port": {"metrics": {"port": 80}},
    "account": {"serviceAccount": {"create": False}},
    "monitor": {"metrics": {"service": {"enabled": False}, "serviceMonitor": {"enabled": True}}},
    "domain": {"clusterDomain": ""},
    "interval": {"metrics": {"serviceMonitor": {"interval": "soon"}}},
    "pull-secrets": {"imagePullSecrets": [{"name": "x"}]},
    "full-name": {"fullnameOverride": "-x"},
    "full-name-long": {"fullnameOverride": "x" * 64},
}
