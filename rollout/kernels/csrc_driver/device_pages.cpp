// Device memory whose pages go back to the system while its addresses stay, by the CUDA driver's virtual memory calls.
//
//     area    addresses of its own, for ever; memory behind them from `alloc` to `discard`, and again from `provide`
//
//     alloc    reserve -> create -> map -> grant access        torch asks for its segments by it (a pluggable allocator)
//     discard  unmap                                           the memory goes back; an access faults
//     provide  create -> map -> grant access -> fill with 0    at the same addresses, so that captured graphs stay valid
//     free     unmap -> give the addresses back
//
// A handle of memory is released once it is mapped: the memory goes with its mapping.  libcuda is opened at run time and
// what is used of its interface (CUDA 10.2 and later) declared here, so that compiling takes no CUDA.
//
// Functions return 0, or -1 with the reason in `lockstep_pages_error`.
#include <dlfcn.h>
#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>
#include <mutex>
#include <string>

namespace lockstep {
namespace driver {

using Result = int;
using Address = unsigned long long;
using Handle = unsigned long long;

struct Location {  // CUmemLocation
  int type;
  int id;
};
struct AllocationProp {  // CUmemAllocationProp
  int type;
  int requested_handle_types;
  Location location;
  void* win32_metadata;
  struct {
    unsigned char compression_type;
    unsigned char gpu_direct_rdma_capable;
    unsigned short usage;
    unsigned char reserved[4];
  } flags;
};
struct AccessDesc {  // CUmemAccessDesc
  Location location;
  int flags;
};
static_assert(sizeof(Location) == 8 && sizeof(AllocationProp) == 32 && sizeof(AccessDesc) == 12);

constexpr int kLocationDevice = 1, kPinned = 1, kReadWrite = 3, kMinimumGranularity = 0;

}  // namespace driver

namespace {

using namespace driver;

struct Driver {
  Result (*init)(unsigned) = nullptr;
  Result (*get_error_name)(Result, const char**) = nullptr;
  Result (*granularity)(size_t*, const AllocationProp*, int) = nullptr;
  Result (*reserve)(Address*, size_t, size_t, Address, unsigned long long) = nullptr;
  Result (*free_addresses)(Address, size_t) = nullptr;
  Result (*create)(Handle*, size_t, const AllocationProp*, unsigned long long) = nullptr;
  Result (*release)(Handle) = nullptr;
  Result (*map)(Address, size_t, size_t, Handle, unsigned long long) = nullptr;
  Result (*unmap)(Address, size_t) = nullptr;
  Result (*set_access)(Address, size_t, const AccessDesc*, size_t) = nullptr;
  Result (*fill)(Address, unsigned char, size_t) = nullptr;
  Result (*to_host)(void*, Address, size_t) = nullptr;
  Result (*to_device)(Address, const void*, size_t) = nullptr;
};

struct Area {
  size_t size;
  int device;
  bool has_memory;
};

Driver calls;
std::mutex mutex;
std::map<Address, Area> areas;
thread_local std::string reason;

bool failed(Result result, const char* call) {
  if (result == 0) return false;
  const char* name = nullptr;
  if (calls.get_error_name != nullptr) calls.get_error_name(result, &name);
  reason = std::string(call) + ": " + (name != nullptr ? name : "error " + std::to_string(result));
  return true;
}

template <class F>
bool find(void* library, const char* name, F& function) {
  function = reinterpret_cast<F>(dlsym(library, name));
  if (function == nullptr) reason = std::string("the CUDA driver has no ") + name;
  return function != nullptr;
}

AllocationProp memory_of(int device) {
  AllocationProp prop = {};
  prop.type = kPinned;
  prop.location = {kLocationDevice, device};
  return prop;
}

// Memory behind the addresses of an area; on failure there is none, as before.
bool back(Address address, const Area& area) {
  const AllocationProp prop = memory_of(area.device);
  Handle handle = 0;
  if (failed(calls.create(&handle, area.size, &prop, 0), "cuMemCreate")) return false;
  const bool is_mapped = !failed(calls.map(address, area.size, 0, handle, 0), "cuMemMap");
  calls.release(handle);
  if (!is_mapped) return false;
  const AccessDesc access = {{kLocationDevice, area.device}, kReadWrite};
  if (!failed(calls.set_access(address, area.size, &access, 1), "cuMemSetAccess")) return true;
  calls.unmap(address, area.size);
  return false;
}

// The area that holds an address, or the end.
std::map<Address, Area>::iterator area_at(Address address) {
  auto after = areas.upper_bound(address);
  if (after == areas.begin()) return areas.end();
  auto found = std::prev(after);
  return address < found->first + found->second.size ? found : areas.end();
}

std::map<Address, Area>::iterator area_from(void* address) {
  auto found = areas.find(reinterpret_cast<Address>(address));
  if (found == areas.end()) reason = "no area begins there";
  return found;
}

}  // namespace
}  // namespace lockstep

using namespace lockstep;

extern "C" {

const char* lockstep_pages_error() { return reason.c_str(); }

// `path`: of libcuda.  Once per process.
int lockstep_pages_open(const char* path) {
  std::lock_guard<std::mutex> lock(mutex);
  void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    reason = dlerror();
    return -1;
  }
  const bool has_all =
      find(library, "cuInit", calls.init) && find(library, "cuGetErrorName", calls.get_error_name) &&
      find(library, "cuMemGetAllocationGranularity", calls.granularity) &&
      find(library, "cuMemAddressReserve", calls.reserve) &&
      find(library, "cuMemAddressFree", calls.free_addresses) && find(library, "cuMemCreate", calls.create) &&
      find(library, "cuMemRelease", calls.release) && find(library, "cuMemMap", calls.map) &&
      find(library, "cuMemUnmap", calls.unmap) && find(library, "cuMemSetAccess", calls.set_access) &&
      find(library, "cuMemsetD8_v2", calls.fill) && find(library, "cuMemcpyDtoH_v2", calls.to_host) &&
      find(library, "cuMemcpyHtoD_v2", calls.to_device);
  return has_all && !failed(calls.init(0), "cuInit") ? 0 : -1;
}

// torch's interface of allocators.  Null where there is no memory: torch then frees what it caches and asks again.
void* lockstep_pages_alloc(ssize_t size, int device, void*) {
  std::lock_guard<std::mutex> lock(mutex);
  const AllocationProp prop = memory_of(device);
  size_t step = 0;
  if (failed(calls.granularity(&step, &prop, kMinimumGranularity), "cuMemGetAllocationGranularity")) return nullptr;
  const Area area = {(static_cast<size_t>(size) + step - 1) / step * step, device, true};
  Address address = 0;
  if (failed(calls.reserve(&address, area.size, step, 0, 0), "cuMemAddressReserve")) return nullptr;
  if (!back(address, area)) {
    calls.free_addresses(address, area.size);
    return nullptr;
  }
  areas.emplace(address, area);
  return reinterpret_cast<void*>(address);
}

void lockstep_pages_free(void* address, size_t, int, void*) {
  std::lock_guard<std::mutex> lock(mutex);
  auto found = area_from(address);
  if (found == areas.end()) return;
  if (found->second.has_memory) calls.unmap(found->first, found->second.size);
  calls.free_addresses(found->first, found->second.size);
  areas.erase(found);
}

// The area that holds `address`: where it begins and its size.
int lockstep_pages_area(void* address, void** begin, size_t* size) {
  std::lock_guard<std::mutex> lock(mutex);
  auto found = area_at(reinterpret_cast<Address>(address));
  if (found == areas.end()) {
    reason = "no area holds that address";
    return -1;
  }
  *begin = reinterpret_cast<void*>(found->first);
  *size = found->second.size;
  return 0;
}

// The area that begins at `address` has memory until this; the caller has waited for the device.
int lockstep_pages_discard(void* address) {
  std::lock_guard<std::mutex> lock(mutex);
  auto found = area_from(address);
  if (found == areas.end()) return -1;
  if (!found->second.has_memory) return 0;
  if (failed(calls.unmap(found->first, found->second.size), "cuMemUnmap")) return -1;
  found->second.has_memory = false;
  return 0;
}

// The area that begins at `address` has memory from now on: zeros, where it had none.
int lockstep_pages_provide(void* address) {
  std::lock_guard<std::mutex> lock(mutex);
  auto found = area_from(address);
  if (found == areas.end()) return -1;
  if (found->second.has_memory) return 0;
  if (!back(found->first, found->second)) return -1;
  found->second.has_memory = true;
  return failed(calls.fill(found->first, 0, found->second.size), "cuMemsetD8") ? -1 : 0;
}

int lockstep_pages_read(void* host, void* device, size_t size) {
  return failed(calls.to_host(host, reinterpret_cast<Address>(device), size), "cuMemcpyDtoH") ? -1 : 0;
}

int lockstep_pages_write(void* device, const void* host, size_t size) {
  return failed(calls.to_device(reinterpret_cast<Address>(device), host, size), "cuMemcpyHtoD") ? -1 : 0;
}

}  // extern "C"
