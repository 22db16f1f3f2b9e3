#!/usr/bin/env python3
"""Measures OpenAI-compatible servers side by side and prints a table of medians and ratios.

    compare.py name=http://127.0.0.1:8000 other=http://127.0.0.1:8001 [--runs 5] [--json FILE]

The servers are measured in turn, run by run, first to last and back, so that whatever else the machine does meets all of
them. The first is the base of the ratios. Figures:

    decode N    tokens per second, summed over N streams, from the first to the last token of all
    ttft        seconds to the first token of a prompt of about 1,000 tokens that nobody sent before
    prefill     prompt tokens per second of that call
    gap p95     95th percentile of the time between two tokens of a stream while such a prompt goes through
"""
import argparse
import asyncio
import json
import os
import statistics
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


async def decode(client, base, streams, args):
    jobs = [stream(client, base, f"Tell the long story number {i}.", args.tokens, args.ban) for i in range(streams)]
    done = await asyncio.gather(*jobs)
    first, last = min(t[0] for _, t, _ in done), max(t[-1] for _, t, _ in done)
    return sum(u["completion_tokens"] - 1 for _, _, u in done) / (last - first)


async def prefill(client, base, args):
    began, times, usage = await stream(client, base, prompt(args.prompt), 1, [])
    return times[0] - began, usage["prompt_tokens"] / (times[0] - began)


async def disturbed(client, base, args):
    running = asyncio.create_task(stream(client, base, "Tell a very long story.", args.tokens, args.ban))
    await asyncio.sleep(0.5)
    begin = time.perf_counter()
    await stream(client, base, prompt(args.prompt), 1, [])
    end = time.perf_counter()
    _, times, _ = await running
    gaps = sorted(b - a for a, b in zip(times, times[1:]) if begin <= b and a <= end)
    return gaps[int(len(gaps) * 0.95)] if gaps else float("nan")


async def measure(args):
    figures = {name: {} for name, _ in args.servers}
    async with httpx.AsyncClient(timeout=600, limits=httpx.Limits(max_keepalive_connections=0)) as client:
        for _, base in args.servers:
            await decode(client, base, 1, args)  # the first request pays for caches that fill
        for run in range(args.runs):
            for name, base in args.servers if run % 2 == 0 else args.servers[::-1]:
                put = lambda key, value: figures[name].setdefault(key, []).append(value)
                for streams in args.streams:
                    put(f"decode {streams}", await decode(client, base, streams, args))
                ttft, speed = await prefill(client, base, args)
                put("ttft", ttft)
                put("prefill", speed)
                put("gap p95", await disturbed(client, base, args))
                put("load", os.getloadavg()[0])
    return figures


def table(figures):
    names = list(figures)
    print(f"| figure (median of {len(next(iter(figures[names[0]].values())))}) | " + " | ".join(names) + " |")
    print("|---" * (len(names) + 1) + "|")
    for key in figures[names[0]]:
        medians = [statistics.median(figures[n][key]) for n in names]
        cells = [f"{m:.3g}" + (f" (×{m / medians[0]:.2f})" if i and medians[0] else "") for i, m in enumerate(medians)]
        print(f"| {key} | " + " | ".join(cells) + " |")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("servers", nargs="+", type=lambda s: tuple(s.split("=", 1)), help="name=URL, the base first")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--streams", type=lambda s: [int(x) for x in s.split(",")], default=[1, 2, 4, 8])
    parser.add_argument("--tokens", type=int, default=96, help="tokens of each answer")
    parser.add_argument("--prompt", type=int, default=1000, help="tokens of the long prompt")
    parser.add_argument("--ban", type=lambda s: [int(x) for x in s.split(",")], default=[0, 2, 4],
                        help="tokens that would end an answer early (SmolLM2's)")
    parser.add_argument("--json", help="file for every single figure")
    args = parser.parse_args()
    figures = asyncio.run(measure(args))
    table(figures)
    if args.json:
        with open(args.json, "w", encoding="utf-8") as out:
            json.dump(figures, out, indent=1)


if __name__ == "__main__":
    main()
