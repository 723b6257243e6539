"""Sleep and wake on CUDA: the real allocator over a driver's stand-in, from allocation to resume."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.core.errors import StartupError
from rollout.kernels.build import find_compiler
from rollout.memory.device_pages import SOURCES, DevicePages, open_library
from rollout.memory.host_pages import HostPages, MemoryTakenError
from rollout.memory.memory_saver import KeptCopyError, MemorySaver
from tests.tiers import examples

MIB = 1 << 20
STAND_IN = Path(__file__).parents[2] / "cuda_driver_stand_in.cpp"
_DRIVER_HEADER = Path(torch.__file__).parents[2] / "triton/backends/nvidia/include/cuda.h"


@dataclass
class Machine:
    """The allocator, and the driver's stand-in below it.  `made`: areas, to be freed."""

    library: ctypes.CDLL
    driver: ctypes.CDLL
    made: list[int] = field(default_factory=list)

    def pages(self) -> DevicePages:
        return DevicePages(self.library, wait=lambda: None, trim=lambda: None)

    def segment(self, nbytes: int) -> torch.Tensor:
        """Allocate a segment as torch's allocator does, as uint8."""
        address = self.library.lockstep_pages_alloc(nbytes, 0, None)
        if not address:
            raise MemoryError(self.library.lockstep_pages_error().decode())
        self.made.append(address)
        return torch.frombuffer((ctypes.c_ubyte * nbytes).from_address(address), dtype=torch.uint8)

    def free_all(self) -> None:
        for address in self.made:
            self.library.lockstep_pages_free(address, 0, 0, None)
        self.made.clear()

    @property
    def used(self) -> int:
        return int(self.driver.stand_in_used())


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> tuple[ctypes.CDLL, ctypes.CDLL]:
    built = tmp_path_factory.mktemp("driver") / "libcuda_stand_in.so"
    command = [*find_compiler(), "-std=c++20", "-O1", "-shared", "-fPIC", str(STAND_IN), "-o", str(built)]
    subprocess.run(command, check=True, timeout=120)
    return open_library(str(built)), load_driver(str(built))


def load_driver(path: str) -> ctypes.CDLL:
    driver = ctypes.CDLL(path)
    driver.stand_in_used.restype, driver.stand_in_misuses.restype = ctypes.c_size_t, ctypes.c_long
    driver.stand_in_capacity.argtypes = [ctypes.c_size_t]
    return driver


@pytest.fixture
def machine(libraries: tuple[ctypes.CDLL, ctypes.CDLL]) -> Iterator[Machine]:
    library, driver = libraries
    driver.stand_in_capacity(1 << 40)
    made = Machine(library, driver)
    misuses = driver.stand_in_misuses()
    yield made
    made.free_all()
    assert driver.stand_in_misuses() == misuses
    assert made.used == 0


def faults(tensor: torch.Tensor) -> bool:
    """Ask the system whether reading the tensor's first byte would end the process."""
    reader, writer = os.pipe()
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.write.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t]
        if libc.write(writer, tensor.data_ptr(), 1) == 1:
            return False
        assert ctypes.get_errno() == errno.EFAULT
        return True
    finally:
        os.close(reader)
        os.close(writer)


def test_memory_goes_back_and_comes_again_at_the_same_address(machine: Machine) -> None:
    weights, kv = machine.segment(5 * MIB), machine.segment(3 * MIB)
    assert machine.used == 10 * MIB, "whole pages of 2 MiB"
    weights.copy_(torch.arange(5 * MIB) % 251)
    kv.fill_(9)
    content, address = weights.clone(), weights.data_ptr()
    saver = MemorySaver({"weights": [weights], "kv_cache": [kv]}, machine.pages())
    saver.keep_copy("weights")
    saver.discard("weights")
    assert machine.used == 4 * MIB and faults(weights) and not faults(kv)
    assert not saver.is_provided("weights") and saver.is_provided("kv_cache")
    saver.provide(["weights"])
    assert weights.data_ptr() == address and not weights.any(), "zeros until the copy is back"
    saver.restore("weights")
    assert torch.equal(weights, content) and bool((kv == 9).all())
    assert machine.used == 10 * MIB


def test_without_a_copy_memory_comes_back_as_zeros(machine: Machine) -> None:
    kv = machine.segment(4 * MIB).fill_(7)
    saver = MemorySaver({"kv_cache": [kv]}, machine.pages())
    saver.discard("kv_cache")
    saver.discard("kv_cache")  # a second release changes nothing
    assert machine.used == 0
    saver.provide(["kv_cache"])
    assert not kv.any()
    kv.fill_(1)
    saver.provide(["kv_cache"])  # a second allocation changes nothing
    assert bool((kv == 1).all())


def test_a_device_that_others_hold_is_an_error_and_changes_nothing(machine: Machine) -> None:
    weights, kv = machine.segment(2 * MIB).fill_(3), machine.segment(4 * MIB).fill_(4)
    saver = MemorySaver({"weights": [weights], "kv_cache": [kv]}, machine.pages())
    saver.keep_copy("weights")
    saver.discard("weights")
    saver.discard("kv_cache")
    machine.driver.stand_in_capacity(4 * MIB)
    with pytest.raises(MemoryTakenError, match=r"4 MiB of device memory.*CUDA_ERROR_OUT_OF_MEMORY"):
        saver.provide(["weights", "kv_cache"])
    assert machine.used == 0 and faults(weights) and faults(kv)
    machine.driver.stand_in_capacity(1 << 40)
    saver.provide(["weights", "kv_cache"])
    saver.restore("weights")
    assert bool((weights == 3).all()) and not kv.any()


def test_torch_hears_of_a_full_device(machine: Machine) -> None:
    machine.driver.stand_in_capacity(2 * MIB)
    with pytest.raises(MemoryError, match="OUT_OF_MEMORY"):
        machine.segment(3 * MIB)
    assert machine.used == 0


def test_a_kept_copy_goes_through_a_small_buffer(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout.memory.device_pages._PART_BYTES", 1000)
    weights = machine.segment(4321).random_()
    content = weights.clone()
    saver = MemorySaver({"weights": [weights]}, machine.pages())
    saver.keep_copy("weights")
    weights.zero_()
    saver.restore("weights")
    assert torch.equal(weights, content)


def test_a_damaged_copy_is_noticed(machine: Machine) -> None:
    weights = machine.segment(MIB).fill_(1)
    saver = MemorySaver({"weights": [weights]}, machine.pages())
    saver.keep_copy("weights")
    copy = saver._copies["weights"]._file
    assert copy is not None
    os.pwrite(copy._file.fileno(), b"\x55", 77)
    with pytest.raises(KeptCopyError):
        saver.restore("weights")


def test_tensors_of_elsewhere_are_refused(machine: Machine) -> None:
    with pytest.raises(StartupError, match="outside of the memory"):
        MemorySaver({"weights": [torch.ones(3)]}, machine.pages())


def test_without_a_driver_the_reason_is_told(libraries: tuple[ctypes.CDLL, ctypes.CDLL], tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"enable-memory-saver on CUDA.*no_such"):
        open_library(str(tmp_path / "no_such.so"))


def views(machine: Machine, sizes: list[tuple[int, bool]]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return tensors that share one segment as torch's allocator cuts it: the tag's own, and others between them."""
    segment = machine.segment(sum(size for size, _ in sizes) or 1)
    ours, others, at = [], [], 0
    for size, is_ours in sizes:
        address = segment.data_ptr() + at
        storage = torch.frombuffer((ctypes.c_ubyte * size).from_address(address), dtype=torch.uint8)
        (ours if is_ours else others).append(storage)
        at += size
    return ours, others


def survives(machine: Machine, sizes: list[tuple[int, bool]], actions: list[str], pages: DevicePages) -> bool:
    """Return whether everything that a release and a resume must keep is kept, through any order of them."""
    ours, others = views(machine, sizes)
    for number, tensor in enumerate([*ours, *others]):
        tensor.fill_(number + 1)
    kept = [tensor.clone() for tensor in ours]
    beside = [tensor.clone() for tensor in others]
    saver = MemorySaver({"weights": ours}, pages)
    is_there, full = True, machine.used
    for action in actions:
        if action == "release" and is_there:
            saver.keep_copy("weights")
            saver.discard("weights")
            is_there = not ours
            if machine.used != (full if is_there else 0):
                return False
        elif action == "fail" and not is_there:
            machine.driver.stand_in_capacity(0)
            with pytest.raises(MemoryTakenError):
                saver.provide(["weights"])
            machine.driver.stand_in_capacity(1 << 40)
        elif action == "resume" and not is_there:
            saver.provide(["weights"])
            saver.restore("weights")
            is_there = True
        if is_there and not all(torch.equal(*pair) for pair in zip([*ours, *others], [*kept, *beside], strict=True)):
            return False
    return True


SIZES = st.lists(st.tuples(st.integers(1, 5000), st.booleans()), min_size=1, max_size=6)
ACTIONS = st.lists(st.sampled_from(["release", "fail", "resume"]), min_size=1, max_size=8)


@settings(max_examples=examples(100), deadline=None)
@given(sizes=SIZES, actions=ACTIONS)
def test_what_lies_beside_the_weights_stays(
    libraries: tuple[ctypes.CDLL, ctypes.CDLL], sizes: list[tuple[int, bool]], actions: list[str]
) -> None:
    machine = Machine(*libraries)
    machine.driver.stand_in_capacity(1 << 40)
    assert survives(machine, sizes, actions, machine.pages())
    machine.free_all()
    assert machine.used == 0 and machine.driver.stand_in_misuses() == 0


# --- wrong variants ---------------------------------------------------------------------------------------------------


class _ForgetsGaps(DevicePages):
    """Pages that take the memory next to the weights for unused."""

    def _copied(self, gap: range) -> bytes:
        return bytes(len(gap))


class _KeepsMemory(DevicePages):
    """Pages that give no memory back."""

    def discard(self, spans) -> None:  # type: ignore[no-untyped-def]
        pass


@pytest.mark.mutant
@pytest.mark.parametrize("wrong", [_ForgetsGaps, _KeepsMemory])
def test_wrong_pages_are_noticed(machine: Machine, wrong: type[DevicePages]) -> None:
    sizes = [(100, True), (50, False), (700, True)]
    pages = wrong(machine.library, wait=lambda: None, trim=lambda: None)
    assert not survives(machine, sizes, ["release", "resume"], pages)


@pytest.mark.mutant
@pytest.mark.parametrize(
    ("right", "wrong", "seen_in"),
    [
        ("  if (!found->second.has_memory) return 0;\n  if (failed(calls.unmap", "  if (failed(calls.unmap", "misuse"),
        ("(static_cast<size_t>(size) + step - 1) / step * step", "static_cast<size_t>(size)", "alloc"),
        ("  const AccessDesc access", "  return true;\n  const AccessDesc access", "fault"),
        ("  calls.release(handle);\n", "", "leak"),
    ],
    ids=["unmapped_twice", "no_granularity", "no_access", "handle_kept"],
)
def test_a_wrong_allocator_is_noticed(
    libraries: tuple[ctypes.CDLL, ctypes.CDLL],
    right: str,
    wrong: str,
    seen_in: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = (SOURCES / "device_pages.cpp").read_text()
    assert text.count(right) == 1
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "device_pages.cpp").write_text(text.replace(right, wrong))
    monkeypatch.setenv("LOCKSTEP_KERNEL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("rollout.memory.device_pages.SOURCES", sources)
    driver = load_driver(shutil.copy(libraries[1]._name, tmp_path))  # its own: leaks there hurt no other test
    machine = Machine(open_library(driver._name), driver)
    misuses, used = machine.driver.stand_in_misuses(), machine.used
    address = machine.library.lockstep_pages_alloc(MIB, 0, None)
    if seen_in == "alloc":
        assert address is None
        return
    tensor = torch.frombuffer((ctypes.c_ubyte * 16).from_address(address), dtype=torch.uint8)
    if seen_in == "fault":
        assert faults(tensor)
    for _ in range(2):
        machine.library.lockstep_pages_discard(address)
    if seen_in == "misuse":
        assert machine.driver.stand_in_misuses() > misuses
    if seen_in == "leak":
        assert machine.used > used


_LAYOUTS = """
#include "cuda.h"
#include "device_pages.cpp"
using lockstep::driver::AllocationProp;
static_assert(sizeof(CUmemAllocationProp) == sizeof(AllocationProp));
static_assert(offsetof(CUmemAllocationProp, location) == offsetof(AllocationProp, location));
static_assert(offsetof(CUmemAllocationProp, allocFlags) == offsetof(AllocationProp, flags));
static_assert(sizeof(CUmemAccessDesc) == sizeof(lockstep::driver::AccessDesc));
static_assert(offsetof(CUmemAccessDesc, flags) == offsetof(lockstep::driver::AccessDesc, flags));
static_assert(CU_MEM_LOCATION_TYPE_DEVICE == lockstep::driver::kLocationDevice);
static_assert(CU_MEM_ALLOCATION_TYPE_PINNED == lockstep::driver::kPinned);
static_assert(CU_MEM_ACCESS_FLAGS_PROT_READWRITE == lockstep::driver::kReadWrite);
static_assert(CU_MEM_ALLOC_GRANULARITY_MINIMUM == lockstep::driver::kMinimumGranularity);
static_assert(sizeof(CUdeviceptr) == 8 && sizeof(CUmemGenericAllocationHandle) == 8);
"""


@pytest.mark.full
def test_what_is_declared_of_the_driver_is_its_headers(tmp_path: Path) -> None:
    if not _DRIVER_HEADER.exists():
        pytest.skip("no cuda.h here: pip install triton")
    (tmp_path / "layouts.cpp").write_text(_LAYOUTS)
    includes = [f"-I{_DRIVER_HEADER.parent}", f"-I{SOURCES}"]
    command = [*find_compiler(), "-std=c++20", "-fsyntax-only", *includes, str(tmp_path / "layouts.cpp")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_cpu_keeps_its_way() -> None:
    tensor = torch.ones(MIB)
    saver = MemorySaver({"weights": [tensor]})
    saver.discard("weights")
    assert saver.is_provided("weights") and not tensor.any()
    assert HostPages().is_provided([])


def test_each_tag_has_a_pool_of_its_own(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's part is noted: an allocator by the names of two functions, a pool that must not outlive it."""
    made: list[tuple[str, str]] = []
    entered: list[object] = []

    class Allocator:
        def __init__(self, path: str, alloc: str, free: str) -> None:
            assert Path(path).exists() and getattr(machine.library, alloc) and getattr(machine.library, free)
            made.append((alloc, free))

        def allocator(self) -> Allocator:
            return self

    monkeypatch.setattr(torch.cuda.memory, "CUDAPluggableAllocator", Allocator)
    monkeypatch.setattr(torch.cuda, "MemPool", lambda allocator: [allocator])
    monkeypatch.setattr(torch.cuda, "use_mem_pool", lambda pool: entered.append(pool))
    pages = machine.pages()
    for tag in ("weights", "kv_cache", "weights"):
        pages.pool(tag)
    assert made == [("lockstep_pages_alloc", "lockstep_pages_free")] * 2
    assert entered[0] is entered[2] is not entered[1]
