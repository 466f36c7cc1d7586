// Sparse tensors of the device, as gradients of embeddings are. What they hold are tensors of the device; what is
// computed with them waits for the host, as sorting and counting indices does on other devices.

#include "operators.h"

#include <ATen/SparseTensorImpl.h>
#include <ATen/ops/_coalesced_native.h>
#include <ATen/ops/_indices_native.h>
#include <ATen/ops/_nnz_native.h>
#include <ATen/ops/_sparse_coo_tensor_unsafe.h>
#include <ATen/ops/_sparse_coo_tensor_with_dims_and_tensors_native.h>
#include <ATen/ops/_sparse_coo_tensor_with_dims_native.h>
#include <ATen/ops/_values_native.h>
#include <ATen/ops/dense_dim_native.h>
#include <ATen/ops/indices_native.h>
#include <ATen/ops/is_coalesced_native.h>
#include <ATen/ops/sparse_dim_native.h>
#include <ATen/ops/values_native.h>
#include <torch/library.h>

namespace late {

void write_later(const at::Tensor& to, const at::Tensor& host);

namespace {

using torch::jit::Stack;

at::SparseTensorImpl* sparse(const at::Tensor& t) { return static_cast<at::SparseTensorImpl*>(t.unsafeGetTensorImpl()); }

at::Tensor sparse_on_host(const at::Tensor& t) {
  auto indices = host_alias(sparse(t)->indices()).clone();
  auto values = host_alias(sparse(t)->values()).clone();
  return at::_sparse_coo_tensor_unsafe(
      indices, values, t.sizes(), values.options().layout(at::kSparse), sparse(t)->coalesced());
}

at::Tensor dense_on_device(const at::Tensor& host, c10::Device device) {
  auto out = empty_as(host, device);
  write_later(out, host);
  return out;
}

void replace(const at::Tensor& on_device, const at::Tensor& host) {
  auto* impl = sparse(on_device);
  const auto device = on_device.device();
  impl->resize_(host.sparse_dim(), host.dense_dim(), host.sizes());
  impl->set_indices_and_values_unsafe(
      dense_on_device(host._indices(), device), dense_on_device(host._values(), device));
  impl->set_coalesced(host.is_coalesced());
}

at::Tensor result_on_device(const at::Tensor& host, c10::Device device) {
  if (!host.is_sparse()) return dense_on_device(host, device);
  return at::native::new_with_dims_and_tensor_sparse_symint(
      host.sparse_dim(), host.dense_dim(), host.sym_sizes(), dense_on_device(host._indices(), device),
      dense_on_device(host._values(), device), host.scalar_type(), at::kSparse, device, std::nullopt, host.is_coalesced());
}

// Dense tensors of the device are worked on where they are, which the host has waited for.
void call_sparse(const c10::OperatorHandle& op, Stack* stack) {
  OnlyKernels only;
  c10::impl::ExcludeDispatchKeyGuard dense_only(c10::DispatchKeySet({c10::DispatchKey::AutogradFunctionality}));
  const size_t num_args = op.schema().arguments().size();
  auto args = torch::jit::last(*stack, num_args).vec();
  std::optional<c10::Device> device;
  for (const auto& arg : args)
    if (arg.isTensor() && is_late(arg.toTensor())) device = arg.toTensor().device();
  TORCH_CHECK(device, "late: ", op.schema(), " got no tensor of the device");
  Runtime::get().synchronize(current_stream(*device), c10::toString(op.schema().operator_name()) + " (sparse)");
  Stack hosts;
  for (const auto& arg : args) {
    if (!arg.isTensor() || !is_late(arg.toTensor())) hosts.push_back(arg);
    else if (arg.toTensor().is_sparse()) hosts.push_back(sparse_on_host(arg.toTensor()));
    else hosts.push_back(host_alias(arg.toTensor()));
  }
  const auto given = hosts;
  op.callBoxed(&hosts);
  torch::jit::drop(*stack, num_args);
  for (const auto& result : hosts) {
    if (!result.isTensor()) {
      stack->push_back(result);
      continue;
    }
    std::optional<at::Tensor> argument;
    for (size_t i = 0; i < num_args; ++i)
      if (given[i].isTensor() && result.toTensor().is_same(given[i].toTensor())) argument = args[i].toTensor();
    if (argument && argument->is_sparse()) replace(*argument, result.toTensor());
    stack->push_back(argument ? *argument : result_on_device(result.toTensor(), *device));
  }
}

TORCH_LIBRARY_IMPL(_, SparsePrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&call_sparse>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_to_sparse", torch::CppFunction::makeFromBoxedFunction<&call_sparse>());
  m.impl("_to_sparse.sparse_dim", torch::CppFunction::makeFromBoxedFunction<&call_sparse>());
}

TORCH_LIBRARY_IMPL(aten, SparsePrivateUse1, m) {
  m.impl("_sparse_coo_tensor_with_dims", &at::native::new_with_dims_sparse);
  m.impl("_sparse_coo_tensor_with_dims_and_tensors", &at::native::new_with_dims_and_tensor_sparse_symint);
  m.impl("indices", &at::native::indices_sparse);
  m.impl("values", &at::native::values_sparse);
  m.impl("_indices", &at::native::_indices_sparse);
  m.impl("_values", &at::native::_values_sparse);
  m.impl("_nnz", &at::native::_nnz_sparse);
  m.impl("sparse_dim", &at::native::sparse_dim_sparse);
  m.impl("dense_dim", &at::native::dense_dim_sparse);
  m.impl("is_coalesced", &at::native::is_coalesced_sparse);
  m.impl("_coalesced_", &at::native::_coalesced_sparse_);
}

}  // namespace

}  // namespace late
