// Device memory and page-locked memory, which are both host memory.
//
// Rules
// 1. A freed block is filled with NaN by a task of its stream, and handed out again at once on the same stream.
// 2. A block that other streams use (`record_stream`) is handed out again once these have done what was queued on them
//    when it was freed; nobody waits for that.
// 3. Device memory is closed to the host: a pointer into it faults, as it does on other devices, and the fault says what
//    was touched. Tasks see the same pages at other addresses (`opened`). A forked process has neither.
// 4. Page-locked memory that a copy is using is closed to the host (to writing, if the device only reads it) until the
//    host has waited for that copy, if races are checked. An access to it is reported as a race, and then performed.
#pragma once

#include "runtime.h"

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>

#include <set>

namespace late {

constexpr auto kLate = c10::DeviceType::PrivateUse1;

extern thread_local int current_device;
int index_of(const c10::Device& device);
int current_stream(const c10::Device& device);
void set_current_stream(int device, int stream);
int stream_index(const c10::Stream& stream);
c10::Stream to_stream(int index, int device);

// Where tasks see what lies at an address of the device; other addresses are themselves.
char* opened(const void* address);

struct Block {
  char* data;  // closed
  size_t size;
  int stream;
  std::set<int> used_by;  // other streams, told by record_stream
  std::vector<std::pair<int, uint64_t>> pending;  // what these have to come to
};

class DeviceMemory final : public c10::DeviceAllocator {
 public:
  static DeviceMemory& get();

  c10::DataPtr allocate(size_t num_bytes) override;
  void recordStream(const c10::DataPtr& ptr, c10::Stream stream) override;
  const char* block_of(const char* address);
  // From a signal's handler: write to stderr what was touched, if it was ours.
  void report_touched(const char* address, bool writes);

  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, std::size_t size) const override {
    default_copy_data(opened(to), opened(from), size);
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override;
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex device) override;

 private:
  static void free(void* context);
  void give_back(Block* block);
  void reclaim();
  Block* take(int stream, size_t size);

  struct Usage {
    size_t current = 0;
    size_t peak = 0;
  };

  std::mutex mutex_;
  std::map<std::pair<int, size_t>, std::vector<Block*>> free_;
  std::map<const char*, Block*> blocks_;
  std::vector<Block*> limbo_;
  std::map<int, Usage> usage_;  // by device
};

// A use of page-locked memory by a queued copy.
struct PinnedUse {
  int stream;
  uint64_t number;
  bool writes;
  Site site;
};

class PinnedMemory final : public at::HostAllocator {
 public:
  static PinnedMemory& get();

  c10::DataPtr allocate(size_t num_bytes) override;
  const char* block_of(const char* address);
  bool is_pinned(const void* address) { return block_of(static_cast<const char*>(address)) != nullptr; }
  // Whether a copy that was queued may still read or write the block.
  bool is_in_use(const char* block);
  void use(const char* block, PinnedUse use);
  // For tasks: the block is open to every thread until `close`.
  void open(const char* block);
  void close(const char* block);
  // From a signal's handler: whether the access was to a closed block, which is open now.
  bool was_closed(const char* address, bool writes);

  c10::DeleterFnPtr raw_deleter() const override { return &PinnedMemory::free; }
  void copy_data(void* to, const void* from, std::size_t size) const override { default_copy_data(to, from, size); }
  bool record_event(void*, void*, c10::Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}

 private:
  struct Pages {
    size_t size;
    int num_open = 0;
    bool is_guarded = false;  // a use has closed it
    std::vector<PinnedUse> uses;
  };

  static void free(void* data);
  void release(const Clock& host);
  std::pair<const char* const, Pages>* find(const char* address);
  void protect(const char* block, const Pages& pages);

  std::mutex mutex_;
  std::map<const char*, Pages> blocks_;
};

// The allocation that an address lies in, device memory or page-locked memory; none of any other.
const char* block_of(const char* address);

void handle_faults();

}  // namespace late
