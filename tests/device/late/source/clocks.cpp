#include <Python.h>

#include "clocks.h"

#include <algorithm>
#include <sstream>

namespace late {

constexpr size_t kMostRaces = 1000;
constexpr int kMostFrames = 12;

void merge(Clock& into, const Clock& from) {
  for (auto [stream, number] : from) {
    auto& known = into[stream];
    known = std::max(known, number);
  }
}

bool knows(const Clock& clock, int stream, uint64_t number) {
  auto found = clock.find(stream);
  return found != clock.end() && found->second >= number;
}

namespace {

// Not torch's CapturedTraceback: the first that is made readable takes it seconds, in each process.
std::string python_stack() {
  if (!Py_IsInitialized() || !PyGILState_GetThisThreadState()) return "    (called without Python, by a thread of C++)";
  const auto gil = PyGILState_Ensure();
  std::ostringstream text;
  PyFrameObject* frame = PyThreadState_GetFrame(PyThreadState_Get());
  if (!frame) text << "    (called without Python, by the autograd engine)";
  for (int depth = 0; frame && depth < kMostFrames; ++depth) {
    PyCodeObject* code = PyFrame_GetCode(frame);
    text << (depth ? "\n    " : "    ") << PyUnicode_AsUTF8(code->co_filename) << ":" << PyFrame_GetLineNumber(frame)
         << " " << PyUnicode_AsUTF8(code->co_name);
    Py_DECREF(code);
    PyFrameObject* outer = PyFrame_GetBack(frame);
    Py_DECREF(frame);
    frame = outer;
  }
  Py_XDECREF(frame);
  PyGILState_Release(gil);
  return text.str();
}

}  // namespace

Site Site::here(std::string name, bool with_stack) {
  if (!with_stack) return {std::move(name), nullptr};
  return {std::move(name), std::make_shared<const std::string>(python_stack())};
}

std::string Site::str() const { return "'" + name + "'" + (stack ? "\n" + *stack : ""); }

std::string Access::str() const {
  std::ostringstream text;
  if (stream == kHost) text << "the host " << (range.writes ? "writes" : "reads");
  else text << "stream " << stream << " " << (range.writes ? "writes" : "reads");
  text << " in " << site.str();
  return text.str();
}

std::string Race::str() const {
  std::ostringstream text;
  const auto bytes = std::min(earlier.range.high, later.range.high) - std::max(earlier.range.low, later.range.low);
  text << "race on " << bytes << " bytes: nothing orders\n  " << later.str() << "\n  after\n  " << earlier.str();
  return text.str();
}

void RaceCheck::turn(bool on) {
  if (on && !is_on_) accesses_.clear();  // memory was used meanwhile
  is_on_ = on;
}

void RaceCheck::add(Race race) {
  auto same = [](const Access& a, const Access& b) { return a.stream == b.stream && a.number == b.number; };
  if (!found.empty() && race.later.stream != kHost && same(found.back().later, race.later) &&
      same(found.back().earlier, race.earlier))
    return;  // two tasks are one race, however many tensors they share
  if (found.size() < kMostRaces) found.push_back(std::move(race));
}

void RaceCheck::enter(const Access& access, const Clock& clock) {
  auto& known = accesses_[access.range.block];
  const Range& range = access.range;
  for (auto it = known.begin(); it != known.end();) {
    const Range& other = it->range;
    if (other.low >= range.high || range.low >= other.high) {
      ++it;
      continue;
    }
    const bool ordered = it->stream == access.stream || knows(clock, it->stream, it->number);
    if (!ordered && (other.writes || range.writes)) add({access, *it});
    const bool covered = range.low <= other.low && other.high <= range.high;
    const bool same = it->stream == access.stream && other.writes == range.writes && covered;
    if ((covered && range.writes) || same) it = known.erase(it);
    else ++it;
  }
  known.push_back(access);
}

}  // namespace late
