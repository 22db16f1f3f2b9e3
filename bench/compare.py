#!/usr/bin/env python3
"""Measures OpenAI-compatible servers side by side and prints a table of medians and ratios.

    compare.py name=http://127.0.0.1:8000@PID,PID other=http://127.0.0.1:8001@PID [--runs 7] [--json FILE]

The servers are measured in turn, run by run, first to last and back, so that whatever else the machine does meets all of
them. Figures:

    decode N    tokens per second, summed over N streams, while all of them are answered
    output N    tokens of these answers per second from the first request to the last token, prompts included
    cpu N       CPU milliseconds of the processes PID and of all below them, for each of these tokens
    ttft N      seconds to the first token of a prompt of about N tokens that nobody sent before
    prefill N   prompt tokens per second of that call
    gap p95     95th percentile of the time between two tokens of a stream while the shortest such prompt goes through
    MiB         memory of the processes at the end, pages that they share counted once (PSS)
"""
import argparse
import concurrent.futures
import json
import os
import pathlib
import re
import statistics
import sys
import time
import uuid

import client

LINES = ["Rain fell on the slate roofs until the gutters sang.", "A ferry crossed the bay with nine cars and one horse.",
         "Every lamp in the street had its own kind of light.", "The clockmaker closed at six and opened again at ten."]


def prompt(tokens):
    """About so many tokens of prose that starts like no other."""
    lines = [f"Report {uuid.uuid4().hex}."]
    lines += [f"{i}. {LINES[i % len(LINES)]}" for i in range(tokens // 15)]
    return " ".join(lines)


def processes(roots):
    """These and all below them."""
    found, todo = [], list(roots)
    while todo:
        pid = todo.pop()
        found.append(pid)
        for task in pathlib.Path(f"/proc/{pid}/task").iterdir():
            todo += map(int, (task / "children").read_text().split())
    return found


def cpu_ms(roots):
    """What they have used so far."""
    ticks = 0
    for pid in processes(roots):
        fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks * 1000 / os.sysconf("SC_CLK_TCK")


def mebibytes(roots):
    rollups = (pathlib.Path(f"/proc/{pid}/smaps_rollup").read_text() for pid in processes(roots))
    return sum(int(re.search(r"^Pss: +(\d+)", text, re.M)[1]) for text in rollups) / 1024


def ask(server, text, tokens, ban=()):
    """A conversation that begins like no other, so that no server has a part of it in its cache."""
    messages = [{"role": "system", "content": f"{uuid.uuid4().hex[:8]} tells stories."}, {"role": "user", "content": text}]
    return client.stream(server.host, messages, tokens, logit_bias={str(t): -100 for t in ban})


def decode(pool, server, streams, args):
    """(tokens per second of decoding, and over all; CPU milliseconds per token). No part of a prompt was sent before."""
    before = cpu_ms(server.pids)
    jobs = [pool.submit(ask, server, f"Tell the long story number {i}.", args.tokens, args.ban) for i in range(streams)]
    done = [job.result() for job in jobs]
    used = cpu_ms(server.pids) - before
    begin, end = max(a.times[0] for a in done), min(a.times[-1] for a in done)
    between = sum(sum(begin < t <= end for t in a.times) for a in done)
    tokens = sum(a.usage["completion_tokens"] for a in done)
    whole = max(a.times[-1] for a in done) - min(a.began for a in done)
    return between / (end - begin) if begin < end else float("nan"), tokens / whole, used / tokens


def prefill(server, tokens):
    answer = ask(server, prompt(tokens), 1)
    return answer.ttft, answer.usage["prompt_tokens"] / answer.ttft


def disturbed(pool, server, args):
    running = pool.submit(ask, server, "Tell a very long story.", args.tokens, args.ban)
    time.sleep(0.5)
    begin = time.perf_counter()
    ask(server, prompt(min(args.prompts)), 1)
    end = time.perf_counter()
    times = running.result().times
    gaps = sorted(b - a for a, b in zip(times, times[1:]) if begin <= b and a <= end)
    return gaps[int(len(gaps) * 0.95)] if gaps else float("nan")


def measure(args):
    figures = {server.name: {} for server in args.servers}
    with concurrent.futures.ThreadPoolExecutor(max(args.streams) + 1) as pool:
        for server in args.servers:
            decode(pool, server, 1, args)  # the first request pays for caches that fill
        for run in range(args.runs):
            for server in args.servers if run % 2 == 0 else args.servers[::-1]:
                put = lambda key, value: figures[server.name].setdefault(key, []).append(value)  # noqa: B023
                for streams in args.streams:
                    speed, output, used = decode(pool, server, streams, args)
                    put(f"decode {streams}", speed)
                    put(f"output {streams}", output)
                    put(f"cpu {streams}", used)
                for tokens in args.prompts:
                    ttft, speed = prefill(server, tokens)
                    put(f"ttft {tokens}", ttft)
                    put(f"prefill {tokens}", speed)
                put("gap p95", disturbed(pool, server, args))
                put("MiB", mebibytes(server.pids))
                put("load", os.getloadavg()[0])
            print(f"run {run + 1} of {args.runs}", file=sys.stderr)
    return figures


def table(figures, base):
    """Ratios are to the best of the servers in `base`, row by row."""
    names = list(figures)
    print(f"| figure (median of {len(next(iter(figures[names[0]].values())))}) | " + " | ".join(names) + " |")
    print("|---" * (len(names) + 1) + "|")
    for key in figures[names[0]]:
        medians = {n: statistics.median(figures[n][key]) for n in names}
        best = max if key.startswith(("decode", "output", "prefill")) else min
        of = best(medians[n] for n in base)
        cells = [f"{m:.3g}" + ("" if n in base or not of else f" (×{m / of:.2f})") for n, m in medians.items()]
        print(f"| {key} | " + " | ".join(cells) + " |")


class Server:
    """name=URL@PID,PID"""

    def __init__(self, text):
        self.name, _, rest = text.partition("=")
        base, _, pids = rest.partition("@")
        self.host = base.removeprefix("http://")
        self.pids = [int(pid) for pid in pids.split(",")]


def numbers(text):
    return [int(n) for n in text.split(",")]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("servers", nargs="+", type=Server, help="name=URL@PID,PID, the base first")
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--streams", type=numbers, default=[1, 4, 8])
    parser.add_argument("--tokens", type=int, default=96, help="tokens of each answer")
    parser.add_argument("--prompts", type=numbers, default=[512, 2048], help="tokens of the long prompts")
    parser.add_argument("--ban", type=numbers, default=[0, 2, 4], help="tokens that would end an answer early (SmolLM2's)")
    parser.add_argument("--json", help="file for every single figure")
    parser.add_argument("--base", type=lambda s: s.split(","), help="names of servers; ratios are to the best of them, row by row")
    args = parser.parse_args()
    names = [server.name for server in args.servers]
    if unknown := set(args.base or []) - set(names):
        parser.error(f"--base: there is no server {', '.join(unknown)}")
    figures = measure(args)
    table(figures, args.base or names[:1])
    if args.json:
        with open(args.json, "w", encoding="utf-8") as out:
            json.dump(figures, out, indent=1)


if __name__ == "__main__":
    main()
