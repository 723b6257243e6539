// A libcuda without a device: the driver's virtual memory calls on host memory, with the traps of their documentation.
//
//   * sizes and addresses must be multiples of the granularity; memory is not zero when it is new
//   * mapping over a mapping, unmapping what is not one whole mapping, giving addresses back under a mapping, using a
//     handle that was released: refused, and counted in `stand_in_misuses`
//   * access before cuMemSetAccess and after cuMemUnmap faults
//   * memory is held by its handle and its mapping, and there is only so much (`stand_in_capacity`)
#include <sys/mman.h>

#include <cstring>
#include <map>

namespace {

using Address = unsigned long long;
constexpr size_t kGranularity = 2 << 20;
constexpr int kOk = 0, kInvalidValue = 1, kOutOfMemory = 2, kNotInitialized = 3;

struct Location {
  int type, id;
};
struct Prop {
  int type, requested;
  Location location;
  void* metadata;
  unsigned char flags[8];
};
struct Access {
  Location location;
  int flags;
};
struct Memory {
  size_t size;
  bool has_handle, is_mapped;
};
struct Mapping {
  size_t size;
  Address handle;
  bool has_access;
};

bool is_ready = false;
size_t capacity = 1ull << 40, used = 0;
long misuses = 0;
Address next_handle = 1;
std::map<Address, size_t> reserved;
std::map<Address, Memory> memories;
std::map<Address, Mapping> mappings;

int misuse() {
  ++misuses;
  return kInvalidValue;
}
bool is_whole(size_t size) { return size != 0 && size % kGranularity == 0; }
void settle(Address handle) {
  auto memory = memories.find(handle);
  if (!memory->second.has_handle && !memory->second.is_mapped) {
    used -= memory->second.size;
    memories.erase(memory);
  }
}
bool is_reachable(Address address, size_t size) {
  auto after = mappings.upper_bound(address);
  if (after == mappings.begin()) return false;
  auto found = std::prev(after);
  return found->second.has_access && address + size <= found->first + found->second.size;
}

}  // namespace

extern "C" {

long stand_in_misuses() { return misuses; }
size_t stand_in_used() { return used; }
void stand_in_capacity(size_t bytes) { capacity = bytes; }

int cuInit(unsigned) {
  is_ready = true;
  return kOk;
}

int cuGetErrorName(int result, const char** name) {
  *name = result == kOutOfMemory      ? "CUDA_ERROR_OUT_OF_MEMORY"
          : result == kInvalidValue   ? "CUDA_ERROR_INVALID_VALUE"
          : result == kNotInitialized ? "CUDA_ERROR_NOT_INITIALIZED"
                                      : nullptr;
  return *name == nullptr ? kInvalidValue : kOk;
}

int cuMemGetAllocationGranularity(size_t* step, const Prop* prop, int option) {
  if (!is_ready) return kNotInitialized;
  if (prop->type != 1 || prop->location.type != 1 || option != 0) return misuse();
  *step = kGranularity;
  return kOk;
}

int cuMemAddressReserve(Address* address, size_t size, size_t alignment, Address, unsigned long long flags) {
  if (!is_ready) return kNotInitialized;
  if (!is_whole(size) || flags != 0 || alignment % kGranularity != 0) return misuse();
  auto* raw = static_cast<char*>(mmap(nullptr, size + kGranularity, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  if (raw == MAP_FAILED) return kOutOfMemory;
  *address = (reinterpret_cast<Address>(raw) + kGranularity - 1) / kGranularity * kGranularity;
  reserved[*address] = size;
  return kOk;
}

int cuMemAddressFree(Address address, size_t size) {
  auto found = reserved.find(address);
  auto inside = mappings.lower_bound(address);
  if (found == reserved.end() || found->second != size) return misuse();
  if (inside != mappings.end() && inside->first < address + size) return misuse();
  munmap(reinterpret_cast<void*>(address), size);
  reserved.erase(found);
  return kOk;
}

int cuMemCreate(Address* handle, size_t size, const Prop* prop, unsigned long long flags) {
  if (!is_ready) return kNotInitialized;
  if (!is_whole(size) || prop->type != 1 || prop->location.type != 1 || flags != 0) return misuse();
  if (used + size > capacity) return kOutOfMemory;
  used += size;
  *handle = next_handle++;
  memories[*handle] = {size, true, false};
  return kOk;
}

int cuMemRelease(Address handle) {
  auto found = memories.find(handle);
  if (found == memories.end() || !found->second.has_handle) return misuse();
  found->second.has_handle = false;
  settle(handle);
  return kOk;
}

int cuMemMap(Address address, size_t size, size_t offset, Address handle, unsigned long long flags) {
  auto memory = memories.find(handle);
  auto range = reserved.upper_bound(address);
  if (memory == memories.end() || !memory->second.has_handle || memory->second.size != size || offset != 0 || flags != 0) return misuse();
  if (range == reserved.begin() || address % kGranularity != 0) return misuse();
  --range;
  if (address + size > range->first + range->second) return misuse();
  auto next = mappings.lower_bound(address);
  if (next != mappings.end() && next->first < address + size) return misuse();
  if (next != mappings.begin() && std::prev(next)->first + std::prev(next)->second.size > address) return misuse();
  auto* at = reinterpret_cast<void*>(address);
  if (mmap(at, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == MAP_FAILED) return kOutOfMemory;
  memset(at, 0xA5, size);
  mprotect(at, size, PROT_NONE);
  memory->second.is_mapped = true;
  mappings[address] = {size, handle, false};
  return kOk;
}

int cuMemUnmap(Address address, size_t size) {
  auto found = mappings.find(address);
  if (found == mappings.end() || found->second.size != size) return misuse();
  const Address handle = found->second.handle;
  mmap(reinterpret_cast<void*>(address), size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
  mappings.erase(found);
  memories[handle].is_mapped = false;
  settle(handle);
  return kOk;
}

int cuMemSetAccess(Address address, size_t size, const Access* access, size_t count) {
  auto found = mappings.find(address);
  if (found == mappings.end() || found->second.size != size || count != 1 || access->flags != 3) return misuse();
  mprotect(reinterpret_cast<void*>(address), size, PROT_READ | PROT_WRITE);
  found->second.has_access = true;
  return kOk;
}

int cuMemsetD8_v2(Address address, unsigned char value, size_t size) {
  if (!is_reachable(address, size)) return misuse();
  memset(reinterpret_cast<void*>(address), value, size);
  return kOk;
}

int cuMemcpyDtoH_v2(void* host, Address device, size_t size) {
  if (!is_reachable(device, size)) return misuse();
  memcpy(host, reinterpret_cast<void*>(device), size);
  return kOk;
}

int cuMemcpyHtoD_v2(Address device, const void* host, size_t size) {
  if (!is_reachable(device, size)) return misuse();
  memcpy(reinterpret_cast<void*>(device), host, size);
  return kOk;
}

}  // extern "C"
