"""What every benchmark shares: the backend under measurement, and a clean Dynamo."""

import platform
from collections.abc import Iterator

import pytest
import torch


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let another backend stand where fuseopt stands, to see the same figures of it."""
    parser.addoption(
        "--backend", default="fuseopt", help="torch.compile's backend to measure"
    )


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> str:
    """Return the name of the backend to measure."""
    return request.config.getoption("--backend")


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    """Start without anything compiled: all of one class's steps share one code object,
    and Dynamo compiles it only so many times before it leaves it to eager, silently.
    """
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def pytest_benchmark_update_machine_info(
    config: pytest.Config, machine_info: dict[str, object]
) -> None:
    """Write down what the figures depend on beside the processor."""
    machine_info["torch"] = torch.__version__
    machine_info["threads"] = torch.get_num_threads()
    machine_info["vector_unit"] = torch.backends.cpu.get_cpu_capability()
    machine_info["compiled_with"] = platform.python_compiler()
    if torch.cuda.is_available():
        machine_info["gpu"] = torch.cuda.get_device_name()
