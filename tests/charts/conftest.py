"""helm, and what it renders."""

import os
import pathlib
import subprocess

import pytest
import yaml

ROOT = pathlib.Path(__file__).resolve().parents[2]
CHARTS = ROOT / "charts"


def helm_path():
    found = subprocess.run([ROOT / "scripts/helm.sh"], capture_output=True, text=True, check=True)
    return found.stdout.strip().splitlines()[-1]


class Helm:
    """Runs helm with homes of its own."""

    def __init__(self, home):
        self.binary = helm_path()
        self.home = home
        self.env = {"PATH": os.environ["PATH"], "HOME": str(home)}

    def run(self, *args, values=None, ok=True):
        given = []
        if values is not None:
            path = self.home / "values.yaml"
            path.write_text(yaml.safe_dump(values))
            given = ["--values", str(path)]
        done = subprocess.run([self.binary, *args, *given], capture_output=True, text=True, env=self.env)
        assert not ok or done.returncode == 0, done.stderr
        return done

    def text(self, chart, values=None, release="splitmodel", namespace="splitmodel-system"):
        """The chart's manifests as text."""
        return self.run("template", release, str(CHARTS / chart), "--namespace", namespace, values=values or {}).stdout

    def render(self, chart, values=None, **more):
        """The chart's objects."""
        return [o for o in yaml.safe_load_all(self.text(chart, values, **more)) if o]


@pytest.fixture(scope="session")
def helm(tmp_path_factory):
    return Helm(tmp_path_factory.mktemp("helm"))
