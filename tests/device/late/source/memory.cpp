#include "memory.h"

#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstring>
#include <sstream>

namespace late {

constexpr size_t kGranule = 512;
constexpr size_t kPage = 4096;
constexpr int kNan = 0xff;  // of these bytes: every floating type's not-a-number, and a large or negative integer

namespace {

size_t rounded(size_t size, size_t to) { return std::max((size + to - 1) / to * to, to); }

}  // namespace

// ---- where a thread is

thread_local int current_device = 0;

static thread_local std::array<int, kMaxDevices> current_streams = [] {
  std::array<int, kMaxDevices> streams{};
  for (int device = 0; device < kMaxDevices; ++device) streams[device] = device;
  return streams;
}();

int index_of(const c10::Device& device) { return device.has_index() ? device.index() : current_device; }
int current_stream(const c10::Device& device) { return current_streams[index_of(device)]; }
void set_current_stream(int device, int stream) { current_streams[device] = stream; }
int stream_index(const c10::Stream& s) { return s.id() == 0 ? s.device_index() : static_cast<int>(s.id()); }
c10::Stream to_stream(int index, int device) {
  return c10::Stream(
      c10::Stream::UNSAFE, c10::Device(kLate, static_cast<c10::DeviceIndex>(device)), index < kMaxDevices ? 0 : index);
}

const char* block_of(const char* address) {
  if (const char* block = DeviceMemory::get().block_of(address)) return block;
  return PinnedMemory::get().block_of(address);
}

// ---- device memory

namespace {

// The pages of all devices, mapped twice. Addresses are given out once; blocks are used again, and never given back.
class Arena {
 public:
  static Arena& get() {
    static auto* arena = new Arena();
    return *arena;
  }

  char* take(size_t size) {
    const size_t begin = used_.fetch_add(size);
    TORCH_CHECK(begin + size <= kSize, "late: device memory has ", kSize >> 30, " GiB, and they are used up");
    return closed_ + begin;
  }
  bool holds(const void* address) const {
    return address >= closed_ && address < closed_ + kSize;
  }
  char* opened(const void* address) const { return open_ + (static_cast<const char*>(address) - closed_); }
  bool is_forked() const { return getpid() != owner_; }

 private:
  static constexpr size_t kSize = size_t{64} << 30;  // of addresses: pages are the host's once they are written to

  Arena() {
    const int file = memfd_create("late", MFD_CLOEXEC);
    TORCH_CHECK(file >= 0 && ftruncate(file, kSize) == 0, "late: the host has no file in memory: ", strerror(errno));
    closed_ = map(file, PROT_NONE);
    open_ = map(file, PROT_READ | PROT_WRITE);
    ::close(file);
  }
  static char* map(int file, int access) {
    void* data = mmap(nullptr, kSize, access, MAP_SHARED | MAP_NORESERVE, file, 0);
    TORCH_CHECK(data != MAP_FAILED, "late: the host has no ", kSize >> 30, " GiB of addresses: ", strerror(errno));
    madvise(data, kSize, MADV_DONTFORK);
    return static_cast<char*>(data);
  }

  const pid_t owner_ = getpid();
  char* closed_;
  char* open_;
  std::atomic<size_t> used_{0};
};

}  // namespace

char* opened(const void* address) {
  auto& arena = Arena::get();
  return arena.holds(address) ? arena.opened(address) : const_cast<char*>(static_cast<const char*>(address));
}

DeviceMemory& DeviceMemory::get() {
  static auto* memory = new DeviceMemory();
  return *memory;
}

c10::DataPtr DeviceMemory::allocate(size_t num_bytes) {
  const c10::Device at(kLate, static_cast<c10::DeviceIndex>(current_device));
  if (num_bytes == 0) return {nullptr, nullptr, [](void*) {}, at};
  Block* block = take(current_stream(at), rounded(num_bytes, kGranule));
  return {block->data, block, &DeviceMemory::free, at};
}

Block* DeviceMemory::take(int stream, size_t size) {
  reclaim();
  std::lock_guard<std::mutex> lock(mutex_);
  auto& usage = usage_[current_device];
  usage.current += size;
  usage.peak = std::max(usage.peak, usage.current);
  auto& free = free_[{stream, size}];
  if (!free.empty()) {
    Block* block = free.back();
    free.pop_back();
    return block;
  }
  auto* block = new Block{Arena::get().take(size), size, stream, {}, {}};
  std::memset(opened(block->data), kNan, size);
  blocks_[block->data] = block;
  return block;
}

void DeviceMemory::recordStream(const c10::DataPtr& ptr, c10::Stream stream) {
  if (!ptr.get() || ptr.get_deleter() != &DeviceMemory::free) return;
  auto* block = static_cast<Block*>(ptr.get_context());
  std::lock_guard<std::mutex> lock(mutex_);
  if (stream_index(stream) != block->stream) block->used_by.insert(stream_index(stream));
}

void DeviceMemory::free(void* context) {
  auto& self = get();
  auto& runtime = Runtime::get();
  auto* block = static_cast<Block*>(context);
  const int device = runtime.device_of(block->stream);
  std::set<int> used_by;
  {
    std::lock_guard<std::mutex> lock(self.mutex_);
    self.usage_[device].current -= block->size;
    std::swap(used_by, block->used_by);
  }
  if (used_by.empty()) return self.give_back(block);
  for (int stream : used_by) block->pending.emplace_back(stream, runtime.queued(stream));
  std::lock_guard<std::mutex> lock(self.mutex_);
  self.limbo_.push_back(block);
}

void DeviceMemory::give_back(Block* block) {
  if (Arena::get().is_forked()) return;
  char* data = block->data;
  const size_t size = block->size;
  Runtime::get().push_quietly(
      block->stream, "free", [data, size] { std::memset(opened(data), kNan, size); },
      {{data, data + size, true, data}});
  std::lock_guard<std::mutex> lock(mutex_);
  free_[{block->stream, size}].push_back(block);
}

void DeviceMemory::reclaim() {
  std::vector<Block*> candidates, done;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (limbo_.empty()) return;
    std::swap(candidates, limbo_);
  }
  auto& runtime = Runtime::get();
  for (auto it = candidates.begin(); it != candidates.end();) {
    auto& pending = (*it)->pending;
    const bool is_done = std::all_of(
        pending.begin(), pending.end(), [&](auto& at) { return runtime.is_done(at.first, at.second); });
    if (is_done) done.push_back(*it);
    it = is_done ? candidates.erase(it) : it + 1;
  }
  for (Block* block : done) {
    block->pending.clear();
    runtime.forget(block->data);
    give_back(block);
  }
  std::lock_guard<std::mutex> lock(mutex_);
  limbo_.insert(limbo_.end(), candidates.begin(), candidates.end());
}

const char* DeviceMemory::block_of(const char* address) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto it = blocks_.upper_bound(address);
  if (it == blocks_.begin()) return nullptr;
  --it;
  return address < it->first + it->second->size ? it->first : nullptr;
}

void DeviceMemory::report_touched(const char* address, bool writes) {
  if (!Arena::get().holds(address)) return;
  const char* begin = block_of(address);
  std::ostringstream text;
  text << "late: the host " << (writes ? "writes" : "reads") << " device memory";
  if (begin) text << ", byte " << address - begin << " of a block of " << blocks_.at(begin)->size;
  text << ". A copy to the host is what it may use.\n" << Site::here("", true).stack->c_str() << "\n";
  const std::string words = text.str();
  if (write(STDERR_FILENO, words.data(), words.size()) < 0) return;
}

c10::CachingDeviceAllocator::DeviceStats DeviceMemory::getDeviceStats(c10::DeviceIndex device) {
  std::lock_guard<std::mutex> lock(mutex_);
  c10::CachingDeviceAllocator::DeviceStats stats;
  stats.allocated_bytes[0].current = static_cast<int64_t>(usage_[device].current);
  stats.allocated_bytes[0].peak = static_cast<int64_t>(usage_[device].peak);
  return stats;
}

void DeviceMemory::resetPeakStats(c10::DeviceIndex device) {
  std::lock_guard<std::mutex> lock(mutex_);
  usage_[device].peak = usage_[device].current;
}

// ---- page-locked memory

PinnedMemory& PinnedMemory::get() {
  static auto* memory = [] {
    auto* made = new PinnedMemory();
    Runtime::get().on_host_wait([made](const Clock& host) { made->release(host); });
    return made;
  }();
  return *memory;
}

c10::DataPtr PinnedMemory::allocate(size_t num_bytes) {
  const size_t size = rounded(num_bytes, kPage);
  void* data = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  TORCH_CHECK(data != MAP_FAILED, "late: the host has no ", size, " bytes of page-locked memory");
  std::lock_guard<std::mutex> lock(mutex_);
  blocks_[static_cast<char*>(data)] = Pages{size};
  return {data, data, &PinnedMemory::free, c10::Device(c10::kCPU)};
}

void PinnedMemory::free(void* data) {
  auto& self = get();
  Runtime::get().forget(static_cast<char*>(data));
  std::lock_guard<std::mutex> lock(self.mutex_);
  auto it = self.blocks_.find(static_cast<char*>(data));
  if (it == self.blocks_.end()) return;
  munmap(data, it->second.size);
  self.blocks_.erase(it);
}

std::pair<const char* const, PinnedMemory::Pages>* PinnedMemory::find(const char* address) {
  auto it = blocks_.upper_bound(address);
  if (it == blocks_.begin()) return nullptr;
  --it;
  return address < it->first + it->second.size ? &*it : nullptr;
}

const char* PinnedMemory::block_of(const char* address) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto* found = find(address);
  return found ? found->first : nullptr;
}

bool PinnedMemory::is_in_use(const char* block) {
  std::vector<PinnedUse> uses;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (auto* found = find(block)) uses = found->second.uses;
  }
  return std::any_of(uses.begin(), uses.end(), [](const PinnedUse& use) {
    return !Runtime::get().is_done(use.stream, use.number);
  });
}

void PinnedMemory::use(const char* block, PinnedUse use) {
  const bool guards = Runtime::get().checks_races();
  std::lock_guard<std::mutex> lock(mutex_);
  auto* found = find(block);
  if (!found) return;
  found->second.uses.push_back(std::move(use));
  if (!guards) return;
  found->second.is_guarded = true;
  protect(found->first, found->second);
}

void PinnedMemory::protect(const char* block, const Pages& pages) {
  int access = PROT_READ | PROT_WRITE;
  if (pages.is_guarded && pages.num_open == 0)
    for (const PinnedUse& use : pages.uses) access &= use.writes ? PROT_NONE : PROT_READ;
  mprotect(const_cast<char*>(block), pages.size, access);
}

void PinnedMemory::open(const char* block) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (auto* found = find(block); found && found->second.num_open++ == 0) protect(block, found->second);
}

void PinnedMemory::close(const char* block) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (auto* found = find(block); found && --found->second.num_open == 0) protect(block, found->second);
}

void PinnedMemory::release(const Clock& host) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto& [block, pages] : blocks_) {
    auto& uses = pages.uses;
    if (uses.empty()) continue;
    auto last = std::remove_if(
        uses.begin(), uses.end(), [&](const PinnedUse& use) { return knows(host, use.stream, use.number); });
    if (last == uses.end()) continue;
    uses.erase(last, uses.end());
    if (pages.is_guarded) protect(block, pages);
    pages.is_guarded = pages.is_guarded && !uses.empty();
  }
}

bool PinnedMemory::was_closed(const char* address, bool writes) {
  std::vector<PinnedUse> uses;
  const char* block;
  size_t size;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    auto* found = find(address);
    if (!found || !found->second.is_guarded) return false;
    block = found->first;
    size = found->second.size;
    std::swap(uses, found->second.uses);
    protect(block, found->second);
  }
  const Access by_host{{address, address + 1, writes, block}, kHost, 0, Site::here("an access to page-locked memory", true)};
  for (const PinnedUse& use : uses)
    if (use.writes || writes)
      Runtime::get().add_race({by_host, {{block, block + size, use.writes, block}, use.stream, use.number, use.site}});
  return true;
}

// ---- faults: an access of the host to closed memory

namespace {

struct sigaction previous;

bool was_writing(const void* context) {
#if defined(__x86_64__)
  return static_cast<const ucontext_t*>(context)->uc_mcontext.gregs[REG_ERR] & 2;
#else
  return true;
#endif
}

// It is raised by the very instruction that touches the memory, so that no lock of ours or of malloc is held.
void on_fault(int, siginfo_t* info, void* context) {
  const auto* address = static_cast<const char*>(info->si_addr);
  if (PinnedMemory::get().was_closed(address, was_writing(context))) return;
  DeviceMemory::get().report_touched(address, was_writing(context));
  sigaction(SIGSEGV, &previous, nullptr);  // the access is repeated, and whoever was before us handles it
}

}  // namespace

void handle_faults() {
  static const bool once = [] {
    PinnedMemory::get();
    struct sigaction ours {};
    ours.sa_sigaction = &on_fault;
    ours.sa_flags = SA_SIGINFO | SA_NODEFER;
    return sigaction(SIGSEGV, &ours, &previous) == 0;
  }();
  (void)once;
}

}  // namespace late
