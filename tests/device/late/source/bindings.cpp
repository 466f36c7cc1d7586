// What Python sees; `device/late/__init__.py` gives it names.

#include "operators.h"

#include <pybind11/functional.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

namespace late {

namespace {

struct HeldFunction {  // by a task, which any thread may drop
  PyObject* function;
  explicit HeldFunction(PyObject* f) : function(f) { Py_INCREF(f); }
  HeldFunction(const HeldFunction&) = delete;
  ~HeldFunction() {
    if (!Py_IsInitialized()) return;
    pybind11::gil_scoped_acquire gil;
    Py_DECREF(function);
  }
};

uint64_t queue_function(
    pybind11::function function, const std::string& name, int stream, const std::vector<at::Tensor>& reads,
    const std::vector<at::Tensor>& writes) {
  auto held = std::make_shared<HeldFunction>(function.ptr());
  std::vector<Range> ranges;
  for (auto& t : reads)
    if (t.numel()) ranges.push_back(range_of(t, false));
  for (auto& t : writes)
    if (t.numel()) ranges.push_back(range_of(t, true));
  auto run = [held] {
    pybind11::gil_scoped_acquire gil;
    pybind11::reinterpret_borrow<pybind11::function>(held->function)();
  };
  return Runtime::get().push(stream, name, run, ranges, true);
}

constexpr const char* kSchedules[] = {"eager", "latest", "others"};

std::string set_schedule(const std::string& name) {
  auto& schedule = Runtime::get().schedule;
  const std::string before = kSchedules[static_cast<int>(schedule)];
  for (int i = 0; i < 3; ++i)
    if (name == kSchedules[i]) {
      schedule = static_cast<Schedule>(i);
      return before;
    }
  TORCH_CHECK_VALUE(false, "late: there is no schedule '", name, "': eager, latest or others");
}

}  // namespace

}  // namespace late

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace late;
  namespace py = pybind11;
  m.def("register_device", &register_device);
  m.def("device_count", &num_devices);
  m.def("current_device", [] { return current_device; });
  m.def("set_device", [](int device) { c10::impl::getDeviceGuardImpl(kLate)->setDevice({kLate, static_cast<c10::DeviceIndex>(device)}); });
  m.def("manual_seed", [](uint64_t seed, int device) {
    at::Generator(default_generator(static_cast<c10::DeviceIndex>(device))).set_current_seed(seed);
  });
  m.def("rng_state", [](int device) { return default_generator(static_cast<c10::DeviceIndex>(device)).get_state(); });
  m.def("set_rng_state", [](const at::Tensor& state, int device) {
    at::Generator(default_generator(static_cast<c10::DeviceIndex>(device))).set_state(state);
  });
  m.def("set_schedule", &set_schedule, "Set it, and return the one before.");
  m.def("check_races", [](bool on) { Runtime::get().check_races(on); });
  m.def("checks_races", [] { return Runtime::get().checks_races(); });
  m.def("take_races", [] { return Runtime::get().take_races(); });
  m.def("take_counts", [] { return Runtime::get().take_counts(); });
  m.def("host_alias", &host_alias, "The memory as a CPU tensor, without waiting: for functions that are queued.");
  m.def("num_queued", [](int stream) { return Runtime::get().queued(stream); });
  m.def(
      "run_until", [](int stream, uint64_t number) { Runtime::get().run_until(stream, number, true); },
      "Let a stream come to a task; an error of one is left to the next host that waits.");
  m.def("is_done", [](int stream, uint64_t number) { return Runtime::get().is_done(stream, number); });
  m.def("queue_function", &queue_function, "Queue a function; it runs on the thread that demands it.");
}
