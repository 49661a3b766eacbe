"""A continuous-batching loop over kvtier: what a server of your own starts from.

Run it: ``.venv/bin/python examples/minimal_server.py``.  docs/embedding.md walks through it.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass, field

from toy_model import LAYOUT, ToyModel, generate_plainly

import kvtier

CHUNK = 24


@dataclass(eq=False)
class Request:
    lease: kvtier.Lease
    tokens: list[int]  # the prompt, then what was generated
    stop: int
    out: asyncio.Queue[int | Exception] = field(default_factory=asyncio.Queue)

    def chunk(self) -> list[int]:
        """What to feed next: a piece of the prompt, or the last token generated."""
        done = self.lease.num_tokens
        return self.tokens[done : self.lease.chunk_end(done, done + CHUNK)]


class Engine:
    def __init__(self, cache: kvtier.Cache, model: Callable[[kvtier.Step], list[int]]):
        self.cache, self.model = cache, model
        self.requests: list[Request] = []
        self.changed = asyncio.Event()  # a request has come or gone

    async def generate(self, prompt: list[int], max_new: int) -> AsyncIterator[int]:
        """Tokens as they come.  Closing the generator cancels the request."""
        with self.cache.lease(prompt, label=f"prompt of {len(prompt)}") as lease:
            await asyncio.wrap_future(lease.ready)
            request = Request(lease, list(prompt), len(prompt) + max_new)
            self.requests.append(request)
            self.changed.set()
            try:
                for _ in range(max_new):
                    token = await request.out.get()
                    if isinstance(token, Exception):
                        raise token
                    yield token
            finally:  # done, or the client has gone: at any moment, also in the middle of a step
                self.requests.remove(request)
                self.changed.set()

    async def run(self) -> None:
        """Step all requests together, prompts in chunks beside those that decode."""
        while True:
            if self.changed.is_set():
                self.changed.clear()
                await self.resume()
            active = [r for r in self.requests if r.lease.state is kvtier.LeaseState.ACTIVE]
            batch = [r for r in active if len(r.tokens) < r.stop]
            if not batch:
                await self.changed.wait()
                continue
            try:
                with self.cache.step([(r.lease, r.chunk()) for r in batch]) as step:
                    sampled = await asyncio.to_thread(self.model, step)
            except Exception as error:  # noqa: BLE001 - the requests are told; nothing was committed
                await self.shed(batch, error)
                continue
            for request, token in zip(batch, sampled, strict=True):
                if request in self.requests and request.lease.num_tokens == len(request.tokens):
                    request.tokens.append(token)
                    request.out.put_nowait(token)

    async def shed(self, batch: list[Request], error: Exception) -> None:
        """If the device is full, the youngest request waits in host memory."""
        if isinstance(error, kvtier.OutOfPages) and len(batch) > 1:
            await asyncio.wrap_future(batch[-1].lease.pause())
        else:
            for request in batch:
                request.stop = 0
                request.out.put_nowait(error)

    async def resume(self) -> None:
        for request in list(self.requests):
            if request.lease.state is kvtier.LeaseState.PAUSED:
                with suppress(kvtier.OutOfPages):  # then after the next request that ends
                    await asyncio.wrap_future(request.lease.resume())


async def serve() -> None:
    system = list(b"You are a helpful assistant. Answer briefly and say when you do not know. ")
    prompts = [system + list(question) for question in (b"Why?", b"How far is the moon?", b"Who?")]
    config = kvtier.CacheConfig(gpu_bytes=32 * LAYOUT.page_bytes(), cpu_bytes="16MiB")
    with kvtier.Cache(LAYOUT, config, model="toy@1", device="cpu") as cache:
        engine = Engine(cache, ToyModel())
        loop = asyncio.create_task(engine.run())

        async def client(prompt: list[int], max_new: int, hang_up_after: int = 1000) -> None:
            got: list[int] = []
            async with aclosing(engine.generate(prompt, max_new)) as tokens:
                async for token in tokens:
                    got.append(token)
                    if len(got) == hang_up_after:
                        break
            assert got == generate_plainly(ToyModel(), prompt, len(got))
            print(f"{bytes(prompt[-12:])!r:>16} -> {len(got)} tokens, as computed without a cache")

        await client(prompts[0], 20)  # fills the cache
        await asyncio.gather(
            *(client(p, 20) for p in prompts), client(prompts[1] + [33], 40, hang_up_after=5)
        )
        hits = cache.stats().tiers[kvtier.Tier.GPU].hit_tokens
        print(f"{hits} of {cache.stats().lookup_tokens} prompt tokens came from the cache")
        loop.cancel()


if __name__ == "__main__":
    asyncio.run(serve())
