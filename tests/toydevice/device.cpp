// A device of PyTorch's own kind for extensions, in host memory: two of them, with a caching
// allocator and its statistics. What it lacks in kernels is done on the CPU.
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_copy_from_and_resize_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <cstdlib>
#include <map>
#include <mutex>
#include <unordered_map>

namespace {

using c10::Device;
using c10::DeviceIndex;
constexpr auto kDevice = c10::DeviceType::PrivateUse1;
constexpr DeviceIndex kCount = 2;
thread_local DeviceIndex current = 0;
bool is_used = false;

struct Block {
  DeviceIndex device;
  size_t size;
  size_t requested;
};

struct Allocator final : c10::DeviceAllocator {
  std::mutex mutex;
  std::unordered_map<void*, Block> blocks;
  std::multimap<size_t, void*> cached[kCount];
  c10::CachingDeviceAllocator::DeviceStats stats[kCount];

  static size_t round(size_t n) {
    return (n + 511) / 512 * 512;
  }
  c10::DataPtr allocate(size_t n) override {
    std::lock_guard<std::mutex> lock(mutex);
    is_used = true;
    const Device device(kDevice, current);
    if (n == 0) {
      return {nullptr, nullptr, &release, device};
    }
    const size_t size = round(n);
    void* data = nullptr;
    auto found = cached[current].find(size);
    if (found != cached[current].end()) {
      data = found->second;
      cached[current].erase(found);
    } else {
      data = std::aligned_alloc(512, size);
      TORCH_CHECK_WITH(OutOfMemoryError, data != nullptr, "the device is out of memory");
      stats[current].reserved_bytes[0].increase(size);
    }
    blocks[data] = {current, size, n};
    stats[current].allocated_bytes[0].increase(size);
    return {data, data, &release, device};
  }
  void free(void* data) {
    std::lock_guard<std::mutex> lock(mutex);
    auto found = blocks.find(data);
    if (found == blocks.end()) {
      return;
    }
    const Block block = found->second;
    blocks.erase(found);
    stats[block.device].allocated_bytes[0].decrease(block.size);
    cached[block.device].emplace(block.size, data);
  }
  static void release(void* data);
  c10::DeleterFnPtr raw_deleter() const override {
    return &release;
  }
  void copy_data(void* to, const void* from, std::size_t n) const override {
    default_copy_data(to, from, n);
  }
  bool initialized() override {
    return is_used;
  }
  void emptyCache(c10::MempoolId_t) override {
    std::lock_guard<std::mutex> lock(mutex);
    for (DeviceIndex i = 0; i < kCount; ++i) {
      for (auto& each : cached[i]) {
        std::free(each.second);
        stats[i].reserved_bytes[0].decrease(each.first);
      }
      cached[i].clear();
    }
  }
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex i) override {
    std::lock_guard<std::mutex> lock(mutex);
    return stats[i];
  }
  void resetAccumulatedStats(DeviceIndex i) override {
    stats[i].allocated_bytes[0].reset_accumulated();
    stats[i].reserved_bytes[0].reset_accumulated();
  }
  void resetPeakStats(DeviceIndex i) override {
    stats[i].allocated_bytes[0].reset_peak();
    stats[i].reserved_bytes[0].reset_peak();
  }
};

Allocator allocator;
void Allocator::release(void* data) {
  allocator.free(data);
}
REGISTER_ALLOCATOR(kDevice, &allocator);

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return kDevice;
  }
  Device exchangeDevice(Device d) const override {
    Device old(kDevice, current);
    current = d.index();
    return old;
  }
  Device getDevice() const override {
    return Device(kDevice, current);
  }
  void setDevice(Device d) const override {
    current = d.index();
  }
  void uncheckedSetDevice(Device d) const noexcept override {
    current = d.index();
  }
  c10::Stream getStream(Device d) const override {
    return c10::Stream(c10::Stream::DEFAULT, d);
  }
  c10::Stream getDefaultStream(Device d) const override {
    return c10::Stream(c10::Stream::DEFAULT, d);
  }
  c10::Stream exchangeStream(c10::Stream s) const override {
    return s;
  }
  DeviceIndex deviceCount() const noexcept override {
    return kCount;
  }
  void synchronizeDevice(const DeviceIndex) const override {}
  // All is done as soon as it is asked for, so events have nothing to tell.
  void record(void**, const c10::Stream&, const DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override {
    return true;
  }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  void synchronizeEvent(void*) const override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  void init() const override {}
  bool isAvailable() const override {
    return true;
  }
  bool hasPrimaryContext(DeviceIndex) const override {
    return is_used;
  }
  DeviceIndex deviceCount() const override {
    return kCount;
  }
  DeviceIndex getCurrentDevice() const override {
    return current;
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t n) const override {
    auto data = allocator.allocate(n);
    std::memcpy(data.get(), storage.data(), std::min(n, storage.nbytes()));
    storage.unsafeGetStorageImpl()->set_data_ptr(std::move(data));
    storage.unsafeGetStorageImpl()->set_nbytes(n);
  }
};
Hooks hooks;
struct Registered {
  Registered() {
    at::RegisterPrivateUse1HooksInterface(&hooks);
  }
} registered;

constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

DeviceIndex index_of(std::optional<Device> device) {
  return device && device->has_index() ? device->index() : current;
}

at::Tensor empty(
    c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<Device> device, std::optional<bool>,
    std::optional<at::MemoryFormat> memory_format) {
  c10::OptionalDeviceGuard guard(Device(kDevice, index_of(device)));
  return at::detail::empty_generic(
      size, &allocator, kKeys, c10::dtype_or_default(dtype), memory_format);
}

at::Tensor empty_strided(
    c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>, std::optional<Device> device, std::optional<bool>) {
  c10::OptionalDeviceGuard guard(Device(kDevice, index_of(device)));
  return at::detail::empty_strided_generic(
      size, stride, &allocator, kKeys, c10::dtype_or_default(dtype));
}

// The same memory as a tensor of the CPU's.
at::Tensor on_cpu(const at::Tensor& x) {
  if (x.device().type() != kDevice) {
    return x;
  }
  return at::from_blob(
      x.data_ptr(), x.sizes(), x.strides(), at::TensorOptions().dtype(x.dtype()));
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& to, bool) {
  on_cpu(to).copy_(on_cpu(self));
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& to) {
  at::native::resize_(to, self.sizes(), std::nullopt);
  on_cpu(to).copy_(on_cpu(self));
  return to;
}

at::Scalar local_scalar(const at::Tensor& self) {
  return on_cpu(self).item();
}

at::Tensor& fill(at::Tensor& self, const at::Scalar& value) {
  on_cpu(self).fill_(value);
  return self;
}

at::Tensor& zero(at::Tensor& self) {
  on_cpu(self).zero_();
  return self;
}

at::Tensor& set_storage(
    at::Tensor& self, at::Storage storage, int64_t offset, c10::IntArrayRef size,
    c10::IntArrayRef stride) {
  return at::native::set_storage_cpu_(self, std::move(storage), offset, size, stride);
}

at::Tensor& set_source(at::Tensor& self, at::Storage storage) {
  const int64_t n = storage.nbytes() / self.dtype().itemsize();
  return at::native::set_storage_cpu_(self, std::move(storage), 0, {n}, {1});
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("resize_", at::native::resize_);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar);
  m.impl("fill_.Scalar", fill);
  m.impl("zero_", zero);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Storage", set_source);
}

void on_the_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  at::native::cpu_fallback(op, stack);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_the_cpu>());
}

} // namespace
