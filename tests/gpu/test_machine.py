"""The facts of this machine (versions, memory, ceilings), and a check that it has the kernels of a model."""

from __future__ import annotations

import importlib.util
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from benchmarks.gpu.ceilings import measure_ceilings
from rollout.kernels.gpu.register import load_gpu_kernels
from tests.gpu.needs import need_cuda

PACKAGES = ("torch", "triton", "transformers", "flashinfer-python", "apache-tvm-ffi", "sgl-deep-ep", "numpy")


def test_the_versions_of_packages_are_noted(device: torch.device, facts: dict[str, Any]) -> None:
    for package in PACKAGES:
        try:
            facts[package] = version(package)
        except PackageNotFoundError:
            facts[package] = "absent"
    facts["flashinfer on the path"] = importlib.util.find_spec("flashinfer") is not None
    facts["cuda"] = str(torch.version.cuda)


def test_the_device_can_run_the_kernels(device: torch.device, facts: dict[str, Any]) -> None:
    need_cuda(device, "properties of a CUDA device")
    properties = torch.cuda.get_device_properties(0)
    free, total = torch.cuda.mem_get_info()
    facts |= {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "free GiB": free / 2**30,
        "total GiB": total / 2**30,
        "devices": torch.cuda.device_count(),
    }
    assert properties.major >= 8, "the kernels are written for compute capability 8.0 and above"


def test_the_ceilings_of_the_device_are_positive(device: torch.device, facts: dict[str, Any]) -> None:
    found = measure_ceilings(device)
    facts |= {
        "copy GB/s, read and written": found.copy_bytes_per_s / 1e9,
        "read GB/s": found.read_bytes_per_s / 1e9,
        "bf16 TFLOP/s": found.bf16_flops_per_s / 1e12,
    }
    assert found.copy_bytes_per_s > 0 and found.bf16_flops_per_s > 0


def test_our_kernels_can_be_used(device: torch.device) -> None:
    need_cuda(device, "kernels in torch's registry for CUDA")
    status = load_gpu_kernels()
    assert status.available, status.reason
