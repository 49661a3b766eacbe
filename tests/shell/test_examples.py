"""The example server runs as users run it, and holds under pressure; its guide quotes it."""

import asyncio
import importlib
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path
from types import ModuleType

import pytest
import torch

import kvtier

ROOT = Path(__file__).parents[2]
SERVER = ROOT / "examples" / "minimal_server.py"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    torch.set_num_threads(1)
    monkeypatch.syspath_prepend(str(SERVER.parent))
    yield importlib.import_module("minimal_server")
    for name in ("minimal_server", "toy_model"):
        del sys.modules[name]


def test_it_runs_as_shown() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", str(SERVER)],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("as computed without a cache") == 5
    assert re.search(r"^[1-9]\d+ of 423 prompt tokens came from the cache$", done.stdout, re.M)


def test_it_stays_short() -> None:
    assert len(SERVER.read_text().splitlines()) <= 120


def test_the_same_loop_serves_a_model_of_hugging_face() -> None:
    """Chunks beside decoding, shared prefixes, and the tokens of plain ``generate``."""
    pytest.importorskip("transformers")
    done = subprocess.run(
        [sys.executable, str(SERVER.with_name("deepseek_server.py"))],
        capture_output=True,
        text=True,
        env={
            "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'adapters/deepseek'}",
            "OMP_NUM_THREADS": "1",
        },
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("16 tokens, those of model.generate") == 4
    assert re.search(r"^[1-9]\d* steps of up to 3 requests$", done.stdout, re.M)
    assert re.search(r"^[1-9]\d* of them fed a chunk of a prompt beside", done.stdout, re.M)
    assert "192 of 447 prompt tokens came from the cache" in done.stdout  # four pages, three times


def test_the_guide_quotes_it() -> None:
    text = (ROOT / "docs" / "embedding.md").read_text()
    quotes = re.findall(r"^```python no-run\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert len(quotes) == 4
    for quote in quotes:
        assert textwrap.indent(quote, "    ") in SERVER.read_text(), quote.splitlines()[0]


def test_a_full_device_costs_time_and_no_tokens(server: ModuleType) -> None:
    """Six requests that fit two at a time: some wait in host memory, one hangs up on the way."""
    layout, model = server.LAYOUT, server.ToyModel()
    sizes = kvtier.CacheConfig(gpu_bytes=9 * layout.page_bytes(), cpu_bytes="4MiB")
    pauses = 0

    class Counting(server.Engine):  # type: ignore[name-defined, misc]
        async def shed(self, batch: list[object], error: Exception) -> None:
            nonlocal pauses
            pauses += 1
            await super().shed(batch, error)

    async def client(engine: object, prompt: list[int], stop: int) -> list[int]:
        got: list[int] = []
        async with aclosing(engine.generate(prompt, 40)) as tokens:  # type: ignore[attr-defined]
            async for token in tokens:
                got.append(token)
                if len(got) == stop:
                    break
        return got

    async def main() -> None:
        with kvtier.Cache(layout, sizes, model="toy@1", device="cpu") as cache:
            engine = Counting(cache, model)
            loop = asyncio.create_task(engine.run())
            prompts = [[seed * 7 + i for i in range(30)] for seed in range(6)]
            stops = [40, 40, 9, 40, 40, 40]
            answers = await asyncio.gather(
                *(client(engine, p, stop) for p, stop in zip(prompts, stops, strict=True))
            )
            loop.cancel()
            assert not engine.requests
            assert not cache.leases()
            cache.check()
        for prompt, answer, stop in zip(prompts, answers, stops, strict=True):
            assert answer == server.generate_plainly(server.ToyModel(), prompt, stop)

    asyncio.run(main())
    assert pauses > 0


def test_errors_reach_the_clients(server: ModuleType) -> None:
    """A request that can never fit, and a model that breaks: both end, and nobody else."""
    layout = server.LAYOUT
    sizes = kvtier.CacheConfig(gpu_bytes=4 * layout.page_bytes(), cpu_bytes="4MiB")

    class Breaking(server.ToyModel):  # type: ignore[name-defined, misc]
        broken = False

        def __call__(self, step: kvtier.Step) -> list[int]:
            if self.broken:
                raise ZeroDivisionError
            tokens: list[int] = super().__call__(step)
            return tokens

    async def collect(engine: object, prompt: list[int], n: int) -> list[int]:
        return [token async for token in engine.generate(prompt, n)]  # type: ignore[attr-defined]

    async def main() -> None:
        with kvtier.Cache(layout, sizes, model="toy@1", device="cpu") as cache:
            model = Breaking()
            engine = server.Engine(cache, model)
            loop = asyncio.create_task(engine.run())
            with pytest.raises(kvtier.OutOfPages):
                await collect(engine, list(range(70)), 3)
            model.broken = True
            with pytest.raises(ZeroDivisionError):
                await collect(engine, list(range(5)), 3)
            model.broken = False
            plain = server.generate_plainly(server.ToyModel(), list(range(5)), 3)
            assert await collect(engine, list(range(5)), 3) == plain
            loop.cancel()

    asyncio.run(main())
