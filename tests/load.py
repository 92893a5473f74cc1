"""Clients of `mlx-qlayers server` on the shipped model, 32 at a time: ``make soak``.

    python -m tests.load                     500 requests
    python -m tests.load --minutes 20        until the time is over
    python -m tests.load --batch-invariant   in bfloat16, where texts are compared with those alone
    python -m tests.load --speed             tokens a second of 8 requests at a time

Prompts have 1 to 4,096 tokens. Some clients leave, some send what is no request, some ask for more
than the context. All others are to get the text that MLX's operators give alone, in float32;
`/health` answers meanwhile, and the server's memory goes back to where it was.
"""

import argparse
import asyncio
import json
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx2
import mlx.core as mx
import mlx_lm
from mlx_lm.utils import dequantize_model

from mlx_qlayers import convert_model
from tests.commands.test_serving import BAD, CHAT, COMPLETE, serving

SHIPPED = Path(__file__).parents[1] / "models" / "tales-qwen2"
CORPUS = SHIPPED.parent / "data" / "grimms_fairy_tales.txt"
LONGEST, CONTEXT, MOST = 4096, 4400, 64  # tokens: of a prompt, of all, of an answer
AT_ONCE = 32
# Between the two likeliest tokens of a text that is compared: what float32 cannot exchange.
_MARGIN = 1e-3
_PATIENCE = 1800  # seconds without a byte: long prompts of 32 clients on a busy machine
_STOCK = 200  # tokens of a prompt that MLX's operators read in a second
_GROWTH = 1.1, 48  # of the server's memory from the first third on: a factor, and MB
# Caches of prompts that mlx-lm keeps, of 26 MB each or of nearly none: ten by default.
_KEPT = 1


@dataclass(frozen=True)
class Text:
    """A prompt of so many tokens, and the greedy text behind it that one client alone gets."""

    prompt: str
    size: int
    asked: int
    text: str
    tokens: int


@dataclass
class Report:
    """The record of clients."""

    answers: Counter[str] = field(default_factory=Counter)  # by kind of request
    wrong: list[str] = field(default_factory=list)  # what was not as it is alone
    tokens: int = 0  # of answers, without those of clients that left
    health: list[float] = field(default_factory=list)  # seconds that each took
    memory: list[float] = field(default_factory=list)  # MB, between rounds

    def check(self, ok: bool, what: str) -> None:
        if not ok:
            self.wrong.append(what)


@contextmanager
def model_in(dtype: mx.Dtype, layers: int = 6) -> Iterator[Path]:
    """A folder with the first layers of the shipped model, its scales and biases in a dtype."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        for file in SHIPPED.iterdir():
            (folder / file.name).symlink_to(file)
        weights: Any = mx.load(str(SHIPPED / "model.safetensors"))
        outside = tuple(f"model.layers.{i}." for i in range(layers, 6))
        cast = {
            key: array if array.dtype == mx.uint32 else array.astype(dtype)
            for key, array in weights.items()
            if not key.startswith(outside)
        }
        config = json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": layers}
        for changed in ("config.json", "model.safetensors"):
            (folder / changed).unlink()
        (folder / "config.json").write_text(json.dumps(config))
        mx.save_safetensors(str(folder / "model.safetensors"), cast, {"format": "mlx"})
        yield folder


def texts(
    model: Path, count: int, longest: int = LONGEST, most: int = MOST, *, invariant: bool = False
) -> list[Text]:
    """Prompts of 1 to ``longest`` tokens, most of them short, with their texts of 1 to ``most``.

    Short ones come from MLX's operators on dense weights, with no near choice between two tokens;
    long ones, for which these take minutes, and bfloat16 from a batch-invariant model.
    """
    short, tokenizer = mlx_lm.load(str(model))[:2]
    long = short if invariant else mlx_lm.load(str(model))[0]
    if invariant or longest > _STOCK:
        convert_model(long, batch_invariant=True, calibrate=False)
    short = short if invariant else dequantize_model(short)
    story, draw = tokenizer.encode(CORPUS.read_text()[: 1000 * longest]), random.Random(count)
    found: list[Text] = []
    while len(found) < count:
        size = round(longest ** (len(found) / (count - 1)))
        start = draw.randrange(len(story) - size)
        prompt = tokenizer.decode(story[start : start + size])
        if len(tokenizer.encode(prompt)) != size:
            continue
        asked, said, far = draw.randint(1, most), [], True
        net = long if size > _STOCK else short
        for each in mlx_lm.stream_generate(net, tokenizer, prompt, max_tokens=asked):
            said.append(each.text)
            second, first = mx.topk(each.logprobs.astype(mx.float32), 2).tolist()
            if not (far := invariant or abs(first - second) > _MARGIN):
                break
        if far:
            found.append(Text(prompt, size, asked, "".join(said), each.generation_tokens))
    return found


class Clients:
    """Requests to one server, each of a random kind."""

    def __init__(self, client: httpx2.AsyncClient, texts: Sequence[Text], seed: int) -> None:
        self.client, self.texts, self.draw = client, texts, random.Random(seed)
        self.weights = [1 / (256 + text.size) for text in texts]
        self.first = iter(texts)
        self.report = Report()
        shares = (self.whole, 8), (self.stream, 8), (self.chat, 4), (self.leave, 3), (self.bad, 2)
        self.kinds = [kind for kind, share in (*shares, (self.too_long, 1)) for _ in range(share)]

    async def one(self) -> None:
        kind: Callable[[Text], Awaitable[None]] = self.draw.choice(self.kinds)
        (some,) = self.draw.choices(self.texts, self.weights)
        text = next(self.first, some)  # each once, then seldom the long ones
        self.report.answers[kind.__name__] += 1
        try:
            await kind(text)
        except (httpx2.HTTPError, OSError, ValueError, KeyError) as error:
            self.report.wrong.append(f"{kind.__name__}, {text.size} tokens: {error!r}")

    def _same(self, kind: str, asked: Text, said: str, reason: str | None) -> None:
        self.report.tokens += asked.tokens
        right = said == asked.text and reason in ("stop", "length")
        self.report.check(right, f"{kind}, {asked.size} tokens, {reason}: {said!r}, {asked.text!r}")

    async def _answer(self, path: str, **body: Any) -> Any:
        answer = await self.client.post(path, json=body)
        answer.raise_for_status()
        return answer.json()

    async def whole(self, text: Text) -> None:
        got = await self._answer(COMPLETE, prompt=text.prompt, max_tokens=text.asked)
        (choice,), usage = got["choices"], got["usage"]
        counts = usage["prompt_tokens"], usage["completion_tokens"]
        self.report.check(counts == (text.size, text.tokens), f"{counts} of {text}")
        self._same("whole", text, choice["text"], choice["finish_reason"])

    async def chat(self, text: Text) -> None:
        said = [{"role": "user", "content": text.prompt}]  # which the template leaves as it is
        got = await self._answer(CHAT, messages=said, max_tokens=text.asked)
        (choice,) = got["choices"]
        self._same("chat", text, choice["message"]["content"] or "", choice["finish_reason"])

    async def stream(self, text: Text, most: int | None = None) -> None:
        body = {"prompt": text.prompt, "max_tokens": text.asked, "stream": True}
        parts, reason, done = [], None, False
        async with self.client.stream("POST", COMPLETE, json=body) as answer:
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                if done := line == "data: [DONE]":
                    break
                if not line.startswith("data: "):
                    continue
                (choice,) = json.loads(line[6:])["choices"]
                parts.append(choice["text"])
                reason = choice["finish_reason"]
                if len(parts) == most:
                    return  # and leave
        if most is None:
            self.report.check(done, f"stream, {text.size} tokens: it has no end")
            self._same("stream", text, "".join(parts), reason)

    async def leave(self, text: Text) -> None:
        """In the middle of a stream, of a prompt or of an answer."""
        if self.draw.random() < 0.5:
            return await self.stream(text, self.draw.randint(1, 8))
        body = {"prompt": text.prompt, "max_tokens": MOST, "stream": self.draw.random() < 0.3}
        wait = self.draw.choice([0.001, 0.1, 1.0])
        try:
            await self.client.post(COMPLETE, json=body, timeout=wait)
        except httpx2.TimeoutException:
            return

    async def bad(self, _: Text) -> None:
        path, body, says = self.draw.choice(BAD)
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        answer = await self.client.post(path, content=data)
        ok = answer.status_code == 400 and says in answer.json()["error"]
        self.report.check(ok, f"{str(body)[:60]}: {answer.status_code} {answer.text[:200]}")

    async def too_long(self, text: Text) -> None:
        many = text.prompt * (CONTEXT // text.size + 1)
        answer = await self.client.post(COMPLETE, json={"prompt": f"{many} and {many}"})
        ok = answer.status_code == 400 and "context" in answer.json()["error"]
        self.report.check(ok, f"too long: {answer.status_code} {answer.text[:200]}")

    async def watch(self) -> None:
        """Ask for health until cancelled."""
        while True:
            begin = time.perf_counter()
            try:
                status = (await self.client.get("/health", timeout=30)).status_code
            except httpx2.HTTPError as error:
                status = repr(error)
            self.report.health.append(time.perf_counter() - begin)
            self.report.check(status == 200, f"health: {status}")
            await asyncio.sleep(0.2)

    async def round(self, count: int, at_once: int = AT_ONCE) -> None:
        left = iter(range(count))

        async def many() -> None:
            for _ in left:
                await self.one()

        await asyncio.gather(*(many() for _ in range(at_once)))


def memory(pid: int) -> float:
    """MB of a process."""
    return int(subprocess.check_output(["ps", "-o", "rss=", "-p", str(pid)])) / 1024


async def settled(pid: int, limit: float = 120) -> float:
    """MB once they stay: who left has been noticed, and what was freed given back."""
    found, begin = [memory(pid)], time.monotonic()
    while time.monotonic() - begin < limit:
        await asyncio.sleep(0.3)
        found.append(memory(pid))
        if len(found) > 4 and max(found[-4:]) - min(found[-4:]) < 1:
            break
    return found[-1]


async def load(
    address: str,
    pid: int,
    asked: Sequence[Text],
    count: int,
    *,
    seconds: float = 0,
    rounds: int = 6,
    at_once: int = AT_ONCE,
) -> Report:
    """Requests in rounds, between which the server is idle; more rounds until time is over."""
    limits, patience = httpx2.Limits(max_connections=None), httpx2.Timeout(_PATIENCE)
    async with httpx2.AsyncClient(base_url=address, limits=limits, timeout=patience) as client:
        clients, begin = Clients(client, asked, count), time.monotonic()
        report, watch = clients.report, asyncio.create_task(clients.watch())
        while len(report.memory) < rounds or time.monotonic() - begin < seconds:
            await clients.round(-(-count // rounds), at_once)
            report.memory.append(await settled(pid))
            told = f"{time.monotonic() - begin:.0f} s, {dict(report.answers)}"
            print(told, f"{report.memory[-1]:.0f} MB", report.wrong[-1:], flush=True)
        watch.cancel()
    factor, more = _GROWTH
    before, after = report.memory[len(report.memory) // 3], report.memory[-1]
    report.check(after <= factor * before + more, f"memory: {report.memory} MB")
    return report


def server(model: Path, *options: str) -> AbstractContextManager[Any]:
    """Of the shipped model, as long as this lasts."""
    own = f"--context={CONTEXT}", f"--prompt-cache-size={_KEPT}"
    return serving(model, *own, "--no-calibrate", "--log-level=ERROR", *options)


async def speed(address: str, rounds: int, at_once: int = 8, tokens: int = 256) -> list[float]:
    """Tokens a second in each round of as many requests as there are at once."""
    story, found = CORPUS.read_text()[20000:], []
    async with httpx2.AsyncClient(base_url=address, timeout=600) as client:

        async def one(at: int) -> int:
            body = {"prompt": story[at * 900 :][:200], "max_tokens": tokens}
            answer = (await client.post(COMPLETE, json=body)).json()
            return int(answer["usage"]["completion_tokens"])

        for round in range(rounds):
            begin = time.perf_counter()
            made = await asyncio.gather(*(one(round * at_once + i) for i in range(at_once)))
            found.append(sum(made) / (time.perf_counter() - begin))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--texts", type=int, default=60, help="different ones")
    parser.add_argument("--minutes", type=float, default=0.0)
    parser.add_argument("--batch-invariant", action="store_true")
    parser.add_argument("--speed", action="store_true")
    args = parser.parse_args()
    options = ["--batch-invariant"] * args.batch_invariant
    if args.speed:
        with server(SHIPPED, *options) as (address, _):
            rates = asyncio.run(speed(address, 6))
        print(f"8 requests at a time, tokens/s by rounds: {[round(each) for each in rates]}")
        return
    with model_in(mx.bfloat16 if args.batch_invariant else mx.float32) as model:
        asked = texts(model, args.texts, invariant=args.batch_invariant)
        print(f"{len(asked)} texts, prompts of {sum(t.size for t in asked)} tokens", flush=True)
        begin = time.monotonic()
        with server(model, *options) as (address, process):
            count, seconds = args.requests, 60 * args.minutes
            report = asyncio.run(load(address, process.pid, asked, count, seconds=seconds))
    taken, slowest = time.monotonic() - begin, max(report.health)
    print(f"{sum(report.answers.values())} requests in {taken:.0f} s, {report.tokens} tokens")
    print(f"health: {len(report.health)} answers, the slowest after {slowest:.2f} s")
    print(f"memory by rounds: {[round(each) for each in report.memory]} MB")
    print(*report.wrong or ["nothing was wrong"], sep="\n")
    sys.exit(bool(report.wrong))


if __name__ == "__main__":
    main()
