#!/usr/bin/env python3
"""Tokens per second of one stream against the delay of every link, beside what the delays allow.

    delay.py [--stages 3] [--delays 0,25,50,100] [--runs 7] [--tokens 33] [--calm 0.5]

Starts a chain of the sample model and changes the delay of its links while it runs (`splitmodel link`). A token crosses as
many hops as there are stages, since the last stage answers stage 0 directly. Allowed are

    1 / (Σ stage time + hops × delay)

tokens per second. Σ stage time is what the stages themselves say they took for the frames of these very runs
(`splitmodel_chain_compute_seconds`, `…_encode_seconds`): after an idle pause a processor is slower, so that it grows with the
delay. The delays are measured in turn, run by run, and medians compared. The exit code is 1 where a delay of 25 ms or more
misses what it allows by over 10 %.
"""
import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

import httpx

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "tests/api"))
from chain import BIN, Chain  # noqa: E402

WITHIN = 0.10


def calm(load):
    """Waits until the machine has little else to do."""
    while os.getloadavg()[0] >= load:
        print(f"waiting for a load below {load} (now {os.getloadavg()[0]:.2f})", file=sys.stderr)
        time.sleep(15)


def set_delay(chain, ms):
    subprocess.run([BIN / "splitmodel", "link", "--state-dir", chain.state, "--all", "--delay", f"{ms}ms"],
                   check=True, stdout=subprocess.DEVNULL, timeout=60)


def stage_seconds(http):
    """Time that all stages computed so far, and frames of the chain."""
    total, frames = 0.0, 0.0
    for line in http.get("/metrics").raise_for_status().text.splitlines():
        if line.startswith(("splitmodel_chain_compute_seconds", "splitmodel_chain_encode_seconds")):
            total += float(line.rsplit(" ", 1)[1])
        if line.startswith("splitmodel_chain_frames") and 'of="0"' in line:
            frames = float(line.rsplit(" ", 1)[1])
    return total, frames


def stream(http, tokens):
    """Seconds per token of one greedy stream, from its first token to its last, and seconds of all stages per frame."""
    body = {"prompt": "Once upon a time", "max_tokens": tokens, "temperature": 0, "stream": True, "ignore_eos": True,
            "stream_options": {"include_usage": True}}
    times, made = [], 0
    before = stage_seconds(http)
    with http.stream("POST", "/v1/completions", json=body) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line[6:])
            if any(c.get("text") for c in chunk["choices"]):
                times.append(time.perf_counter())
            made = (chunk.get("usage") or {}).get("completion_tokens", made)
    assert made == tokens == len(times), f"{made} tokens in {len(times)} pieces instead of {tokens}"
    after = stage_seconds(http)
    return (times[-1] - times[0]) / (tokens - 1), (after[0] - before[0]) / (after[1] - before[1])


def measure(args):
    taken = {ms: [] for ms in args.delays}
    with tempfile.TemporaryDirectory() as directory:
        chain = Chain(pathlib.Path(directory), args.stages)
        try:
            with httpx.Client(base_url=chain.url, timeout=300) as http:
                stream(http, args.tokens)  # the first request pays for caches that fill
                for run in range(args.runs):
                    for ms in args.delays if run % 2 == 0 else args.delays[::-1]:
                        set_delay(chain, ms)
                        taken[ms].append(stream(http, args.tokens))
        finally:
            chain.end()
    return {ms: [statistics.median(figures) for figures in zip(*runs)] for ms, runs in taken.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, default=3)
    parser.add_argument("--delays", type=lambda s: [float(x) for x in s.split(",")], default=[0.0, 25.0, 50.0, 100.0],
                        help="milliseconds; the first is 0")
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=33)
    parser.add_argument("--calm", type=float, default=0.5, help="load average to wait for; 0: do not wait")
    args = parser.parse_args()
    if args.delays[0] != 0:
        parser.error("--delays must begin with 0")
    if args.calm:
        calm(args.calm)
    load = os.getloadavg()[0]
    medians = measure(args)
    print(f"{args.stages} stages, {args.runs} runs of {args.tokens} tokens, load before {load:.2f}\n")
    print("| delay of each link | Σ stage time | tokens/s | allowed | ratio | left over per hop |\n|---|---|---|---|---|---|")
    missed = False
    for ms, (taken, stages) in medians.items():
        allowed = 1 / (stages + args.stages * ms / 1000)
        ratio = 1 / taken / allowed
        missed |= ms >= 25 and abs(ratio - 1) > WITHIN
        left = (taken - 1 / allowed) / args.stages
        print(f"| {ms:g} ms | {stages * 1000:.1f} ms | {1 / taken:.2f} | {allowed:.2f} | {ratio:.3f} | {left * 1000:.2f} ms |")
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
