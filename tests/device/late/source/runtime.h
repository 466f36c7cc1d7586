// Streams, events and schedules: which task runs when, and on which thread.
//
// Rules
// 1. What is queued on a stream is a task. Nothing runs by itself: a task runs on the thread that demands it, which is
//    a host that waits (for a stream, an event, a value), or a process group whose peer has come to a collective.
// 2. `latest` runs what is demanded and what that waits for, nothing else. `others` runs everything else first, and
//    what is demanded last. `eager` runs a task when it is queued. A program without a missing wait computes the same
//    under each of them.
// 3. A task's error is kept, and raised to the next host that waits.
// 4. Whoever waits for a task gives up Python's lock, which the task may need. No lock of ours is held while a task
//    runs, or while the allocator is asked something.
#pragma once

#include "clocks.h"

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

namespace late {

constexpr int kMaxDevices = 8;
constexpr int kPollsBeforeProgress = 3;  // a loop over query() must end

enum class Schedule { Eager, Latest, Others };

struct Task {
  std::string name;
  std::function<void()> run;  // none: it only waits
  bool may_wait = false;      // for another process, as a collective does
  int wait_stream = -1;
  uint64_t wait_number = 0;
};

struct Stream {
  int index;
  int device;
  std::deque<Task> queue;  // the front is task number done + 1
  uint64_t queued = 0;
  uint64_t done = 0;
  bool is_running = false;
  std::string running_name;
  std::thread::id runner;
  Clock clock;  // of the task queued last
  int polls = 0;
};

// One recording of an event. Recording it again makes another one: who waits for the first is not concerned.
struct Mark {
  int stream = -1;
  uint64_t number = 0;
  std::atomic<int> polls{0};
  double at_ms = 0;
  Clock clock;
};
using MarkPtr = std::shared_ptr<Mark>;

int num_devices();
double now_ms();

class Runtime {
 public:
  static Runtime& get();

  Schedule schedule = Schedule::Latest;

  // ---- what a program does

  int new_stream(int device);
  // Queue a task; returns its number on the stream.
  uint64_t push(
      int stream, std::string name, std::function<void()> run, const std::vector<Range>& ranges = {},
      bool may_wait = false);
  // From the allocator: runs no other task, as it is called from anywhere, and raises nothing.
  void push_quietly(int stream, std::string name, std::function<void()> run, const std::vector<Range>& ranges);
  MarkPtr record(int stream);
  void block(const MarkPtr& mark, int stream);
  bool query(const MarkPtr& mark);
  bool query_stream(int stream);
  // The host waits; counted under `cause`.
  void synchronize(const MarkPtr& mark, const char* cause);
  void synchronize(int stream, const std::string& cause);
  void synchronize_device(int device);

  // ---- what the emulation does

  // Let `stream` come to a task, with all that it waits for. A quiet one leaves an error to the next host that waits.
  void run_until(int stream, uint64_t number, bool quietly = false);
  bool is_done(int stream, uint64_t number);
  int device_of(int stream);
  uint64_t queued(int stream);
  void forget(const char* block);

  bool checks_races();
  void check_races(bool on);
  void add_race(Race race);
  std::vector<std::string> take_races();
  void count(const std::string& cause);
  std::map<std::string, uint64_t> take_counts();
  // Told the host's clock whenever the host has waited.
  void on_host_wait(std::function<void(const Clock&)> listener) { host_waited_ = std::move(listener); }

 private:
  Runtime();
  int add_stream(int device);
  uint64_t push_locked(Stream& stream, Task task);
  void check_locked(Stream& stream, uint64_t number, const Site& site, const std::vector<Range>& ranges);
  void after_push(int stream, uint64_t number);
  void host_knows(const Clock& clock);
  // Let `stream` come to a task, on another thread; returns when it has, or after a second.
  void ask(int stream, uint64_t number);
  void raise_error(std::unique_lock<std::mutex>& lock);
  void come_to(std::unique_lock<std::mutex>& lock, int stream, uint64_t number, bool others_first);
  void come_to_on_a_thread(std::unique_lock<std::mutex>& lock, int stream, uint64_t number, bool others_first);
  bool run_one_of_others(std::unique_lock<std::mutex>& lock, const std::vector<std::pair<int, uint64_t>>& goals);
  void run_front(std::unique_lock<std::mutex>& lock, Stream& stream);

  std::mutex mutex_;
  std::condition_variable condition_;
  std::deque<std::unique_ptr<Stream>> streams_;
  std::vector<int> num_made_;  // by device
  std::string error_;
  Clock host_clock_;
  RaceCheck races_;
  std::map<std::string, uint64_t> counts_;  // of the host's waits, by cause
  std::function<void(const Clock&)> host_waited_;
};

}  // namespace late
