// Operators with a kernel of their own: memory, views, copies. And which of the others are queued as one.

#include "operators.h"

#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DefaultDtype.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <cstring>

namespace late {

namespace {

using torch::jit::Stack;

const c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

// ---- memory

at::Tensor empty(
    at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(device.value_or(c10::Device(kLate)));
  return at::Tensor(
      at::detail::empty_generic(size, &DeviceMemory::get(), kKeys, c10::dtype_or_default(dtype), format));
}

at::Tensor empty_strided(
    at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(device.value_or(c10::Device(kLate)));
  return at::Tensor(
      at::detail::empty_strided_generic(size, stride, &DeviceMemory::get(), kKeys, c10::dtype_or_default(dtype)));
}

const at::Tensor& resize_(const at::Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  resize_tensor(self, size, std::nullopt);
  if (format && *format != at::MemoryFormat::Preserve) self.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  return self;
}

at::Tensor& set_source_storage(
    at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(offset);
  if (stride.size() == size.size() && !size.empty()) impl->set_sizes_and_strides(size, stride, offset);
  else impl->set_sizes_contiguous(size);
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source) {
  const int64_t numel = static_cast<int64_t>(source.nbytes() / self.element_size());
  return set_source_storage(self, std::move(source), 0, {numel}, {});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_source_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

at::Tensor& set_nothing(at::Tensor& self) {
  c10::Storage none(c10::Storage::use_byte_size_t(), 0, &DeviceMemory::get(), /*resizable=*/true);
  return set_source_storage(self, std::move(none), 0, {0}, {});
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  DeviceMemory::get().recordStream(self.storage().data_ptr(), stream);
}

// ---- copies

struct PinnedOpen {
  const char* block;
  explicit PinnedOpen(const char* b) : block(b) { PinnedMemory::get().open(block); }
  PinnedOpen(const PinnedOpen&) = delete;
  ~PinnedOpen() { PinnedMemory::get().close(block); }
};

const char* pinned_block_of(const at::Tensor& host) {
  if (!host.has_storage()) return nullptr;
  return PinnedMemory::get().block_of(static_cast<const char*>(host.storage().data()));
}

uint64_t queue_copy(int stream, const at::Tensor& from, const at::Tensor& to, const std::vector<Range>& ranges) {
  auto run = [from, to] {
    OnlyKernels only;
    at::Tensor(to).copy_(from);
  };
  return Runtime::get().push(stream, "copy", run, ranges);
}

// The task keeps page-locked memory alive, as the caching allocator for it would.
void queue_pinned_copy(int stream, const at::Tensor& from, const at::Tensor& to, const at::Tensor& pinned,
                       const std::vector<Range>& ranges) {
  const char* block = pinned_block_of(pinned);
  auto run = [from, to, block] {
    OnlyKernels only;
    PinnedOpen open(block);
    at::Tensor(to).copy_(from);
  };
  auto& runtime = Runtime::get();
  const uint64_t number = runtime.push(stream, "copy", run, ranges);
  const bool writes = pinned.is_same(to);
  PinnedMemory::get().use(
      block, {stream, number, writes, Site::here(writes ? "copy to the host" : "copy from the host", runtime.checks_races())});
}

// Whoever reads it before the copy is done shall see that. Not if an earlier copy still needs what is there.
void spoil(const at::Tensor& pinned) {
  const char* block = pinned_block_of(pinned);
  if (!pinned.is_contiguous() || PinnedMemory::get().is_in_use(block)) return;
  PinnedOpen open(block);
  std::memset(pinned.data_ptr(), 0xff, pinned.nbytes());
}

void copy_to_device(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  const int stream = current_stream(to.device());
  if (pinned_block_of(from)) {
    queue_pinned_copy(
        stream, from.detach(), host_alias(to), from.detach(), {range_of(to, true), range_of(from, false)});
  } else {  // the driver has copied pageable memory when the call returns
    queue_copy(stream, from.expand(to.sizes()).clone(), host_alias(to), {range_of(to, true)});
  }
  if (!non_blocking) Runtime::get().synchronize(stream, "copy from the host");
}

void copy_to_host(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  const int stream = current_stream(from.device());
  if (non_blocking && pinned_block_of(to)) {
    spoil(to);
    const auto pinned = to.detach();
    queue_pinned_copy(stream, host_alias(from), pinned, pinned, {range_of(from, false), range_of(to, true)});
    return;
  }
  if (pinned_block_of(to)) {
    const auto pinned = to.detach();
    queue_pinned_copy(stream, host_alias(from), pinned, pinned, {range_of(from, false), range_of(to, true)});
  } else {
    queue_copy(stream, host_alias(from), to.detach(), {range_of(from, false)});
  }
  Runtime::get().synchronize(stream, "copy to the host");  // also if it need not block: the memory is pageable
}

// On the source's stream, in between what both devices' streams do: as torch's copies between devices.
void copy_on_device(const at::Tensor& from, const at::Tensor& to) {
  auto& runtime = Runtime::get();
  const int stream = current_stream(from.device());
  const int other = current_stream(to.device());
  if (from.device() != to.device()) runtime.block(runtime.record(other), stream);
  queue_copy(stream, host_alias(from), host_alias(to), {range_of(from, false), range_of(to, true)});
  if (from.device() != to.device()) runtime.block(runtime.record(stream), other);
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& to, bool non_blocking) {
  OnlyKernels only;
  if (to.numel() == 0) return to;
  if (!is_late(self)) copy_to_device(self, to, non_blocking);
  else if (!is_late(to)) copy_to_host(self, to, non_blocking);
  else copy_on_device(self, to);
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& to) {
  to.resize_(self.sizes());
  return copy_from(self, to, false);
}

at::Scalar local_scalar_dense(const at::Tensor& self) {
  Runtime::get().synchronize(current_stream(self.device()), "item");
  OnlyKernels only;
  return host_alias(self).item();
}

// ---- what other devices have operators of their own for, and the CPU has not

const c10::OperatorHandle& operator_named(const char* name) {
  static auto* known = new std::map<std::string, c10::OperatorHandle>();
  auto found = known->find(name);
  if (found == known->end())
    found = known->emplace(name, c10::Dispatcher::singleton().findSchemaOrThrow(name, "")).first;
  return found->second;
}

void convolution(const c10::OperatorHandle&, Stack* stack) { call_operator(operator_named("aten::convolution"), stack); }

void convolution_backward(const c10::OperatorHandle& from, Stack* stack) {  // which is told the bias's sizes as well
  auto args = torch::jit::last(*stack, from.schema().arguments().size()).vec();
  torch::jit::drop(*stack, args.size());
  const std::vector<int64_t> bias_sizes{args[0].toTensor().size(1)};
  for (size_t i = 0; i < args.size(); ++i) {
    if (i == 3) stack->push_back(c10::IValue(c10::List<int64_t>(bias_sizes)));
    stack->push_back(args[i]);
  }
  call_operator(operator_named("aten::convolution_backward"), stack);
}

// ---- autocast: torch's lists for devices, from its header; performed boxed

#define LATE_NAME(OP, ...) late_name(#OP, #__VA_ARGS__)
#define LATE_LISTED(...) LATE_NAME(__VA_ARGS__, ),
std::string late_name(std::string op, std::string overload) {
  const auto end = overload.find_first_of(", ");
  if (end != std::string::npos) overload.resize(end);
  return overload.empty() ? op : op + "." + overload;
}

constexpr auto kAutocast = c10::DispatchKey::AutocastPrivateUse1;

template <typename Choose>
void cast_and_call(const c10::OperatorHandle& op, Stack* stack, Choose&& choose) {
  c10::impl::ExcludeDispatchKeyGuard no_autocast(kAutocast);
  auto args = torch::jit::last(*stack, op.schema().arguments().size());
  std::vector<at::Tensor> tensors;
  for (const auto& arg : args) {
    if (arg.isTensor()) tensors.push_back(arg.toTensor());
    else if (arg.isTensorList())
      for (const at::Tensor& t : arg.toTensorVector()) tensors.push_back(t);
  }
  const at::ScalarType dtype = choose(tensors);
  auto cast = [&](const at::Tensor& t) { return t.defined() ? at::autocast::cached_cast(dtype, t, kLate) : t; };
  const size_t begin = stack->size() - args.size();
  for (size_t i = begin; i < stack->size(); ++i) {
    auto& value = (*stack)[i];
    if (value.isTensor()) value = cast(value.toTensor());
    else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& t : value.toTensorVector()) list.push_back(cast(t));
      value = list;
    }
  }
  op.callBoxed(stack);
}

void in_lower_precision(const c10::OperatorHandle& op, Stack* stack) {
  cast_and_call(op, stack, [](auto&) { return at::autocast::get_autocast_dtype(kLate); });
}

void in_float(const c10::OperatorHandle& op, Stack* stack) {
  cast_and_call(op, stack, [](auto&) { return at::kFloat; });
}

void in_widest(const c10::OperatorHandle& op, Stack* stack) {
  cast_and_call(op, stack, [](const std::vector<at::Tensor>& tensors) {
    auto dtype = at::autocast::get_autocast_dtype(kLate);
    for (const at::Tensor& t : tensors)
      if (t.defined()) dtype = at::autocast::prioritize(dtype, t, kLate);
    return dtype;
  });
}

// Their result is in float, unless a dtype is asked for.
void into_float(const c10::OperatorHandle& op, Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard no_autocast(kAutocast);
  const auto& arguments = op.schema().arguments();
  const size_t begin = stack->size() - arguments.size();
  for (size_t i = 0; i < arguments.size(); ++i) {
    auto& value = (*stack)[begin + i];
    if (arguments[i].name() != "dtype" || !value.isNone()) continue;
    if (at::autocast::is_eligible((*stack)[begin].toTensor(), kLate)) value = static_cast<int64_t>(at::kFloat);
  }
  op.callBoxed(stack);
}

void register_autocast() {
  static auto* library =
      new torch::Library(torch::Library::IMPL, "aten", kAutocast, __FILE__, __LINE__);
  auto add = [&](const std::vector<std::string>& names, auto kernel) {
    for (const auto& name : names) library->impl(name.c_str(), kernel());
  };
  using torch::CppFunction;
  add({AT_FORALL_LOWER_PRECISION_FP(LATE_LISTED)}, [] { return CppFunction::makeFromBoxedFunction<&in_lower_precision>(); });
  add({AT_FORALL_FP32(LATE_LISTED)}, [] { return CppFunction::makeFromBoxedFunction<&in_float>(); });
  add({"norm.Scalar", "norm.ScalarOpt_dim"}, [] { return CppFunction::makeFromBoxedFunction<&in_float>(); });
  add({AT_FORALL_FP32_SET_OPT_DTYPE(LATE_LISTED)}, [] { return CppFunction::makeFromBoxedFunction<&into_float>(); });
  add({AT_FORALL_PROMOTE(LATE_LISTED)}, [] { return CppFunction::makeFromBoxedFunction<&in_widest>(); });
}

// ---- registration

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&call_operator>()); }

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("resize_", &resize_);
  m.impl("set_.source_Storage_storage_offset", &set_source_storage);
  m.impl("set_.source_Storage", &set_storage);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("set_", &set_nothing);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar_dense);
  m.impl("record_stream", &record_stream);
  m.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution>());
  m.impl("convolution_backward_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution_backward>());
}

// A conjugated tensor is resolved by a copy of it, which must not be resolved in turn.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

// What torch would decompose for a foreign device, and is one operator on the CPU (layer norm, foreach): queued as one,
// so that its numbers are the CPU's. Not structured operators: torch finds their shape in C++, and calls out=.
void register_undecomposed() {
  using Key = c10::DispatchKey;
  static auto* library = new torch::Library(torch::Library::IMPL, "aten", Key::PrivateUse1, __FILE__, __LINE__);
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    if (name.name.rfind("aten::", 0) != 0) continue;
    auto op = dispatcher.findOp(name);
    if (!op || !op->hasSchema()) continue;
    if (!op->hasKernelForDispatchKey(Key::CPU) || op->hasKernelForDispatchKey(Key::PrivateUse1) ||
        !op->hasKernelForDispatchKey(Key::Autograd) ||
        op->hasKernelForDispatchKey(Key::CompositeExplicitAutogradNonFunctional))
      continue;
    const bool is_foreach = name.name.rfind("aten::_foreach_", 0) == 0;
    if (is_foreach && !op->schema().returns().empty()) continue;
    const std::string full = name.name.substr(6) + (name.overload_name.empty() ? "" : "." + name.overload_name);
    library->impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&call_operator>());
  }
}

}  // namespace

void register_operators() {
  register_undecomposed();
  register_autocast();
}

}  // namespace late
