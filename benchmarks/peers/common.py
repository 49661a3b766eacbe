"""What the peers' scripts share: importing a CUDA package on a machine without one, and output."""

import argparse
import json
import logging
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.harness import Param, measure, summarise
from benchmarks.workload import Workload

__all__ = ["emit", "options", "quiet_imports"]


def quiet_imports() -> None:
    """Let packages built for CUDA import beside a CPU torch, without their banners."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
    os.environ.setdefault("SGLANG_RUST_BUILD_MODE", "never")
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    import torch

    torch.set_num_threads(1)
    register = torch.library.register_fake

    def tolerant(op: Any, *args: Any, **kwargs: Any) -> Any:
        # torchvision's operators need its CUDA library; nothing here calls them.
        if isinstance(op, str) and op.startswith("torchvision::"):
            return lambda function: function
        return register(op, *args, **kwargs)

    torch.library.register_fake = tolerant


def options(description: str | None) -> tuple[Workload, bool]:
    """The workload asked for on the command line, and whether it is the quick one."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    return Workload.of_size(quick=quick), quick


def emit(name: str, calls: Sequence[Callable[[], object]], *, page: int, peer: str) -> None:
    """Time the calls and print the result."""
    params: dict[str, Param] = {"page": page, "peer": peer}
    result = summarise(name, measure(calls), unit="us", params=params)
    print(json.dumps(asdict(result)), flush=True)
