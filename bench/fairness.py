#!/usr/bin/env python3
"""Pauses between the tokens of running answers while a long prompt goes through, beside what is allowed.

    fairness.py [--stages 3] [--prompt 4000] [--chunk 128] [--shared 512] [--answers 3] [--runs 3] [--calm 0.5]

Allowed are, at the 95th percentile, three times the undisturbed pause and the time of one chunk of the prompt: a chunk of --chunk rows
(`scheduling.prefill_chunk`), its share of the time that the same prompt takes on the idle chain. --shared sets
`scheduling.prefill_chunk_shared`, the most rows under way at once beside answers. Medians of --runs.
"""
import argparse
import json
import pathlib
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time

import httpx

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "tests/api"))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from chain import BIN, Chain  # noqa: E402
from delay import calm  # noqa: E402

MANIFEST = """apiVersion: splitmodel.dev/v1alpha1
kind: SplitModel
metadata: {{ name: fairness }}
spec:
  model: {{ source: "file://{model}" }}
  stages: {stages}
  contextLength: 6144
  parallel: 4
"""


class Stages:
    """Stage processes of configurations that `up` wrote, with scheduling changed."""

    def __init__(self, configs, scheduling):
        self.processes, self.url = [], None
        for path in configs:
            path = pathlib.Path(path)
            text = path.read_text()
            for key, value in scheduling.items():
                text, n = re.subn(rf"(?m)^(\s+){key}:.*$", rf"\g<1>{key}: {value}", text)
                if n == 0:
                    text, n = re.subn(r"(?m)^scheduling:\s*$", f"scheduling:\n  {key}: {value}", text)
                assert n == 1, f"{key} has no place in {path}"
            path.write_text(text)
            api = re.search(r"(?m)^api:\s*\n(?:\s+.*\n)*?\s+bind:\s*[\"']?([\d.:]+)", text)
            self.url = self.url or (api and f"http://{api.group(1)}")
            command = [BIN / "splitmodel-stage", "serve", "--config", path]
            self.processes.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
        for _ in range(600):
            try:
                if httpx.get(f"{self.url}/ready").status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.1)
        raise RuntimeError("the chain is not ready after a minute")

    def end(self):
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            process.wait(60)


def tokens(seed, n):
    return [random.Random(seed * 10_000 + i).randrange(100, 40_000) for i in range(n)]


def stream(url, prompt, n, arrived):
    body = {"prompt": prompt, "max_tokens": n, "temperature": 0, "stream": True, "ignore_eos": True, "logprobs": 1}
    with httpx.Client(timeout=600) as http, http.stream("POST", f"{url}/v1/completions", json=body) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if line.startswith("data: {") and json.loads(line[6:])["choices"]:
                arrived.append(time.perf_counter())


def percentile(values, percent):
    return sorted(values)[min(len(values) - 1, len(values) * percent // 100)]


def once(url, args, seed):
    """(pauses undisturbed, pauses disturbed)."""
    # Enough tokens for the whole prompt: where an answer ends earlier, only what ran beside it counts.
    arrived = [[] for _ in range(args.answers)]
    threads = [threading.Thread(target=stream, args=(url, tokens(seed + k, 20), args.tokens, at))
               for k, at in enumerate(arrived)]
    for thread in threads:
        thread.start()
    while min(map(len, arrived)) < 40:
        time.sleep(0.01)
    begun, long = time.perf_counter(), []
    stream(url, tokens(seed + 99, args.prompt), 2, long)
    for thread in threads:
        thread.join()
    undisturbed, disturbed = [], []
    for at in arrived:
        for a, b in zip(at, at[1:]):
            if b < begun:
                undisturbed.append(b - a)
            elif a > begun and b < long[0]:
                disturbed.append(b - a)
    return undisturbed, disturbed


def measure(url, args):
    """Pauses in seconds, and the time of a chunk."""
    undisturbed, disturbed, alone = [], [], []
    for run in range(args.runs):
        u, d = once(url, args, 1000 * run)
        undisturbed.append((percentile(u, 50), percentile(u, 95)))
        disturbed.append((percentile(d, 50), percentile(d, 95)))
        begun, first = time.perf_counter(), []
        stream(url, tokens(1000 * run + 500, args.prompt), 1, first)
        alone.append((first[0] - begun) * args.chunk / args.prompt)
    middle = lambda pairs, i: statistics.median(p[i] for p in pairs)  # noqa: E731
    return (middle(undisturbed, 0), middle(undisturbed, 1), middle(disturbed, 0), middle(disturbed, 1),
            statistics.median(alone))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, default=3)
    parser.add_argument("--prompt", type=int, default=4000)
    parser.add_argument("--answers", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--shared", type=lambda s: [int(n) for n in s.split(",")], default=[512])
    parser.add_argument("--chunk", type=int, default=128)
    parser.add_argument("--calm", type=float, default=0.5)
    args = parser.parse_args()
    print("| rows shared | undisturbed p50 / p95 | beside the prompt p50 / p95 | a chunk | allowed | p95 of allowed |")
    print("|---|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as directory:
        directory = pathlib.Path(directory)
        chain = Chain(directory, args.stages, manifest=manifest(directory, args.stages))
        written = sorted((directory / "state").glob("run/*/stage-*.yaml"))
        configs = [shutil.copy(path, directory / path.name) for path in written]
        chain.end()
        for shared in args.shared:
            calm(args.calm)
            stages = Stages(configs, {"prefill_chunk_shared": shared, "prefill_chunk": args.chunk})
            try:
                u50, u95, d50, d95, chunk = measure(stages.url, args)
            finally:
                stages.end()
            allowed = 3 * u95 + chunk
            ms = lambda s: f"{1000 * s:.0f}"  # noqa: E731
            print(f"| {shared} | {ms(u50)} / {ms(u95)} ms | {ms(d50)} / {ms(d95)} ms | {ms(chunk)} ms | {ms(allowed)} ms "
                  f"| {d95 / allowed:.2f} |", flush=True)


def manifest(directory, stages):
    model = pathlib.Path.home() / ".cache/splitmodel/models/SmolLM2-135M-Instruct.Q4_1.gguf"
    path = directory / "fairness.yaml"
    path.write_text(MANIFEST.format(model=model, stages=stages))
    return path


if __name__ == "__main__":
    main()
