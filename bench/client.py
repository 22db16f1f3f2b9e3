"""A client of chat completions. On the machine that is measured it takes time from servers that use all of it, so it is a plain one."""
import dataclasses
import http.client
import json
import time


@dataclasses.dataclass
class Answer:
    """What came, and when, in seconds of one clock."""
    began: float
    times: list
    text: str
    usage: dict

    @property
    def ttft(self):
        return self.times[0] - self.began

    @property
    def cached(self):
        return (self.usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


def stream(host, messages, tokens, **more):
    """The answer of `host` (name:port), at most so many tokens, greedy."""
    body = {"messages": messages, "max_tokens": tokens, "temperature": 0, "stream": True,
            "stream_options": {"include_usage": True}, **more}
    began, times, texts, usage = time.perf_counter(), [], [], {}
    connection = http.client.HTTPConnection(host, timeout=600)
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        if answer.status != 200:
            raise SystemExit(f"{host}: HTTP {answer.status}: {answer.read().decode(errors='replace')}")
        for line in answer:
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line[6:])
            pieces = [text for c in chunk.get("choices") or [] if (text := c.get("delta", {}).get("content"))]
            if pieces:
                times.append(time.perf_counter())
                texts += pieces
            usage = chunk.get("usage") or usage
    finally:
        connection.close()
    return Answer(began, times, "".join(texts), usage)
