// What torch asks of a device: guard, hooks, generators.

#include "operators.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace late {

namespace {

struct Event {
  MarkPtr mark;
};

MarkPtr& mark_of(void* event) { return static_cast<Event*>(event)->mark; }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kLate; }
  c10::Device getDevice() const override { return {kLate, static_cast<c10::DeviceIndex>(current_device)}; }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(
        index_of(device) < num_devices(), "late: there is no device ", index_of(device), " of ", num_devices(),
        ". Set LATE_DEVICES before the device is loaded.");
    current_device = index_of(device);
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current_device = index_of(device); }
  c10::DeviceIndex deviceCount() const noexcept override { return static_cast<c10::DeviceIndex>(num_devices()); }

  c10::Stream getStream(c10::Device device) const override {
    return to_stream(current_stream(device), index_of(device));
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return to_stream(index_of(device), index_of(device));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return to_stream(Runtime::get().new_stream(index_of(device)), index_of(device));
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto before = getStream(stream.device());
    set_current_stream(stream.device_index(), stream_index(stream));
    return before;
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override {
    return reinterpret_cast<void*>(static_cast<intptr_t>(stream_index(stream)));
  }
  bool queryStream(const c10::Stream& stream) const override {
    return Runtime::get().query_stream(stream_index(stream));
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    Runtime::get().synchronize(stream_index(stream), "stream.synchronize");
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    Runtime::get().synchronize_device(device < 0 ? current_device : device);
  }
  void recordDataPtrOnStream(const c10::DataPtr& ptr, const c10::Stream& stream) const override {
    DeviceMemory::get().recordStream(ptr, stream);
  }

  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new Event();
    mark_of(*event) = Runtime::get().record(stream_index(stream));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event) Runtime::get().block(mark_of(event), stream_index(stream));
  }
  bool queryEvent(void* event) const override { return !event || Runtime::get().query(mark_of(event)); }
  void synchronizeEvent(void* event) const override {
    if (event) Runtime::get().synchronize(mark_of(event), "event.synchronize");
  }
  double elapsedTime(void* start, void* end, const c10::DeviceIndex) const override {
    return mark_of(end)->at_ms - mark_of(start)->at_ms;
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

struct Generator final : c10::GeneratorImpl {
  at::Generator host;
  explicit Generator(c10::DeviceIndex device, at::Generator of_host = at::detail::createCPUGenerator())
      : GeneratorImpl(c10::Device(kLate, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        host(std::move(of_host)) {}
  void set_current_seed(uint64_t seed) override { host.set_current_seed(seed); }
  void set_offset(uint64_t) override { TORCH_CHECK(false, "late: generators have no offset"); }
  uint64_t get_offset() const override { TORCH_CHECK(false, "late: generators have no offset"); }
  uint64_t current_seed() const override { return host.current_seed(); }
  uint64_t seed() override { return host.seed(); }
  void set_state(const c10::TensorImpl& state) override { host.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return host.unsafeGetGeneratorImpl()->get_state(); }
  Generator* clone_impl() const override { return new Generator(device().index(), host.clone()); }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  void init() const override {}
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override { return default_generator(device); }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<Generator>(device < 0 ? static_cast<c10::DeviceIndex>(current_device) : device);
  }
  at::Device getDeviceFromPtr(void*) const override { return {kLate, 0}; }
  bool isPinnedPtr(const void* address) const override { return PinnedMemory::get().is_pinned(address); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &PinnedMemory::get(); }
  c10::DeviceIndex deviceCount() const override { return static_cast<c10::DeviceIndex>(num_devices()); }
  void setCurrentDevice(c10::DeviceIndex device) const override { current_device = device; }
  c10::DeviceIndex getCurrentDevice() const override { return static_cast<c10::DeviceIndex>(current_device); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return static_cast<c10::DeviceIndex>(std::exchange(current_device, device));
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 ? getCurrentDevice() : exchangeDevice(device);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t num_bytes) const override {
    resize_bytes(storage, num_bytes);
  }
};

}  // namespace

const at::Generator& default_generator(c10::DeviceIndex device) {
  static auto* generators = [] {
    auto* made = new std::vector<at::Generator>();
    for (int i = 0; i < num_devices(); ++i)
      made->push_back(at::make_generator<Generator>(static_cast<c10::DeviceIndex>(i)));
    return made;
  }();
  return generators->at(device < 0 ? current_device : device);
}

at::Generator on_host(const at::Generator& generator) {
  if (generator.device().type() != kLate) return generator;
  return static_cast<Generator*>(generator.unsafeGetGeneratorImpl())->host;
}

void register_device() {
  static const bool once = [] {
    c10::SetAllocator(kLate, &DeviceMemory::get());
    at::setHostAllocator(kLate, &PinnedMemory::get());
    at::RegisterPrivateUse1HooksInterface(new Hooks());
    register_operators();
    handle_faults();
    return true;
  }();
  (void)once;
}

}  // namespace late
