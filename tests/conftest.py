"""What every test runs under: the CPU, no network, and eight devices for those that ask."""

import os
import sys
from collections.abc import Iterator

import pytest

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def pytest_configure(config: pytest.Config) -> None:
    # Most programs run once or twice: compiling them well takes a third of the suite's time.
    flags = [os.environ.get("XLA_FLAGS", ""), "--xla_backend_optimization_level=0"]
    # The number of host devices is fixed when jax starts, hence a process of their own.
    if config.option.markexpr.startswith("devices8"):
        flags.append("--xla_force_host_platform_device_count=8")
    os.environ["XLA_FLAGS"] = " ".join(flags).strip()


@pytest.fixture(autouse=True, scope="module")
def forget_programs() -> Iterator[None]:
    """Drop compiled programs after each file: a process may map only so much memory on Linux.

    Thousands of XLA's programs reach `vm.max_map_count` (65530), and the next one aborts.
    """
    yield
    if "jax" in sys.modules:
        sys.modules["jax"].clear_caches()
