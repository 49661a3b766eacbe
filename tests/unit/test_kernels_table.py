"""The table: every case is listed, a reference, or an error; never the closest kernel (AT-4.3)."""

import ast
import dataclasses
import re
import sys
from typing import ClassVar

import pytest
import torch

from kvtier import ConfigError
from kvtier.kernels import OPERATIONS, RECORDS, Case, select, select_all, table

ABSORBED = Case("mla_absorbed", "dense", (576, 512), torch.bfloat16, "cuda")
WHOLE = Case("mla_materialised_whole", "dense", (192, 128), torch.float32, "cpu")


def test_every_operation_has_an_available_row() -> None:
    rows = table()
    for operation in OPERATIONS:
        assert any(r["operation"] == operation and r["available"] == "yes" for r in rows)
    backends = {"torch", "sdpa", "triton", "gluon", "flashmla", "flashinfer"}
    assert {r["backend"] for r in rows} == backends


@pytest.mark.parametrize("operation", [op for op in OPERATIONS if op != "mla_materialised_whole"])
@pytest.mark.parametrize("dims", [(576, 512), (80, 64), (1, 1)])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_any_dimensions_find_the_reference(
    operation: str, dims: tuple[int, int], device: str
) -> None:
    case = Case(operation, "dense", dims, torch.float32, device)
    assert select(case).backend == "torch"
    assert select(case, backend="torch").run is select(case).run


@pytest.mark.parametrize(
    "change",
    [
        {"record": "fp8"},
        {"dtype": torch.float8_e4m3fn},
        {"dtype": torch.int32},
        {"device": "mps"},
        {"operation": "mla_paged"},
    ],
    ids=lambda change: str(next(iter(change.values()))),
)
@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_an_unlisted_case_raises(change: dict[str, object], backend: str) -> None:
    with pytest.raises(ConfigError, match=r"lists|does not list|unknown operation"):
        select(dataclasses.replace(ABSORBED, **change), backend=backend)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("backend", "reason"),
    [
        ("flashmla", r"needs an H100 or H200|neither flash_mla nor a vLLM"),
        ("flashinfer", r"needs a CUDA device of capability 8.0|flashinfer is not installed"),
    ],
)
def test_a_forced_backend_that_is_not_there_says_so(backend: str, reason: str) -> None:
    if any(r["available"] == "yes" for r in table() if r["backend"] == backend):
        pytest.skip(f"{backend} is here")
    with pytest.raises(ConfigError, match=reason):
        select(ABSORBED, backend=backend)


@pytest.mark.parametrize("backend", ["flashmla", "flashinfer", "triton", "sdpa"])
def test_a_forced_backend_never_takes_other_dimensions(backend: str) -> None:
    case = dataclasses.replace(ABSORBED, dims=(576, 256))
    with pytest.raises(ConfigError, match="does not list"):
        select(case, backend=backend)


@pytest.mark.parametrize(
    ("backend", "change", "reason"),
    [
        ("triton", {"device": "cpu"}, "it runs on cuda only, not on cpu"),
        ("flashinfer", {"device": "cpu"}, "it runs on cuda only, not on cpu"),
        ("sdpa", {}, "it has no such operation"),
        (
            "flashinfer",
            {"dims": (80, 64)},
            r"dims=\(80, 64\).* was asked for, it has .*'dense', \[\(576, 512\)\], torch.bfloat16",
        ),
    ],
)
def test_a_forced_backend_says_what_stands_against_it(
    backend: str, change: dict[str, object], reason: str
) -> None:
    case = dataclasses.replace(ABSORBED, **change)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=reason):
        select(case, backend=backend)
    with pytest.raises(ConfigError, match=reason):
        select_all({"a": case, "b": case}, backend=backend)


def listed() -> list[tuple[str, str, str, set[tuple[int, ...]] | None, set[str], set[str], str]]:
    """Rows as ``table`` tells of them, in order."""
    rows = []
    for row in table():
        dims = None
        if row["dims"] != "any":
            dims = {ast.literal_eval(d) for d in re.findall(r"\([^)]*\)", row["dims"])}
        types, devices = set(row["dtype"].split()), set(row["device"].split())
        key = (row["operation"], row["record"], row["backend"])
        rows.append((*key, dims, types, devices, row["available"]))
    return rows


@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_combination(operation: str) -> None:
    """AT-4.3: of all records, dimensions, types and devices: what a row lists or the reference, an
    error else; and never a backend that does not list the case."""
    rows = listed()
    every_dims = {d for row in rows for d in row[3] or ()} | {(1,), (80, 64), (576,), (512, 576)}
    every_type = ("float64", "float32", "bfloat16", "float16", "uint8", "int32", "float8_e4m3fn")
    backends = sorted({row[2] for row in rows})
    seen = 0
    for record in (*RECORDS, "fp8"):
        mine = [row for row in rows if row[:2] == (operation, record)]
        for dims in every_dims:
            for dtype in every_type:
                for device in ("cpu", "cuda", "mps"):
                    case = Case(operation, record, dims, getattr(torch, dtype), device)
                    able = {
                        row[2]: row[6] == "yes"
                        for row in mine
                        if (row[3] is None or dims in row[3])
                        and dtype in row[4]
                        and device in row[5]
                    }
                    here = [name for name, there in able.items() if there]
                    if here:
                        assert select(case).backend in here
                        seen += 1
                    else:
                        with pytest.raises(ConfigError):
                            select(case)
                    for name in backends:
                        if name in here:
                            assert select(case, backend=name).backend == name
                        elif able or dims == (576, 512):  # the others alike, and slowly
                            with pytest.raises(ConfigError):
                                select(case, backend=name)
    assert seen > 0


def test_what_attention_kernels_are_made_for() -> None:
    """AT-4.3: widths of keys and values, by hand; a kernel would read any others as these."""
    halves = {"bfloat16", "float16"}
    made = {
        "mla_absorbed": ((576, 512), halves),
        "mla_materialised": ((192, 128), halves),
        "mla_sparse": ((576, 512), halves),
        "sparse_attend": ((512,), halves | {"float32"}),
    }
    seen = set()
    for operation, _, backend, dims, types, devices, _ in listed():
        if operation in made and backend not in ("torch", "sdpa"):
            widths, known = made[operation]
            assert dims == {widths} and types <= known and devices == {"cuda"}
            seen.add((operation, backend))
    assert seen >= {(operation, backend) for operation in made for backend in ("triton", "gluon")}


def test_unknown_backend() -> None:
    with pytest.raises(ConfigError, match="unknown backend 'fastest'; known: flashinfer, flashmla"):
        select(ABSORBED, backend="fastest")


def test_errors_name_the_whole_case() -> None:
    with pytest.raises(ConfigError) as caught:
        select(dataclasses.replace(ABSORBED, record="fp8"))
    for part in ("mla_absorbed", "fp8", "(576, 512)", "torch.bfloat16", "cuda"):
        assert part in str(caught.value)


class TestSelectAll:
    cases: ClassVar = {"decode": dataclasses.replace(ABSORBED, device="cpu"), "whole": WHOLE}

    def test_auto_takes_the_first_available_row(self) -> None:
        chosen = select_all(self.cases)
        assert {k: v.backend for k, v in chosen.items()} == {"decode": "torch", "whole": "sdpa"}

    def test_a_named_backend_is_used_where_it_is_listed_only(self) -> None:
        chosen = select_all(self.cases, backend="sdpa")
        assert {k: v.backend for k, v in chosen.items()} == {"decode": "torch", "whole": "sdpa"}

    def test_a_case_the_named_backend_and_the_reference_lack_is_left_out(self) -> None:
        assert list(select_all(self.cases, backend="torch")) == ["decode"]

    @pytest.mark.parametrize("backend", ["flashmla", "triton", "nonsense"])
    def test_a_named_backend_that_lists_nothing_raises(self, backend: str) -> None:
        with pytest.raises(ConfigError, match=backend):
            select_all(self.cases, backend=backend)

    def test_a_named_backend_that_is_missing_raises_even_if_others_could(self) -> None:
        if torch.cuda.is_available():
            pytest.skip("it may be here")
        with pytest.raises(ConfigError, match="needs an H100 or H200"):
            select_all({"decode": ABSORBED}, backend="flashmla")


class TestWithoutTriton:
    case: ClassVar = Case("write_record", "v4_fp8", (512,), torch.bfloat16, "cuda")

    @pytest.fixture(autouse=True)
    def _absent(self, monkeypatch: pytest.MonkeyPatch) -> None:
        module = sys.modules["kvtier.kernels.pack"]
        monkeypatch.setattr(module, "has_triton", lambda: False)

    def test_its_rows_say_so_and_are_passed_over(self) -> None:
        assert select(self.case).backend == "torch"
        reasons = {r["available"] for r in table() if r["backend"] == "triton"}
        assert "triton is not installed" in reasons and "yes" not in reasons

    def test_asking_for_it_raises(self) -> None:
        for choose in (
            lambda: select(self.case, backend="triton"),
            lambda: select_all({"write": self.case}, backend="triton"),
        ):
            with pytest.raises(ConfigError, match="triton is not installed"):
                choose()
