// One boxed kernel for every operator that has none of its own.

#include "operators.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/List.h>
#include <ATen/core/enum_tag.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/DeviceGuard.h>

#include <cstring>
#include <set>
#include <unordered_map>

namespace late {

using c10::IValue;
using torch::jit::Stack;

c10::DispatchKeySet above_kernels() {
  using Key = c10::DispatchKey;
  return c10::autograd_dispatch_keyset_with_ADInplaceOrView |
      c10::DispatchKeySet({Key::Python, Key::PythonTLSSnapshot, Key::AutocastCPU, Key::AutocastPrivateUse1});
}

at::Tensor host_alias(const at::Tensor& t) {
  OnlyKernels only;
  void* data = nullptr;
  if (t.numel()) data = opened(t.storage().data()) + t.storage_offset() * t.element_size();
  auto options = at::TensorOptions().dtype(t.scalar_type()).device(c10::kCPU);
  auto alias = at::from_blob(data, t.sizes(), t.strides(), options);
  auto* impl = alias.unsafeGetTensorImpl();
  if (t.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  if (t.is_conj()) impl->_set_conj(true);
  if (t.is_neg()) impl->_set_neg(true);
  return alias;
}

Range range_of(const at::Tensor& t, bool writes) {
  const char* low = static_cast<const char*>(t.storage().data()) + t.storage_offset() * t.element_size();
  int64_t extent = t.numel() ? 1 : 0;
  for (int64_t d = 0; d < t.dim() && t.numel(); ++d) extent += (t.size(d) - 1) * t.stride(d);
  return {low, low + extent * t.element_size(), writes, block_of(low)};
}

at::Tensor empty_as(const at::Tensor& meta, c10::Device device) {
  c10::DeviceGuard guard(device);
  return at::Tensor(at::detail::empty_strided_generic(
      meta.sizes(), meta.strides(), &DeviceMemory::get(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      meta.scalar_type()));
}

void resize_tensor(const at::Tensor& self, at::IntArrayRef size, std::optional<at::IntArrayRef> stride) {
  auto* impl = self.unsafeGetTensorImpl();
  if (self.sizes() == size && (!stride || self.strides() == *stride)) return;
  if (stride) impl->set_sizes_and_strides(size, *stride);
  else impl->set_sizes_contiguous(size);
  const size_t needed = at::detail::computeStorageNbytes(
      self.sizes(), self.strides(), self.element_size(), self.storage_offset());
  if (self.numel() && needed > self.storage().nbytes()) resize_bytes(self.storage(), needed);
}

void resize_bytes(const c10::Storage& storage, size_t num_bytes) {
  auto* impl = storage.unsafeGetStorageImpl();
  c10::DeviceGuard guard(storage.device());
  auto fresh = DeviceMemory::get().allocate(num_bytes);
  const size_t kept = std::min(num_bytes, storage.nbytes());
  if (kept && storage.data()) {
    auto* to = static_cast<char*>(fresh.get());
    auto* from = static_cast<const char*>(storage.data());
    Runtime::get().push(
        current_stream(storage.device()), "resize", [to, from, kept] { std::memcpy(opened(to), opened(from), kept); },
        {{from, from + kept, false, block_of(from)}, {to, to + kept, true, to}});
  }
  impl->set_data_ptr_noswap(std::move(fresh));
  impl->set_nbytes(num_bytes);
}

// By a task, even if the host has waited: memory that was just allocated may still have to be filled with NaN.
void write_later(const at::Tensor& to, const at::Tensor& host) {
  if (!to.numel()) return;
  auto run = [alias = host_alias(to), host] {
    OnlyKernels only;
    at::Tensor(alias).copy_(host);
  };
  Runtime::get().push(current_stream(to.device()), "copy of a result", run, {range_of(to, true)});
}

namespace {

template <typename F>
void each_tensor(const IValue& value, F&& visit) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) visit(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& t : value.toTensorVector()) visit(t);
  } else if (value.isList()) {
    for (const IValue& item : value.toListRef())
      if (item.isTensor() && item.toTensor().defined()) visit(item.toTensor());
  }
}

// Arguments as they are on another device. The same tensor stays the same tensor.
struct Elsewhere {
  std::function<at::Tensor(const at::Tensor&)> map;
  c10::DeviceType device;
  std::unordered_map<c10::TensorImpl*, at::Tensor> known = {};

  at::Tensor tensor(const at::Tensor& t) {
    if (!t.defined()) return t;
    auto found = known.find(t.unsafeGetTensorImpl());
    if (found != known.end()) return found->second;
    return known[t.unsafeGetTensorImpl()] = map(t);
  }

  IValue value(const IValue& v) {
    if (v.isTensor()) return tensor(v.toTensor());
    if (v.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& t : v.toTensorVector()) list.push_back(tensor(t));
      return list;
    }
    if (v.isDevice() && v.toDevice().type() == kLate) return c10::Device(device);
    if (v.isList() && !v.toListRef().empty() && v.toList().elementType()->kind() == c10::TypeKind::OptionalType) {
      c10::List<std::optional<at::Tensor>> list;
      for (const IValue& item : v.toListRef())
        list.push_back(item.isNone() ? std::optional<at::Tensor>() : tensor(item.toTensor()));
      return list;
    }
    return v;
  }
};

at::Tensor to_meta(const at::Tensor& t) {
  if (t.dim() == 0 && t.is_cpu()) return t;  // a number; a meta kernel in Python needs its value, if it is wrapped
  auto meta = at::Tensor(at::detail::empty_strided_meta(t.sizes(), t.strides(), t.scalar_type()));
  if (t.storage_offset()) meta.unsafeGetTensorImpl()->set_storage_offset(t.storage_offset());
  return meta;
}

// Some kernels give an output another shape for a moment. It then goes to other memory, and comes back by a copy.
at::Tensor resizable(const at::Tensor& alias) {
  if (!alias.numel()) return alias;
  c10::Storage storage(
      c10::Storage::use_byte_size_t(), alias.storage().nbytes(), {alias.data_ptr(), c10::Device(c10::kCPU)},
      c10::GetAllocator(c10::kCPU), /*resizable=*/true);
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), alias.key_set(), alias.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(alias.sizes(), alias.strides());
  return made;
}

at::Tensor to_host(const at::Tensor& t) {  // for a task: the device's memory by address, the host's by value
  if (is_late(t)) return host_alias(t);
  auto value = t.clone();
  if (t.unsafeGetTensorImpl()->is_wrapped_number()) value.unsafeGetTensorImpl()->set_wrapped_number(true);
  return value;
}

void call_cpu(const c10::OperatorHandle& op, Stack& stack) {
  OnlyKernels only;
  op.callBoxed(&stack);
}

// ---- what meta kernels said

struct Shapes {
  Stack results;
  std::vector<at::Tensor> written;  // of the arguments that are written to, in order
};

constexpr size_t kMostShapes = 20000;
std::mutex shapes_mutex;

std::unordered_map<std::string, std::shared_ptr<Shapes>>& known_shapes() {
  static auto* known = new std::unordered_map<std::string, std::shared_ptr<Shapes>>();
  return *known;
}

template <typename T>
void append(std::string& key, const T& value) {
  key.append(reinterpret_cast<const char*>(&value), sizeof(value));
}

void append_tensor(std::string& key, const at::Tensor& t) {
  if (!t.defined()) return key.push_back('u');
  key.push_back(is_late(t) ? 'l' : 'c');
  append(key, t.scalar_type());
  append(key, t.dim());
  append(key, t.storage_offset());
  append(key, t.unsafeGetTensorImpl()->is_wrapped_number());
  for (int64_t d = 0; d < t.dim(); ++d) {
    append(key, t.size(d));
    append(key, t.stride(d));
  }
}

// Whether all of an argument that a shape may depend on could be written down.
bool append_value(std::string& key, const IValue& v) {
  if (v.isTensor()) append_tensor(key.append("T"), v.toTensor());
  else if (v.isNone()) key.push_back('N');
  else if (v.isInt()) append(key.append("I"), v.toInt());
  else if (v.isBool()) append(key.append("B"), v.toBool());
  else if (v.isDouble()) append(key.append("D"), v.toDouble());
  else if (v.isString()) key.append("S").append(v.toStringRef()).push_back('\0');
  else if (v.isDevice() || v.isGenerator()) key.push_back('-');
  else if (v.isList()) {
    const auto items = v.toListRef();
    append(key.append("L"), items.size());
    for (const IValue& item : items)
      if (!append_value(key, item)) return false;
  } else return false;
  return true;
}

// ---- a call

class Call {
 public:
  Call(const c10::OperatorHandle& op, Stack* stack)
      : op_(op), stack_(stack), schema_(op.schema()), num_args_(schema_.arguments().size()),
        args_(torch::jit::last(*stack, num_args_).vec()) {
    for (const auto& returned : schema_.returns()) {
      const auto kind = returned.type()->kind();
      const bool is_list = kind == c10::TypeKind::ListType &&
          returned.type()->containedType(0)->kind() == c10::TypeKind::TensorType;
      yields_tensors_ = yields_tensors_ && (kind == c10::TypeKind::TensorType || is_list);
      only_writes_ = only_writes_ && returned.alias_info() && returned.alias_info()->isWrite();
    }
    find_place();
  }

  void perform() {
    c10::DeviceGuard guard(device_);
    stream_ = current_stream(device_);
    TORCH_CHECK_NOT_IMPLEMENTED(
        draws_ || !op_.hasTag(at::Tag::nondeterministic_seeded), "late: ", name(),
        " draws random numbers from no generator that it is given, so when it is run would decide which");
    if (!yields_tensors_) return run_now("value");
    if (needs_shapes() && !find_shapes() && !only_writes_) return run_now("no shape");
    if (shapes_) resize_outputs();
    make_results();
    if (is_view_) return finish();
    if (draws_) return draw();
    queue();
  }

 private:
  bool writes(size_t i) const {
    auto* alias = schema_.arguments()[i].alias_info();
    return alias && alias->isWrite();
  }

  // As on other devices: an operator takes tensors of one device, and of the host numbers, and what it uses there.
  void check_device(const at::Tensor& t, const std::string& argument) const {
    static const std::set<std::string> of_the_host{"indices", "lengths", "batch_sizes", "input_lengths", "target_lengths"};
    if (t.device() == device_ || (t.is_cpu() && (t.dim() == 0 || of_the_host.count(argument)))) return;
    TORCH_CHECK(false, "late: ", name(), " got tensors on ", device_, " and on ", t.device(), " (", argument, ")");
  }

  // The device of the first tensor that is on one of ours, or the one that is asked for.
  void find_place() {
    std::optional<c10::Device> device;
    for (size_t i = 0; i < num_args_; ++i) {
      each_tensor(args_[i], [&](const at::Tensor& t) {
        if (is_late(t) && !device) device = t.device();
        if (!writes(i)) reads_ = true;
      });
      if (args_[i].isDevice() && args_[i].toDevice().type() == kLate && !device)
        device = c10::Device(kLate, static_cast<c10::DeviceIndex>(index_of(args_[i].toDevice())));
      if (schema_.arguments()[i].name() == "generator") {
        draws_ = true;
        if (args_[i].isGenerator()) generator_ = args_[i].toGenerator();
      }
    }
    device_ = device.value_or(c10::Device(kLate, static_cast<c10::DeviceIndex>(current_device)));
    for (size_t i = 0; i < num_args_; ++i)
      each_tensor(args_[i], [&](const at::Tensor& t) { check_device(t, schema_.arguments()[i].name()); });
  }

  // What only writes to tensors that have their shape needs none. Its task checks that this was right.
  bool needs_shapes() const {
    if (!only_writes_) return true;
    bool needed = false;
    for (size_t i = 0; i < num_args_; ++i)
      if (writes(i)) each_tensor(args_[i], [&](const at::Tensor& t) { needed = needed || t.numel() == 0; });
    return needed;
  }

  bool find_shapes() {
    std::string key = c10::toString(schema_.operator_name());
    append(key, c10::get_default_dtype_as_scalartype());
    bool is_whole = true;
    for (const IValue& arg : args_) is_whole = is_whole && append_value(key, arg);
    if (is_whole) {
      std::lock_guard<std::mutex> lock(shapes_mutex);
      auto found = known_shapes().find(key);
      if (found != known_shapes().end()) shapes_ = found->second;
    }
    if (!shapes_ && ask_meta_kernel() && is_whole) {
      std::lock_guard<std::mutex> lock(shapes_mutex);
      if (known_shapes().size() >= kMostShapes) known_shapes().clear();
      known_shapes()[key] = shapes_;
    }
    return shapes_ != nullptr;
  }

  bool ask_meta_kernel() {
    Elsewhere metas{to_meta, c10::kMeta};
    auto asked = std::make_shared<Shapes>();
    for (const IValue& arg : args_) asked->results.push_back(arg.isGenerator() ? IValue() : metas.value(arg));
    for (size_t i = 0; i < num_args_; ++i)
      if (writes(i)) each_tensor(args_[i], [&](const at::Tensor& t) { asked->written.push_back(metas.tensor(t)); });
    try {
      call_cpu(op_, asked->results);
    } catch (const c10::NotImplementedError&) {
      return false;
    } catch (const c10::Error& e) {
      // Shapes that depend on data, and operators without a meta kernel, say so in several ways.
      const std::string text = e.what_without_backtrace();
      for (const char* word : {"meta", "Meta", "NotImplemented"})
        if (text.find(word) != std::string::npos) return false;
      throw;
    } catch (const std::exception&) {  // of a meta kernel written in Python
      return false;
    }
    shapes_ = std::move(asked);
    return true;
  }

  void resize_outputs() {  // out= may have been given another shape
    size_t next = 0;
    for (size_t i = 0; i < num_args_; ++i)
      if (writes(i))
        each_tensor(args_[i], [&](const at::Tensor& t) {
          const at::Tensor& meta = shapes_->written.at(next++);
          if (is_late(t) && meta.sizes() != t.sizes()) resize_tensor(t, meta.sizes(), meta.strides());
        });
  }

  // Each is an argument, a view of one, or new.
  void make_results() {
    const auto& returns = schema_.returns();
    for (size_t r = 0; r < returns.size(); ++r) {
      if (auto* alias = returns[r].alias_info()) {
        const IValue& source = args_[source_of(*alias)];
        results_.push_back(alias->isWrite() ? source : views_of(source.toTensor(), shapes_->results[r]));
        is_view_ = is_view_ || !alias->isWrite();
      } else {
        Elsewhere fresh{[&](const at::Tensor& meta) { return make(meta); }, kLate};
        const IValue& meta = shapes_->results[r];
        if (meta.isTensor() && !meta.toTensor().defined()) fresh_.emplace_back();
        results_.push_back(fresh.value(meta));
      }
    }
  }

  size_t source_of(const c10::AliasInfo& alias) const {
    for (size_t i = 0; i < num_args_; ++i) {
      auto* of = schema_.arguments()[i].alias_info();
      if (of && of->beforeSets() == alias.beforeSets()) return i;
    }
    TORCH_CHECK(false, "late: which argument does ", schema_, " return?");
  }

  static IValue views_of(const at::Tensor& base, const IValue& metas) {
    Elsewhere views{[&](const at::Tensor& meta) {
      auto view = at::detail::make_tensor<c10::TensorImpl>(
          c10::TensorImpl::VIEW, c10::Storage(base.storage()), base.key_set(),
          c10::scalarTypeToTypeMeta(meta.scalar_type()));
      view.unsafeGetTensorImpl()->set_sizes_and_strides(meta.sizes(), meta.strides(), meta.storage_offset());
      return view;
    }, kLate};
    return views.value(metas);
  }

  at::Tensor make(const at::Tensor& meta) {
    auto out = empty_as(meta, device_);
    fresh_.push_back(host_alias(out));
    if (out.numel()) ranges_.push_back(range_of(out, true));
    return out;
  }

  void finish() {
    torch::jit::drop(*stack_, num_args_);
    for (auto& result : results_) stack_->push_back(std::move(result));
  }

  std::string name() const { return c10::toString(schema_.operator_name()); }

  void queue() {
    Elsewhere hosts{to_host, c10::kCPU};
    Stack stack;
    std::vector<std::pair<at::Tensor, at::Tensor>> outputs;  // as the kernel sees them, and where they are
    for (size_t i = 0; i < num_args_; ++i) {
      if (writes(i))
        each_tensor(args_[i], [&](const at::Tensor& t) {
          auto& known = hosts.known[t.unsafeGetTensorImpl()];
          if (known.defined()) return;
          if (!is_late(t)) {
            known = to_host(t);
            return;
          }
          const auto alias = host_alias(t);
          known = t.is_conj() || t.is_neg() ? alias : resizable(alias);
          outputs.emplace_back(known, alias);
        });
      stack.push_back(hosts.value(args_[i]));
      each_tensor(args_[i], [&](const at::Tensor& t) {
        if (is_late(t) && t.numel()) ranges_.push_back(range_of(t, writes(i)));
      });
    }
    auto run = [op = op_, stack = std::move(stack), outputs = std::move(outputs), fresh = std::move(fresh_),
                only_writes = only_writes_]() mutable {
      call_cpu(op, stack);
      OnlyKernels only;
      for (auto& [seen, alias] : outputs) {
        if (seen.data_ptr() == alias.data_ptr()) continue;
        TORCH_CHECK(seen.sizes() == alias.sizes(), "out= had not the result's shape, which is seen only now");
        alias.copy_(seen);
      }
      if (only_writes) return;
      size_t next = 0;
      for (const IValue& result : stack) {
        auto put = [&](const at::Tensor& value) {
          if (next < fresh.size() && fresh[next].defined() && value.defined()) fresh[next].copy_(value);
          ++next;
        };
        if (result.isTensor()) put(result.toTensor());
        else for (const at::Tensor& value : result.toTensorVector()) put(value);
      }
    };
    Runtime::get().push(stream_, name(), std::move(run), ranges_);
    finish();
  }

  void draw() {  // on the host, now; the numbers go to the device by a queued copy
    if (reads_ || !only_writes_) return run_now("draws by values");
    Elsewhere hosts{[](const at::Tensor& t) {
      return at::empty_strided(t.sizes(), t.strides(), t.options().device(c10::kCPU));
    }, c10::kCPU};
    Stack stack = with_generator_of_host(hosts);
    call_cpu(op_, stack);
    std::vector<std::pair<at::Tensor, at::Tensor>> copies;
    for (const IValue& arg : args_)
      each_tensor(arg, [&](const at::Tensor& t) {
        copies.emplace_back(host_alias(t), hosts.tensor(t));
        ranges_.push_back(range_of(t, true));
      });
    auto run = [copies] {
      OnlyKernels only;
      for (const auto& [to, from] : copies) at::Tensor(to).copy_(from);
    };
    Runtime::get().push(stream_, name(), run, ranges_);
    finish();
  }

  Stack with_generator_of_host(Elsewhere& hosts) {
    Stack stack;
    for (size_t i = 0; i < num_args_; ++i) {
      const bool is_generator = schema_.arguments()[i].name() == "generator";
      if (!is_generator) stack.push_back(hosts.value(args_[i]));
      else stack.push_back(on_host(generator_ ? *generator_ : default_generator(device_.index())));
    }
    return stack;
  }

  // It cannot be queued: what it returns depends on data. The host waits.
  void run_now(const char* why) {
    Runtime::get().synchronize(stream_, name() + " (" + why + ")");
    Elsewhere hosts{[](const at::Tensor& t) { return is_late(t) ? host_alias(t).clone() : t; }, c10::kCPU};
    Stack stack = with_generator_of_host(hosts);
    std::vector<std::pair<at::Tensor, at::Tensor>> written;
    for (size_t i = 0; i < num_args_; ++i)
      if (writes(i))
        each_tensor(args_[i], [&](const at::Tensor& t) {
          if (is_late(t)) written.emplace_back(t, hosts.tensor(t));
        });
    call_cpu(op_, stack);
    OnlyKernels only;
    Elsewhere back{[&](const at::Tensor& t) {
      auto out = empty_as(t, device_);
      write_later(out, t);
      return out;
    }, kLate};
    for (auto& [to, from] : written) {
      resize_tensor(to, from.sizes(), std::nullopt);
      write_later(to, from);
      back.known[from.unsafeGetTensorImpl()] = to;
    }
    for (const IValue& value : stack) results_.push_back(back.value(value));
    finish();
  }

  const c10::OperatorHandle op_;
  Stack* stack_;
  const c10::FunctionSchema& schema_;
  const size_t num_args_;
  const std::vector<IValue> args_;
  c10::Device device_{kLate, 0};
  int stream_ = 0;
  bool yields_tensors_ = true;
  bool only_writes_ = true;  // what it returns are arguments
  bool reads_ = false;       // tensors that it does not write to
  bool draws_ = false;
  bool is_view_ = false;
  std::optional<at::Generator> generator_;
  std::shared_ptr<Shapes> shapes_;
  std::vector<IValue> results_;
  std::vector<at::Tensor> fresh_;  // of new results, in order; undefined where a result is
  std::vector<Range> ranges_;
};

}  // namespace

void call_operator(const c10::OperatorHandle& op, Stack* stack) {
  OnlyKernels only;
  Call(op, stack).perform();
}

}  // namespace late
