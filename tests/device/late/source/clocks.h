// Vector clocks: which accesses to memory are ordered, whatever the schedule happened to do.
//
// Rules
// 1. A stream's clock says, for each stream, how many of its tasks are known to come before the stream's next task.
//    An event carries its stream's clock to who waits for it. The host has one clock for all its threads, which hand
//    over work to each other in ways that are not seen here: so races between threads of the host are not found.
// 2. Two accesses to common bytes, one of which writes, race unless the later one's clock knows the earlier one.
// 3. A strided tensor counts as all bytes from its first to its last.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace late {

using Clock = std::map<int, uint64_t>;
void merge(Clock& into, const Clock& from);
bool knows(const Clock& clock, int stream, uint64_t number);

struct Range {
  const char* low;
  const char* high;
  bool writes;
  const char* block;  // the allocation's first byte
};

// An operator, and the Python stack it was called from: a line a frame, the innermost first.
struct Site {
  std::string name;
  std::shared_ptr<const std::string> stack;

  static Site here(std::string name, bool with_stack);
  std::string str() const;
};

struct Access {
  Range range;
  int stream;
  uint64_t number;
  Site site;

  std::string str() const;
};

constexpr int kHost = -1;  // as the stream of an access

struct Race {
  Access later;
  Access earlier;

  std::string str() const;
};

class RaceCheck {
 public:
  std::vector<Race> found;

  bool is_on() const { return is_on_; }
  void turn(bool on);
  // Of a task: `clock` is its stream's.
  void enter(const Access& access, const Clock& clock);
  // The allocator knows that whatever used this block is done.
  void forget(const char* block) { accesses_.erase(block); }
  void add(Race race);

 private:
  bool is_on_ = false;
  std::map<const char*, std::vector<Access>> accesses_;  // by block
};

}  // namespace late
