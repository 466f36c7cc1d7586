// Operators: how a call becomes a task.
//
// Rules
// 1. An operator's task runs the CPU's kernel on the same memory: results are the CPU's to the last bit.
// 2. A task holds addresses, never tensors of the device: memory that is freed too early is not kept by accident.
// 3. Shapes come from meta kernels, which run on the host when the operator is called; what they said is remembered by
//    the shapes they were asked for, as some are written in Python and take a millisecond.
// 4. Random numbers are drawn on the host when an operator is called, from a generator of the CPU: they depend on the
//    program, not on the schedule, and are those that the CPU draws with the same seed.
// 5. An operator whose result's shape or value depends on data waits for its stream, as on other devices.
#pragma once

#include "memory.h"

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace late {

// Everything above the kernels: autograd, autocast, modes written in Python. They have seen the call already.
c10::DispatchKeySet above_kernels();
struct OnlyKernels {
  c10::impl::ExcludeDispatchKeyGuard guard{above_kernels()};
};

inline bool is_late(const at::Tensor& t) { return t.defined() && t.device().type() == kLate; }

// The same memory as a CPU tensor, without a reference to it, and without waiting for what is queued.
at::Tensor host_alias(const at::Tensor& tensor);
Range range_of(const at::Tensor& tensor, bool writes);

at::Tensor empty_as(const at::Tensor& meta, c10::Device device);
void resize_tensor(const at::Tensor& self, at::IntArrayRef size, std::optional<at::IntArrayRef> stride);
void resize_bytes(const c10::Storage& storage, size_t num_bytes);

// The device's default generator, and the CPU's generator that it stands for.
const at::Generator& default_generator(c10::DeviceIndex device);
at::Generator on_host(const at::Generator& generator);

void call_operator(const c10::OperatorHandle& op, torch::jit::Stack* stack);
void register_operators();
void register_device();

}  // namespace late
