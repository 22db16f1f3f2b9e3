#!/usr/bin/env python3
"""What kept prefixes save, beside llama-server's prompt cache, in one run on one machine.

    cache.py --llama-server PATH [--runs 7] [--tokens 1000] [--threads N] [--delay 25] [--calm 0.5]

Starts llama-server and chains of 1 and of 3 stages, each process with N threads (all cores unless told), and measures them in turn, run by run,
first to last and back. Every run has texts of its own. Figures, medians of the runs:

    cold        seconds to the first token of a system prompt of --tokens tokens that nobody sent before, and a question
    warm        another question after the same system prompt
    repeated    the very same request once more
    chat        tokens computed in a turn of a growing conversation beyond those that are new in it, the most of three turns
    kept        of three conversations in turn: the smallest part of an earlier turn that the next one finds
    hops        what --delay milliseconds on each link add to the first token of a warm prompt, and to a token of an answer, in such delays

`warm ÷ cold` and `repeated ÷ warm` are medians of the runs' own ratios.
"""
import argparse
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request

import client
from compare import prompt
from delay import calm, set_delay

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "tests/api"))
from chain import CONTEXT, LANES, ROOT, Chain, free_port  # noqa: E402

MODEL = ROOT / "examples/models/SmolLM2-135M-Instruct.Q4_1.gguf"
QUESTIONS = ["Who comes first?", "Who comes last?", "Who comes next?"]


class Llama:
    """llama-server, with as many sequences of as many tokens as the chains."""

    def __init__(self, path, directory, threads):
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        command = [path, "-m", MODEL, "--parallel", str(LANES), "-c", str(LANES * CONTEXT), "-t", str(threads), "-tb", str(threads),
                   "--jinja", "--no-warmup", "--host", "127.0.0.1", "--port", str(port)]
        with open(directory / "llama.log", "wb") as log:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        for _ in range(240):
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=5).close()
                return
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.5)
        self.end()
        raise SystemExit(f"llama-server does not answer: {(directory / 'llama.log').read_text()[-2000:]}")

    def end(self):
        self.process.terminate()
        self.process.wait(30)


def ask(server, messages, tokens=16):
    return client.stream(server.url.removeprefix("http://"), messages, tokens)


def user(text):
    return {"role": "user", "content": text}


def asked(text, question):
    return [{"role": "system", "content": text}, user(question)]


def first_tokens(server, args):
    text = prompt(args.tokens)
    cold, warm, repeated = (ask(server, asked(text, q)) for q in (QUESTIONS[0], QUESTIONS[1], QUESTIONS[1]))
    return {"cold": cold.ttft, "warm": warm.ttft, "repeated": repeated.ttft, "warm ÷ cold": warm.ttft / cold.ttft,
            "repeated ÷ warm": repeated.ttft / warm.ttft, "computed of a warm one": warm.usage["prompt_tokens"] - warm.cached}


def chat(server):
    messages, known, beyond = [], None, []
    for question in [f"{prompt(200)} {QUESTIONS[0]}", *QUESTIONS[1:], "Thank you. Is that all?"]:
        messages.append(user(question))
        answer = ask(server, messages)
        if known is not None:
            beyond.append(known - answer.cached)
        known = answer.usage["prompt_tokens"] + answer.usage["completion_tokens"]
        messages.append({"role": "assistant", "content": answer.text})
    return {"chat": max(beyond)}


def conversations(server):
    chats = [[user(f"{prompt(200)} {QUESTIONS[0]}")] for _ in range(3)]
    kept, sent = [], [0] * len(chats)
    for turn in range(3):
        for i, messages in enumerate(chats):
            answer = ask(server, messages)
            if turn:
                kept.append(answer.cached / sent[i])
            sent[i] = answer.usage["prompt_tokens"]
            messages += [{"role": "assistant", "content": answer.text}, user(QUESTIONS[turn])]
    return {"kept": min(kept)}


def over_delays(chain, args):
    """Seconds to the first token of warm prompts and between tokens, without and with the delay."""
    text, found = prompt(args.tokens), {}
    ask(chain, asked(text, QUESTIONS[0]))
    for i, ms in enumerate((0, args.delay)):
        set_delay(chain, ms)
        # A question that was not asked, as nothing is replayed then.
        answer = ask(chain, asked(text, QUESTIONS[1 + i]))
        found[ms] = answer.ttft, (answer.times[-1] - answer.times[0]) / (len(answer.times) - 1)
    set_delay(chain, 0)
    first, token = (1000 * (found[args.delay][i] - found[0][i]) / args.delay for i in (0, 1))
    return {"hops of a warm first token": first, "hops of a token": token}


def measure(servers, args):
    figures = {name: {} for name in servers}
    for server in servers.values():
        ask(server, [user("Hello")])  # the first request pays for caches that fill
    for run in range(args.runs):
        for name in list(servers)[::1 if run % 2 == 0 else -1]:
            server = servers[name]
            found = first_tokens(server, args) | chat(server) | conversations(server)
            if isinstance(server, Chain) and server.stages > 1:
                found |= over_delays(server, args)
            for key, value in found.items():
                figures[name].setdefault(key, []).append(value)
        print(f"run {run + 1} of {args.runs}", file=sys.stderr)
    return figures


def table(figures):
    names = list(figures)
    print("| | " + " | ".join(names) + " |")
    print("|---" * (len(names) + 1) + "|")
    medians = {n: {key: statistics.median(values) for key, values in figures[n].items()} for n in names}
    for key in medians[names[-1]]:
        cells = [f"{medians[n][key]:.3g}" if key in medians[n] else "" for n in names]
        if key in ("cold", "warm", "repeated"):
            cells = [f"{cell} s (×{medians[n][key] / medians[names[0]][key]:.2f})" for n, cell in zip(names, cells)]
        print(f"| {key} | " + " | ".join(cells) + " |")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama-server", required=True, help="the program; bench/peers.sh builds it and prints its folder")
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=1000, help="tokens of the shared text")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of each process")
    parser.add_argument("--delay", type=float, default=25.0, help="milliseconds")
    parser.add_argument("--calm", type=float, default=0.5, help="load average to wait for; 0: do not wait")
    args = parser.parse_args()
    if args.calm:
        calm(args.calm)
    with tempfile.TemporaryDirectory() as scratch:
        servers = {}
        try:
            servers["llama-server"] = Llama(args.llama_server, pathlib.Path(scratch), args.threads)
            for stages in (1, 3):
                directory = pathlib.Path(scratch, str(stages))
                directory.mkdir()
                servers[f"{stages} stage{'s' * (stages > 1)}"] = Chain(directory, stages, threads=args.threads)
            figures = measure(servers, args)
        finally:
            for server in servers.values():
                server.end()
    table(figures)


if __name__ == "__main__":
    main()
