"""Hypothesis profiles, the ``gpu`` marker, and the rule that no test may leave a lease open."""

import gc
import os
import sys
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, Phase, settings

_COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow], "print_blob": True}
settings.register_profile(
    "dev", max_examples=50, stateful_step_count=30, derandomize=False, **_COMMON
)
# The same examples every time: a red build can be seen again.
settings.register_profile(
    "ci", max_examples=200, stateful_step_count=50, derandomize=True, database=None, **_COMMON
)
# For scripts/mutate.py: the first failure is enough.
settings.register_profile(
    "mutate",
    max_examples=200,
    stateful_step_count=50,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    **_COMMON,
)
settings.register_profile(
    "long",
    max_examples=20_000,
    stateful_step_count=60,
    derandomize=False,
    phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],
    **_COMMON,
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--long",
        action="store_true",
        help="run the property tests with the 'long' profile and assert what they reached",
    )


def pytest_configure(config: pytest.Config) -> None:
    import torch

    if not torch.cuda.is_available():
        # Triton reads it when it is imported, and any test module may be the first to do so.
        os.environ["TRITON_INTERPRET"] = "1"
    if config.getoption("--long"):
        settings.load_profile("long")
    elif not config.getoption("--hypothesis-profile", None):
        settings.load_profile("ci" if os.environ.get("CI") else "dev")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--timeout", None) == 0:  # a test's own mark would win over it
        for item in items:
            item.add_marker(pytest.mark.timeout(0), append=False)
    gpu = [item for item in items if "gpu" in item.keywords]
    if not gpu:
        return
    import torch

    if not torch.cuda.is_available():
        for item in gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session")
def long_run(request: pytest.FixtureRequest) -> bool:
    """Whether ``--long`` was given: reach counters are asserted then."""
    return bool(request.config.getoption("--long"))


@pytest.fixture(autouse=True)
def no_lease_left_open() -> Iterator[None]:
    """Collect young garbage after each test, so that a leaked lease is reported by the test that
    leaked it (a ResourceWarning, which is an error here) and not by a later one."""
    yield
    if "kvtier.cache" in sys.modules:
        gc.collect(1)


@pytest.fixture(autouse=True)
def share_the_device(request: pytest.FixtureRequest) -> Iterator[None]:
    """Give a GPU's memory back after each test on it: others run beside it, in other processes."""
    yield
    if "gpu" in request.keywords:
        import torch

        if torch.cuda.is_available():
            gc.collect()
            torch.cuda.empty_cache()
