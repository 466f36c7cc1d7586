#include <Python.h>

#include "runtime.h"

#include <c10/util/Exception.h>

#include <chrono>
#include <cstdlib>

namespace late {

constexpr int kStreamsOfADevice = 32;  // then torch's pools of streams begin again with the first
constexpr std::chrono::seconds kLongestWaitForAThread{1};

namespace {

struct WithoutGil {
  PyThreadState* state = nullptr;
  WithoutGil() {
    if (Py_IsInitialized() && PyGILState_Check()) state = PyEval_SaveThread();
  }
  ~WithoutGil() {
    if (state) PyEval_RestoreThread(state);
  }
};

}  // namespace

int num_devices() {
  static const int number = [] {
    const char* text = std::getenv("LATE_DEVICES");
    return std::min(std::max(text ? std::atoi(text) : 1, 1), kMaxDevices);
  }();
  return number;
}

double now_ms() {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

Runtime& Runtime::get() {
  static auto* runtime = new Runtime();  // never freed: streams are used until the very end
  return *runtime;
}

Runtime::Runtime() : num_made_(kMaxDevices, 0) {
  for (int device = 0; device < kMaxDevices; ++device) add_stream(device);  // default streams: index = device
}

int Runtime::add_stream(int device) {
  auto stream = std::make_unique<Stream>();
  stream->index = static_cast<int>(streams_.size());
  stream->device = device;
  streams_.push_back(std::move(stream));
  return streams_.back()->index;
}

int Runtime::new_stream(int device) {
  std::lock_guard<std::mutex> lock(mutex_);
  const int turn = num_made_[device]++ % kStreamsOfADevice;
  if (num_made_[device] <= kStreamsOfADevice) return add_stream(device);
  int seen = -1;
  for (auto& stream : streams_)
    if (stream->index >= kMaxDevices && stream->device == device && ++seen == turn) return stream->index;
  return add_stream(device);
}

// ---- queueing

uint64_t Runtime::push(
    int stream, std::string name, std::function<void()> run, const std::vector<Range>& ranges, bool may_wait) {
  const Site site = Site::here(name, checks_races() && !ranges.empty());
  uint64_t number;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    auto& s = *streams_[stream];
    number = push_locked(s, {std::move(name), std::move(run), may_wait});
    check_locked(s, number, site, ranges);
  }
  after_push(stream, number);
  return number;
}

void Runtime::push_quietly(
    int stream, std::string name, std::function<void()> run, const std::vector<Range>& ranges) {
  const Site site = Site::here(name, checks_races());
  {
    std::lock_guard<std::mutex> lock(mutex_);
    auto& s = *streams_[stream];
    if (schedule != Schedule::Eager || !s.queue.empty()) {
      const uint64_t number = push_locked(s, {std::move(name), std::move(run)});
      check_locked(s, number, site, ranges);
      return;
    }
  }
  run();
}

uint64_t Runtime::push_locked(Stream& stream, Task task) {
  if (races_.is_on()) merge(stream.clock, host_clock_);
  stream.queue.push_back(std::move(task));
  return ++stream.queued;
}

void Runtime::check_locked(Stream& stream, uint64_t number, const Site& site, const std::vector<Range>& ranges) {
  stream.clock[stream.index] = number;
  if (!races_.is_on()) return;
  for (const Range& range : ranges) races_.enter({range, stream.index, number, site}, stream.clock);
}

void Runtime::after_push(int stream, uint64_t number) {
  if (schedule == Schedule::Eager) run_until(stream, number);
}

MarkPtr Runtime::record(int stream) {
  auto mark = std::make_shared<Mark>();
  mark->stream = stream;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    auto& s = *streams_[stream];
    mark->number = push_locked(s, {"record", [mark] { mark->at_ms = now_ms(); }});
    s.clock[stream] = mark->number;
    mark->clock = s.clock;
  }
  after_push(stream, mark->number);
  return mark;
}

void Runtime::block(const MarkPtr& mark, int stream) {
  if (!mark || mark->stream == stream) return;
  uint64_t number;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    auto& s = *streams_[stream];
    number = push_locked(s, {"wait", nullptr, false, mark->stream, mark->number});
    merge(s.clock, mark->clock);
    s.clock[stream] = number;
  }
  after_push(stream, number);
}

// ---- the host waits

bool Runtime::query(const MarkPtr& mark) {
  if (!mark) return true;
  if (!is_done(mark->stream, mark->number)) {
    if (++mark->polls != kPollsBeforeProgress + 1) return false;
    ask(mark->stream, mark->number);
    if (!is_done(mark->stream, mark->number)) return false;
  }
  host_knows(mark->clock);
  return true;
}

bool Runtime::query_stream(int stream) {
  uint64_t queued;
  Clock clock;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    auto& s = *streams_[stream];
    if (s.done < s.queued && ++s.polls <= kPollsBeforeProgress) return false;
    s.polls = 0;
    queued = s.queued;
    clock = s.clock;
  }
  ask(stream, queued);
  if (!is_done(stream, queued)) return false;
  host_knows(clock);
  return true;
}

void Runtime::synchronize(const MarkPtr& mark, const char* cause) {
  count(cause);
  if (!mark) return;
  run_until(mark->stream, mark->number);
  host_knows(mark->clock);
}

void Runtime::synchronize(int stream, const std::string& cause) {
  if (!cause.empty()) count(cause);
  uint64_t number;
  Clock clock;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    number = streams_[stream]->queued;
    clock = streams_[stream]->clock;
  }
  run_until(stream, number);
  host_knows(clock);
}

void Runtime::synchronize_device(int device) {
  count("device.synchronize");
  std::vector<int> streams;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto& stream : streams_)
      if (stream->device == device) streams.push_back(stream->index);
  }
  for (int stream : streams) synchronize(stream, "");
}

void Runtime::host_knows(const Clock& clock) {
  Clock host;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    merge(host_clock_, clock);
    host = host_clock_;
  }
  if (host_waited_) host_waited_(host);
}

// ---- running

void Runtime::run_until(int stream, uint64_t number, bool quietly) {
  WithoutGil without_gil;
  std::unique_lock<std::mutex> lock(mutex_);
  come_to(lock, stream, number, schedule == Schedule::Others);
  if (!quietly) raise_error(lock);
}

void Runtime::ask(int stream, uint64_t number) {
  WithoutGil without_gil;
  std::unique_lock<std::mutex> lock(mutex_);
  come_to_on_a_thread(lock, stream, number, schedule == Schedule::Others);
  raise_error(lock);
}

void Runtime::raise_error(std::unique_lock<std::mutex>& lock) {
  if (error_.empty()) return;
  std::string error;
  std::swap(error, error_);
  lock.unlock();
  TORCH_CHECK(false, error);
}

void Runtime::come_to(std::unique_lock<std::mutex>& lock, int stream, uint64_t number, bool others_first) {
  std::vector<std::pair<int, uint64_t>> goals{{stream, number}};  // the last one first; each waits for the next
  while (!goals.empty()) {
    auto [index, target] = goals.back();
    auto& s = *streams_[index];
    if (s.done >= target) {
      goals.pop_back();
      continue;
    }
    if (s.is_running) {
      TORCH_CHECK(
          s.runner != std::this_thread::get_id(), "late: task '", s.running_name, "' waits for its own stream ",
          index, ", which cannot go on before the task has ended");
      condition_.wait(lock);
      continue;
    }
    const Task& task = s.queue.front();
    if (task.wait_stream >= 0 && streams_[task.wait_stream]->done < task.wait_number) {
      goals.emplace_back(task.wait_stream, task.wait_number);
      continue;
    }
    if (others_first && run_one_of_others(lock, goals)) continue;
    run_front(lock, s);
  }
}

// On a thread of its own, which is waited for as long as a peer usually takes: not for ever, as its task may wait for
// a peer whose host waits for this thread.
void Runtime::come_to_on_a_thread(
    std::unique_lock<std::mutex>& lock, int stream, uint64_t number, bool others_first) {
  std::thread([this, stream, number, others_first] {
    std::unique_lock<std::mutex> own(mutex_);
    come_to(own, stream, number, others_first);
  }).detach();
  condition_.wait_for(lock, kLongestWaitForAThread, [&] { return streams_[stream]->done >= number; });
}

// Run the front task of a stream that nobody has demanded, if there is one that may run.
bool Runtime::run_one_of_others(
    std::unique_lock<std::mutex>& lock, const std::vector<std::pair<int, uint64_t>>& goals) {
  for (auto& stream : streams_) {
    if (stream->is_running || stream->queue.empty()) continue;
    bool is_goal = false;
    for (auto& goal : goals) is_goal = is_goal || goal.first == stream->index;
    const Task& task = stream->queue.front();
    if (is_goal || (task.wait_stream >= 0 && streams_[task.wait_stream]->done < task.wait_number)) continue;
    if (task.may_wait) come_to_on_a_thread(lock, stream->index, stream->done + 1, false);
    else run_front(lock, *stream);
    return true;
  }
  return false;
}

void Runtime::run_front(std::unique_lock<std::mutex>& lock, Stream& stream) {
  stream.is_running = true;
  stream.runner = std::this_thread::get_id();
  Task task = std::move(stream.queue.front());
  stream.running_name = task.name;
  lock.unlock();
  std::string error;
  if (task.run) {
    try {
      task.run();
    } catch (const c10::Error& e) {
      error = "late: '" + task.name + "', queued earlier, failed: " + e.what_without_backtrace();
    } catch (const std::exception& e) {
      error = "late: '" + task.name + "', queued earlier, failed: " + e.what();
    }
  }
  task.run = nullptr;  // what it holds goes while no lock is held
  lock.lock();
  if (!error.empty() && error_.empty()) error_ = error;
  stream.queue.pop_front();
  ++stream.done;
  stream.is_running = false;
  condition_.notify_all();
}

// ---- queries

bool Runtime::is_done(int stream, uint64_t number) {
  std::lock_guard<std::mutex> lock(mutex_);
  return streams_[stream]->done >= number;
}

int Runtime::device_of(int stream) {
  std::lock_guard<std::mutex> lock(mutex_);
  return streams_[stream]->device;
}

uint64_t Runtime::queued(int stream) {
  std::lock_guard<std::mutex> lock(mutex_);
  return streams_[stream]->queued;
}

void Runtime::forget(const char* block) {
  std::lock_guard<std::mutex> lock(mutex_);
  races_.forget(block);
}

bool Runtime::checks_races() {
  std::lock_guard<std::mutex> lock(mutex_);
  return races_.is_on();
}

void Runtime::check_races(bool on) {
  std::lock_guard<std::mutex> lock(mutex_);
  races_.turn(on);
}

void Runtime::add_race(Race race) {
  std::lock_guard<std::mutex> lock(mutex_);
  races_.add(std::move(race));
}

std::vector<std::string> Runtime::take_races() {
  std::vector<Race> races;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    std::swap(races, races_.found);
  }
  std::vector<std::string> texts;
  for (const Race& race : races) texts.push_back(race.str());
  return texts;
}

void Runtime::count(const std::string& cause) {
  std::lock_guard<std::mutex> lock(mutex_);
  ++counts_[cause];
}

std::map<std::string, uint64_t> Runtime::take_counts() {
  std::lock_guard<std::mutex> lock(mutex_);
  return std::exchange(counts_, {});
}

}  // namespace late
