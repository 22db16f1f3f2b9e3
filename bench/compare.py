#!/usr/bin/env python3
"""Measures OpenAI-compatible servers side by side and prints a table of medians and ratios.

    compare.py name=http://127.0.0.1:8000@PID,PID other=http://127.0.0.1:8001@PID [--runs 7] [--json FILE]

The servers are measured in turn, run by run, first to last and back, so that whatever else the machine does meets all of
them. Figures:

    decode N    tokens per second, summed over N streams, from the first to the last token of all
    cpu N       CPU milliseconds of the processes PID and of all below them, for each of these tokens
    ttft N      seconds to the first token of a prompt of about N tokens that nobody sent before
    prefill N   prompt tokens per second of that call
    gap p95     95th percentile of the time between two tokens of a stream while the shortest such prompt goes through
    MiB         memory of the processes at the end, pages that they share counted once (PSS)
"""
import argparse
import asyncio
import json
import os
import pathlib
import re
import statistics
import sys
import time
import uuid

import httpx

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


async def stream(client, base, text, tokens, ban):
    """(time of the request, times of the tokens, usage)."""
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": tokens, "temperature": 0, "stream": True,
            "stream_options": {"include_usage": True}, "logit_bias": {str(t): -100 for t in ban}}
    began, times, usage = time.perf_counter(), [], {}
    async with client.stream("POST", base + "/v1/chat/completions", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line[6:])
            if any(c.get("delta", {}).get("content") for c in chunk.get("choices") or []):
                times.append(time.perf_counter())
            usage = chunk.get("usage") or usage
    return began, times, usage


async def decode(client, server, streams, args):
    """(tokens per second, CPU milliseconds per token)."""
    jobs = [stream(client, server.base, f"Tell the long story number {i}.", args.tokens, args.ban) for i in range(streams)]
    before = cpu_ms(server.pids)
    done = await asyncio.gather(*jobs)
    used = cpu_ms(server.pids) - before
    first, last = min(t[0] for _, t, _ in done), max(t[-1] for _, t, _ in done)
    tokens = sum(u["completion_tokens"] for _, _, u in done)
    return (tokens - len(done)) / (last - first), used / tokens


async def prefill(client, server, tokens):
    began, times, usage = await stream(client, server.base, prompt(tokens), 1, [])
    return times[0] - began, usage["prompt_tokens"] / (times[0] - began)


async def disturbed(client, server, args):
    running = asyncio.create_task(stream(client, server.base, "Tell a very long story.", args.tokens, args.ban))
    await asyncio.sleep(0.5)
    begin = time.perf_counter()
    await stream(client, server.base, prompt(min(args.prompts)), 1, [])
    end = time.perf_counter()
    _, times, _ = await running
    gaps = sorted(b - a for a, b in zip(times, times[1:]) if begin <= b and a <= end)
    return gaps[int(len(gaps) * 0.95)] if gaps else float("nan")


async def measure(args):
    figures = {server.name: {} for server in args.servers}
    async with httpx.AsyncClient(timeout=600, limits=httpx.Limits(max_keepalive_connections=0)) as client:
        for server in args.servers:
            await decode(client, server, 1, args)  # the first request pays for caches that fill
        for run in range(args.runs):
            for server in args.servers if run % 2 == 0 else args.servers[::-1]:
                put = lambda key, value: figures[server.name].setdefault(key, []).append(value)  # noqa: B023
                for streams in args.streams:
                    speed, used = await decode(client, server, streams, args)
                    put(f"decode {streams}", speed)
                    put(f"cpu {streams}", used)
                for tokens in args.prompts:
                    ttft, speed = await prefill(client, server, tokens)
                    put(f"ttft {tokens}", ttft)
                    put(f"prefill {tokens}", speed)
                put("gap p95", await disturbed(client, server, args))
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
        best = max if key.startswith(("decode", "prefill")) else min
        of = best(medians[n] for n in base)
        cells = [f"{m:.3g}" + ("" if n in base or not of else f" (×{m / of:.2f})") for n, m in medians.items()]
        print(f"| {key} | " + " | ".join(cells) + " |")


class Server:
    """name=URL@PID,PID"""

    def __init__(self, text):
        self.name, _, rest = text.partition("=")
        self.base, _, pids = rest.partition("@")
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
    figures = asyncio.run(measure(args))
    table(figures, args.base or names[:1])
    if args.json:
        with open(args.json, "w", encoding="utf-8") as out:
            json.dump(figures, out, indent=1)


if __name__ == "__main__":
    main()
