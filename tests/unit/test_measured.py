"""Choosing a kernel by measured times: the fastest right one of those that are here (E9)."""

import dataclasses
import importlib
import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.attention_parts import PARTS
from benchmarks.prefill_parts import GPU
from kvtier import ConfigError
from kvtier.kernels import Case, Load, choices, measured, select, select_all
from kvtier.kernels.measured import Figures

kernel_table = importlib.import_module("kvtier.kernels.table")  # `table` is its function, too
CASE = Case("mla_absorbed", "dense", (576, 512), torch.bfloat16, "cuda")
SMALL, LARGE = Load(1, 16, 8192), Load(128, 128, 4096)
TIMES = {
    SMALL: {"triton": 15.0, "flashmla": 29.0},
    LARGE: {"triton": 268.0, "flashmla": 253.0},
}


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Pretends that backends are installed, and that these times were measured on the device."""

    def pretend(
        checked: set[str],
        times: Mapping[Load, Mapping[str, float]] = TIMES,
        missing: str = "",
        case: Case = CASE,
    ) -> None:
        rows = tuple(
            dataclasses.replace(row, missing=lambda: missing)
            if row.backend in ("flashmla", "flashinfer")
            else row
            for row in kernel_table.ROWS
        )
        known = {("a device", case): Figures(times, frozenset(checked))}
        monkeypatch.setattr(kernel_table, "ROWS", rows)
        monkeypatch.setattr(measured, "_shipped", lambda: known)
        monkeypatch.setattr(measured, "device_name", lambda: "a device")

    return pretend


def test_the_fastest_of_each_load(here: Any) -> None:
    here({"triton", "flashmla"})
    kernel = select(CASE)
    assert kernel.backend == "triton"  # the first in order, as long as no load is named
    assert [k.backend for k in kernel.variants] == ["triton", "flashmla", "torch"]
    assert kernel.for_load(SMALL).backend == "triton"
    assert kernel.for_load(LARGE).backend == "flashmla"
    assert kernel.for_load(LARGE) == kernel.for_load(Load(100, 120, 5000))
    assert kernel.for_load(Load(1, 1, 1)).backend == "triton"
    assert kernel.for_load(Load(256, 128, 200000)).backend == "flashmla"


def test_times_without_a_check_count_for_nothing(here: Any) -> None:
    here({"triton"})
    kernel = select(CASE)
    assert [k.backend for k in kernel.variants] == ["triton", "torch"]
    assert kernel.for_load(LARGE).backend == "triton"
    assert select(CASE, backend="flashmla").backend == "flashmla"


def test_what_was_found_wrong_is_not_taken(here: Any) -> None:
    times = {SMALL: {"triton": 1.0, "torch": 9.0}, LARGE: {"triton": 2.0, "torch": 9.0}}
    here({"torch"}, times=times)
    kernel = select(CASE)
    assert kernel.backend == "torch" and kernel.for_load(SMALL).backend == "torch"
    assert select(CASE, backend="triton").backend == "triton"
    here({"torch", "triton"}, times={SMALL: times[SMALL]})
    assert select(CASE).for_load(LARGE).backend == "triton"
    both = frozenset({"triton", "torch"})
    assert measured.fastest(Figures(times, both), SMALL, both) == "triton"
    assert measured.fastest(Figures(times, frozenset({"torch"})), SMALL, both) == "torch"


def test_what_is_not_here_is_not_picked(here: Any) -> None:
    here({"triton", "flashmla"}, missing="not installed")
    kernel = select(CASE)
    assert "flashmla" not in [k.backend for k in kernel.variants]
    assert kernel.for_load(LARGE).backend == "triton"


def test_without_figures_the_order_decides(here: Any) -> None:
    other = dataclasses.replace(CASE, dtype=torch.float16)
    here({"triton", "flashmla"})
    kernel = select(other)
    assert (kernel.backend, kernel.variants) == ("triton", (kernel,))
    assert kernel.for_load(LARGE) is kernel
    here({"triton", "flashmla"}, times={})
    assert select(CASE).for_load(LARGE).backend == "triton"


def test_a_named_backend_has_no_rivals(here: Any) -> None:
    here({"triton", "flashmla"})
    for backend in ("triton", "flashmla", "torch"):
        kernel = select(CASE, backend=backend)
        assert kernel.variants == (kernel,) and kernel.for_load(LARGE) is kernel
    assert select_all({"a": CASE}, backend="torch")["a"].for_load(LARGE).backend == "torch"


def test_a_named_backend_leaves_the_rest_to_the_others(here: Any) -> None:
    here({"triton"})
    cases = {
        "attend": CASE,
        "write": Case("write_rows", "dense", (576,), torch.bfloat16, "cuda"),
        "whole": Case("mla_materialised_whole", "dense", (192, 128), torch.bfloat16, "cuda"),
    }
    chosen = select_all(cases, backend="flashmla")
    found = {key: kernel.backend for key, kernel in chosen.items()}
    assert found == {"attend": "flashmla", "write": "triton", "whole": "sdpa"}
    assert not chosen["attend"].rivals
    found = {key: kernel.backend for key, kernel in select_all(cases, backend="torch").items()}
    assert found == {"attend": "torch", "write": "torch"}


def test_pages_that_the_fastest_does_not_take(here: Any) -> None:
    here({"triton", "flashmla"})
    kernel = select(CASE)
    pages = {n: dataclasses.replace(LARGE, page_tokens=n) for n in (16, 64, 96, 128)}
    found = {n: kernel.for_load(load).backend for n, load in pages.items()}
    assert found == {16: "triton", 64: "flashmla", 96: "triton", 128: "flashmla"}


def test_a_graph_holds_nothing_that_plans_on_the_host(here: Any) -> None:
    here({"triton", "flashinfer"}, times={LARGE: {"triton": 2.0, "flashinfer": 1.0}})
    kernel = select(CASE)
    assert kernel.for_load(LARGE).backend == "flashinfer"
    captured = dataclasses.replace(LARGE, captured=True)
    assert kernel.for_load(captured).backend == "triton"
    # Nor what waits for the device, however fast.
    here({"triton", "torch"}, times={LARGE: {"triton": 2.0, "torch": 1.0}})
    kernel = select(CASE)
    assert kernel.for_load(LARGE).backend == "torch"
    assert kernel.for_load(captured).backend == "triton"


def test_nearest_means_doubled_least_often() -> None:
    known = Figures(
        {
            Load(1, 64, 1024): {"a": 1.0},
            Load(16, 64, 1024): {"a": 2.0, "b": 9.0},
            Load(16, 64, 65536, queries=2): {"a": 3.0},
        },
        frozenset({"a", "b"}),
    )

    def us(load: Load, *names: str) -> Mapping[str, float]:
        return known.nearest(load, names or ("a",))

    assert us(Load(3, 64, 1024)) == {"a": 1.0}
    assert us(Load(5, 64, 1024)) == {"a": 2.0}
    assert us(Load(16, 64, 20000, queries=2)) == {"a": 3.0}
    assert us(Load(1, 64, 1024), "b") == {"b": 9.0}  # the nearest at which it was measured
    assert us(Load(1, 64, 1024), "c") == {}
    assert us(Load(0, 64, 0)) == {"a": 1.0}


def test_the_shipped_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured, "device_name", lambda: "NVIDIA H200")
    known = measured.figures(CASE)
    assert known is not None and "triton" in known.checked
    assert known.times[SMALL]["triton"] < known.times[SMALL]["flashmla"]
    assert measured.figures(dataclasses.replace(CASE, device="cpu")) is None
    for other in ("NVIDIA A100", None):
        monkeypatch.setattr(measured, "device_name", lambda other=other: other)
        assert measured.figures(CASE) is None
    backends = {row.backend for row in kernel_table.ROWS}
    for (_, case), figures in measured._shipped().items():
        assert any(row.lists(case) for row in kernel_table.ROWS)
        assert figures.times and figures.checked <= backends
        for times in figures.times.values():
            assert set(times) <= backends and all(us > 0 for us in times.values())


def test_every_size_that_was_measured_gets_the_fastest_right_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Read from the file as it ships, by itself; every backend pretends to be here."""
    path = Path(str(measured.__file__)).with_name("measured_h200.json")
    document = json.loads(path.read_text())
    there = tuple(dataclasses.replace(row, missing=str) for row in kernel_table.ROWS)
    monkeypatch.setattr(kernel_table, "ROWS", there)
    monkeypatch.setattr(measured, "device_name", lambda: document["device"])
    seen = set()
    for told in document["cases"]:
        dtype = getattr(torch, told["dtype"])
        case = Case(told["operation"], told["record"], tuple(told["dims"]), dtype, "cuda")
        kernel = select(case)
        for row in told["rows"]:
            batch, queries, heads, keys = row[:4]
            times = dict(zip(told["columns"][4:], row[4:], strict=True))
            right = {name: us for name, us in times.items() if us and name in told["checked"]}
            load = Load(batch, heads, keys, queries=queries, captured=True)
            if right:
                assert right[kernel.for_load(load).backend] == min(right.values()), (case, load)
                seen.add((case.operation, load))
    for part in (PARTS["dense"], PARTS["v4"]):
        if part.operation in {told["operation"] for told in document["cases"]}:
            for shape in part.targets:
                size = (shape.batch, shape.heads, shape.keys)
                load = Load(*size, queries=shape.queries, captured=True)
                if part.operation == "sparse_attend":
                    keys = shape.keys + shape.extra
                    load = Load(shape.tokens, shape.heads, keys, captured=True)
                assert (part.operation, load) in seen


def test_prompts_are_attended_by_gluon_on_an_h200(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many: no size was measured at which all backends have the same kernel, as they have
    for up to 64 new tokens, so that chance would pick for sizes near it."""
    there = tuple(dataclasses.replace(row, missing=str) for row in kernel_table.ROWS)
    monkeypatch.setattr(kernel_table, "ROWS", there)
    monkeypatch.setattr(measured, "device_name", lambda: "NVIDIA H200")
    case = Case("mla_materialised", "dense", (192, 128), torch.bfloat16, "cuda")
    kernel = select(case)
    assert kernel.figures is not None
    assert all(load.queries > 64 for load in kernel.figures.times)
    assert all(queries > 64 for _, queries, _ in GPU.loads)
    for batch, queries, keys in itertools.product((1, 8, 32, 256), (65, 129, 1024), (512, 16384)):
        assert kernel.for_load(Load(batch, 128, keys, queries)).backend == "gluon"


@pytest.mark.parametrize(
    "text", [None, "", "{}", "[]", '{"device": "a", "cases": [{}]}', "\x00"], ids=repr
)
def test_a_damaged_file(text: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Named, and only where it matters: what runs on a CPU asks for no figures."""
    name = tmp_path / "measured.json"
    if text is not None:
        name.write_text(text)
    monkeypatch.setattr(measured, "FILES", (str(name),))
    monkeypatch.setattr(measured, "device_name", lambda: "NVIDIA H200")
    measured._shipped.cache_clear()
    try:
        with pytest.raises(ConfigError, match=r"measured\.json is missing or damaged"):
            measured.figures(CASE)
        monkeypatch.setattr(measured, "device_name", lambda: None)
        assert measured.figures(CASE) is None
    finally:
        measured._shipped.cache_clear()


def test_what_is_told_of_a_choice(here: Any) -> None:
    def told(operation: str, record: str) -> dict[str, Any]:
        return next(
            each
            for each in choices("cuda")
            if (each["operation"], each["record"]) == (operation, record)
        )

    here({"triton", "flashmla"})
    attention = told("mla_absorbed", "dense")
    assert attention["chosen"] == "triton"
    assert attention["why"] == "fastest of those measured: triton at 1, flashmla at 1 of 2 sizes"
    assert attention["available"] == ["triton", "flashmla", "flashinfer", "torch"]
    assert told("merge", "dense")["why"] == "the only one"
    here({"triton"}, missing="is elsewhere")
    assert told("mla_absorbed", "dense")["missing"] == {
        "flashmla": "is elsewhere",
        "flashinfer": "is elsewhere",
    }
    assert told("write_rows", "dense")["why"] == "first of triton, torch"
    assert {each["chosen"] for each in choices("cpu")} == {"torch", "sdpa"}
