#!/usr/bin/env python3
"""A chain under load and faults for a long time: nothing but whole answers and clean refusals, and nothing grows.

    soak_chain.py [--minutes 30] [--clients 16] [--every 60] [--seed 1] [--out DIR]

Starts `splitmodel up` with three stages of the sample model and lets 16 clients ask at once: prompts of 1 to 1,500 tokens,
streamed and not, greedy, seeded, with penalties and with a JSON schema, and every fourth client leaves early: in the queue, in
prefill, or in mid-answer. Every 60 seconds a stage other than 0 is killed (SIGKILL); every fifth time it is stopped for five
seconds instead. Fails (exit code 1) where anything else comes than a whole answer, a 429 or 503 with Retry-After, or an error
event that says when to try again; where a greedy answer is wrong; where lanes stay in use or requests in the queue; and where
memory or descriptors of a process that lived all the time have grown. Table, samples and logs are written to DIR.
"""
import argparse
import asyncio
import collections
import contextlib
import csv
import json
import math
import os
import pathlib
import random
import shutil
import signal
import statistics
import subprocess
import sys
import time

import httpx

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests/api"))
from chain import BIN, CONTEXT, Chain  # noqa: E402

STAGES = 3
LONGEST_PROMPT = 1500
LONGEST_ANSWER = 200
SAMPLE = 10  # seconds
STOPPED = 5  # seconds
PATIENCE = 240  # seconds for an answer: longer than every deadline of the chain together
# What may grow without meaning anything: caches that fill up slowly, and clients that come and go.
RSS_SLACK, FD_SLACK = 24 << 20, 24
SCHEMA = {"type": "object", "additionalProperties": False, "required": ["name", "count"], "properties": {
    "name": {"type": "string", "maxLength": 12}, "count": {"type": "integer", "minimum": 0, "maximum": 999}}}
# What every greedy answer must begin with, whatever else the chain is doing.
SURE = [("The capital of France is", " Paris"), ("One, two, three, four,", " five"), ("1 2 3 4 5 6", " 7")]


class Fail(Exception):
    """Something that must not happen; its text is its kind."""


class Left(Exception):
    """This client went away as it was to."""


def spread(random, least, most):
    """A number from `least` to `most`, small ones as likely as large ones."""
    return round(math.exp(random.uniform(math.log(least), math.log(most))))


class Soak:
    def __init__(self, args, chain, http, prose):
        self.args, self.chain, self.http, self.prose = args, chain, http, prose
        self.random = random.Random(args.seed)
        self.counts = collections.Counter()
        self.fails = []
        self.tokens = 0
        self.recoveries = {"formed": [], "killed": [], "stopped": []}
        self.samples = []
        self.over = asyncio.Event()

    def fail(self, kind, detail):
        self.counts[f"FAIL {kind}"] += 1
        self.fails.append(f"{time.strftime('%H:%M:%S')} {kind}: {detail}")
        print("FAIL", self.fails[-1], flush=True)

    # ---- clients

    def request(self):
        """A body, where it goes, and what its answer must look like."""
        r = self.random
        if r.random() < 0.1:
            text, begin = r.choice(SURE)

            def sure(text, _):
                self.counts["of them with a known beginning"] += 1
                return text.startswith(begin)
            return "/v1/completions", {"prompt": text, "max_tokens": 4, "temperature": 0}, sure
        length = spread(r, 1, LONGEST_PROMPT)
        begin = r.randrange(len(self.prose) - length)
        body = {"max_tokens": min(spread(r, 1, LONGEST_ANSWER), CONTEXT - length - 1)}
        kind = r.choice(["greedy", "seeded", "penalised", "grammar"])
        body |= {
            "greedy": {"temperature": 0},
            "seeded": {"temperature": 0.9, "top_p": 0.95, "seed": r.randrange(1 << 31)},
            "penalised": {"temperature": 1.1, "min_p": 0.03, "repeat_penalty": 1.2, "frequency_penalty": 0.3, "seed": 7},
            "grammar": {"temperature": 0, "max_tokens": 60, "response_format": {
                "type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA}}},
        }[kind]
        check = is_thing if kind == "grammar" else lambda text, finish: True
        if kind == "grammar" or r.random() < 0.3:
            words = r.choice(["Describe", "Count", "Name"]) + " a thing of this tale as JSON: "
            words += "rain and lamps " * (length // 5)
            return "/v1/chat/completions", body | {"messages": [{"role": "user", "content": words}]}, check
        if r.random() < 0.5:
            body["ignore_eos"] = True
        return "/v1/completions", body | {"prompt": self.prose[begin:begin + length]}, check

    def leaves(self, body):
        """When this client goes away: (seconds, tokens), whatever comes first."""
        r = self.random
        if r.random() >= 0.25:
            return math.inf, math.inf
        how = r.choice(["at once", "before a token", "in mid-answer"])
        if how == "in mid-answer":
            body["stream"] = True
            return math.inf, r.randint(1, 12)
        return (r.uniform(0, 0.1) if how == "at once" else r.uniform(0.1, 4)), math.inf

    async def client(self, number):
        await asyncio.sleep(number * 0.2)
        while not self.over.is_set():
            path, body, check = self.request()
            body["stream"] = self.random.random() < 0.6
            seconds, tokens = self.leaves(body)
            self.counts["requests"] += 1
            pause = 0
            try:
                async with asyncio.timeout(min(seconds, PATIENCE)):
                    ask = self.streamed if body["stream"] else self.whole
                    pause = await ask(path, body, check, tokens)
            except Left:
                self.counts["left in mid-answer"] += 1
            except TimeoutError:
                if seconds < PATIENCE:
                    self.counts["left at once" if seconds < 0.1 else "left before the end"] += 1
                else:
                    self.fail("timeout", f"no end in {PATIENCE} s of {path} {short(body)}")
            except Fail as fail:
                self.fail(str(fail), f"{path} {short(body)} {fail.__cause__ or ''}")
            except httpx.HTTPError as error:
                self.fail(f"connection {type(error).__name__}", f"{error} {path} {short(body)}")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.over.wait(), pause + self.random.expovariate(5))

    async def whole(self, path, body, check, _):
        answer = await self.http.post(path, json=body)
        if answer.status_code != 200:
            return self.refused(answer)
        choice = answer.json()["choices"][0]
        text = choice["text"] if "text" in choice else choice["message"]["content"]
        self.finished(text, choice["finish_reason"], check)
        return 0

    async def streamed(self, path, body, check, leave_after):
        async with self.http.stream("POST", path, json=body) as answer:
            if answer.status_code != 200:
                await answer.aread()
                return self.refused(answer)
            text, finish, count, lines = "", None, 0, answer.aiter_lines()
            async for line in lines:
                if line == "data: [DONE]":
                    self.finished(text, finish, check)
                    return 0
                if line.startswith(":"):
                    self.counts["keep-alive comments"] += 1
                if not line.startswith("data: "):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    return self.event(event["error"], [line async for line in lines if line])
                choice = event["choices"][0]
                piece = choice["text"] if "text" in choice else choice["delta"].get("content")
                finish = choice["finish_reason"] or finish
                if piece:
                    text, count = text + piece, count + 1
                    self.tokens += 1
                if count >= leave_after:
                    raise Left
            raise Fail("a stream that was cut")

    def finished(self, text, finish, check):
        if finish not in ("stop", "length"):
            raise Fail(f"finish reason {finish}")
        if not check(text, finish):
            raise Fail("a wrong answer") from ValueError(repr(text))
        self.counts["finished"] += 1

    def refused(self, answer):
        """A refusal, which must be clean; for how long to stay away."""
        after = answer.headers.get("retry-after", "")
        if answer.status_code not in (429, 503) or not after.isdigit() or "message" not in answer.json().get("error", {}):
            raise Fail(f"status {answer.status_code}") from ValueError(answer.text[:300])
        self.counts[f"status {answer.status_code}"] += 1
        return min(int(after), 5)

    def event(self, error, rest):
        """An error in mid-stream, which must say when to try again and end the stream in order."""
        hint = error.get("retry_after") is not None or "again" in error.get("message", "")
        if error.get("type") != "service_unavailable_error" or not hint or rest != ["data: [DONE]"]:
            raise Fail(f"event {error.get('type')}") from ValueError(f"{error} {rest}")
        self.counts["error events"] += 1
        return 2

    # ---- faults

    async def faults(self):
        number = 0
        while not await self.rests(self.args.every):
            number += 1
            stage = self.random.randrange(1, STAGES)
            pid = self.chain.pid(stage)
            if number % 5 == 0:
                os.kill(pid, signal.SIGSTOP)
                await asyncio.sleep(STOPPED)
                begun, tokens = time.monotonic(), await self.metric("splitmodel_generated_tokens_total")
                os.kill(pid, signal.SIGCONT)
                await self.rises("splitmodel_generated_tokens_total", tokens, begun, "stopped")
                continue
            formations = await self.metric("splitmodel_formations_total")
            begun = time.monotonic()
            os.kill(pid, signal.SIGKILL)
            await self.rises("splitmodel_formations_total", formations, begun, "formed")
            # None can have come before the probe, which has yet to go through.
            tokens = await self.metric("splitmodel_generated_tokens_total")
            await self.rises("splitmodel_generated_tokens_total", tokens, begun, "killed")

    async def rises(self, name, before, begun, what):
        """Waits until a metric rises, and notes how long after `begun` that is."""
        while await self.metric(name) <= before:
            if time.monotonic() > begun + 60:
                return self.fail("no recovery", f"{name} did not rise in 60 s")
            await asyncio.sleep(0.02)
        self.recoveries[what].append(time.monotonic() - begun)

    async def metric(self, name):
        text = (await self.http.get("/metrics")).text
        return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith((name + " ", name + "{")))

    async def rests(self, seconds):
        """Sleeps; true when the soak is over."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.over.wait(), seconds)
        return self.over.is_set()

    # ---- what is measured

    async def watch(self):
        begun = time.monotonic()
        while not self.over.is_set():
            for name, pid in [("up", self.chain.process.pid), *((f"stage {s}", self.chain.pid(s)) for s in range(STAGES))]:
                with contextlib.suppress(OSError):  # it may have been killed just now
                    rss = int(pathlib.Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
                    fds = len(os.listdir(f"/proc/{pid}/fd"))
                    self.samples.append((time.monotonic() - begun, name, pid, rss, fds))
            if await self.rests(SAMPLE):
                return

    def growth(self):
        """Rows of (process, RSS early, RSS late, descriptors early, descriptors late, starts), and failures."""
        end = max(s[0] for s in self.samples)
        early, window = min(300, end / 3), max(SAMPLE * 1.5, min(60, end / 10))
        rows = []
        for name in ["up", *(f"stage {s}" for s in range(STAGES))]:
            own = [s for s in self.samples if s[1] == name]
            then = [s for s in own if abs(s[0] - early) <= window] or own[:1]
            now = [s for s in own if s[0] >= end - 2 * window]
            pick = lambda part, at: statistics.median(s[at] for s in part)
            row = (name, pick(then, 3), pick(now, 3), pick(then, 4), pick(now, 4), len({s[2] for s in own}))
            rows.append(row)
            if row[2] > row[1] * 1.1 + RSS_SLACK or row[4] > row[3] + FD_SLACK:
                self.fail("growth", f"{name}: RSS {row[1]:.0f} → {row[2]:.0f} bytes, descriptors {row[3]:.0f} → {row[4]:.0f}")
        return rows

    async def at_rest(self):
        """Lanes and queue once all clients have gone."""
        for _ in range(120):
            told = subprocess.run([BIN / "splitmodel", "status", "--json", "--state-dir", self.chain.state],
                                  capture_output=True, text=True, timeout=60)
            stages = json.loads(told.stdout)[0]["stages"] if told.returncode == 0 else []
            lanes, queue = [s.get("lanes_used") for s in stages], [s.get("queued") for s in stages]
            if lanes == queue == [0] * STAGES:
                break
            await asyncio.sleep(0.5)
        else:
            self.fail("lanes", f"at rest lanes {lanes} are in use and {queue} wait")
        return lanes, queue


def is_thing(text, finish):
    """Whether a whole answer is what the schema wants; one that was cut by its length need not be."""
    if finish == "length":
        return True
    try:
        thing = json.loads(text)
        return isinstance(thing["name"], str) and isinstance(thing["count"], int)
    except (ValueError, KeyError):
        return False


def short(body):
    prompt = body.get("prompt") or body.get("messages")
    return json.dumps({k: v for k, v in body.items() if k not in ("prompt", "messages")})[:300] + f" prompt {len(prompt)}"


async def greedy(http, prose):
    """The text that must be the same before and after."""
    body = {"prompt": prose[:40], "max_tokens": 48, "temperature": 0, "ignore_eos": True}
    return (await http.post("/v1/completions", json=body)).raise_for_status().json()["choices"][0]["text"]


async def run(args, chain):
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=args.clients)
    async with httpx.AsyncClient(base_url=chain.url, timeout=None, limits=limits) as http:
        text = "".join((ROOT / "docs" / name).read_text() for name in ("architecture.md", "wire.md"))
        prose = (await http.post("/tokenize", json={"content": text})).raise_for_status().json()["tokens"]
        assert len(prose) > 2 * LONGEST_PROMPT, len(prose)
        before = await greedy(http, prose)
        soak = Soak(args, chain, http, prose)
        begun = time.monotonic()
        clients = [asyncio.create_task(soak.client(n)) for n in range(args.clients)]
        others = [asyncio.create_task(soak.faults()), asyncio.create_task(soak.watch())]
        while time.monotonic() < begun + args.minutes * 60 and not any(t.done() for t in [*clients, *others]):
            await asyncio.sleep(1)
        soak.over.set()
        await asyncio.gather(*clients, *others)
        minutes = (time.monotonic() - begun) / 60
        lanes, queue = await soak.at_rest()
        after = await greedy(http, prose)
        if after != before:
            soak.fail("another text", f"{before!r}, afterwards {after!r}")
        return soak, report(args, soak, minutes, lanes, queue, soak.growth())


def report(args, soak, minutes, lanes, queue, growth):
    counts = soak.counts
    lines = [f"{minutes:.1f} minutes, {args.clients} clients, seed {args.seed}, {STAGES} stages, {os.cpu_count()} cores",
             "", "| what | how many |", "|---|---|"]
    first = ["requests", "finished", "of them with a known beginning", "left at once", "left before the end", "left in mid-answer", "status 429", "status 503",
             "error events", "keep-alive comments"]
    lines += [f"| {key} | {counts[key]} |" for key in first]
    lines += [f"| pieces of text in streams | {soak.tokens} |"]
    lines += [f"| {key} | {counts[key]} |" for key in sorted(counts) if key.startswith("FAIL")] or ["| failures | 0 |"]
    lines += [f"| lanes in use, requests in the queue at the end | {lanes}, {queue} |", "",
              "| time | times | median | longest |", "|---|---|---|---|"]
    names = {"formed": "from the kill of a stage until the chain is formed", "killed": "from the kill to the next token",
             "stopped": f"from the end of a stop of {STOPPED} s to the next token"}
    for how, times in soak.recoveries.items():
        figures = f"{statistics.median(times):.2f} s | {max(times):.2f} s" if times else "| "
        lines.append(f"| {names[how]} | {len(times)} | {figures} |")
    lines += ["", "| process | starts | RSS early | RSS late | descriptors early | late |", "|---|---|---|---|---|---|"]
    lines += [f"| {name} | {starts} | {a / 2**20:.0f} MiB | {b / 2**20:.0f} MiB | {c:.0f} | {d:.0f} |"
              for name, a, b, c, d, starts in growth]
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--every", type=float, default=60, help="seconds between two faults")
    parser.add_argument("--seed", type=int, default=1)
    cache = pathlib.Path(os.environ.get("SPLITMODEL_CACHE", pathlib.Path.home() / ".cache/splitmodel"))
    parser.add_argument("--out", type=pathlib.Path, default=cache / "soak" / time.strftime("%Y%m%d-%H%M%S"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    chain = Chain(args.out, STAGES)
    try:
        soak, table = asyncio.run(run(args, chain))
    finally:
        for log in chain.state.glob("run/*/stage-*.log"):
            shutil.copy(log, args.out)
        (args.out / "up.log").write_text("\n".join(chain.lines) + "\n")
        code = chain.end()
    if code != 0:
        soak.fail("end", f"up ended with {code}")
    (args.out / "table.md").write_text(table + "\n")
    with open(args.out / "samples.csv", "w", newline="", encoding="utf-8") as out:
        csv.writer(out).writerows([("seconds", "process", "pid", "rss_bytes", "descriptors"), *soak.samples])
    (args.out / "failures.txt").write_text("".join(line + "\n" for line in soak.fails))
    print(f"\n{table}\n\nwritten to {args.out}; {len(soak.fails)} failures")
    sys.exit(1 if soak.fails else 0)


if __name__ == "__main__":
    main()
